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
again in backward, and 4·D_S for its products; what fits into ``KEEP`` of the logits is computed only once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .checks import check_temperature
from .head import Head, accumulation_dtype
from .operands import Gradients, Operands, Tiles, operands, room
from .tiles import NEVER, Transform, no_second_derivative, per_row, run, spans, worth_compiling

ROWS, COLUMNS = 1024, 1024  # 4 MB of float32 for each head: two tiles and their temporaries fit into 32 MB of cache
KEEP = 2**25  # bytes of logits, of each head, that a pass leaves for the next

T = TypeVar("T")


def linear_divergence(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    *,
    beta: float,
    temperature: float | Tensor,
    vocab: int,
) -> Tensor:
    """The contract of ``reference.linear_divergence``."""
    dtype = accumulation_dtype(student_hidden.dtype)
    trained, fixed = operands(student_hidden, student, dtype), operands(teacher_hidden, teacher, dtype)
    graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)
    keep = KEEP if graph or 0 < beta < 1 else 0
    constants = (student.scale, student.softcap, teacher.scale, teacher.softcap, beta, vocab, keep)
    temperatures = per_row(temperature, student_hidden)
    divergence: Tensor = _forward(*trained, *fixed, temperatures, *constants)[0]
    return divergence


class _Rows(NamedTuple):
    """What a later pass needs, each ``[n]``: m and log S of both heads; D or, where there is a mixture, K."""

    student_shift: Tensor
    student_log_total: Tensor
    teacher_shift: Tensor
    teacher_log_total: Tensor
    level: Tensor

    def rows(self, rows: slice) -> "_Rows":
        return _Rows(*(t[rows] for t in self))


class _Pair(NamedTuple):
    """Both heads and where their tiles of c are; after ``columns``, for a span of the vocabulary."""

    student: Operands
    teacher: Operands
    places: tuple[Tiles, Tiles]
    transforms: tuple[Transform, Transform]

    def columns(self, columns: slice) -> "_Pair":
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


def fold(p: Tensor, q: Tensor, state: Tensor, to_z: Transform, to_w: Transform, gap: bool) -> Tensor:
    """``[n, 5]``, m_P, S, m_Q, R and G of KL(P‖Q), after one more pair of tiles of c; G only if it is asked for."""
    shift, total, other_shift, other_total, sum_of_gaps = state.unbind(1)
    z, w = to_z.tempered(to_z.capped(p)), to_w.tempered(to_w.capped(q))
    top, other_top = torch.maximum(shift, z.amax(1)), torch.maximum(other_shift, w.amax(1))
    drop, other_drop = shift - top, other_shift - other_top
    x, y = z - top[:, None], w - other_top[:, None]
    weight = x.exp()
    total_after = total * drop.exp() + weight.sum(1)
    if gap:
        sum_of_gaps = (sum_of_gaps + (drop - other_drop) * total) * drop.exp() + weight.mul_(x.sub_(y)).sum(1)
    other_after = other_total * other_drop.exp() + y.exp_().sum(1)
    return torch.stack((top, total_after, other_top, other_after, sum_of_gaps), 1)


def mix(student: Tensor, teacher: Tensor, known: _Rows, to_z: Transform, to_w: Transform, beta: float) -> Tensor:
    """``[n, 2]``: Σ eᵗ·(t − log M) and Σ eˢ·(s − log M) over a pair of tiles of c."""
    s, t = _log_probabilities(student, teacher, known, to_z, to_w)
    p, q = s.exp(), t.exp()
    mixture = _log_mixture(p, q, beta)
    return torch.stack((q.mul_(t.sub_(mixture)).sum(1), p.mul_(s.sub_(mixture)).sum(1)), 1)


