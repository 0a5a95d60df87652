"""The parts that the operators share: tiles of logits and their memory, products of dc, ranks, and
schemas.

The vocabulary is the outer loop, rows the inner one. Products are torch's. The elementwise pass
between two of them is torch's too (softmax.py), or Triton's (triton_softmax.py).
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .backend import accumulation_dtype
from .head import HeadFactors, multiply_
from .sharding import gather_columns, sum_over
from .softmax import IMPOSSIBLE, LogitTransform, Softmax
from .threads import block_rows, for_each_tile

# columns: rows of tiles, and factors on tensor cores, begin at multiples of 16 bytes and more
ALIGNED = 64
ROWS, COLUMNS = 1024, 2048  # 8 MB of float32: a tile and its temporaries fit into 32 MB of cache
# bytes of logits that forward leaves for backward: an eighth of naive memory in all, see README.md
KEEP = 3 * 2**25
# On a GPU: 128 MB of float32, and dc as large. Products this large run at the rate of the tensor
# cores.
GPU_ROWS, GPU_COLUMNS = 4096, 8192
# The share of rows without a gradient from which on they are left out: gathering the other rows
# costs a little.
WORTH_LEAVING_OUT = 0.1
# On a GPU dc of two tiles stands side by side: of 8192 rows a span's dW is one product, rounded as
# it is written.
TILES_AT_ONCE = {"cuda": 2}
# From so many logits on each thread of a CPU works on a tile of its own.
THREADS_FROM = 2**24
# the factors in ``HeadFactors`` with a row per token of the vocabulary
WEIGHT, BIAS, UP = PER_TOKEN = (1, 2, 4)
# operators that wait for the GPU can't be captured in a CUDA graph
WAITS = (torch.Tag.cudagraph_unsafe,)


# writes dc of a tile: (rows, out, thread)
WriteTile = Callable[[slice, Tensor, int], None]
# the factors of a span of the vocabulary, and what writes dc of its tiles
OpenSpan = Callable[[slice], tuple[HeadFactors, WriteTile]]


def spans(stop: int, widest: int, start: int = 0) -> Iterator[slice]:
    return (slice(first, min(first + widest, stop)) for first in range(start, stop, widest))


def vocabulary_spans(vocab: int, widest: int, device: torch.device) -> Iterator[slice]:
    """Spans of the vocabulary.

    On a GPU the ragged remainder is a span of its own, so that the slow products of ragged matrices
    are small.
    """
    ragged = vocab % ALIGNED if device.type == "cuda" else 0
    yield from spans(vocab - ragged, widest)
    yield from spans(vocab, ALIGNED, vocab - ragged)


class TileStore:
    """Memory for tiles of logits: one buffer for all in turn, and the first of the vocabulary kept
    for backward.

    Torch passes keep c itself, in the place where it was computed. Triton passes keep z less the
    largest z of its row in the tile, in 16 bits, and ``tops``, those largest: near the top, where
    the probability is, hardly a digit is lost, while of plain logits rounded to 16 bits hardly one
    would be left.

    Args:
        kept: ``[C, N]``, memory for the first C columns of the vocabulary. Each span of them
            ``[N, width]`` is in one piece, one after the other.
        rows, columns: of a tile; rows of all ``threads`` together.
        tops: ``[spans, N]``; None where c itself is kept.
        only: ``[live]``, the rows of N that are worked on, if not all.
        threads: how many work on tiles at once, each in a buffer of its own.

    Attributes:
        rows: of a tile.
        recomputed: tiles from this column on are not kept.
        width: of the buffer.
    """

    def __init__(
        self,
        kept: Tensor,
        rows: int,
        columns: int,
        vocab: int,
        tops: Tensor | None = None,
        only: Tensor | None = None,
        threads: int = 1,
    ) -> None:
        self.kept = kept
        self.tops = tops
        self.only = only
        self.threads = threads
        self.columns = columns
        self.vocab = vocab
        self.recomputed, self.all_rows = kept.shape
        self.worked_on = self.all_rows if only is None else len(only)
        self.rows = rows if threads == 1 else block_rows(self.worked_on, threads, rows)
        self.width = -(-min(vocab, columns) // ALIGNED) * ALIGNED
        dtype = kept.dtype if tops is None else tops.dtype
        height = min(self.all_rows, self.rows)
        self.buffers = kept.new_empty(threads, height, self.width, dtype=dtype)

    def tile(
        self, rows: slice, columns: slice, thread: int = 0
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Where the tile is to be computed, or already is; and the 16-bit copy of it that a Triton
        pass keeps, or has kept, with its tops."""
        buffer = self.buffers[thread, : rows.stop - rows.start, : columns.stop - columns.start]
        if columns.start >= self.recomputed:
            return buffer, None
        index = rows if self.only is None else self.only[rows]
        kept = self._span(columns)[index]
        if self.tops is None:
            return kept, None
        return buffer, (kept, self.tops[self._number(columns)][index])

    def for_each_tile(self, work: Callable[[int, slice, slice], None]) -> None:
        """``work(thread, rows, columns)`` for every tile, on all threads; see threads.py."""
        blocks = list(spans(self.worked_on, self.rows))
        columns = list(spans(self.vocab, self.columns))

        def work_on_tile(thread: int, block: int, span: int) -> None:
            work(thread, blocks[block], columns[span])

        for_each_tile(len(blocks), len(columns), self.threads, work_on_tile)

    def _span(self, columns: slice) -> Tensor:
        """``[N, width]``, the kept span of these columns."""
        n = self.all_rows
        piece = self.kept.view(-1)[columns.start * n : columns.stop * n]
        return piece.view(n, columns.stop - columns.start)

    def _number(self, columns: slice) -> int:
        """Where the tops of this span are: the ragged remainder, which begins among another span's
        columns, is last.
        """
        number, offset = divmod(columns.start, self.columns)
        return -1 if offset else number


