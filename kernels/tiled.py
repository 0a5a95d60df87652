"""``linear_logprob`` on any device without ``[N, V]`` in memory: tiles of tokens × vocabulary that stay in the cache.

    c = h·Wᵀ + b + u·Bᵀ        z = cap(scale·c)/T        cap(s) = softcap·tanh(s/softcap)

Forward folds each tile into a running softmax (tiles.py). Backward takes the tile that forward kept, or computes it
again, turns it into dc, and multiplies it out: dh = dc·W, dW = dcᵀ·h, db = Σ dc, du = dc·B, dB = dcᵀ·u, and, because
Σ_v dz_v = g_L,

    dT = −(Σ_v dz_v·z_v)/T = −(Σ_v dz_v·x_v + g_L·m)/T

(8 − 2f)·NDV floating-point operations, where f is the part of the logits that fits into ``KEEP``: all but the last
tile when N is small. Moved: W and dW once, h and dh once per vocabulary tile. The vocabulary is the outer loop, so a
tile of dW is complete before it is rounded to the precision of W, and of a 16-bit W only one tile is ever in float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import check_rows
from .reference import Adapter, Logprobs, accumulation_dtype
from .tiles import (
    NEVER,
    Softmax,
    Transform,
    add_target_,
    coefficients,
    finish,
    fold,
    no_second_derivative,
    per_row,
    pull,
    run,
    spans,
    start,
    temperature_gradient,
    worth_compiling,
)

ROWS, COLUMNS = 1024, 2048  # 8 MB of float32: a tile and its temporaries fit into 32 MB of cache
KEEP = 2**25  # bytes of logits that forward leaves for backward


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    scale: float,
    adapter: Adapter | None,
    vocab: int,
) -> Logprobs:
    """The contract of ``reference.linear_logprob``. Autograd itself carries u = scaling·h·Aᵀ back to h and A."""
    low = up = None
    if adapter is not None:
        down, up, scaling = adapter
        # Cast once, so that its two gradients are added before they are rounded.
        hidden = hidden.to(accumulation_dtype(hidden.dtype))
        low = scaling * (hidden @ down.to(hidden.dtype).t())
    temperatures = per_row(temperature, hidden)
    operands = (hidden, weight, target, bias, low, up, temperatures)
    keep = KEEP if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands) else 0
    return Logprobs(*_forward(*operands, scale, softcap, vocab, keep)[:3])


class _Head(NamedTuple):
    """The operands of the logits; after ``columns``, in one precision."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    low: Tensor | None  # [N, r], u
    up: Tensor | None  # [V, r], B

    def columns(self, columns: slice) -> "_Head":
        """The operands for a span of the vocabulary. A bias of −inf becomes finite, see ``NEVER``."""
        dtype = self.hidden.dtype
        bias = None if self.bias is None else self.bias[columns].to(dtype).clamp(min=NEVER)
        up = None if self.up is None else self.up[columns].to(dtype)
        return _Head(self.hidden, self.weight[columns].to(dtype), bias, self.low, up)

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """c for a span of rows, written into ``out``."""
        if self.bias is None:
            torch.mm(self.hidden[rows], self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, self.hidden[rows], self.weight.t(), out=out)
        return out if self.low is None or self.up is None else out.addmm_(self.low[rows], self.up.t())


