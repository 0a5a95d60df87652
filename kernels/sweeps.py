"""The two loops over the tiles of the logits, vocabulary outside, rows inside: sums forward, gradients backward.

Products are torch's. The pass between two of them is torch's too (tiles.py), or Triton's (triton_tiles.py).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .operands import Gradients, Operands, Tiles, factors
from .ranking import Ranking
from .shard import sum_over
from .tiles import (
    Softmax,
    State,
    Transform,
    Upstream,
    add_target_,
    coefficients,
    fold,
    pull_into,
    run,
    spans,
    temperature_gradient,
    worth_compiling,
)

WORTH_LEAVING_OUT = 0.1  # share of rows without a gradient from which on they are: gathering the others costs a little


class Call(NamedTuple):
    """What is the same in all tiles of a call."""

    transform: Transform
    vocab: int
    rows: int
    columns: int
    passes: str
    group: str | None


def fold_all(head: Operands, target: Tensor, call: Call, state: State, place: Tiles, ranking: Ranking) -> None:
    """Forward: ``state`` over all tiles, and those in ``place`` that are to be kept."""
    for columns in spans(call.vocab, call.columns):
        part = head.columns(columns)
        for rows in spans(len(head.hidden), call.rows):
            tile = part.logits(rows, place(rows, columns))
            ranking.see(tile, rows, columns)
            column, sums, transform = target[rows] - columns.start, state.rows(rows), call.transform.rows(rows)
            if call.passes == "triton":
                from . import triton_tiles

                triton_tiles.fold_(tile, column, sums, transform, place.shifted(rows, columns))
            else:
                compiled = _compiled(tile, call, len(head.hidden))
                sums.store_(slice(None), run(fold, tile, column, sums, transform, compiled=compiled))


def gradients(
    upstream: Sequence[Tensor | None],
    softmax: Softmax,
    kept: Sequence[Tensor],
    head: Operands,
    target: Tensor,
    call: Call,
    needed: Sequence[bool],
    main_grad: Tensor | None = None,
) -> list[Tensor | None]:
    """Backward: the gradients of the fields of ``Operands`` and of the temperature, in accumulation precision or
    rounded to that of their input; None where not needed.

    Args:
        upstream: of the outputs, None where nothing arrives.
        kept: what forward has left, see ``Tiles``.
        main_grad: ``[V, D]``, what the gradient of the weight is added to instead of being returned.
    """
    some = live_rows(upstream, len(head.hidden))
    if some is not None:
        upstream, softmax, head, target, call = _selected(some, upstream, softmax, head, target, call)
    head = head._replace(hidden=factors(head.hidden))
    n, exact, transform = len(head.hidden), softmax.shift.dtype, call.transform
    unit = unit_of(upstream, head.hidden.dtype, transform.scale)
    arriving = coefficients([None if u is None else u / unit for u in upstream], softmax, transform)
    whole = Gradients.zeros(head, needed[:5])
    if main_grad is not None and whole.weight is not None:
        whole = whole._replace(weight=main_grad)
    moments = torch.zeros_like(softmax.shift) if needed[5] else None
    space, tops = kept
    place = Tiles(space, call.rows, call.vocab, tops if call.passes == "triton" else None, some and some.rows)
    buffer = head.hidden.new_empty(min(n, call.rows) * min(call.vocab, call.columns))  # of dc
    for columns in spans(call.vocab, call.columns):
        part, grads = head.columns(columns), whole.columns(columns, exact)
        for rows in spans(n, call.rows):
            tile, old = place(rows, columns), place.shifted(rows, columns)
            if not place.keeps(columns):
                part.logits(rows, tile)
            column, shift, here = target[rows] - columns.start, softmax.shift[rows], arriving.rows(rows)
            moment = None if moments is None else moments[rows]
            dc = buffer[: tile.numel()].view(tile.shape)
            if call.passes == "torch":
                _pull(tile, column, shift, here, transform.rows(rows), moment, dc, _compiled(tile, call, n))
            else:
                from . import triton_tiles

                source, top = old or (tile, None)
                rest = shift, here, transform.rows(rows), dc
                triton_tiles.pull_(source, column, *rest, top=top, moments=moment)
            grads.add_(dc, part, rows, unit)
        whole.store_(columns, grads)
    if call.group is not None:
        for t in (whole.hidden, whole.low, moments):
            if t is not None:
                sum_over(t, call.group)
    if moments is not None:
        moments = temperature_gradient(moments * unit, upstream, softmax, transform)
    if main_grad is not None:
        whole = whole._replace(weight=None)
    per_row = {"hidden": whole.hidden, "low": whole.low}
    whole = whole._replace(**{name: spread(t, some) for name, t in per_row.items()})
    return [*whole, spread(moments, some)]


def live_rows(upstream: Sequence[Tensor | None], n: int) -> "Live | None":
    """The rows with a gradient, None if that is nearly all of them."""
    alive: Tensor | None = None
    for gradient in upstream:
        if gradient is not None and gradient.numel():
            arrives = gradient != 0
            arrives = arrives.any(1) if arrives.ndim == 2 else arrives
            alive = arrives if alive is None else alive | arrives
    if alive is None or int(alive.sum()) > (1 - WORTH_LEAVING_OUT) * n:
        return None
    return Live(alive.nonzero()[:, 0], n)


class Live(NamedTuple):
    """Indices ``[live]`` of some of ``n`` rows."""

    rows: Tensor
    n: int


def _selected(
    some: Live, upstream: Sequence[Tensor | None], softmax: Softmax, head: Operands, target: Tensor, call: Call
) -> tuple[list[Tensor | None], Softmax, Operands, Tensor, Call]:
    """Of everything that has rows, those."""

    def rows(t: Tensor | None) -> Tensor | None:
        return None if t is None else t[some.rows] if t.numel() else t  # what was not asked for is empty

    picked = Softmax(*(t[some.rows] if t.numel() else t for t in softmax))
    head = head._replace(hidden=head.hidden[some.rows], low=rows(head.low))
    transform = call.transform._replace(temperature=rows(call.transform.temperature))
    return [rows(u) for u in upstream], picked, head, target[some.rows], call._replace(transform=transform)


def spread(t: Tensor | None, some: Live | None) -> Tensor | None:
    """Back to all rows; the others have a gradient of 0."""
    if t is None or some is None:
        return t
    return t.new_zeros(some.n, *t.shape[1:]).index_copy_(0, some.rows, t)


def unit_of(upstream: Sequence[Tensor | None], dtype: torch.dtype, scale: float = 1.0) -> float:
    """What dc is a multiple of where it is float16, so that gradients of 1/N do not vanish: a power of 2, exact."""
    if dtype != torch.float16:
        return 1.0
    largest = max((float(u.abs().max()) for u in upstream if u is not None and u.numel()), default=0.0) * scale
    return 2.0 ** math.floor(math.log2(largest)) if 0 < largest < math.inf else 1.0


def _pull(
    tile: Tensor,
    column: Tensor,
    shift: Tensor,
    upstream: Upstream,
    transform: Transform,
    moments: Tensor | None,
    out: Tensor,
    compiled: bool,
) -> None:
    moment = run(pull_into, tile, shift, upstream, transform, moments is not None, out, compiled=compiled)
    add_target_(out, column, upstream.gain)
    if moments is not None and moment is not None:
        moments += moment


def _compiled(tile: Tensor, call: Call, n: int) -> bool:
    """Whether the passes over a tile are worth compiling: only tiles of one width are, once for all calls."""
    return tile.shape[1] == call.columns and worth_compiling(tile, n * call.vocab)