def pull(
    student: Tensor, teacher: Tensor, known: _Rows, gain: Tensor, to_z: Transform, to_w: Transform, beta: float
) -> Tensor:
    """From a pair of tiles of c, the student's dc; ``gain`` is g·scale/T, in a mixture times 1−β."""
    s, t = _log_probabilities(student, teacher, known, to_z, to_w)
    p = s.exp()
    if beta == 0:
        dz = p.sub_(t.exp_())
    elif beta == 1:
        dz = p.mul_(s.sub_(t).sub_(known.level[:, None]))
    else:
        dz = p.mul_(s.sub_(_log_mixture(p, t.exp_(), beta)).sub_(known.level[:, None]))
    dz.mul_(gain[:, None])
    return dz if to_z.softcap is None else dz.mul_(1 - (to_z.capped(student) / to_z.softcap).square_())


def _log_probabilities(
    student: Tensor, teacher: Tensor, known: _Rows, to_z: Transform, to_w: Transform
) -> tuple[Tensor, Tensor]:
    """s and t, free to be overwritten. Minus m first: large logits cost no digits."""
    s = to_z.tempered(to_z.capped(student)) - known.student_shift[:, None]
    t = to_w.tempered(to_w.capped(teacher)) - known.teacher_shift[:, None]
    return s.sub_(known.student_log_total[:, None]), t.sub_(known.teacher_log_total[:, None])


def _log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """log((1−β)p + βq), finite where it underflows: there it is multiplied by zero."""
    return (p * (1 - beta)).add_(q, alpha=beta).clamp_(min=torch.finfo(p.dtype).tiny).log_()


