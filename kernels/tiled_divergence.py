"""``linear_divergence`` on any device without ``[N, V]`` in memory: the tiles of both heads side by side.

Let s = log p_S and t = log p_T. A Kullback-Leibler divergence takes one pass over the vocabulary, because its
normalizers leave the sum: with x = z_P − m_P and y = z_Q − m_Q, relative to the largest logits so far,

    S = Σ eˣ        R = Σ eʸ        G = Σ eˣ·(x − y)        KL(P‖Q) = G/S − log S + log R

and when m_P and m_Q grow by δ and ε:  G ← (G − (δ − ε)·S)·e^(−δ),  S ← S·e^(−δ),  R ← R·e^(−ε). The mixture
M = (1−β)S + βT has both normalizers inside its logarithm, so 0 < β < 1 takes a second pass, with s and t known:

    D = β·Σ eᵗ·(t − log M) + (1−β)·K        K = KL(S‖M) = Σ eˢ·(s − log M)

Backward, for the gradient g of D. With d_v = ∂D/∂p_S(v) the softmax gives dz_v = g·eˢ·(d_v − Σ_u p_S(u)·d_u), and d is
−e^(t−s) for KL(T‖S), s − t + 1 for KL(S‖T), and else (1−β)·(s − log M): the derivatives of s and log M cancel.

    β = 0    KL(T‖S)    dz = g·(eˢ − eᵗ)
    β = 1    KL(S‖T)    dz = g·eˢ·(s − t − D)
    else                dz = g·(1−β)·eˢ·(s − log M − K)

and from dz to the operands as in tiled.py. Floating-point operations in units of N·V: 2(D_S + D_T) a pass, as much
again in backward, and 4·D_S for its products; logits that are kept are computed only once, and rows that no gradient
arrives at are left out of backward. Products are torch's; the pass between two of them is torch's too
(divergence_tiles.py), or Triton's (triton_divergence.py).
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from .checks import check_values
from .divergence_tiles import LEVEL, fold, mix, pull
from .head import Head, accumulation_dtype
from .operands import Gradients, Operands, Tiles, buffer, keep_by_default, operands, room
from .sweeps import live_rows, rows_at_once, spread
from .tiles import (
    NEVER,
    WAITS,
    Transform,
    no_second_derivative,
    per_row,
    run,
    spans,
    vocabulary_spans,
    worth_compiling,
)

ROWS, COLUMNS = 1024, 1024  # 4 MB of float32 for each head: two tiles and their temporaries fit into 32 MB of cache
# On a GPU 64 MB for each head, and dc of half of that: a product of 512 blocks of 128 × 256 is four full waves.
GPU_ROWS, GPU_COLUMNS = 4096, 4096
KEEP = 2**26  # bytes of logits, of both heads together, that a pass leaves for the next; of a GPU see keep_by_default

Passes = Literal["torch", "triton"]
T = TypeVar("T")


class Plan(NamedTuple):
    """How a call is cut into tiles, how many bytes of both heads' are kept (None: by default), whose passes go over
    them, and what the factors of either head are rounded to."""

    rows: int
    columns: int
    keep: int | None
    passes: str
    compute: torch.dtype
    teacher_compute: torch.dtype


def plan(student: Operands, teacher: Operands, passes: Passes, keep_bytes: int | None, *, again: bool) -> Plan:
    """By device and arguments only: the same call always takes the same road. ``again``: another pass will follow."""
    rows, columns = (GPU_ROWS, GPU_COLUMNS) if student.hidden.device.type == "cuda" else (ROWS, COLUMNS)
    return Plan(rows, columns, keep_bytes if again else 0, passes, student.compute, teacher.compute)


def linear_divergence(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    *,
    beta: float,
    temperature: float | Tensor,
    vocab: int,
    keep_bytes: int | None = None,
    compute_dtype: torch.dtype | None = None,
    passes: Passes = "torch",
) -> Tensor:
    """The contract of ``kernels.linear_divergence``."""
    trained = operands(student_hidden, student, compute_dtype)
    fixed = operands(teacher_hidden, teacher, compute_dtype)
    graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained[:5])
    how = plan(trained, fixed, passes, keep_bytes, again=graph or 0 < beta < 1)
    constants = student.scale, student.softcap, teacher.scale, teacher.softcap, beta, vocab
    divergence: Tensor = _forward(*trained[:5], *fixed[:5], per_row(temperature, student_hidden), *constants, *how)[0]
    return divergence


class _Call(NamedTuple):
    """Both heads, after ``columns`` for a span of the vocabulary, and all else that the loops over tiles need."""

    student: Operands
    teacher: Operands
    places: tuple[Tiles, Tiles]
    transforms: tuple[Transform, Transform]
    beta: float
    vocab: int
    plan: Plan

    def columns(self, columns: slice) -> "_Call":
        return self._replace(student=self.student.columns(columns), teacher=self.teacher.columns(columns))

    def tiles(self, rows: slice, columns: slice, seen: bool) -> tuple[Tensor, Tensor]:
        """Both tiles of c, computed unless an earlier pass has ``seen`` them and they were kept."""
        student, teacher = (place(rows, columns) for place in self.places)
        if not (seen and self.places[0].keeps(columns)):
            self.student.logits(rows, student)
            self.teacher.logits(rows, teacher)
        return student, teacher

    def at(self, rows: slice) -> tuple[Transform, Transform]:
        student, teacher = self.transforms
        return student.rows(rows), teacher.rows(rows)

    def compiled(self, tile: Tensor) -> bool:
        """Whether passes over tiles like this are worth compiling: only those of full width are, once for all calls."""
        return tile.shape[1] == self.plan.columns and worth_compiling(tile, len(self.student.hidden) * self.vocab)


@torch.library.custom_op("burnish::tiled_linear_divergence", mutates_args=(), tags=WAITS)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    teacher_low: Tensor | None,
    teacher_up: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
    teacher_scale: float,
    teacher_softcap: float | None,
    beta: float,
    vocab: int,
    rows: int,
    columns: int,
    keep: int | None,
    passes: str,
    compute: torch.dtype,
    teacher_compute: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The divergence, what is ``known`` of the rows (divergence_tiles.py), and the tiles of both heads that stay."""
    check_values("linear_divergence", None, vocab, temperature)
    how = Plan(rows, columns, keep, passes, compute, teacher_compute)
    kept = _space(hidden, vocab, columns, keep), _space(hidden, vocab, columns, keep)
    teacher = teacher_hidden, teacher_weight, teacher_bias, teacher_low, teacher_up
    constants = scale, softcap, teacher_scale, teacher_softcap
    call = _call((hidden, weight, bias, low, up), teacher, temperature, constants, kept, beta, vocab, how)
    known = _first_pass(call)
    if 0 < beta < 1:
        divergence, known[:, LEVEL] = _second_pass(call, known)
        return divergence, known, *kept
    return known[:, LEVEL].clone(), known, *kept


