"""Fixtures of the kernel tests."""

import importlib.util
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from burnish.kernels import passes
from packaging.version import Version


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """``torch.empty`` is full of NaN, so that nothing which is read before it is written goes unnoticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def one_rounding_in_a_fused_multiply_add() -> None:
    """As on every GPU, and in Triton's own interpreter from 3.9 on: before, it rounds the product as well."""
    if importlib.util.find_spec("triton") is None or Version(version("triton")) >= Version("3.9"):
        return
    from triton.runtime import interpreter

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


@pytest.fixture(params=[0, 20_000], ids=["all_recomputed", "some_kept"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in both directions, the last ones ragged, at sizes where float64 references are cheap."""
    monkeypatch.setattr(passes, "ROWS", 24)
    monkeypatch.setattr(passes, "COLUMNS", 32)
    monkeypatch.setattr(passes, "KEEP", request.param)


@pytest.fixture
def tiles_kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tiles of a head each forward leaves for another pass, filled while the test runs."""
    allocate, tiles = passes.allocate_kept, []

    def counted(*given: Any) -> Any:
        kept = allocate(*given)
        tiles.append(len(kept))
        return kept

    monkeypatch.setattr(passes, "allocate_kept", counted)
    return tiles