@torch.library.custom_op("burnish::tiled_linear_divergence", mutates_args=())
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
    keep: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The divergence, the fields of ``_Rows`` as columns, and the tiles of student and teacher that are kept."""
    check_temperature("linear_divergence", temperature)
    kept = room(hidden, vocab, COLUMNS, keep), room(hidden, vocab, COLUMNS, keep)
    transforms = _transforms(hidden, temperature, scale, softcap, teacher_scale, teacher_softcap)
    teacher = teacher_hidden, teacher_weight, teacher_bias, teacher_low, teacher_up
    pair = _pair((hidden, weight, bias, low, up), teacher, transforms, kept, vocab)
    known = _first_pass(pair, beta, vocab)
    if 0 < beta < 1:
        divergence, level = _second_pass(pair, known, beta, vocab)
        return divergence, torch.stack((*known[:4], level), 1), *kept
    return known.level.clone(), torch.stack(known, 1), *kept


def _transforms(like: Tensor, temperature: Tensor | None, *constants: Any) -> tuple[Transform, Transform]:
    scale, softcap, teacher_scale, teacher_softcap = constants
    student = Transform.of(scale, softcap, temperature, like)
    return student, Transform.of(teacher_scale, teacher_softcap, temperature, like)


def _pair(
    student: Sequence[Any],
    teacher: Sequence[Any],
    transforms: tuple[Transform, Transform],
    kept: Sequence[Tensor],
    vocab: int,
) -> _Pair:
    own, other = (Operands(hidden.to(kept[0].dtype), *rest) for hidden, *rest in (student, teacher))
    return _Pair(own, other, (Tiles(kept[0], ROWS, vocab), Tiles(kept[1], ROWS, vocab)), transforms)


def _p_and_q(student: T, teacher: T, beta: float) -> tuple[T, T]:
    """Their roles in KL(P‖Q), and back: in forward KL the teacher is P."""
    return (teacher, student) if beta == 0 else (student, teacher)


def _first_pass(pair: _Pair, beta: float, vocab: int) -> _Rows:
    """The normalizers and, where there is no mixture, the divergence."""
    n = len(pair.student.hidden)
    state = pair.student.hidden.new_zeros(n, 5)
    state[:, 0] = state[:, 2] = NEVER
    for columns in spans(vocab, COLUMNS):
        part = pair.columns(columns)
        for rows in spans(n, ROWS):
            p, q = _p_and_q(*part.tiles(rows, columns, seen=False), beta)
            to_z, to_w = _p_and_q(*part.at(rows), beta)
            compiled = p.shape[1] == COLUMNS and worth_compiling(p, n * vocab)
            state[rows] = run(fold, p, q, state[rows], to_z, to_w, beta in (0, 1), compiled=compiled)
    shift, total, other_shift, other_total, gap = state.unbind(1)
    divergence = gap / total - total.log() + other_total.log()
    if _is_infinite(*_p_and_q(pair.student, pair.teacher, beta), *_p_and_q(*pair.transforms, beta), vocab):
        divergence.fill_(torch.inf)
    student, teacher = _p_and_q((shift, total.log()), (other_shift, other_total.log()), beta)
    return _Rows(student[0], student[1], teacher[0], teacher[1], divergence)


def _is_infinite(p: Operands, q: Operands, to_z: Transform, to_w: Transform, vocab: int) -> bool:
    """Whether Q forbids a token that P allows. In the tiles −inf is finite, see ``NEVER``, and capped it is anyway."""
    if q.bias is None or to_w.softcap is not None:
        return False
    ruled_out = q.bias[:vocab].isneginf()
    if p.bias is not None and to_z.softcap is None:
        ruled_out = ruled_out & ~p.bias[:vocab].isneginf()
    return bool(ruled_out.any())


def _second_pass(pair: _Pair, known: _Rows, beta: float, vocab: int) -> tuple[Tensor, Tensor]:
    """D and K of a mixture."""
    n = len(pair.student.hidden)
    sums = pair.student.hidden.new_zeros(n, 2)
    for columns in spans(vocab, COLUMNS):
        part = pair.columns(columns)
        for rows in spans(n, ROWS):
            student, teacher = part.tiles(rows, columns, seen=True)
            compiled = student.shape[1] == COLUMNS and worth_compiling(student, n * vocab)
            sums[rows] += run(mix, student, teacher, known.rows(rows), *part.at(rows), beta, compiled=compiled)
    from_teacher, from_student = sums.unbind(1)
    return beta * from_teacher + (1 - beta) * from_student, from_student


@_forward.register_fake
def _(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, vocab, keep = rest
    dtype = accumulation_dtype(hidden.dtype)
    kept = (room(hidden, vocab, COLUMNS, keep) for _ in range(2))
    return hidden.new_empty(hidden.shape[0], dtype=dtype), hidden.new_empty(hidden.shape[0], 5, dtype=dtype), *kept


@torch.library.custom_op("burnish::tiled_linear_divergence_backward", mutates_args=())
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
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of hidden, weight, bias, low and up, those of them that are needed."""
    student, kept = (hidden, weight, bias, low, up), (student_kept, teacher_kept)
    teacher = teacher_hidden, teacher_weight, teacher_bias, teacher_low, teacher_up
    transforms = _transforms(hidden, temperature, scale, softcap, teacher_scale, teacher_softcap)
    pair = _pair(student, teacher, transforms, kept, vocab)
    saved, n = _Rows(*known.unbind(1)), len(hidden)
    gain = upstream * transforms[0].inner(upstream) * (1 - beta if 0 < beta < 1 else 1)
    whole = Gradients.zeros(pair.student, needed)
    for columns in spans(vocab, COLUMNS):
        part, grads = pair.columns(columns), whole.columns(columns, known.dtype)
        for rows in spans(n, ROWS):
            tiles = part.tiles(rows, columns, seen=True)
            compiled = tiles[0].shape[1] == COLUMNS and worth_compiling(tiles[0], n * vocab)
            dc = run(pull, *tiles, saved.rows(rows), gain[rows], *part.at(rows), beta, compiled=compiled)
            grads.add_(dc, part.student, rows)
        whole.store_(columns, grads)
    results = zip(whole, student, strict=True)
    return [grad.to(like.dtype) for grad, like in results if grad is not None and like is not None]


@_backward.register_fake
def _(upstream: Tensor, known: Tensor, student_kept: Tensor, teacher_kept: Tensor, *rest: Any) -> list[Tensor]:
    *_, needed = rest
    return [t.new_empty(t.shape) for t, n in zip(rest[:5], needed, strict=True) if n]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.constants = inputs[11:-1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], *inputs[:11])


def _apply_backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:5])
    grads = iter(_backward(upstream, *ctx.saved_tensors, *ctx.constants, needed))
    return *(next(grads) if n else None for n in needed), *(None,) * 13


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(no_second_derivative)
