"""Triton's passes over two tiles, in the interpreter where there is no GPU: against torch's, and
against float64.
"""

import importlib
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from burnish.kernels import Head, divergence_passes, linear_divergence, passes, reference
from burnish.kernels.divergence_passes import LEVEL, backward_tile, fold, mix
from burnish.kernels.softmax import NEVER, LogitTransform
from grids import grid
from pairs import (
    BETAS,
    CASES,
    arriving,
    assert_as_good_as_the_reference,
    biased,
    in_dtype,
    leaves,
    measure,
    normal,
    problem,
)
from torch import Tensor

triton_divergence = pytest.importorskip("burnish.kernels.triton_divergence", exc_type=ImportError)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture
def four_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tiles of 63 × 100 logits, the last ones ragged; those of the first span are kept."""
    for prefix in ("", "GPU_"):
        monkeypatch.setattr(divergence_passes, f"{prefix}ROWS", 40)
        monkeypatch.setattr(divergence_passes, f"{prefix}COLUMNS", 64)
    allocate = passes.allocate_kept

    def allocate_one_span(*arguments: Any) -> Tensor:
        *others, keep_bytes, _, heads = arguments
        return allocate(
            *others, 2 * (63 * 64 * 4 + 1) if keep_bytes is None else keep_bytes, 0, heads
        )

    monkeypatch.setattr(passes, "allocate_kept", allocate_one_span)


def on_device(case: Any) -> Any:
    if isinstance(case, Tensor):
        return case.detach().to(DEVICE).requires_grad_(case.requires_grad)
    if isinstance(case, Head):
        return Head(*(on_device(value) for value in case))
    if isinstance(case, tuple):
        return tuple(on_device(value) for value in case)
    return (
        {name: on_device(value) for name, value in case.items()} if isinstance(case, dict) else case
    )


def logits(case: dict[str, Any], who: str) -> Tensor:
    """c, rounded to float32, inside a wider matrix of NaN."""
    head, vocab = (
        case[who]._replace(scale=1.0, softcap=None),
        case.get("vocab") or len(case["student"].weight),
    )
    c = reference.head_logits(case[f"{who}_hidden"], head, vocab, torch.float64).clamp(min=NEVER)
    wide = torch.full((len(c), vocab + 3), math.nan)
    wide[:, :vocab] = c
    return wide[:, :vocab].to(DEVICE)


def torch_passes(
    student: Tensor,
    teacher: Tensor,
    to_z: LogitTransform,
    to_w: LogitTransform,
    gain: Tensor,
    beta: float,
) -> tuple[Tensor, ...]:
    """State, sums of a mixture and dc, as torch computes them."""
    state = student.new_zeros(len(student), 5)
    state[:, 0] = state[:, 2] = NEVER
    for columns in halves(student):
        state = fold(student[:, columns], teacher[:, columns], state, to_z, to_w, True)
    known = known_from(state)
    sums = mix(student, teacher, known, to_z, to_w, beta)
    dc = torch.empty_like(student)
    backward_tile(dc, student, teacher, known, gain, to_z, to_w, beta)
    return state, sums, dc


def triton_passes(
    student: Tensor,
    teacher: Tensor,
    to_z: LogitTransform,
    to_w: LogitTransform,
    gain: Tensor,
    beta: float,
) -> tuple[Tensor, ...]:
    state = student.new_zeros(len(student), 5)
    state[:, 0] = state[:, 2] = NEVER
    for columns in halves(student):
        triton_divergence.fold_(state, student[:, columns], teacher[:, columns], to_z, to_w, True)
    known, sums = known_from(state), student.new_zeros(len(student), 2)
    for columns in halves(student):
        triton_divergence.mix_(
            sums, student[:, columns], teacher[:, columns], known, to_z, to_w, beta
        )
    dc = torch.empty_like(student)
    triton_divergence.backward_tile_(dc, student, teacher, known, gain, to_z, to_w, beta)
    return state, sums, dc


def halves(tile: Tensor) -> list[slice]:
    cut = (tile.shape[1] + 1) // 2
    return [span for span in (slice(cut), slice(cut, tile.shape[1])) if span.start != span.stop]


def known_from(state: Tensor) -> Tensor:
    """With a level that is not its own, so that nothing cancels."""
    shift, total, other_shift, other_total, _ = state.unbind(1)
    return torch.stack(
        (shift, total.log(), other_shift, other_total.log(), torch.full_like(shift, 0.3)), 1
    )


def transforms(case: dict[str, Any], dtype: torch.dtype) -> list[LogitTransform]:
    rows = case.get("temperature")
    if isinstance(rows, float):
        rows = torch.full((len(case["student_hidden"]),), rows)
    if rows is not None:
        rows = rows.float().to(DEVICE, dtype)
    return [
        LogitTransform(case[who].scale, case[who].softcap, rows) for who in ("student", "teacher")
    ]


@grid(strength=1, case=CASES, beta=[0.0, 0.3, 1.0])
def test_each_pass_is_as_close_to_float64_as_torchs(case: str, beta: float) -> None:
    arguments = CASES[case]
    tiles = [logits(arguments, who) for who in ("student", "teacher")]
    gain = (arriving(len(tiles[0])) * 3).to(DEVICE)
    ours = triton_passes(*tiles, *transforms(arguments, torch.float32), gain, beta)
    theirs = torch_passes(*tiles, *transforms(arguments, torch.float32), gain, beta)
    exact = torch_passes(
        *(t.double() for t in tiles), *transforms(arguments, torch.float64), gain.double(), beta
    )
    for name, found, definition, truth in zip(
        ("state", "sums", "dc"), ours, theirs, exact, strict=True
    ):
        error, allowed = (found - truth).abs(), 2 * (definition - truth).abs().amax(0) + 1e-6
        assert (error <= allowed + 1e-6 * truth.abs()).all(), name


@grid(
    strength=1,
    case=[
        "everything",
        "one_token",
        "one_column",
        "peaked",
        "peaked_on_different_tokens",
        "one_large_one_negative",
    ],
    beta=[0.3, 0.0, 1.0, 0.5],
)
@pytest.mark.usefixtures("four_tiles")
def test_it_is_as_close_to_float64_as_the_reference(case: str, beta: float) -> None:
    assert_as_good_as_the_reference(on_device(CASES[case]), beta, torch.float32, "triton")


def run(
    case: dict[str, Any], beta: float, backend: str = "triton", **changes: Any
) -> dict[str, Tensor]:
    return measure(in_dtype(on_device(case), torch.float32), backend, beta=beta, **changes)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.usefixtures("four_tiles")
def test_a_student_that_equals_its_teacher_is_at_zero_and_stays_there(beta: float) -> None:
    head, hidden = normal.head(20, 100, bias=normal(100) * 3, softcap=6.0), normal(63, 20) * 3
    case = {"student": head, "student_hidden": hidden, "teacher": head, "teacher_hidden": hidden}
    for name, value in run(case, beta).items():
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-6, msg=name)


def forbidding(span: slice) -> Tensor:
    bias = torch.zeros(100, dtype=torch.float64)
    bias[span] = -torch.inf
    return bias


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.usefixtures("four_tiles")
def test_what_both_forbid_is_not_there(beta: float) -> None:
    bias = forbidding(slice(70))  # one tile whole, part of the next
    case = biased(student=bias, teacher=bias) | {"temperature": normal(63).exp()}
    without = case | {
        name: Head(case[name].weight[70:], bias[70:]) for name in ("student", "teacher")
    }
    ours, expected = run(case, beta), run(without, beta, "torch")
    for name in ("divergence", "d_hidden"):
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-5)
    for name in ("d_weight", "d_bias"):
        assert (ours[name][:70] == 0).all()
        torch.testing.assert_close(ours[name][70:], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("four_tiles")
def test_divergence_from_the_impossible_is_infinite_and_everything_else_finite() -> None:
    span = slice(60, 70)  # in both tiles
    student, teacher = (
        biased(**{who: forbidding(span)}) | {"temperature": 3.0} for who in ("student", "teacher")
    )
    assert run(student, 0.0)["divergence"].isposinf().all()
    assert run(teacher, 1.0)["divergence"].isposinf().all()
    for case, beta in ((student, 1.0), (student, 0.3), (teacher, 0.0), (teacher, 0.3)):
        ours, exact = run(case, beta), run(case, beta, "torch")
        for name, value in ours.items():
            assert value.isfinite().all()
            torch.testing.assert_close(value, exact[name], rtol=1e-4, atol=1e-5, msg=name)
    upstream = arriving(63)
    upstream[::2] = 0
    assert (run(teacher, 1.0, upstream=upstream.to(DEVICE))["d_hidden"][::2] == 0).all()


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_no_tokens_give_a_differentiable_zero(beta: float) -> None:
    student = normal.head(20, 100, bias=normal(100), adapter=normal.lora(20, 100))
    case = in_dtype(
        on_device(problem(tokens=0, student=student, temperature=torch.ones(0))), torch.float32
    )
    assert measure(case, "triton", beta=beta)["divergence"].shape == (0,)
    for name, leaf in leaves(case).items():
        assert leaf.grad is not None and (leaf.grad == 0).all(), name


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.usefixtures("four_tiles")
def test_the_same_call_gives_the_same_bits_and_rows_do_not_interact(beta: float) -> None:
    case = CASES["everything"]
    once, twice = run(case, beta), run(case, beta)
    assert all(torch.equal(value, twice[name]) for name, value in once.items())
    case = in_dtype(case, torch.float64)
    case["student_hidden"].data[5] *= 50
    changed = run(case, beta)
    others = torch.arange(63) != 5
    for name in ("divergence", "d_hidden"):
        assert not torch.equal(once[name][5], changed[name][5])
        torch.testing.assert_close(once[name][others], changed[name][others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [0.05, 0.5])
@pytest.mark.usefixtures("four_tiles")
def test_gradients_are_those_of_all_rows_however_many_are_left_out(share: float) -> None:
    upstream = arriving(63).to(DEVICE)
    upstream[torch.arange(63) % 20 < 20 * share] = 0
    ours, expected = (
        run(CASES["everything"], 0.3, backend, upstream=upstream) for backend in ("triton", "torch")
    )
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=on_gpu)], ids=str
)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_dc_is_rounded_once_to_16_bits_and_may_replace_the_tile(
    beta: float, dtype: torch.dtype
) -> None:
    case = CASES["everything"]
    tiles = [logits(case, who) for who in ("student", "teacher")]
    to_z, to_w = transforms(case, torch.float32)
    known = known_from(torch_passes(*tiles, to_z, to_w, torch.ones(63, device=DEVICE), beta)[0])
    gain, exact = torch.ones(63, device=DEVICE), torch.empty_like(tiles[0])
    triton_divergence.backward_tile_(exact, *tiles, known, gain, to_z, to_w, beta)
    rounded = torch.empty_like(exact, dtype=dtype)
    triton_divergence.backward_tile_(rounded, *tiles, known, gain, to_z, to_w, beta)
    assert torch.equal(rounded, exact.to(dtype))
    triton_divergence.backward_tile_(tiles[0], *tiles, known, gain, to_z, to_w, beta)
    assert torch.equal(tiles[0], exact)


def test_what_is_past_the_tile_is_neither_read_nor_written() -> None:
    case = CASES["plain"]
    tiles, (to_z, to_w) = (
        [logits(case, who) for who in ("student", "teacher")],
        transforms(case, torch.float32),
    )
    state = torch.zeros(70, 5, device=DEVICE)
    triton_divergence.fold_(state[3:66], *tiles, to_z, to_w, True)
    assert (state[:3] == 0).all() and (state[66:] == 0).all() and state[3:66].isfinite().all()
    known, sums, out = (
        known_from(state[3:66]),
        torch.zeros(70, 2, device=DEVICE),
        torch.zeros(70, 103, device=DEVICE),
    )
    triton_divergence.mix_(sums[3:66], *tiles, known, to_z, to_w, 0.3)
    assert (sums[:3] == 0).all() and (sums[66:] == 0).all() and sums[3:66].isfinite().all()
    triton_divergence.backward_tile_(
        out[3:66, :100], *tiles, known, known[:, LEVEL].clone(), to_z, to_w, 0.3
    )
    assert (
        (out[:3] == 0).all()
        and (out[66:] == 0).all()
        and (out[:, 100:] == 0).all()
        and out.isfinite().all()
    )


FAR = """
import torch
from burnish.kernels.softmax import NEVER, LogitTransform
from burnish.kernels.triton_divergence import fold_, mix_, backward_tile_

