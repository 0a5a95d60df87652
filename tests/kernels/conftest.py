"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest
import torch
from burnish.kernels import tiled


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """``torch.empty`` is full of NaN, so that nothing which is read before it is written goes unnoticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[0, 20_000], ids=["all_recomputed", "some_kept"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in both directions, the last ones ragged, at sizes where float64 references are cheap."""
    monkeypatch.setattr(tiled, "ROWS", 24)
    monkeypatch.setattr(tiled, "COLUMNS", 32)
    monkeypatch.setattr(tiled, "KEEP", request.param)
