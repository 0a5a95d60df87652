"""The persistent forward kernel against the definition: in Triton's interpreter where there is no
GPU.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from burnish.kernels import Head, Logprobs, reference, softmax
from burnish.kernels.head import HeadFactors
from grids import slow
from torch import Tensor

forward = pytest.importorskip("burnish.kernels.triton_forward", reason="needs triton")

EXTRAS = ("mean_logprob", "log_sum_squares")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def silent_infinities() -> Iterator[None]:
    """In the interpreter, arithmetic with infinities is NumPy's, which warns of them."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


def inputs(rows: int = 37, width: int = 24, size: int = 150, /, **changes: Any) -> dict[str, Any]:
    """What a head and its targets are, in float64: logits of about ±4, with these changes."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    arguments = {
        "hidden": normal(rows, width),
        "weight": normal(size, width) * 4 / width**0.5,
        "target": torch.randint(size, (rows, 1), generator=random),
        "vocab": size,
    }
    return arguments | {
        name: change(normal) if callable(change) else change for name, change in changes.items()
    }


def forbidding(normal: Any) -> Tensor:
    """A bias that forbids the first 70 tokens, so a whole tile, and the last."""
    bias = normal(150)
    bias[:70] = bias[149] = -torch.inf
    return bias


def padded(normal: Any) -> Tensor:
    """A weight whose last rows are no tokens, and not even numbers."""
    weight = normal(150, 24)
    weight[131:] = torch.nan
    return weight


ADAPTER = {"adapter": lambda normal: (normal(3, 24), normal(150, 3), 0.7)}
EVERYTHING = ADAPTER | {
    "weight": padded, "vocab": 131, "bias": lambda normal: normal(150), "scale": 1.5, "softcap": 4.0, "outputs": EXTRAS,
    "temperature": lambda normal: (normal(37) / 2).exp(), "target": torch.arange(94, 131).repeat(7, 1).T,
}  # fmt: skip
CASES = {
    "plain": inputs(),
    "one_row": inputs(1),
    "one_column": inputs(5, 24, 1),
    "one_column_of_a_second_tile": inputs(5, 24, 65),
    "exact_tiles": inputs(32, 32, 128),
    "many_rows": inputs(100, 24, 70),
    "width_of_no_descriptor": inputs(37, 19),
    "columns_apart": inputs(
        hidden=lambda normal: normal(37, 48)[:, ::2],
        weight=lambda normal: normal(24, 150).T,
        # a rank that is not padded
        adapter=lambda normal: (normal(16, 24), normal(16, 150).T, 0.2),
    ),
    "peaked": inputs(hidden=lambda normal: normal(37, 24) * 30),
    "flat": inputs(hidden=torch.zeros(37, 24, dtype=torch.float64)),
    "all_logits_negative": inputs(bias=lambda normal: normal(150) - 1000),
    "all_logits_large": inputs(bias=lambda normal: normal(150) + 1000),
    "rising_over_the_vocabulary": inputs(bias=torch.arange(150, dtype=torch.float64) * 3),
    "falling_over_the_vocabulary": inputs(bias=torch.arange(150, dtype=torch.float64) * -3),
    "target_in_the_last_column": inputs(target=torch.full((37, 1), 149)),
    "target_in_the_first_column": inputs(target=torch.zeros(37, 1, dtype=torch.int64)),
    "bias": inputs(bias=lambda normal: normal(150)),
    "forbidden": inputs(
        bias=forbidding,
        target=torch.arange(100, 137)[:, None],
        outputs=EXTRAS,
        temperature=lambda normal: normal(37).exp(),
    ),
    "temperature": inputs(temperature=lambda normal: normal(37).exp()),
    "softcap": inputs(softcap=3.0),
    "soft_softcap": inputs(softcap=50.0),
    "scale": inputs(scale=0.25),
    "adapter": inputs(**ADAPTER),
    "padded_vocabulary": inputs(weight=padded, vocab=131, target=torch.full((37, 1), 130)),
    "padded_by_tiles": inputs(weight=padded, vocab=60, target=torch.arange(23, 60)[:, None]),
    "several_targets": inputs(target=torch.arange(37 * 7).reshape(37, 7) % 150),
    "many_targets": inputs(target=torch.arange(37 * 20).reshape(37, 20) % 150),
    "mean": inputs(outputs=EXTRAS[:1]),
    "squares": inputs(outputs=EXTRAS[1:]),
    "everything": inputs(**EVERYTHING),
    "everything_without_descriptors": inputs(
        37, 19, **EVERYTHING | {"weight": lambda normal: normal(150, 19), "adapter": None}
    ),
}


def rounded(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def cast(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cast(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        value = value.to(DEVICE)
        return value.to(dtype) if value.is_floating_point() else value

    return {name: cast(value) for name, value in case.items()}


def definition(case: dict[str, Any], dtype: torch.dtype) -> Logprobs:
    hidden, weight, target, vocab, temperature, outputs, head = apart(rounded(case, dtype))
    return reference.linear_logprob(
        hidden, Head(weight, **head), target, temperature=temperature, vocab=vocab, outputs=outputs
    )


def apart(case: dict[str, Any]) -> Any:
    rest = {"temperature": 1.0, "outputs": ()} | case
    return *(
        rest.pop(n) for n in ("hidden", "weight", "target", "vocab", "temperature", "outputs")
    ), rest


def sums(case: dict[str, Any]) -> softmax.SoftmaxState:
    hidden, weight, target, vocab, temperature, outputs, head = apart(case)
    temperature = temperature.float() if isinstance(temperature, Tensor) else None
    given = HeadFactors.of(hidden, Head(weight, **head)).rounded().columns(slice(vocab))
    return forward.accumulate(
        given, target, vocab=vocab, mean=EXTRAS[0] in outputs, squares=EXTRAS[1] in outputs,
        transform=softmax.LogitTransform(head.get("scale", 1.0), head.get("softcap"), temperature),
    )  # fmt: skip


def ours(case: dict[str, Any]) -> Logprobs:
    logprob, entropy, logsumexp, *extras = softmax.finish(sums(case))[:5]
    return Logprobs(
        logprob, entropy, logsumexp, *(extra if extra.numel() else None for extra in extras)
    )


def assert_as_good_as_the_definition(case: dict[str, Any], dtype: torch.dtype) -> None:
    """Error against float64 at most twice the definition's own in the same precision, plus 1e-6;
    on a GPU the last digit of the result, too: its exp2 and log2 are approximations.
    """
    case = rounded(case, dtype)
    exact, same = definition(case, torch.float64)._asdict(), definition(case, dtype)._asdict()
    for name, found in ours(case)._asdict().items():
        assert (found is None) == (exact[name] is None), name
        if found is not None:
            allowed = 2 * (same[name] - exact[name]).abs().max() + 1e-6
            if DEVICE == "cuda":
                allowed += torch.finfo(torch.float32).eps * exact[name].abs().max()
            error = (found - exact[name]).abs().max()
            assert error <= allowed, f"{name}: {error:.3g} > {allowed:.3g}"


FEW = ["plain", "one_column_of_a_second_tile", "many_rows", "columns_apart", "width_of_no_descriptor", "forbidden",
       "padded_by_tiles", "many_targets", "rising_over_the_vocabulary", "everything"]  # fmt: skip


@pytest.mark.parametrize("case", [case if case in FEW else slow(case) for case in CASES])
def test_as_close_to_float64_as_the_definition(case: str) -> None:
    assert_as_good_as_the_definition(CASES[case], torch.float32)


@pytest.mark.parametrize(
    "case",
    [
        "plain",
        "width_of_no_descriptor",
        "peaked",
        "all_logits_large",
        "adapter",
        "padded_vocabulary",
        "everything",
    ],
)
def test_the_same_in_16_bits(case: str) -> None:
    assert_as_good_as_the_definition(CASES[case], torch.float16)


@pytest.mark.parametrize(("splits", "span"), [(3, 1), (2, 2), (1, 3)])
def test_spans_may_be_cut_anywhere(splits: int, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "schedule", lambda *_: (splits, span))
    assert_as_good_as_the_definition(CASES["everything"], torch.float32)


def test_blocks_of_rows_may_be_grouped_anyhow(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 rows are four blocks: here groups of three, the last one not full, and two spans."""
    monkeypatch.setattr(forward, "schedule", lambda *_: (2, 1))
    whole = sums(rounded(CASES["many_rows"], torch.float32))
    monkeypatch.setattr(forward, "L2_SHARE", 3 * 32 * 24 * 4)
    grouped = sums(rounded(CASES["many_rows"], torch.float32))
    for one, other in zip(whole[:4], grouped[:4], strict=True):
        assert one.equal(other)


