"""The passes over the tiles of two heads, side by side: three elementwise functions, and the loops
that call them.

The equations are in linear_divergence.py. ``row_stats`` ``[n, 5]`` has, of each row, m and log S of
the student, m and log R of the teacher, and in ``LEVEL`` what backward subtracts, D or in a mixture
K. Products are torch's; elementwise passes are torch's too, eager or compiled, or Triton's
(triton_divergence.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .head import HeadFactors
from .passes import TileStore, WriteTile, multiply_out, spans, vocabulary_spans
from .softmax import NEVER, LogitTransform, rows_of, run

LEVEL = 4
# 4 MB of float32 for each head: two tiles and their temporaries fit into 32 MB of cache
ROWS, COLUMNS = 1024, 1024
# On a GPU 64 MB for each head, and dc of half of that: a product of 512 blocks of 128 × 256 is four
# full waves.
GPU_ROWS, GPU_COLUMNS = 4096, 4096
# bytes of logits, of both heads together, that a pass leaves for the next; of a GPU see
# allocate_kept
KEEP = 2**26
T = TypeVar("T")
Transforms = tuple[LogitTransform, LogitTransform]
# works on a pair of tiles: (rows, tiles, transforms of the rows)
WorkOnTiles = Callable[[slice, tuple[Tensor, Tensor], Transforms], None]


class HeadPair(NamedTuple):
    """Both heads, after ``columns`` for a span of the vocabulary, and what else the loops over
    tiles need.
    """

    student: HeadFactors
    teacher: HeadFactors
    stores: tuple[TileStore, TileStore]
    transforms: Transforms
    beta: float
    backend: str

    def columns(self, columns: slice) -> "HeadPair":
        return self._replace(
            student=self.student.columns(columns), teacher=self.teacher.columns(columns)
        )

    def tile(
        self, rows: slice, columns: slice, thread: int, *, seen: bool
    ) -> tuple[Tensor, Tensor]:
        """Both tiles of c, computed unless an earlier pass has ``seen`` them and they were kept."""
        student, teacher = (store.tile(rows, columns, thread)[0] for store in self.stores)
        if not seen or columns.start >= self.stores[0].recomputed:
            self.student.logits(rows, student)
            self.teacher.logits(rows, teacher)
        return student, teacher

    def transforms_of(self, rows: slice) -> Transforms:
        student, teacher = self.transforms
        return rows_of(student, rows), rows_of(teacher, rows)

    def for_each_tile(self, work: WorkOnTiles, *, seen: bool) -> None:
        """``work(rows, tiles, transforms)`` for every pair of tiles.

        Args:
            seen: whether an earlier pass has computed the tiles.
        """

        def on_thread(thread: int, rows: slice, columns: slice) -> None:
            span = self.columns(columns)
            work(rows, span.tile(rows, columns, thread, seen=seen), self.transforms_of(rows))

        store = self.stores[0]
        if store.threads > 1:
            store.for_each_tile(on_thread)
            return
        for columns in vocabulary_spans(store.vocab, store.columns, self.student.hidden.device):
            span = self.columns(columns)
            for rows in spans(len(self.student.hidden), store.rows):
                work(rows, span.tile(rows, columns, 0, seen=seen), self.transforms_of(rows))

    def run(self, function: Callable[..., T], tile: Tensor, *rest: object) -> T:
        """``function(tile, *rest)``, compiled where that is worth it."""
        store = self.stores[0]
        return run(
            function,
            tile,
            *rest,
            width=store.columns,
            logits=len(self.student.hidden) * store.vocab,
        )


def _p_and_q(student: T, teacher: T, beta: float) -> tuple[T, T]:
    """Their roles in KL(P‖Q), and back: in forward KL the teacher is P."""
    return (teacher, student) if beta == 0 else (student, teacher)


def first_pass(pair: HeadPair) -> Tensor:
    """``row_stats``: the normalizers and, where there is no mixture, the divergence."""
    beta, gap = pair.beta, pair.beta in (0, 1)
    state = pair.stores[0].kept.new_zeros(len(pair.student.hidden), 5)
    state[:, 0] = state[:, 2] = NEVER

    def fold_tiles(rows: slice, tiles: tuple[Tensor, Tensor], transforms: Transforms) -> None:
        (p, q), (to_z, to_w) = _p_and_q(*tiles, beta), _p_and_q(*transforms, beta)
        if pair.backend == "triton":
            from . import triton_divergence

            triton_divergence.fold_(state[rows], p, q, to_z, to_w, gap)
        else:
            state[rows] = pair.run(fold, p, q, state[rows], to_z, to_w, gap)

    pair.for_each_tile(fold_tiles, seen=False)
    shift, total, other_shift, other_total, sum_of_gaps = state.unbind(1)
    divergence = sum_of_gaps / total - total.log() + other_total.log()
    if (ruled_out := _ruled_out(pair)) is not None:
        divergence.masked_fill_(ruled_out, torch.inf)
    student, teacher = _p_and_q((shift, total.log()), (other_shift, other_total.log()), beta)
    return torch.stack((*student, *teacher, divergence), 1)


def _ruled_out(pair: HeadPair) -> Tensor | None:
    """True where Q forbids a token that P allows; None if it can't: in the tiles −inf is finite,
    see ``NEVER``, and capped it is anyway."""
    p, q = _p_and_q(pair.student.bias, pair.teacher.bias, pair.beta)
    to_z, to_w = _p_and_q(*pair.transforms, pair.beta)
    vocab = pair.stores[0].vocab
    if q is None or to_w.softcap is not None:
        return None
    ruled_out = q[:vocab].isneginf()
    if p is not None and to_z.softcap is None:
        ruled_out = ruled_out & ~p[:vocab].isneginf()
    return ruled_out.any()


def second_pass(pair: HeadPair, row_stats: Tensor) -> tuple[Tensor, Tensor]:
    """D and K of a mixture."""
    beta, sums = pair.beta, row_stats.new_zeros(len(row_stats), 2)

    def mix_tiles(rows: slice, tiles: tuple[Tensor, Tensor], transforms: Transforms) -> None:
        if pair.backend == "triton":
            from . import triton_divergence

            triton_divergence.mix_(sums[rows], *tiles, row_stats[rows], *transforms, beta)
        else:
            sums[rows] += pair.run(mix, *tiles, row_stats[rows], *transforms, beta)

    pair.for_each_tile(mix_tiles, seen=True)
    from_teacher, from_student = sums.unbind(1)
    return beta * from_teacher + (1 - beta) * from_student, from_student


def student_gradients(
    pair: HeadPair, upstream: Tensor, row_stats: Tensor, unit: float, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Backward: the gradients of the student, summed over all tiles; dc is in multiples of
    ``unit``.
    """
    beta = pair.beta
    gain = upstream * pair.transforms[0].slope(upstream) * (1 - beta if 0 < beta < 1 else 1)
    row_stats = row_stats.clone()
    # a row without an upstream gradient has none, even if it diverges
    row_stats[:, LEVEL].masked_fill_(gain == 0, 0)
    gain = gain / unit

    def open_span(columns: slice) -> tuple[HeadFactors, WriteTile]:
        span = pair.columns(columns)

        def write(rows: slice, out: Tensor, thread: int) -> None:
            rest = (
                *span.tile(rows, columns, thread, seen=True),
                row_stats[rows],
                gain[rows],
                *pair.transforms_of(rows),
                beta,
            )
            if pair.backend == "triton":
                from . import triton_divergence

                triton_divergence.backward_tile_(out, *rest)
            else:
                pair.run(backward_tile, out, *rest)

        return span.student, write

    return multiply_out(pair.student, needed, pair.stores[0], unit, open_span)


