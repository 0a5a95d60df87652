"""The Triton passes over a tile against those of torch in float64; interpreted where there is no
GPU.
"""

import subprocess
import sys
import textwrap
from functools import partial
from typing import NamedTuple

import pytest
import torch
from burnish.kernels.passes import spans
from burnish.kernels.softmax import (
    NEVER,
    Coefficients,
    LogitTransform,
    Softmax,
    SoftmaxState,
    add_target_,
    backward_tile,
    coefficients,
    finish,
    fold,
    rows_of,
)
from grids import grid
from torch import Tensor

pytest.importorskip("triton")
from burnish.kernels import triton_softmax
from burnish.kernels.triton_softmax import backward_tile_, fold_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# not in the interpreter
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
NAN = float("nan")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a row, the last one ragged."""
    monkeypatch.setattr(triton_softmax, "launch", lambda columns, most=0: (64, 1))


class Case(NamedTuple):
    logits: Tensor  # [n, V], c
    target: Tensor  # [n, k]
    transform: LogitTransform
    mean: bool = True
    squares: bool = True
    width: int = 1000  # of a tile

    def exactly(self) -> "Case":
        """As softmax.py wants it, in float64."""
        temperature = self.transform.temperature
        transform = self.transform._replace(
            temperature=None if temperature is None else temperature.double()
        )
        return self._replace(logits=self.logits.double().clamp(min=NEVER), transform=transform)

    def plainly(self) -> "Case":
        return self._replace(logits=self.logits.float().clamp(min=NEVER))

    def start(self) -> SoftmaxState:
        dtype = torch.float64 if self.logits.dtype == torch.float64 else torch.float32
        return SoftmaxState.start(
            self.target, self.logits.new_empty(0, dtype=dtype), self.mean, self.squares
        )

    def tiles(self) -> list[tuple[slice, Tensor]]:
        """Each span of the vocabulary, and the places of the targets in it."""
        return [
            (columns, self.target - columns.start)
            for columns in spans(self.logits.shape[1], self.width)
        ]


def a_case(
    n: int = 4,
    vocab: int = 150,
    targets: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    spread: float = 3.0,
    temperature: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
    width: int = 1000,
) -> Case:
    generator = torch.Generator().manual_seed(vocab)
    logits = spread * torch.randn(n, vocab, generator=generator)
    target = torch.randint(vocab, (n, targets), generator=generator)
    temperatures = (0.5 + torch.rand(n, generator=generator)).to(DEVICE) if temperature else None
    transform = LogitTransform(scale, softcap, temperatures)
    return Case(logits.to(DEVICE, dtype), target.to(DEVICE), transform, width=width)


def in_torch(case: Case) -> Softmax:
    state = case.start()
    for columns, here in case.tiles():
        state = fold(case.logits[:, columns], here, state, case.transform)
    return finish(state)


def in_triton(case: Case) -> Softmax:
    state = case.start()
    for columns, here in case.tiles():
        fold_(case.logits[:, columns], here, state, case.transform)
    return finish(state)


def arriving(case: Case, softmax: Softmax) -> Coefficients:
    generator = torch.Generator().manual_seed(1)
    like = softmax.logprob, *softmax[1:5]
    upstream = [torch.randn(t.shape, generator=generator).to(t) for t in like]
    return coefficients(upstream, softmax, case.transform)


class Pulled(NamedTuple):
    dc: Tensor
    moments: Tensor


def pulled_in_torch(case: Case, shift: Tensor, upstream: Coefficients) -> Pulled:
    out, moments = torch.empty_like(case.logits), torch.zeros_like(shift)
    for columns, here in case.tiles():
        dc = case.logits[:, columns].clone()
        moment = backward_tile(dc, shift, upstream, case.transform, True, dc)
        add_target_(dc, here, upstream.gain)
        out[:, columns], moments = dc, moments + moment
    return Pulled(out, moments)


def pulled_in_triton(case: Case, shift: Tensor, upstream: Coefficients) -> Pulled:
    out, moments = torch.full_like(case.logits, NAN, dtype=torch.float32), torch.zeros_like(shift)
    for columns, here in case.tiles():
        backward_tile_(
            case.logits[:, columns],
            here,
            shift,
            upstream,
            case.transform,
            out[:, columns],
            moments=moments,
        )
    return Pulled(out, moments)


def error(got: Tensor, exact: Tensor) -> float:
    return (got.double() - exact).abs().max().item() if got.numel() else 0.0


def assert_as_exact(
    got: tuple[Tensor, ...], plain: tuple[Tensor, ...], exact: tuple[Tensor, ...], times: int = 2
) -> None:
    """As near to float64 as torch's float32 is."""
    for i, (ours, theirs, right) in enumerate(zip(got, plain, exact, strict=True)):
        assert error(ours, right) <= times * error(theirs, right) + 1e-6, (
            i,
            error(ours, right),
            error(theirs, right),
        )