class _Gradients(NamedTuple):
    """Sums over the tiles, field by field those of ``_Head``; None where no gradient is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None

    def columns(self, columns: slice, dtype: torch.dtype) -> "_Gradients":
        """The sums for a span of the vocabulary: a view where the precision is right, else zeros to be stored later."""
        weight, bias, up = (
            None if t is None else t[columns] if t.dtype == dtype else torch.zeros_like(t[columns], dtype=dtype)
            for t in (self.weight, self.bias, self.up)
        )
        return self._replace(weight=weight, bias=bias, up=up)

    def add_(self, dc: Tensor, head: _Head, rows: slice) -> None:
        if self.hidden is not None:
            self.hidden[rows].addmm_(dc, head.weight)
        if self.weight is not None:
            self.weight.addmm_(dc.t(), head.hidden[rows])
        if self.bias is not None:
            self.bias.add_(dc.sum(0))
        if self.low is not None and head.up is not None:
            self.low[rows].addmm_(dc, head.up)
        if self.up is not None and head.low is not None:
            self.up.addmm_(dc.t(), head.low[rows])

    def store_(self, columns: slice, part: "_Gradients") -> None:
        """Rounds what ``columns`` had to keep in another precision."""
        for whole, sums in ((self.weight, part.weight), (self.bias, part.bias), (self.up, part.up)):
            if whole is not None and sums is not None and whole.dtype != sums.dtype:
                whole[columns] = sums


class _Tiles:
    """Where the tiles of c are: the first of the vocabulary in ``kept``, all others in turn in one buffer."""

    def __init__(self, kept: Tensor, vocab: int) -> None:
        self.kept = kept  # [tiles, N, COLUMNS]
        self.buffer = kept.new_empty(min(kept.shape[1], ROWS) * min(vocab, COLUMNS))

    def keeps(self, columns: slice) -> bool:
        return int(columns.start) < len(self.kept) * COLUMNS

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        if self.keeps(columns):
            return self.kept[columns.start // COLUMNS, rows]
        n, k = rows.stop - rows.start, columns.stop - columns.start
        return self.buffer[: n * k].view(n, k)


def _room(hidden: Tensor, vocab: int, keep: int) -> Tensor:
    """``[tiles, N, COLUMNS]``: as many tiles as fit into ``keep`` bytes, but never all of them."""
    dtype = accumulation_dtype(hidden.dtype)
    bytes_per_tile = hidden.shape[0] * COLUMNS * dtype.itemsize + 1
    tiles = torch.sym_min(  # type: ignore[no-untyped-call]
        (vocab - 1) // COLUMNS, keep // bytes_per_tile
    )
    return hidden.new_empty(tiles, hidden.shape[0], COLUMNS, dtype=dtype)


@torch.library.custom_op("burnish::tiled_linear_logprob", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
    vocab: int,
    keep: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``Softmax``, and the tiles that are kept."""
    check_rows(target, temperature, vocab)
    head = _Head(hidden.to(accumulation_dtype(hidden.dtype)), weight, bias, low, up)
    transform = Transform.of(scale, softcap, temperature, hidden)
    state, kept = start(len(hidden), head.hidden), _room(hidden, vocab, keep)
    place = _Tiles(kept, vocab)
    for columns in spans(vocab, COLUMNS):
        part = head.columns(columns)
        for rows in spans(len(hidden), ROWS):
            tile = part.logits(rows, place(rows, columns))
            compiled = tile.shape[1] == COLUMNS and worth_compiling(tile, len(hidden) * vocab)
            here = target[rows] - columns.start
            state[rows] = run(fold, tile, here, state[rows], transform.rows(rows), compiled=compiled)
    softmax = finish(state)
    if bias is not None and softcap is None:
        softmax.logprob.masked_fill_(bias[target].isneginf(), -torch.inf)
    return *softmax, kept


@_forward.register_fake
def _(hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, vocab, keep = rest
    dtype = accumulation_dtype(hidden.dtype)
    return *(hidden.new_empty(hidden.shape[:1], dtype=dtype) for _ in Softmax._fields), _room(hidden, vocab, keep)


@torch.library.custom_op("burnish::tiled_linear_logprob_backward", mutates_args=())
def _backward(
    upstream: list[Tensor | None],
    softmax: list[Tensor],
    kept: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
    vocab: int,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of hidden, weight, bias, low, up and temperature, those of them that are needed."""
    saved = Softmax(*softmax)
    dtype = saved.shift.dtype
    head = _Head(hidden.to(dtype), weight, bias, low, up)
    transform = Transform.of(scale, softcap, temperature, hidden)
    arriving = coefficients(upstream, saved, transform)
    likes = zip((head.hidden, weight, bias, low, up, saved.shift), needed, strict=True)
    *sums, moments = (t.new_zeros(t.shape) if n and t is not None else None for t, n in likes)
    whole, place = _Gradients(*sums), _Tiles(kept, vocab)
    for columns in spans(vocab, COLUMNS):
        part, grads = head.columns(columns), whole.columns(columns, dtype)
        for rows in spans(len(hidden), ROWS):
            tile, here = place(rows, columns), arriving.rows(rows)
            if not place.keeps(columns):
                part.logits(rows, tile)
            compiled = tile.shape[1] == COLUMNS and worth_compiling(tile, len(hidden) * vocab)
            dc, moment = run(
                pull, tile, saved.shift[rows], here, transform.rows(rows), moments is not None, compiled=compiled
            )
            add_target_(dc, target[rows] - columns.start, here.gain)
            grads.add_(dc, part, rows)
            if moments is not None and moment is not None:
                moments[rows] += moment
        whole.store_(columns, grads)
    if moments is not None:
        moments = temperature_gradient(moments, upstream, saved, transform)
    results = zip((*whole, moments), (hidden, weight, bias, low, up, temperature), strict=True)
    return [grad.to(like.dtype) for grad, like in results if grad is not None and like is not None]


@_backward.register_fake
def _(upstream: list[Tensor | None], softmax: list[Tensor], kept: Tensor, *rest: Any) -> list[Tensor]:
    hidden, weight, _, bias, low, up, temperature, *_, needed = rest
    return [
        t.new_empty(t.shape) for t, n in zip((hidden, weight, bias, low, up, temperature), needed, strict=True) if n
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, bias, low, up, temperature, *ctx.constants, _ = inputs
    ctx.set_materialize_grads(False)  # None for an output nobody used
    ctx.mark_non_differentiable(*output[3:])
    ctx.save_for_backward(*output, hidden, weight, target, bias, low, up, temperature)


def _apply_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 3, 4, 5, 6)]
    grads = iter(_backward(list(upstream[:3]), list(tensors[:6]), *tensors[6:], *ctx.constants, needed))
    hidden, weight, *others = (next(grads) if n else None for n in needed)
    return hidden, weight, None, *others, None, None, None, None


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(no_second_derivative)
