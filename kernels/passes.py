"""The loops over the tiles of the logits, vocabulary outside, rows inside: sums forward, gradients backward.

Products are torch's. The elementwise pass between two of them is torch's too (softmax.py), or Triton's
(triton_softmax.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .head import HeadFactors, HeadGradients
from .precision import factor_dtype
from .ranking import Ranking
from .sharding import sum_over
from .softmax import (
    LogitTransform,
    Softmax,
    SoftmaxState,
    add_target_,
    backward_tile,
    backward_tile_into,
    coefficients,
    fold,
    run,
    temperature_gradient,
    worth_compiling,
)

ALIGNED = 64  # columns: rows of tiles, and what is multiplied by tensor cores, begin at multiples of 16 bytes and more
ROWS, COLUMNS = 1024, 2048  # 8 MB of float32: a tile and its temporaries fit into 32 MB of cache
KEEP = 3 * 2**25  # bytes of logits that forward leaves for backward: an eighth of naive memory in all, see README.md
# On a GPU: 128 MB of float32, and dc as large. Products this large run at the rate of the tensor cores.
GPU_ROWS, GPU_COLUMNS = 4096, 8192
WORTH_LEAVING_OUT = 0.1  # share of rows without a gradient from which on they are: gathering the others costs a little
# On a GPU dc of two tiles stands side by side: of 8192 rows a span's dW is one product, rounded as it is written.
GPU_TILES_AT_ONCE = 2
OptionalTensor = TypeVar("OptionalTensor", Tensor, Tensor | None)
WriteTile = Callable[[slice, Tensor], None]


class Tiling(NamedTuple):
    """How the logits of a call are cut into tiles, and the backend of the passes over them."""

    rows: int
    columns: int
    vocab: int
    backend: str

    def compiled(self, tile: Tensor, n: int) -> bool:
        """True if passes over this tile are worth compiling: only tiles of one width are, once for all calls."""
        return tile.shape[1] == self.columns and worth_compiling(tile, n * self.vocab)


def tile_shape(device: torch.device) -> tuple[int, int]:
    """Rows and columns, by device only: the same call is always cut in the same way."""
    return (GPU_ROWS, GPU_COLUMNS) if device.type == "cuda" else (ROWS, COLUMNS)


def spans(stop: int, widest: int, start: int = 0) -> Iterator[slice]:
    return (slice(first, min(first + widest, stop)) for first in range(start, stop, widest))


def vocabulary_spans(vocab: int, widest: int, device: torch.device) -> Iterator[slice]:
    """Spans of the vocabulary. On a GPU the ragged remainder is a span of its own, so that the slow products of ragged
    matrices are small."""
    ragged = vocab % ALIGNED if device.type == "cuda" else 0
    yield from spans(vocab - ragged, widest)
    if ragged:
        yield slice(vocab - ragged, vocab)


class TileStore:
    """Memory for tiles of logits: one buffer for all in turn, and the first of the vocabulary kept for backward.

    Torch passes keep c itself, in the place where it was computed. Triton passes keep z less the largest z of its row
    in the tile, in 16 bits, and ``tops``, those largest: near the top, where the probability is, hardly a digit is
    lost, while of plain logits rounded to 16 bits hardly one would be left.
    """

    def __init__(
        self, kept: Tensor, rows: int, vocab: int, tops: Tensor | None = None, only: Tensor | None = None
    ) -> None:
        self.kept = kept  # [tiles, N, columns]
        self.tops = tops  # [tiles, N]; None where c itself is kept
        self.only = only  # [live], the rows of N that are worked on, if not all
        self.columns = kept.shape[2]
        dtype = kept.dtype if tops is None else tops.dtype
        self.buffer = aligned_buffer(kept, min(kept.shape[1], rows), min(vocab, self.columns), dtype)

    def keeps(self, columns: slice) -> bool:
        return int(columns.start) < len(self.kept) * self.columns

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Where the tile is to be computed, or already is."""
        if self.tops is None and self.keeps(columns):
            return self._rows(self.kept[columns.start // self.columns], rows)
        return self.buffer[: rows.stop - rows.start, : columns.stop - columns.start]

    def shifted(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """The 16-bit copy of this tile that a Triton pass keeps, or has kept; None if nothing."""
        if self.tops is None or not self.keeps(columns):
            return None
        i = columns.start // self.columns
        return self._rows(self.kept[i], rows), self._rows(self.tops[i], rows)

    def _rows(self, t: Tensor, rows: slice) -> Tensor:
        return t[rows] if self.only is None else t[self.only[rows]]


def aligned_buffer(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """``[rows, columns or a few more]``: every row begins at a multiple of 16 bytes, as tensor cores like it."""
    return like.new_empty(rows, -(-columns // ALIGNED) * ALIGNED, dtype=dtype)


def allocate_kept(hidden: Tensor, vocab: int, columns: int, keep_bytes: int, dtype: torch.dtype) -> Tensor:
    """``[tiles, N, columns]``: as many tiles as fit into ``keep_bytes``, but never all of them."""
    bytes_per_tile = torch.sym_max(hidden.shape[0], 1) * columns * dtype.itemsize  # type: ignore[no-untyped-call]
    tiles = torch.sym_min(  # type: ignore[no-untyped-call]
        max(vocab - 1, 0) // columns, keep_bytes // bytes_per_tile
    )
    return hidden.new_empty(tiles, hidden.shape[0], columns, dtype=dtype)


def keep_by_default(device: torch.device, on_cpu: int) -> int:
    """Bytes of logits to keep. On a GPU a thirty-second of its memory, which a model that fits leaves free, and at most
    4 GiB, which are most of the logits of 8192 tokens."""
    if device.type != "cuda":
        return on_cpu
    return min(2**32, torch.cuda.get_device_properties(device).total_memory // 32)


def fold_all(
    head: HeadFactors, target: Tensor, transform: LogitTransform, tiling: Tiling, state: SoftmaxState,
    store: TileStore, ranking: Ranking,
) -> None:  # fmt: skip
    """Forward: bring ``state`` up to date with all tiles, and fill those that ``store`` keeps."""
    n = len(head.hidden)
    for columns in vocabulary_spans(tiling.vocab, tiling.columns, head.hidden.device):
        span = head.columns(columns)
        for rows in spans(n, tiling.rows):
            tile = span.logits(rows, store.tile(rows, columns))
            ranking.update(tile, rows, columns)
            column, sums, row_transform = target[rows] - columns.start, state.rows(rows), transform.rows(rows)
            if tiling.backend == "triton":
                from . import triton_softmax

                triton_softmax.fold_(tile, column, sums, row_transform, store.shifted(rows, columns))
            else:
                compiled = tiling.compiled(tile, n)
                sums.store_(slice(None), run(fold, tile, column, sums, row_transform, compiled=compiled))


def gradients(
    upstream: Sequence[Tensor | None], softmax: Softmax, kept: Sequence[Tensor], head: HeadFactors, target: Tensor,
    transform: LogitTransform, tiling: Tiling, group: str | None, needed: Sequence[bool], main_grad: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """Backward: the gradients of the tensors of ``HeadFactors`` and of the temperature, in accumulation precision or
    rounded to that of their input; None where not needed.

    Args:
        upstream: gradients of the outputs, None for an output that is not used.
        kept: what forward has left, see ``TileStore``.
        group: ranks that the vocabulary is split over.
        main_grad: ``[V, D]``, what the gradient of the weight is added to instead of being returned.
    """
    live, unit = live_rows(upstream, head, transform.scale)
    if live is not None:
        upstream, softmax = [live.pick(u) for u in upstream], Softmax(*(live.pick(t) for t in softmax))
        head, target = head.rows(live.rows), target[live.rows]
        transform = transform._replace(temperature=live.pick(transform.temperature))
    head = head.rounded()
    arriving = coefficients([None if u is None else u / unit for u in upstream], softmax, transform)
    sums = HeadGradients.allocate(head, needed[:5], tiling.vocab, main_grad)
    moments = torch.zeros_like(softmax.shift) if needed[5] else None
    space, tops = kept
    only = None if live is None else live.rows
    store = TileStore(space, tiling.rows, tiling.vocab, tops if tiling.backend == "triton" else None, only)

    def open_span(columns: slice) -> tuple[HeadFactors, WriteTile]:
        span = head.columns(columns)

        def write(rows: slice, out: Tensor) -> None:
            tile, shifted = store.tile(rows, columns), store.shifted(rows, columns)
            if not store.keeps(columns):
                span.logits(rows, tile)
            column, moment = target[rows] - columns.start, None if moments is None else moments[rows]
            rest = softmax.shift[rows], arriving.rows(rows), transform.rows(rows)
            if tiling.backend != "torch":  # backward of "fused" is Triton's, too
                from . import triton_softmax

                source, top = shifted or (tile, None)
                triton_softmax.backward_tile_(source, column, *rest, out, top=top, moments=moment)
                return
            if out.dtype == tile.dtype:
                compiled = tiling.compiled(tile, len(head.hidden))
                added = run(backward_tile_into, tile, *rest, moment is not None, out, compiled=compiled)
                add_target_(out, column, rest[1].gain)
            else:  # 16 bits: rounded once, with the targets' share
                dc, added = backward_tile(tile, *rest, moment is not None)
                add_target_(dc, column, rest[1].gain)
                out.copy_(dc)
            if moment is not None and added is not None:
                moment += added

        return span, write

    multiply_out(head, sums, tiling, unit, open_span)
    if group is not None:
        for t in (sums.hidden, sums.low, moments):
            if t is not None:
                sum_over(t, group)
    if moments is not None:
        moments = temperature_gradient(moments * unit, upstream, softmax, transform)
    hidden, weight, bias, low, up, added = sums
    hidden, low, moments = (scatter_rows(t, live) for t in (hidden, low, moments))
    return [hidden, None if added else weight, bias, low, up, moments]


def multiply_out(
    head: HeadFactors, sums: HeadGradients, tiling: Tiling, unit: float,
    open_span: Callable[[slice], tuple[HeadFactors, WriteTile]],
) -> None:  # fmt: skip
    """Fill ``sums`` with the products of dc, tile by tile.

    Args:
        unit: what dc is in multiples of.
        open_span: gives, for a span of the vocabulary, the factors of the span and a function ``(rows, out)`` that
            writes dc of a tile into ``out``.
    """
    n, at_once = len(head.hidden), rows_at_once(head.hidden, tiling.rows)
    buffer = aligned_buffer(head.hidden, min(n, at_once), min(tiling.vocab, tiling.columns), head.hidden.dtype)
    for columns in vocabulary_spans(tiling.vocab, tiling.columns, head.hidden.device):
        (span, write), span_sums = open_span(columns), sums.columns(columns, head, at_once=n <= at_once)
        for block in spans(n, at_once):
            dc = buffer[: block.stop - block.start, : columns.stop - columns.start]
            for rows in spans(block.stop, tiling.rows, block.start):
                write(rows, dc[rows.start - block.start : rows.stop - block.start])
            span_sums.add_(dc, span, block, columns, unit)
        sums.store_(columns, span_sums)


def rows_at_once(hidden: Tensor, rows: int) -> int:
    """How many rows' dc is there at once, for tiles of so many ``rows``."""
    return rows * GPU_TILES_AT_ONCE if hidden.device.type == "cuda" else rows


class LiveRows(NamedTuple):
    """Indices ``[live]`` of the rows, of ``n``, that a gradient arrives at."""

    rows: Tensor
    n: int

    def pick(self, t: OptionalTensor) -> OptionalTensor:
        """These rows of ``t``; what was not asked for is empty, and stays it."""
        return t if t is None or not t.numel() else t[self.rows]


def live_rows(
    upstream: Sequence[Tensor | None], head: HeadFactors, scale: float = 1.0
) -> tuple[LiveRows | None, float]:
    """The rows with a gradient, None if that is nearly all of them; and the unit that dc is in multiples of.

    Waits for the GPU once. dc in float16 is in multiples of the largest gradient that arrives, or those of 1/N would
    vanish; the unit is a power of 2, which is exact.
    """
    n = len(head.hidden)
    arriving = [gradient.reshape(n, -1) for gradient in upstream if gradient is not None and gradient.numel()]
    if not arriving:
        return None, 1.0
    largest = torch.stack([gradient.abs().amax(1) for gradient in arriving]).amax(0)  # [n]
    alive = ~(largest == 0)  # NaN too
    count, top = torch.stack((alive.sum().double(), largest.amax().double())).tolist()
    half = factor_dtype(head.hidden, head.compute) == torch.float16
    unit = 2.0 ** math.floor(math.log2(top * scale)) if half and 0 < top * scale < math.inf else 1.0
    if count > (1 - WORTH_LEAVING_OUT) * n:
        return None, unit
    # Sorted instead of `nonzero`, which would wait once more.
    return LiveRows((~alive).to(torch.uint8).sort(stable=True).indices[: int(count)], n), unit


def scatter_rows(t: Tensor | None, live: LiveRows | None) -> Tensor | None:
    """Back to all rows; the others have a gradient of 0."""
    if t is None or live is None:
        return t
    return t.new_zeros(live.n, *t.shape[1:]).index_copy_(0, live.rows, t)