def test_same_bits_every_time() -> None:
    case = rounded(CASES["everything"], torch.float32)
    for one, other in zip(sums(case), sums(case), strict=True):
        assert one is not None and one.equal(other)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_rows_do_not_interact() -> None:
    """Bit for bit: what the other rows hold does not matter, even if it is NaN."""
    case = rounded(CASES["plain"], torch.float32)
    alone = sums(case)
    case["hidden"][5:] = torch.nan
    together = sums(case)
    for name in ("shift", "total", "moment", "chosen"):
        assert getattr(together, name)[:5].equal(getattr(alone, name)[:5]), name
    assert together.total[5:].isnan().all()


def test_a_certain_token_has_logprob_zero() -> None:
    """The target's z has the bits of the largest z, so a log-prob is at most 0."""
    case = rounded(CASES["peaked"], torch.float16)
    hidden, weight, *_ = apart(case)
    case["target"] = (hidden.double() @ weight.double().T).argmax(1, keepdim=True)
    logprob = ours(case).logprob
    assert (logprob <= 0).all() and (logprob == 0).any()


def test_a_target_elsewhere_has_z_zero() -> None:
    """As for the rank of a split vocabulary that does not have it."""
    case = rounded(inputs(4, 24, 150, vocab=131), torch.float32)
    case["target"] = torch.tensor([[-1], [131], [149], [2**40]], device=DEVICE)
    assert (sums(case).chosen == 0).all()
    several = sums(case | {"target": case["target"].repeat(1, 3)})
    assert (several.chosen == 0).all()