@_forward.register_fake
def _(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, vocab, _, columns, keep, _, _, _ = rest
    dtype = accumulation_dtype(hidden.dtype)
    kept = (_space(hidden, vocab, columns, keep) for _ in range(2))
    return hidden.new_empty(hidden.shape[0], dtype=dtype), hidden.new_empty(hidden.shape[0], 5, dtype=dtype), *kept


def _space(hidden: Tensor, vocab: int, columns: int, keep: int | None) -> Tensor:
    """Room for the tiles of one head that stay: half of the bytes."""
    keep = keep_by_default(hidden.device, KEEP) if keep is None else keep
    return room(hidden, vocab, columns, keep // 2, accumulation_dtype(hidden.dtype))


def _call(
    student: Sequence[Any],
    teacher: Sequence[Any],
    temperature: Tensor | None,
    constants: Sequence[Any],
    kept: Sequence[Tensor],
    beta: float,
    vocab: int,
    how: Plan,
    only: Tensor | None = None,
) -> _Call:
    """``only`` ``[live]``: the rows that are worked on, if not all."""

    def pick(t: Any) -> Any:
        return t if t is None or only is None else t[only]

    def head(
        compute: torch.dtype, hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, up: Tensor | None
    ) -> Operands:
        return Operands(pick(hidden), weight, bias, pick(low), up, compute).rounded()

    scale, softcap, teacher_scale, teacher_softcap = constants
    temperature = pick(temperature)
    transforms = (
        Transform.of(scale, softcap, temperature, kept[0]),
        Transform.of(teacher_scale, teacher_softcap, temperature, kept[0]),
    )
    places = Tiles(kept[0], how.rows, vocab, only=only), Tiles(kept[1], how.rows, vocab, only=only)
    both = head(how.compute, *student), head(how.teacher_compute, *teacher)
    return _Call(*both, places, transforms, beta, vocab, how)


def _p_and_q(student: T, teacher: T, beta: float) -> tuple[T, T]:
    """Their roles in KL(P‖Q), and back: in forward KL the teacher is P."""
    return (teacher, student) if beta == 0 else (student, teacher)


def _first_pass(call: _Call) -> Tensor:
    """The normalizers and, where there is no mixture, the divergence, as columns of ``known``."""
    n, beta, gap = len(call.student.hidden), call.beta, call.beta in (0, 1)
    state = call.places[0].kept.new_zeros(n, 5)
    state[:, 0] = state[:, 2] = NEVER
    for columns in vocabulary_spans(call.vocab, call.plan.columns, state.device):
        part = call.columns(columns)
        for rows in spans(n, call.plan.rows):
            p, q = _p_and_q(*part.tiles(rows, columns, seen=False), beta)
            to_z, to_w = _p_and_q(*part.at(rows), beta)
            if call.plan.passes == "triton":
                from . import triton_divergence

                triton_divergence.fold_(state[rows], p, q, to_z, to_w, gap)
            else:
                state[rows] = run(fold, p, q, state[rows], to_z, to_w, gap, compiled=call.compiled(p))
    shift, total, other_shift, other_total, sum_of_gaps = state.unbind(1)
    divergence = sum_of_gaps / total - total.log() + other_total.log()
    if (ruled_out := _ruled_out(call)) is not None:
        divergence.masked_fill_(ruled_out, torch.inf)
    student, teacher = _p_and_q((shift, total.log()), (other_shift, other_total.log()), beta)
    return torch.stack((*student, *teacher, divergence), 1)


def _ruled_out(call: _Call) -> Tensor | None:
    """Whether Q forbids a token that P allows, None if it can't. In the tiles −inf is finite, see ``NEVER``, and capped
    it is anyway."""
    p, q = _p_and_q(call.student.bias, call.teacher.bias, call.beta)
    to_z, to_w = _p_and_q(*call.transforms, call.beta)
    if q is None or to_w.softcap is not None:
        return None
    ruled_out = q[: call.vocab].isneginf()
    if p is not None and to_z.softcap is None:
        ruled_out = ruled_out & ~p[: call.vocab].isneginf()
    return ruled_out.any()


def _second_pass(call: _Call, known: Tensor) -> tuple[Tensor, Tensor]:
    """D and K of a mixture."""
    n, beta = len(call.student.hidden), call.beta
    sums = known.new_zeros(n, 2)
    for columns in vocabulary_spans(call.vocab, call.plan.columns, known.device):
        part = call.columns(columns)
        for rows in spans(n, call.plan.rows):
            tiles = part.tiles(rows, columns, seen=True)
            to_z, to_w = part.at(rows)
            if call.plan.passes == "triton":
                from . import triton_divergence

                triton_divergence.mix_(sums[rows], *tiles, known[rows], to_z, to_w, beta)
            else:
                sums[rows] += run(mix, *tiles, known[rows], to_z, to_w, beta, compiled=call.compiled(tiles[0]))
    from_teacher, from_student = sums.unbind(1)
    return beta * from_teacher + (1 - beta) * from_student, from_student


@torch.library.custom_op("burnish::tiled_linear_divergence_backward", mutates_args=(), tags=WAITS)
def _backward(
    upstream: Tensor,
    known: Tensor,
    student_kept: Tensor,
    teacher_kept: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    teacher_low: Tensor | None,
    teacher_up: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
    teacher_scale: float,
    teacher_softcap: float | None,
    beta: float,
    vocab: int,
    rows: int,
    columns: int,
    passes: str,
    compute: torch.dtype,
    teacher_compute: torch.dtype,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of hidden, weight, bias, low and up, those of them that are needed."""
    student, kept = (hidden, weight, bias, low, up), (student_kept, teacher_kept)
    teacher = teacher_hidden, teacher_weight, teacher_bias, teacher_low, teacher_up
    constants = scale, softcap, teacher_scale, teacher_softcap
    how = Plan(rows, columns, 0, passes, compute, teacher_compute)
    some, unit = live_rows([upstream], len(hidden), Operands(*student, compute), scale)
    only = None if some is None else some.rows
    call = _call(student, teacher, temperature, constants, kept, beta, vocab, how, only)
    whole = _gradients(call, *((upstream, known) if only is None else (upstream[only], known[only])), unit, needed)
    if only is not None:
        whole = whole._replace(hidden=spread(whole.hidden, some), low=spread(whole.low, some))
    results = zip(whole[:5], student, strict=True)
    return [grad.to(like.dtype) for grad, like in results if grad is not None and like is not None]


def _gradients(call: _Call, upstream: Tensor, known: Tensor, unit: float, needed: Sequence[bool]) -> Gradients:
    """Their sums over all tiles; dc is in multiples of ``unit``."""
    n, beta, head = len(upstream), call.beta, call.student
    whole = Gradients.room(head, needed, call.vocab)
    gain = upstream * call.transforms[0].inner(upstream) * (1 - beta if 0 < beta < 1 else 1)
    known = known.clone()
    known[:, LEVEL].masked_fill_(gain == 0, 0)  # a row that no gradient arrives at has none, even if it diverges
    gain = gain / unit
    at_once = rows_at_once(head.hidden, call.plan.rows)
    room = buffer(head.hidden, min(n, at_once), min(call.vocab, call.plan.columns), head.hidden.dtype)  # of dc
    for columns in vocabulary_spans(call.vocab, call.plan.columns, known.device):
        part, grads = call.columns(columns), whole.columns(columns, head, at_once=n <= at_once)
        for block in spans(n, at_once):
            dc = room[: block.stop - block.start, : columns.stop - columns.start]
            for rows in spans(block.stop, call.plan.rows, block.start):
                tiles, out = (
                    part.tiles(rows, columns, seen=True),
                    dc[rows.start - block.start : rows.stop - block.start],
                )
                here, (to_z, to_w) = (known[rows], gain[rows]), part.at(rows)
                if call.plan.passes == "triton":
                    from . import triton_divergence

                    triton_divergence.pull_(out, *tiles, *here, to_z, to_w, beta)
                else:
                    run(pull, out, *tiles, *here, to_z, to_w, beta, compiled=call.compiled(out))
            grads.add_(dc, part.student, block, columns, unit)
        whole.store_(columns, grads)
    return whole


@_backward.register_fake
def _(upstream: Tensor, known: Tensor, student_kept: Tensor, teacher_kept: Tensor, *rest: Any) -> list[Tensor]:
    *_, needed = rest
    return [t.new_empty(t.shape) for t, n in zip(rest[:5], needed, strict=True) if n]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *constants, _, passes, compute, teacher_compute = inputs[11:]
    ctx.constants = *constants, passes, compute, teacher_compute
    ctx.set_materialize_grads(False)  # else backward would begin with zeros in the size of all that was kept
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], *inputs[:11])


def _apply_backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:5])
    grads = iter([] if upstream is None else _backward(upstream, *ctx.saved_tensors, *ctx.constants, needed))
    return *(next(grads, None) if n else None for n in needed), *(None,) * 18


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(no_second_derivative)