def check(case: Case, used: tuple[bool, ...] = (True,) * 4) -> None:
    """Forward, and backward for upstream gradients of every output, of which some coefficients are
    used.
    """
    # A float32 product with two factors, which the interpreter does not fuse, is rounded once more
    # than a quotient.
    times = 2 if case.transform.temperature is None else 3
    plain, exact = case.plainly(), case.exactly()
    ours, theirs, right = in_triton(case), in_torch(plain), in_torch(exact)
    assert_as_exact(ours, theirs, right, times)
    pulled = []
    for one, softmax, pull_all in (
        (case, ours, pulled_in_triton),
        (plain, theirs, pulled_in_torch),
        (exact, right, pulled_in_torch),
    ):
        level, *others = arriving(one, softmax)
        upstream = Coefficients(
            level, *(t if wanted else None for t, wanted in zip(others, used, strict=True))
        )
        dc, moments = pull_all(one, softmax.shift, upstream)
        pulled.append((dc, moments / case.logits.shape[1]))
    assert_as_exact(*pulled, times)


@grid(strength=2, vocab=[128, 150], width=[1000, 70], dtype=DTYPES)
def test_passes_equal_float64(
    vocab: int, width: int, dtype: torch.dtype, small_blocks: None
) -> None:
    check(a_case(n=3, vocab=vocab, width=width, dtype=dtype))


@grid(strength=2, scale=[1.0, 0.3], softcap=[None, 5.0], temperature=[False, True])
def test_temperature_softcap_and_scale(
    temperature: bool, softcap: float | None, scale: float, small_blocks: None
) -> None:
    check(a_case(n=3, temperature=temperature, softcap=softcap, scale=scale, width=100))


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0, 300.0])
def test_softcap_is_exact_near_zero_and_where_it_saturates(
    spread: float, small_blocks: None
) -> None:
    check(a_case(n=3, softcap=30.0, spread=spread))


EXTREME = {
    "peaked": lambda c: c + 60.0 * torch.eye(*c.shape),
    "all -1000": lambda c: c - 1000.0,
    "all +1000": lambda c: c + 1000.0,
    "rising": lambda c: c + torch.linspace(-500, 500, c.shape[1]),
    "falling": lambda c: c - torch.linspace(-500, 500, c.shape[1]),
    "constant": lambda c: torch.zeros_like(c),
}


