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

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from .checks import check_target, check_temperature
from .head import Head, accumulation_dtype
from .operands import Gradients, Operands, Tiles, operands, room
from .reference import Extra, MoreLogprobs
from .tiles import (
    OUTPUTS,
    SAVED,
    Softmax,
    State,
    Transform,
    add_target_,
    coefficients,
    finish,
    fold,
    more_logprobs,
    no_second_derivative,
    per_row,
    pull,
    run,
    spans,
    temperature_gradient,
    worth_compiling,
)

ROWS, COLUMNS = 1024, 2048  # 8 MB of float32: a tile and its temporaries fit into 32 MB of cache
KEEP = 2**25  # bytes of logits that forward leaves for backward


def linear_logprob(
    hidden: Tensor, head: Head, target: Tensor, *, temperature: float | Tensor, vocab: int, outputs: Collection[Extra]
) -> MoreLogprobs:
    """The contract of ``reference.linear_logprob``."""
    hidden, weight, *others = operands(hidden, head, accumulation_dtype(hidden.dtype))
    columns = target if target.ndim == 2 else target[:, None]
    inputs = (hidden, weight, columns, *others, per_row(temperature, hidden))
    keep = KEEP if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs) else 0
    extras = "mean_logprob" in outputs, "log_sum_squares" in outputs
    return more_logprobs(_forward(*inputs, head.scale, head.softcap, vocab, *extras, keep), target, *extras)


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
    mean: bool,
    squares: bool,
    keep: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``Softmax``, and the tiles that are kept."""
    check_target("linear_logprob", target, vocab)
    check_temperature("linear_logprob", temperature)
    head = Operands(hidden.to(accumulation_dtype(hidden.dtype)), weight, bias, low, up)
    transform = Transform.of(scale, softcap, temperature, hidden)
    state, kept = State.start(target, head.hidden, mean, squares), room(hidden, vocab, COLUMNS, keep)
    place = Tiles(kept, ROWS, vocab)
    for columns in spans(vocab, COLUMNS):
        part = head.columns(columns)
        for rows in spans(len(hidden), ROWS):
            tile = part.logits(rows, place(rows, columns))
            compiled = tile.shape[1] == COLUMNS and worth_compiling(tile, len(hidden) * vocab)
            here = target[rows] - columns.start
            state.store_(rows, run(fold, tile, here, state.rows(rows), transform.rows(rows), compiled=compiled))
    softmax = finish(state)
    if bias is not None and softcap is None:
        softmax.logprob.masked_fill_(bias[target].isneginf(), -torch.inf)
    return *softmax, kept


@_forward.register_fake
def _(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, vocab, mean, squares, keep = rest
    return *Softmax.empty(target, hidden, mean, squares), room(hidden, vocab, COLUMNS, keep)


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
    head = Operands(hidden.to(dtype), weight, bias, low, up)
    transform = Transform.of(scale, softcap, temperature, hidden)
    arriving = coefficients(upstream, saved, transform)
    whole, place = Gradients.zeros(head, needed[:5]), Tiles(kept, ROWS, vocab)
    moments = torch.zeros_like(saved.shift) if needed[5] else None
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
    hidden, weight, target, bias, low, up, temperature, *ctx.constants, _, _, _ = inputs
    ctx.set_materialize_grads(False)  # None for an output nobody used
    ctx.mark_non_differentiable(*output[OUTPUTS:])
    ctx.save_for_backward(*output, hidden, weight, target, bias, low, up, temperature)


def _apply_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 3, 4, 5, 6)]
    grads = iter(_backward(list(upstream[:OUTPUTS]), list(tensors[:SAVED]), *tensors[SAVED:], *ctx.constants, needed))
    hidden, weight, *others = (next(grads) if n else None for n in needed)
    return hidden, weight, None, *others, *(None,) * 6


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(no_second_derivative)