def fold(
    p: Tensor, q: Tensor, state: Tensor, to_z: LogitTransform, to_w: LogitTransform, gap: bool
) -> Tensor:
    """``[n, 5]``, m_P, S, m_Q, R and G of KL(P‖Q), after one more pair of tiles of c; G only if
    ``gap``.
    """
    shift, total, other_shift, other_total, sum_of_gaps = state.unbind(1)
    z, w = to_z.tempered(to_z.capped(p)), to_w.tempered(to_w.capped(q))
    top, other_top = torch.maximum(shift, z.amax(1)), torch.maximum(other_shift, w.amax(1))
    drop, other_drop = shift - top, other_shift - other_top
    x, y = z - top[:, None], w - other_top[:, None]
    weight = x.exp()
    total_after = total * drop.exp() + weight.sum(1)
    if gap:
        sum_of_gaps = (sum_of_gaps + (drop - other_drop) * total) * drop.exp() + weight.mul_(
            x.sub_(y)
        ).sum(1)
    other_after = other_total * other_drop.exp() + y.exp_().sum(1)
    return torch.stack((top, total_after, other_top, other_after, sum_of_gaps), 1)


def mix(
    student: Tensor,
    teacher: Tensor,
    row_stats: Tensor,
    to_z: LogitTransform,
    to_w: LogitTransform,
    beta: float,
) -> Tensor:
    """``[n, 2]``: Σ eᵗ·(t − log M) and Σ eˢ·(s − log M) over a pair of tiles of c."""
    s, t = _log_probabilities(student, teacher, row_stats, to_z, to_w)
    p, q = s.exp(), t.exp()
    mixture = _log_mixture(p, q, beta)
    return torch.stack((q.mul_(t.sub_(mixture)).sum(1), p.mul_(s.sub_(mixture)).sum(1)), 1)


def backward_tile(
    out: Tensor, student: Tensor, teacher: Tensor, row_stats: Tensor, gain: Tensor, to_z: LogitTransform,
    to_w: LogitTransform, beta: float,
) -> None:  # fmt: skip
    """Write the student's dc of a pair of tiles of c into ``out``.

    ``gain`` is g·scale/T, in a mixture times 1−β.
    """
    s, t = _log_probabilities(student, teacher, row_stats, to_z, to_w)
    p, level = s.exp(), row_stats[:, LEVEL, None]
    if beta == 0:
        dz = p.sub_(t.exp_())
    elif beta == 1:
        dz = p.mul_(s.sub_(t).sub_(level))
    else:
        dz = p.mul_(s.sub_(_log_mixture(p, t.exp_(), beta)).sub_(level))
    if to_z.softcap is not None:
        dz.mul_(1 - (to_z.capped(student) / to_z.softcap).square_())
    torch.mul(dz, gain[:, None], out=out)


def _log_probabilities(
    student: Tensor, teacher: Tensor, row_stats: Tensor, to_z: LogitTransform, to_w: LogitTransform
) -> tuple[Tensor, Tensor]:
    """s and t, free to be overwritten. Minus m first: large logits cost no digits."""
    shift, log_total, other_shift, other_log_total, _ = row_stats[:, :, None].unbind(1)
    s = to_z.tempered(to_z.capped(student)) - shift
    t = to_w.tempered(to_w.capped(teacher)) - other_shift
    return s.sub_(log_total), t.sub_(other_log_total)


def _log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """log((1−β)p + βq), finite where it underflows: there it is multiplied by zero."""
    return (p * (1 - beta)).add_(q, alpha=beta).clamp_(min=torch.finfo(p.dtype).tiny).log_()