memory = torch.empty(3 * 2**30, dtype=torch.float16)  # mapped, but hardly any of it is ever touched
tile = memory.as_strided((3, 16), (2**30, 1)).fill_(1.0)
plain, state = LogitTransform(1.0, None, None), torch.zeros(3, 5)
state[:, 0] = state[:, 2] = NEVER
fold_(state, tile, tile, plain, plain, True)
assert (state == torch.tensor([1.0, 16, 1, 16, 0])).all(), state
known, sums = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.5]] * 3), torch.zeros(3, 2)
mix_(sums, tile, tile, known, plain, plain, 0.5)
assert (sums == 0).all(), sums
backward_tile_(tile, tile, tile, known, torch.ones(3), plain, plain, 1.0)
assert (tile == -0.5).all(), tile
"""


@pytest.mark.skipif(
    DEVICE == "cuda" or sys.platform != "linux", reason="memory is mapped lazily by Linux"
)
def test_offsets_beyond_2_to_the_31_are_right() -> None:
    subprocess.run([sys.executable, "-c", FAR], check=True)


def test_nothing_is_asked_of_triton_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(tokens=3)
    with pytest.raises(
        ValueError, match="backend='triton' has no float64; use 'torch' or 'reference'"
    ):
        linear_divergence(**case, beta=0.5, backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError,
        match=r"linear_divergence: backend='triton' .* cpu; use 'torch', or .*TRITON_INTERP",
    ):
        linear_divergence(**in_dtype(case, torch.float32), beta=0.5, backend="triton")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu_auto_is_triton_and_float64_is_torchs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    module = importlib.import_module("burnish.kernels.linear_divergence")
    monkeypatch.setattr(
        module, "DivergenceArguments", lambda *_, backend, **__: seen.append(backend) or 1 / 0
    )
    for precision in (dtype, torch.float64):
        with pytest.raises(ZeroDivisionError):
            linear_divergence(**in_dtype(on_device(problem(tokens=3)), precision), beta=0.5)
    assert seen == ["triton", "torch"]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.usefixtures("four_tiles")
def test_on_a_gpu_every_precision_is_close_to_float64(beta: float, dtype: torch.dtype) -> None:
    products = "exact" if dtype == torch.float32 else "of 16 bits"
    for case in CASES.values():
        assert_as_good_as_the_reference(on_device(case), beta, dtype, "triton", products)


@on_gpu
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_on_a_gpu_the_logits_are_never_in_memory_and_bits_repeat(beta: float) -> None:
    n, d, v = 8192, 256, 65536
    hidden, other = (
        torch.randn(n, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)
    )
    weight, teacher = (
        torch.randn(v, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)
    )

    def step() -> tuple[Tensor, ...]:
        found = linear_divergence(
            hidden, Head(weight), other, Head(teacher), beta=beta, keep_bytes=0
        )
        return found, *torch.autograd.grad(found.mean(), (hidden, weight))

    once = step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert all(torch.equal(a, b) for a, b in zip(once, step(), strict=True))
    tiles = 4096 * 4096 * (4 + 4 + 2)
    assert (
        torch.cuda.max_memory_allocated() - before
        < tiles + 2 * v * d * 2 + 4 * n * d * 4 + 2**24
        < n * v * 4 / 2
    )
