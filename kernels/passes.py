"""The two loops over the tiles of the logits, vocabulary outside, rows inside: sums forward, gradients backward.

Products are torch's. The pass between two of them is torch's too (tiles.py), or Triton's (triton_tiles.py).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .head import factor_dtype
from .operands import Gradients, Operands, Tiles, buffer
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
    pull,
    pull_into,
    run,
    spans,
    temperature_gradient,
    vocabulary_spans,
    worth_compiling,
)

WORTH_LEAVING_OUT = 0.1  # share of rows without a gradient from which on they are: gathering the others costs a little
# On a GPU dc of two tiles stands side by side: of 8192 rows a span's dW is one product, rounded as it is written.
GPU_TILES_AT_ONCE = 2


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
    for columns in vocabulary_spans(call.vocab, call.columns, head.hidden.device):
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
    some, unit = live_rows(upstream, len(head.hidden), head, call.transform.scale)
    if some is not None:
        upstream, softmax, head, target, call = _selected(some, upstream, softmax, head, target, call)
    head = head.rounded()
    n, transform = len(head.hidden), call.transform
    arriving = coefficients([None if u is None else u / unit for u in upstream], softmax, transform)
    whole = Gradients.room(head, needed[:5], call.vocab, main_grad)
    moments = torch.zeros_like(softmax.shift) if needed[5] else None
    space, tops = kept
    place = Tiles(space, call.rows, call.vocab, tops if call.passes == "triton" else None, some and some.rows)
    at_once = rows_at_once(head.hidden, call.rows)
    room = buffer(head.hidden, min(n, at_once), min(call.vocab, call.columns), head.hidden.dtype)  # of dc
    for columns in vocabulary_spans(call.vocab, call.columns, head.hidden.device):
        part, grads = head.columns(columns), whole.columns(columns, head, at_once=n <= at_once)
        for block in spans(n, at_once):
            dc = room[: block.stop - block.start, : columns.stop - columns.start]
            for rows in spans(block.stop, call.rows, block.start):
                tile, old = place(rows, columns), place.shifted(rows, columns)
                if not place.keeps(columns):
                    part.logits(rows, tile)
                column, shift, here = target[rows] - columns.start, softmax.shift[rows], arriving.rows(rows)
                moment, out = (
                    None if moments is None else moments[rows],
                    dc[rows.start - block.start : rows.stop - block.start],
                )
                if call.passes == "torch":
                    _pull(tile, column, shift, here, transform.rows(rows), moment, out, _compiled(tile, call, n))
                else:
                    from . import triton_tiles

                    source, top = old or (tile, None)
                    rest = shift, here, transform.rows(rows), out
                    triton_tiles.pull_(source, column, *rest, top=top, moments=moment)
            grads.add_(dc, part, block, columns, unit)
        whole.store_(columns, grads)
    if call.group is not None:
        for t in (whole.hidden, whole.low, moments):
            if t is not None:
                sum_over(t, call.group)
    if moments is not None:
        moments = temperature_gradient(moments * unit, upstream, softmax, transform)
    if main_grad is not None:
        whole = whole._replace(weight=None)
    hidden, weight, bias, low, up, _ = whole
    return [spread(hidden, some), weight, bias, spread(low, some), up, spread(moments, some)]


def rows_at_once(hidden: Tensor, rows: int) -> int:
    """How many rows' dc is there at once, for tiles of so many ``rows``."""
    return rows * GPU_TILES_AT_ONCE if hidden.device.type == "cuda" else rows


def live_rows(
    upstream: Sequence[Tensor | None], n: int, head: Operands, scale: float = 1.0
) -> "tuple[Live | None, float]":
    """The rows with a gradient, None if that is nearly all of them; and what dc is in multiples of.

    Waits for the GPU once. dc in float16 is in multiples of the largest gradient that arrives, or those of 1/N would
    vanish; of a power of 2, which is exact.
    """
    given = [gradient.reshape(n, -1) for gradient in upstream if gradient is not None and gradient.numel()]
    if not given:
        return None, 1.0
    largest = torch.stack([gradient.abs().amax(1) for gradient in given]).amax(0)  # [n]
    alive = ~(largest == 0)  # NaN too
    count, top = torch.stack((alive.sum().double(), largest.amax().double())).tolist()
    half = factor_dtype(head.hidden, head.compute) == torch.float16
    unit = 2.0 ** math.floor(math.log2(top * scale)) if half and 0 < top * scale < math.inf else 1.0
    if count > (1 - WORTH_LEAVING_OUT) * n:
        return None, unit
    # Sorted, not asked for by `nonzero`, which would wait once more.
    return Live((~alive).to(torch.uint8).sort(stable=True).indices[: int(count)], n), unit


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
    if out.dtype == tile.dtype:
        moment = run(pull_into, tile, shift, upstream, transform, moments is not None, out, compiled=compiled)
        add_target_(out, column, upstream.gain)
    else:  # 16 bits: rounded once, with the targets' share
        dc, moment = pull(tile, shift, upstream, transform, moments is not None)
        add_target_(dc, column, upstream.gain)
        out.copy_(dc)
    if moments is not None and moment is not None:
        moments += moment


def _compiled(tile: Tensor, call: Call, n: int) -> bool:
    """Whether the passes over a tile are worth compiling: only tiles of one width are, once for all calls."""
    return tile.shape[1] == call.columns and worth_compiling(tile, n * call.vocab)