@grid(strength=1, name=EXTREME, temperature=[False, True])
def test_extreme_logits_cost_no_digits(name: str, temperature: bool, small_blocks: None) -> None:
    case = a_case(n=3, vocab=130, temperature=temperature, width=70)
    check(case._replace(logits=EXTREME[name](case.logits.cpu()).to(DEVICE)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forbidden_tokens_have_no_share(dtype: torch.dtype, small_blocks: None) -> None:
    case = a_case(temperature=True, width=70, dtype=dtype)
    case.logits[0, 1:60] = case.logits[1, 60:] = case.logits[2, :140] = -torch.inf
    case.target[:] = torch.tensor([[0], [3], [149], [149]])
    check(case)
    softmax = in_triton(case)
    dc, _ = pulled_in_triton(case, softmax.shift, arriving(case, softmax)._replace(gain=None))
    assert (dc[case.logits.isneginf()] == 0).all()


def test_nan_logits_do_not_pass_for_forbidden_ones(small_blocks: None) -> None:
    case = a_case(n=2)
    case.logits[0, 100] = NAN
    softmax = in_triton(case)
    assert softmax.logsumexp.isnan().tolist() == [True, False]
    upstream = Coefficients(torch.ones(2, device=DEVICE), None, None, None, None)
    dc, _ = pulled_in_triton(case, softmax.shift, upstream)
    assert dc.isnan().nonzero().tolist() == [[0, 100]]


@pytest.mark.parametrize("targets", [1, 5])
def test_targets_in_the_last_column_and_several_in_a_row(targets: int, small_blocks: None) -> None:
    case = a_case(targets=targets)
    case.target[0], case.target[1, 0] = 149, 0
    case.target[2] = case.target[2, 0].item()  # the same one, several times
    case.target[3] = torch.tensor([63, 64, 127, 128, 149])[:targets]  # the edges of blocks
    check(case)


def test_targets_of_other_tiles_are_left_alone(small_blocks: None) -> None:
    case = a_case(n=3, targets=4)
    here = torch.tensor(
        [[-1, 0, 149, 150], [-150, 2**40, -(2**40), 149], [5, 5, 300, -70]], device=DEVICE
    )
    outside = (here < 0) | (here >= 150)
    state = case.start()
    state.chosen.fill_(7.5)
    fold_(case.logits, here, state, case.transform)
    assert (state.chosen[outside] == 7.5).all()
    assert torch.equal(state.chosen[~outside], case.logits.gather(1, here.clamp(0, 149))[~outside])
    gain = torch.ones(3, 4, device=DEVICE)
    zero = torch.zeros(3, device=DEVICE)
    out = torch.full_like(case.logits, NAN)
    backward_tile_(
        case.logits, here, zero, Coefficients(zero, None, None, None, gain), case.transform, out
    )
    expected = torch.zeros_like(out)
    add_target_(expected, here, gain)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mean", [False, True], ids=["", "mean"])
@pytest.mark.parametrize("squares", [False, True], ids=["", "squares"])
def test_sums_that_nobody_asked_for_are_not_needed(
    mean: bool, squares: bool, small_blocks: None
) -> None:
    check(a_case(n=2, width=70)._replace(mean=mean, squares=squares))


@grid(strength=2, slope=[False, True], bend=[False, True], flat=[False, True], gain=[False, True])
def test_gradients_of_some_outputs_only(
    slope: bool, bend: bool, flat: bool, gain: bool, small_blocks: None
) -> None:
    check(
        a_case(n=2, vocab=100, targets=2, temperature=True, softcap=8.0), (slope, bend, flat, gain)
    )


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65])
def test_short_rows(vocab: int, small_blocks: None) -> None:
    check(a_case(n=2, vocab=vocab, targets=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 200, 4096, 9001])
def test_the_launch_table_fits_every_length(vocab: int, dtype: torch.dtype) -> None:
    check(a_case(n=2, vocab=vocab, dtype=dtype))


