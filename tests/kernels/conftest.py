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
    """``torch.empty`` is full of NaN, so that nothing which is read before it is written goes
    unnoticed.
    """
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def one_rounding_in_a_fused_multiply_add() -> None:
    """As on every GPU, and in Triton's own interpreter from 3.9 on: before, it rounds the product
    as well.
    """
    if importlib.util.find_spec("triton") is None or Version(version("triton")) >= Version("3.9"):
        return
    from triton.runtime import interpreter

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


@pytest.fixture(params=[0, 20_000], ids=["all_recomputed", "some_kept"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in both directions, the last ones ragged, at sizes where float64 references are
    cheap.
    """
    monkeypatch.setattr(passes, "ROWS", 24)
    monkeypatch.setattr(passes, "COLUMNS", 32)
    monkeypatch.setattr(passes, "KEEP", request.param)


@pytest.fixture
def columns_kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many columns of a head's logits each forward leaves for another pass, filled while the
    test runs.
    """
    allocate = passes.allocate_kept
    columns: list[int] = []

    def counted(*given: Any) -> Any:
        kept = allocate(*given)
        columns.append(len(kept))
        return kept

    monkeypatch.setattr(passes, "allocate_kept", counted)
    return columns


@pytest.fixture(autouse=True, scope="session")
def bfloat16_in_the_interpreter() -> None:
    """Numbers in bfloat16 as on a GPU: Triton's own interpreter truncates them, and multiplies
    their bits.
    """
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def as_float32(source: Any) -> Any:
        if source.dtype.scalar != tl.bfloat16:
            return source
        bits = source.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        source = as_float32(source)
        if kind.scalar != tl.bfloat16:
            return source if kind.scalar == source.dtype.scalar else cast(self, source, kind)
        exact = source.data.astype(np.float32)
        bits = exact.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        rounded = np.where(np.isnan(exact), np.uint32(0x7FC0), rounded)
        return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, as_float32(a), as_float32(b), *rest)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