def allocate_kept(
    hidden: Tensor,
    vocab: int,
    columns: int,
    dtype: torch.dtype,
    keep_bytes: int | None,
    on_cpu: int,
    heads: int = 1,
) -> Tensor:
    """``[C, N]``, memory for as many columns in whole spans as fit into ``keep_bytes``, shared by
    ``heads``.

    By default, ``on_cpu`` bytes; on a GPU a thirty-second of its memory, which a model that fits
    leaves free, and at most 4 GiB, which are most of the logits of 8192 tokens.
    """
    if keep_bytes is None:
        keep_bytes = on_cpu
        if hidden.device.type == "cuda":
            total = torch.cuda.get_device_properties(hidden.device).total_memory
            keep_bytes = min(2**32, total // 32)
    bytes_per_column = torch.sym_max(hidden.shape[0], 1) * dtype.itemsize  # type: ignore[no-untyped-call]
    fitting: int = torch.sym_min(keep_bytes // heads // bytes_per_column, vocab)  # type: ignore[no-untyped-call]
    # Without an `if`, which torch.compile would have to guard: all columns if they fit, else a
    # multiple of a span's.
    all_fit = fitting // max(vocab, 1)
    left_over = fitting % columns * (1 - all_fit)
    return hidden.new_empty(fitting - left_over, hidden.shape[0], dtype=dtype)


def allocate_tops(kept: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """``[spans, N]``, memory for the tops of the kept spans and of a ragged remainder.

    See ``TileStore``.
    """
    kept_columns, n = kept.shape
    remainder = torch.sym_min(kept_columns, 1)  # type: ignore[no-untyped-call]
    return kept.new_empty(-(-kept_columns // columns) + remainder, n, dtype=dtype)


def threads_for(head: HeadFactors, logits: int, rows: int) -> int:
    """How many threads work on so many ``logits`` at once, each on a tile of its own; 1 if all of
    torch's threads share each tile.

    More than one on a CPU only, and where W is multiplied, and gets its gradient, as it stands: of
    a span that has to be converted each thread would need a copy.

    Args:
        rows: of the tiles of all threads together.
    """
    like = head.hidden
    exact = accumulation_dtype(like.dtype)
    per_token = [head.weight, head.bias, head.up]
    as_it_stands = head.compute == exact and all(t is None or t.dtype == exact for t in per_token)
    threads = torch.get_num_threads()
    if like.device.type != "cpu" or not as_it_stands or logits < THREADS_FROM:
        return 1
    return threads if block_rows(len(like), threads, rows) else 1


def multiply_out(
    head: HeadFactors, needed: Sequence[bool], store: TileStore, unit: float, open_span: OpenSpan,
    main_grad: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of hidden, weight, bias, low and up: the products of dc, tile by tile.

    None where not needed.

    Nothing is filled with zeros: the first product for a place does not read it. Sums over the
    vocabulary have the accumulation dtype; what is complete with a span of the vocabulary has the
    dtype of its input.

    Args:
        unit: what dc is in multiples of.
        open_span: gives, for a span of the vocabulary, the factors of the span and a function
            ``(rows, out, thread)`` that writes dc of a tile into ``out``.
        main_grad: ``[V, D]``, what the gradient of the weight is added to instead of being
            returned.
    """
    written = store.vocab if len(head.hidden) else 0
    gradients = _empty_gradients(head, needed, written, main_grad)
    multiply = _multiply_on_threads if store.threads > 1 else _multiply_in_order
    multiply(gradients, head, store, unit, open_span, main_grad is not None)
    return [None if gradient is main_grad else gradient for gradient in gradients]


def _multiply_in_order(
    gradients: Sequence[Tensor | None], head: HeadFactors, store: TileStore, unit: float,
    open_span: OpenSpan, main_grad: bool,
) -> None:  # fmt: skip
    """The products of every tile, span by span of the vocabulary."""
    like = head.hidden
    n = len(like)
    at_once = store.rows * TILES_AT_ONCE.get(like.device.type, 1)
    buffer = like.new_empty(min(n, at_once), store.width)
    for span in vocabulary_spans(store.vocab if n else 0, store.columns, like.device):
        factors, write = open_span(span)
        sums = _sums_of_span(gradients, span, like.dtype, one_product=n <= at_once)
        for block in spans(n, at_once):
            dc = buffer[: block.stop - block.start, : span.stop - span.start]
            for part in spans(block.stop, store.rows, block.start):
                write(part, dc[part.start - block.start : part.stop - block.start], 0)
            add_products_(sums, dc, factors, block, span, unit, main_grad=main_grad)
        _round_into(gradients, sums, span)


def _multiply_on_threads(
    gradients: Sequence[Tensor | None], head: HeadFactors, store: TileStore, unit: float,
    open_span: OpenSpan, main_grad: bool,
) -> None:  # fmt: skip
    """The products of every tile, of several at once; see ``threads_for``."""
    like = head.hidden
    buffers = like.new_empty(store.threads, min(len(like), store.rows), store.width)

    def add_tile(thread: int, rows: slice, columns: slice) -> None:
        factors, write = open_span(columns)
        sums = _sums_of_span(gradients, columns, like.dtype, one_product=False)
        dc = buffers[thread, : rows.stop - rows.start, : columns.stop - columns.start]
        write(rows, dc, thread)
        add_products_(sums, dc, factors, rows, columns, unit, main_grad=main_grad)

    store.for_each_tile(add_tile)


def _empty_gradients(
    head: HeadFactors, needed: Sequence[bool], written: int, main_grad: Tensor | None
) -> list[Tensor | None]:
    """Memory for the gradients of hidden, weight, bias, low and up; None where not needed.

    Args:
        written: columns of the vocabulary that tiles will write.
    """
    exact = accumulation_dtype(head.hidden.dtype)
    gradients: list[Tensor | None] = []
    # `needed` has more entries where an operator has more tensors than the head
    for i, (t, wanted) in enumerate(zip(head[:5], needed, strict=False)):
        gradient = None
        if t is None or not wanted:
            pass
        elif i not in PER_TOKEN:  # a sum over the vocabulary
            make = torch.empty_like if written else torch.zeros_like
            gradient = make(t, dtype=exact)
        elif i == WEIGHT and main_grad is not None:
            gradient = main_grad
        else:
            gradient = t.new_empty(t.shape)
            gradient[written:] = 0  # where no tile will write
        gradients.append(gradient)
    return gradients


def _sums_of_span(
    gradients: Sequence[Tensor | None], span: slice, factors: torch.dtype, *, one_product: bool
) -> list[Tensor | None]:
    """What the products of a span are added to: of the gradients with a row per token of the
    vocabulary views, or buffers that are rounded into them later.

    Args:
        factors: dtype that products are multiplied in.
        one_product: whether all rows come in one product, which may round its sums as it writes
            them.
    """
    exact = accumulation_dtype(factors)
    sums = list(gradients)
    for i in PER_TOKEN:
        gradient = gradients[i]
        if gradient is not None:
            rounds = one_product and i != BIAS and gradient.dtype == factors
            direct = gradient.dtype == exact or rounds
            part = gradient[span]
            sums[i] = part if direct else torch.empty_like(part, dtype=exact)
    return sums


def _round_into(
    gradients: Sequence[Tensor | None], sums: Sequence[Tensor | None], span: slice
) -> None:
    """Round the sums of a span that were kept in another dtype into their gradients."""
    for gradient, total in zip(gradients, sums, strict=True):
        if gradient is not None and total is not None and gradient.dtype != total.dtype:
            gradient[span] = total


def add_products_(
    sums: Sequence[Tensor | None], dc: Tensor, head: HeadFactors, rows: slice, columns: slice, unit: float, *,
    main_grad: bool,
) -> None:  # fmt: skip
    """Add the share of ``dc`` ``[rows, columns]``, in multiples of ``unit``; of a span, the first
    rows first.

    Args:
        sums: for hidden, weight, bias, low and up, of which the three over rows are those of the
            span; None where no gradient is needed.
        main_grad: the weight's share is added to what is there, also the first.
    """
    d_hidden, d_weight, d_bias, d_low, d_up = sums
    # β: 0 for the first product
    over_vocabulary, over_rows = float(columns.start > 0), float(rows.start > 0)
    if d_hidden is not None:
        multiply_(d_hidden[rows], dc, head.weight, beta=over_vocabulary, alpha=unit)
    if d_weight is not None:
        beta = 1.0 if main_grad else over_rows
        multiply_(d_weight, dc.t(), head.hidden[rows], beta=beta, alpha=unit)
    if d_bias is not None:
        share = dc.sum(0, dtype=d_bias.dtype)
        if rows.start:
            d_bias.add_(share, alpha=unit)
        else:
            torch.mul(share, unit, out=d_bias)
    if d_low is not None and head.up is not None:
        multiply_(d_low[rows], dc, head.up, beta=over_vocabulary, alpha=unit)
    if d_up is not None and head.low is not None:
        multiply_(d_up, dc.t(), head.low[rows], beta=over_rows, alpha=unit)


def live_rows(
    upstream: Sequence[Tensor | None], dtype: torch.dtype, scale: float
) -> tuple[Tensor | None, float]:
    """Indices ``[live]`` of the rows that a gradient arrives at, None if that is nearly all of
    them; and the unit that dc, of this dtype, is in multiples of.

    Waits for the GPU once. dc in float16 is in multiples of the largest gradient that arrives, or
    those of 1/N would vanish; the unit is a power of 2, which is exact.
    """
    arriving = [
        each.reshape(len(each), -1) for each in upstream if each is not None and each.numel()
    ]
    if not arriving:
        return None, 1.0
    largest = torch.stack([gradient.abs().amax(1) for gradient in arriving]).amax(0)  # [n]
    alive = ~(largest == 0)  # NaN too: it must reach the weights, so that the step is refused
    count, top = torch.stack((alive.sum().double(), largest.amax().double())).tolist()
    unit = 1.0
    if dtype == torch.float16 and 0 < top * scale < math.inf:
        unit = 2.0 ** math.floor(math.log2(top * scale))
    if count > (1 - WORTH_LEAVING_OUT) * len(alive):
        return None, unit
    # Sorted instead of `nonzero`, which would wait once more.
    return (~alive).to(torch.uint8).sort(stable=True).indices[: int(count)], unit


def scatter_rows(t: Tensor | None, live: Tensor, n: int) -> Tensor | None:
    """Back to all ``n`` rows; the others have a gradient of 0."""
    return None if t is None else t.new_zeros(n, *t.shape[1:]).index_copy_(0, live, t)


class Ranking:
    """The likeliest tokens of each row and the rank of its target, over the tiles so far.

    Constants: no gradients.

    Scale, soft cap and temperature keep the order of the logits, so it is c that is compared.

    Args:
        top_k: how many of the likeliest tokens to keep, 0 for none.
        target: ``[N]``, as this rank numbers them, if their ranks are wanted.
        group: the ranks that the vocabulary is split over.
    """

    def __init__(
        self, head: HeadFactors, top_k: int, target: Tensor | None, vocab: int, group: str | None
    ) -> None:
        like = head.hidden
        n = len(like)
        self.values = like.new_full((n, top_k), -torch.inf, dtype=accumulation_dtype(like.dtype))
        self.ids = torch.zeros(n, top_k, dtype=torch.int64, device=like.device)
        self.above = torch.zeros(0 if target is None else n, dtype=torch.int64, device=like.device)
        self.target = target
        self.group = group
        if target is not None:
            self.bar = _logit(head, target, vocab, group)

    def update(self, tile: Tensor, rows: slice, columns: slice) -> None:
        k = self.values.shape[1]
        if k:
            values, ids = tile.topk(min(k, tile.shape[1]))
            # The likeliest of this tile beside the likeliest so far: at most 2 k candidates.
            values = torch.cat((self.values[rows], values), 1)
            ids = torch.cat((self.ids[rows], ids + columns.start), 1)
            self.values[rows], best = values.topk(k)
            self.ids[rows] = ids.gather(1, best)
        if self.target is not None:
            # Computed in another order, the target's own logit may be a hair above itself.
            token = torch.arange(columns.start, columns.stop, device=tile.device)
            itself = token == self.target[rows, None]
            self.above[rows] += ((tile > self.bar[rows, None]) & ~itself).sum(1)

    def finish(
        self, softmax: Softmax, transform: LogitTransform, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rank of the target, ids and log-probs of the likeliest; ids count from ``start``."""
        values = self.values
        ids = self.ids + start
        above = self.above
        if self.group is not None:  # every rank has the likeliest of its part
            values, best = gather_columns(values, self.group).topk(values.shape[1])
            ids = gather_columns(ids, self.group).gather(1, best)
            above = sum_over(above, self.group)
        z = transform.tempered(transform.capped(values))
        logprob = (z - softmax.shift[:, None]) - softmax.log_total[:, None]
        return above, ids, logprob.masked_fill_(z < IMPOSSIBLE, -torch.inf)


def _logit(head: HeadFactors, target: Tensor, vocab: int, group: str | None) -> Tensor:
    """``[N]``, c of the target, from the rank that holds it."""
    inside = (target >= 0) & (target < vocab)  # a target may be in the part of another rank
    index = target.clamp(0, max(vocab - 1, 0))
    dtype = accumulation_dtype(head.hidden.dtype)
    c = (head.hidden.to(dtype) * head.factor(head.weight[index]).to(dtype)).sum(1)
    if head.bias is not None:
        c = c + head.bias[index].to(dtype)
    if head.low is not None and head.up is not None:
        c = c + (head.low.to(dtype) * head.factor(head.up[index]).to(dtype)).sum(1)
    return sum_over(torch.where(inside, c, 0), group)


def operator_schema(
    arguments: type, results: int, *, mutates: Sequence[str] = (), **leading: object
) -> str:
    """The schema of an operator that returns so many tensors.

    Args:
        arguments: a NamedTuple, whose fields are the operator's arguments.
        mutates: names of arguments that it writes to.
        leading: names and types of arguments that come before those of ``arguments``.
    """

    def prototype() -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    types = (leading | arguments.__annotations__).items()
    parameters = [
        inspect.Parameter(name, kind, annotation=annotation) for name, annotation in types
    ]
    signature = inspect.Signature(parameters, return_annotation=tuple[(Tensor,) * results])  # type: ignore[misc]
    prototype.__signature__ = signature  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=mutates)


def returned(
    inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The gradients as an operator returns them: each in the dtype of its input, empty for one that
    is not needed.
    """
    like = inputs[0]
    assert like is not None
    results = []
    for gradient, t in zip(gradients, inputs, strict=True):
        if gradient is None or t is None:
            results.append(like.new_empty(0))  # an operator can't return None for a tensor
        else:
            results.append(gradient.to(t.dtype))
    return tuple(results)


def returned_shapes(inputs: Sequence[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor, ...]:
    """``returned`` for tracing."""
    gradients: list[Tensor | None] = []
    for t, wanted in zip(inputs, needed, strict=True):
        gradients.append(t.new_empty(t.shape) if wanted and t is not None else None)
    return returned(inputs, gradients)


def no_second_derivative(ctx: object, *_: object) -> None:
    """The backward of a backward."""
    raise NotImplementedError(
        "kernels: this backend has no second derivative, use backend='reference', which has them all"
    )