def test_no_rows() -> None:
    case = a_case(n=0)
    fold_(
        case.logits,
        case.target,
        case.start(),
        case.transform,
        (torch.empty_like(case.logits), torch.empty(0)),
    )
    none = torch.empty(0, device=DEVICE)
    backward_tile_(
        case.logits,
        case.target,
        none,
        Coefficients(none, *[None] * 4),
        case.transform,
        torch.empty_like(case.logits),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
def test_kept_logits_are_relative_to_the_highest_of_the_tile(
    softcap: float | None, dtype: torch.dtype, small_blocks: None
) -> None:
    case = a_case(temperature=True, softcap=softcap, scale=1.3, dtype=dtype)
    case.logits[:, 3] = -3000.0
    state, top = case.start(), torch.full((4,), NAN, device=DEVICE)
    state.shift.fill_(1000.0)  # of an earlier tile, of no interest here
    shifted = torch.full_like(case.logits, NAN)
    fold_(case.logits, case.target, state, case.transform, (shifted, top))
    exact, plain = (
        one.transform.tempered(one.transform.capped(one.logits))
        for one in (case.exactly(), case.plainly())
    )
    assert_as_exact((top,), (plain.amax(1),), (exact.amax(1),), 3)
    # A GPU may fuse a product and a sum in one of the two places where z is computed.
    assert shifted.amax(1).abs().max() <= (1e-6 if DEVICE == "cuda" else 0)
    relative = exact - exact.amax(1, keepdim=True)
    assert torch.allclose(shifted.double(), relative, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("forbidden", [False, True], ids=["", "forbidden"])
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["", "softcap"])
def test_gradients_from_kept_logits(
    softcap: float | None, forbidden: bool, small_blocks: None
) -> None:
    """Float32 costs nothing; 16 bits cost |x|·eˣ·ε ≤ ε/e of a coefficient, where raw logits would
    cost |z|·ε.
    """
    case = a_case(n=3, spread=8.0, temperature=True, softcap=softcap, targets=2, width=100)
    case = case._replace(logits=case.logits + 20)
    if forbidden:
        case.logits[:, 10:20] = -torch.inf
    plain, exact = case.plainly(), case.exactly()
    (theirs, _), (right, upstream) = (
        (pulled_in_torch(one, softmax.shift, gradients), gradients)
        for one, softmax in ((plain, in_torch(plain)), (exact, in_torch(exact)))
        for gradients in [arriving(one, softmax)]
    )
    for dtype in (torch.float32, *DTYPES[1:]):
        kept, state, tops = torch.full_like(case.logits, NAN, dtype=dtype), case.start(), []
        for columns, here in case.tiles():
            tops.append(torch.full((3,), NAN, device=DEVICE))
            fold_(
                case.logits[:, columns], here, state, case.transform, (kept[:, columns], tops[-1])
            )
        got = Pulled(torch.full_like(case.logits, NAN), torch.zeros(3, device=DEVICE))
        rest = state.shift, arriving(plain, finish(state)), case.transform
        for (columns, here), top in zip(case.tiles(), tops, strict=True):
            backward_tile_(
                kept[:, columns], here, *rest, got.dc[:, columns], top=top, moments=got.moments
            )
        if dtype == torch.float32:
            assert_as_exact(got, theirs, right, 3)
        else:
            largest = max(t.abs().max() for t in upstream)
            assert error(got.dc, right.dc) <= torch.finfo(dtype).eps * largest
            rounded = plain._replace(logits=case.logits.to(dtype).float().clamp(min=NEVER))
            raw = pulled_in_torch(rounded, *rest[:2])
            assert error(got.dc, right.dc) <= error(raw.dc, right.dc) / 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_may_take_the_place_of_the_logits(dtype: torch.dtype, small_blocks: None) -> None:
    case = a_case(n=3, targets=3, dtype=dtype, temperature=True)
    softmax = in_triton(case)
    upstream = arriving(case.plainly(), softmax)
    rest = case.target, softmax.shift, upstream, case.transform
    apart, in_place = torch.full_like(case.logits, NAN), case.logits.clone()
    backward_tile_(case.logits, *rest, apart)
    backward_tile_(in_place, *rest, in_place)
    assert torch.equal(apart, in_place)
    exact = case.exactly()
    expected = in_torch(exact)
    right, _ = pulled_in_torch(exact, expected.shift, arriving(exact, expected))
    assert torch.allclose(apart.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_moments_are_added_to_what_is_there(small_blocks: None) -> None:
    case = a_case(n=2, temperature=True)
    softmax = in_triton(case)
    rest = softmax.shift, arriving(case, softmax), case.transform, torch.empty_like(case.logits)
    once, again = torch.zeros(2, device=DEVICE), torch.full((2,), 3.0, device=DEVICE)
    backward_tile_(case.logits, case.target, *rest, moments=once)
    backward_tile_(case.logits, case.target, *rest, moments=again)
    assert torch.equal(again, once + 3.0)


def test_rows_may_lie_apart(small_blocks: None) -> None:
    """Rows of a wider tensor, some rows of the sums, per-row inputs of any strides: as if all were
    dense. A GPU reads what lies otherwise in other pieces, and adds them in another order.
    """
    case = a_case(n=6, targets=2, temperature=True)
    rows, wide = slice(2, 5), torch.full((6, 400), NAN, device=DEVICE)
    wide[:, 100:250] = case.logits
    strided = (
        case.target.t().contiguous().t(),
        case.transform._replace(temperature=case.transform.temperature.repeat_interleave(2)[::2]),
    )
    dense, part = case.start(), case.start()
    kept, apart = torch.full((6, 150), NAN, device=DEVICE), torch.full((6, 300), NAN, device=DEVICE)
    tops = torch.full((2, 6), NAN, device=DEVICE)
    fold_(case.logits, case.target, dense, case.transform, (kept, tops[0]))
    view = (apart[rows, 50:200], tops[1, rows])
    fold_(
        wide[rows, 100:250], strided[0][rows], rows_of(part, rows), rows_of(strided[1], rows), view
    )
    fresh = case.start()
    same = torch.equal if DEVICE == "cpu" else partial(torch.allclose, rtol=1e-6, atol=1e-6)
    for ours, whole, untouched in zip(part, dense, fresh, strict=True):
        assert same(ours[rows], whole[rows])
        assert torch.equal(ours[:2], untouched[:2]) and torch.equal(ours[5:], untouched[5:])
    assert same(apart[rows, 50:200], kept[rows]) and apart.isnan().sum() == 6 * 300 - 3 * 150
    assert torch.equal(tops[1, rows], tops[0, rows])

    upstream = arriving(case, finish(dense))
    loose = Coefficients(
        *(t.t().contiguous().t() if t.ndim == 2 else t.repeat_interleave(2)[::2] for t in upstream)
    )
    out, apart = torch.full_like(case.logits, NAN), torch.full((6, 300), NAN, device=DEVICE)
    backward_tile_(case.logits, case.target, dense.shift, upstream, case.transform, out)
    backward_tile_(
        wide[rows, 100:250],
        strided[0][rows],
        dense.shift[rows],
        rows_of(loose, rows),
        rows_of(strided[1], rows),
        apart[rows, 50:200],
    )
    assert torch.equal(apart[rows, 50:200], out[rows]) and apart.isnan().sum() == 6 * 300 - 3 * 150


def test_rows_may_lie_beyond_32_bits() -> None:
    """In a process of its own, since a wrong address ends it: rows 2³⁰ logits apart in memory that
    is never touched.
    """
    script = f"""
        import os, sys
        if "{DEVICE}" == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        import torch
        from burnish.kernels.softmax import SoftmaxState, LogitTransform, Coefficients
        from burnish.kernels.triton_softmax import fold_, backward_tile_

        try:
            memory = torch.empty(3 * 2**30 + 64, dtype=torch.float16, device="{DEVICE}")
        except RuntimeError:
            sys.exit(77)
        far, kept, out = (memory.as_strided((4, 16), (2**30, 1), start) for start in (0, 16, 32))
        near = torch.randn(4, 16).to(far)
        far.copy_(near)
        column = torch.arange(4, device="{DEVICE}")[:, None]
        answers = []
        for tile, shifted, dc in ((near, torch.empty_like(near), torch.empty_like(near)), (far, kept, out)):
            state = SoftmaxState.start(column, torch.empty(0, device="{DEVICE}"), True, True)
            top = torch.empty_like(state.shift)
            fold_(tile, column, state, LogitTransform(1.0, None, None), (shifted, top))
            upstream = Coefficients(state.total, None, None, None, state.chosen)
            backward_tile_(tile, column, state.shift, upstream, LogitTransform(1.0, None, None), dc)
            answers.append((*state, shifted.clone(), dc.clone()))
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip("6 GB cannot be mapped")
    assert done.returncode == 0, done.stderr
