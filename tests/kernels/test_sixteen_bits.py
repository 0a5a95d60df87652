"""The road of a GPU, on which the factors of every product have 16 bits, with Triton's interpreter.

bfloat16 is wrong in the interpreter, which a fixture of conftest.py mends. On tensor cores:
test_backends.py.
"""

from typing import Any

import numpy as np
import pytest
import tensor_cores
import torch
from burnish.kernels import passes
from grids import grid, slow
from heads import CASES, assert_as_good_as_the_reference, in_dtype, logprobs
from torch import Tensor

triton_softmax = pytest.importorskip(
    "burnish.kernels.triton_softmax", reason="needs triton", exc_type=ImportError
)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes this road itself")
SOME = [
    "plain",
    "one_token",
    "peaked",
    "rising_over_the_vocabulary",
    "scale",
    "adapter",
    "more_of_everything",
]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_cores.emulate(monkeypatch)
    monkeypatch.setattr(passes, "ROWS", 8)
    monkeypatch.setattr(passes, "COLUMNS", 64)


def some_rows(name: str, keep_bytes: int) -> dict[str, Any]:
    """The interpreter is slow: a tile of rows and a bit."""
    case = CASES[name] | {"keep_bytes": keep_bytes}
    rows = {
        name: case[name][:11]
        for name in ("hidden", "target", "temperature")
        if isinstance(case.get(name), Tensor)
    }
    return case | rows


@grid(strength=1, case=SOME, keep_bytes=[0, 2**20])
def test_float16_factors_cost_no_more_than_their_roundings(case: str, keep_bytes: int) -> None:
    assert_as_good_as_the_reference(
        some_rows(case, keep_bytes), torch.float16, "triton", "of 16 bits"
    )


ROADS = {
    "recomputed": {"backend": "triton", "keep_bytes": 0},
    "kept": {"backend": "triton", "keep_bytes": 2**20},
    "fused": {"backend": "fused"},
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("case", [name if name in SOME else slow(name) for name in CASES])
def test_bfloat16_factors_cost_no_more_than_their_roundings(case: str, road: str) -> None:
    options = dict(ROADS[road])
    backend = options.pop("backend")
    assert_as_good_as_the_reference(
        some_rows(case, 0) | options, torch.bfloat16, backend, "of 16 bits"
    )


def test_a_cast_to_bfloat16_that_truncates_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def truncated(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar == triton_softmax.tl.bfloat16 and source.data.dtype == np.float32:
            bits = source.data.view(np.uint32) & np.uint32(0xFFFF0000)
            source = interpreter.TensorHandle(bits.view(np.float32), source.dtype)
        return cast(self, source, kind)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", truncated)
    with pytest.raises(AssertionError, match="d_"):
        assert_as_good_as_the_reference(
            some_rows("peaked", 0), torch.bfloat16, "triton", "of 16 bits"
        )


def test_a_ragged_remainder_is_kept_beside_whole_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the last columns, no multiple of 64, are a span of their own, with its own
    largest logits.
    """
    monkeypatch.setattr(passes, "ROWS", 8)
    monkeypatch.setattr(passes, "COLUMNS", 128)

    def with_a_remainder(vocab: int, widest: int, device: torch.device) -> Any:
        assert (vocab, widest) == (150, 128)
        return iter([slice(0, 128), slice(128, 144), slice(144, 150)])

    monkeypatch.setattr(passes, "vocabulary_spans", with_a_remainder)
    case = some_rows("rising_over_the_vocabulary", 2**20)
    random = torch.Generator().manual_seed(3)
    case["weight"] = torch.randn(150, 20, generator=random, dtype=torch.float64)
    case["bias"] = torch.arange(150, dtype=torch.float64) * 3
    case["target"] = torch.arange(139, 150)
    for dtype in (torch.float16, torch.bfloat16):
        assert_as_good_as_the_reference(case, dtype, "triton", "of 16 bits")


@grid(strength=1, case=["plain", "peaked", "scale", "adapter"], field=["level", "gain"])
def test_one_per_cent_is_more_than_a_rounding(
    case: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward_tile_ = triton_softmax.backward_tile_

    def wrong(
        tile: Tensor, column: Tensor, shift: Tensor, upstream: Any, *rest: Any, **options: Any
    ) -> None:
        changed = upstream._replace(**{field: getattr(upstream, field) * 1.01})
        backward_tile_(tile, column, shift, changed, *rest, **options)

    monkeypatch.setattr(triton_softmax, "backward_tile_", wrong)
    with pytest.raises(AssertionError, match="d_"):
        assert_as_good_as_the_reference(some_rows(case, 0), torch.float16, "triton", "of 16 bits")


@pytest.mark.parametrize("arriving", [0.0, torch.inf])
def test_a_gradient_of_nothing_or_of_infinity_goes_through(arriving: float) -> None:
    """What arrives from a loss whose scale has overflowed: the optimizer is to see it and skip the
    step.
    """
    case = in_dtype(some_rows("plain", 0), torch.float16)
    logprob = logprobs(case, backend="torch").logprob
    logprob.backward(torch.full_like(logprob, arriving))
    for name in ("hidden", "weight"):
        assert (
            (case[name].grad == 0).all() if arriving == 0 else not case[name].grad.isfinite().any()
        ), name


def test_a_small_scale_of_the_logits_does_not_vanish() -> None:
    """The same logits of a weight that is larger by a power of 2, which is exact."""
    plain, scaled = (some_rows("plain", 0) for _ in range(2))
    scaled |= {"weight": scaled["weight"] * 2.0**10, "scale": 2.0**-10}
    gradients = []
    for case in (in_dtype(plain, torch.float16), in_dtype(scaled, torch.float16)):
        logprobs(case, backend="torch").logprob.sum().backward()
        gradients.append(case["hidden"].grad)
    assert torch.equal(*gradients)