@pytest.mark.parametrize(("rows", "vocab"), [(0, 150), (5, 0)])
def test_nothing_to_sum(rows: int, vocab: int) -> None:
    case = rounded(inputs(rows, vocab=vocab, outputs=EXTRAS), torch.float32)
    state = sums(case)
    assert [t.shape[0] for t in state if t is not None] == [rows] * 6
    assert (state.total == 0).all() and (state.shift == softmax.NEVER).all()


def test_hidden_states_may_be_more_precise_than_the_weight() -> None:
    case = rounded(CASES["plain"], torch.float16)
    case["hidden"] = CASES["plain"]["hidden"].float().to(DEVICE)
    exact = definition(case, torch.float64)
    assert (ours(case).logprob - exact.logprob).abs().max() <= 1e-5


def test_offsets_beyond_32_bits() -> None:
    """Rows so far apart that the third's offset, wrapped to 32 bits, would be another address of
    this memory.
    """
    case = rounded(inputs(3, 24, 3), torch.float16)
    # 8 GB that nobody touches cost nothing
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        memory = torch.empty(2**32 + 64, dtype=torch.float16, device=DEVICE)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    far = memory[2**31 :].as_strided((3, 24), (2**30 + 1, 1)).copy_(case["hidden"])
    for one, other in zip(sums(case)[:4], sums(case | {"hidden": far})[:4], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("blocks", [1, 16, 64, 100])
@pytest.mark.parametrize("tiles_", [1, 501, 594, 1024])
def test_the_schedule_covers_the_vocabulary_once_and_keeps_a_gpu_busy(
    blocks: int, tiles_: int
) -> None:
    splits, span = forward.schedule(blocks, tiles_, 132)
    assert (splits - 1) * span < tiles_ <= splits * span
    if tiles_ > 1:
        waves = -(-blocks * splits // 132)
        assert blocks * tiles_ / (132 * waves * span) > 0.88


@needs_gpu
@pytest.mark.parametrize("width", [2048, 100], ids=["descriptors", "pointers"])
def test_logprobs_of_bf16_inputs_are_within_1e_4_of_float64(width: int) -> None:
    """Hopper's tensor cores truncate their sums after every 16 products: 5e-5 at D = 2048 in
    simulation.
    """
    case = rounded(inputs(1000, width, 32007, outputs=EXTRAS), torch.bfloat16)
    exact = definition(case, torch.float64)._asdict()
    for name, found in ours(case)._asdict().items():
        if found is not None:
            assert (found - exact[name]).abs().max() <= 1e-4, name


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case", ["plain", "adapter", "everything", "everything_without_descriptors"]
)
def test_every_precision_on_a_gpu(case: str, dtype: torch.dtype) -> None:
    assert_as_good_as_the_definition(CASES[case], dtype)


@needs_gpu
def test_same_bits_every_time_on_a_whole_gpu() -> None:
    case = rounded(
        inputs(3000, 512, 50001, outputs=EXTRAS, temperature=torch.rand(3000) + 0.5), torch.bfloat16
    )
    first = sums(case)
    for _ in range(5):
        assert all(one.equal(other) for one, other in zip(first, sums(case), strict=True))


@needs_gpu
def test_no_logits_in_memory() -> None:
    """By the allocator's peak: N·V in 16 bits would be 1 GB."""
    case = {"hidden": torch.randn(4096, 256), "weight": torch.randn(2**17, 256), "vocab": 2**17}
    case = rounded(case, torch.bfloat16) | {
        "target": torch.randint(2**17, (4096, 1), device=DEVICE)
    }
    sums(case)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sums(case)
    assert torch.cuda.max_memory_allocated() - before < 2**23  # sums of each row and span


@needs_gpu
def test_a_weight_of_more_than_two_to_the_31_numbers() -> None:
    size, width = 600_000, 4096
    hidden = torch.randn(3, width, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.zeros(size, width, device=DEVICE, dtype=torch.bfloat16)
    weight[-1] = hidden[0] / 64
    case = {
        "hidden": hidden,
        "weight": weight,
        "target": torch.full((3, 1), size - 1, device=DEVICE),
        "vocab": size,
    }
    exact = definition(
        case | {"weight": weight[-2:], "target": case["target"] * 0 + 1, "vocab": 2}, torch.float64
    )
    # All other logits are 0 as well.
    z = exact.logprob[:, 0] + exact.logsumexp
    assert (ours(case).logprob[:, 0] - (z - torch.log(size - 1 + z.exp()))).abs().max() <= 1e-4
