"""``linear_logprob`` for those who already hold the logits: a few rows at a time, while they are in the cache.

Moved: the logits once forward; the logits once and their gradient once backward.
"""

from typing import Any, overload

import torch
from torch import Tensor

from .checks import check_outputs, check_rows, check_target, check_temperature, checked_vocab
from .head import accumulation_dtype
from .reference import Extra, Logprobs, MoreLogprobs
from .tiles import (
    NEVER,
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

LOGITS_AT_ONCE = 2**20


@overload
def logits_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab: int | None = None,
    outputs: tuple[()] = (),
) -> Logprobs: ...
@overload
def logits_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab: int | None = None,
    outputs: tuple[Extra, *tuple[Extra, ...]],
) -> MoreLogprobs: ...
def logits_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab: int | None = None,
    outputs: tuple[Extra, ...] = (),
) -> Logprobs | MoreLogprobs:
    """``Logprobs(logprob, entropy, logsumexp)`` of softmax(logits / temperature), differentiable once.

    Args:
        logits: ``[N, V]``, in any floating-point dtype; −inf forbids a token.
        target: int64 ``[N]``, or ``[N, k]`` for k tokens of each row; ``logprob`` has its shape.
        temperature: T > 0, one number or ``[N]``, one per token.
        vocab: columns from here on are padding and have probability 0.
        outputs: what else to compute, and to return in ``MoreLogprobs``, as in ``linear_logprob``.

    Raises:
        ValueError: if shapes disagree, or a hyper-parameter is out of range.
        IndexError: if a target is outside ``[0, vocab)``.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits_logprob: logits must be [N, V], got {list(logits.shape)}")
    check_rows("logits_logprob", {"logits": logits}, temperature, target)
    check_outputs("logits_logprob", outputs)
    vocab = checked_vocab("logits_logprob", vocab, logits.shape[1])
    extras = "mean_logprob" in outputs, "log_sum_squares" in outputs
    columns = target if target.ndim == 2 else target[:, None]
    softmax = _forward(logits, columns, per_row(temperature, logits), vocab, *extras)
    result = more_logprobs(softmax, target, *extras)
    return result if outputs else Logprobs(*result[:3])


def _precise(logits: Tensor, rows: slice, vocab: int) -> Tensor:
    """A few rows in the accumulation dtype, free to be overwritten; −inf becomes finite, see ``NEVER``."""
    return logits[rows, :vocab].to(accumulation_dtype(logits.dtype)).clamp(min=NEVER)


@torch.library.custom_op("burnish::logits_logprob", mutates_args=())
def _forward(
    logits: Tensor, target: Tensor, temperature: Tensor | None, vocab: int, mean: bool, squares: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``Softmax``."""
    check_target("logits_logprob", target, vocab)
    check_temperature("logits_logprob", temperature)
    transform = Transform.of(1.0, None, temperature, logits)
    like = logits.new_empty(0, dtype=accumulation_dtype(logits.dtype))
    state = State.start(target, like, mean, squares)
    for rows in spans(len(logits), max(1, LOGITS_AT_ONCE // vocab)):
        tile = _precise(logits, rows, vocab)
        compiled = worth_compiling(tile, len(logits) * vocab)
        state.store_(rows, run(fold, tile, target[rows], state.rows(rows), transform.rows(rows), compiled=compiled))
    softmax = finish(state)
    softmax.logprob.masked_fill_(logits.gather(1, target).isneginf(), -torch.inf)
    return softmax


@_forward.register_fake
def _(logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, mean, squares = rest
    return Softmax.empty(target, logits, mean, squares)


@torch.library.custom_op("burnish::logits_logprob_backward", mutates_args=())
def _backward(
    upstream: list[Tensor | None],
    softmax: list[Tensor],
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    vocab: int,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of logits and temperature, those of them that are needed."""
    saved = Softmax(*softmax)
    transform = Transform.of(1.0, None, temperature, logits)
    arriving = coefficients(upstream, saved, transform)
    d_logits = torch.empty_like(logits) if needed[0] else None
    moments = torch.empty_like(saved.shift) if needed[1] else None
    if d_logits is not None:
        d_logits[:, vocab:] = 0
    for rows in spans(len(logits), max(1, LOGITS_AT_ONCE // vocab)):
        tile, here = _precise(logits, rows, vocab), arriving.rows(rows)
        compiled = worth_compiling(tile, len(logits) * vocab)
        rest = saved.shift[rows], here, transform.rows(rows), moments is not None
        dz, moment = run(pull, tile, *rest, compiled=compiled)
        if moments is not None and moment is not None:
            moments[rows] = moment
        if d_logits is not None:
            add_target_(dz, target[rows], here.gain)
            d_logits[rows, :vocab] = dz
    if moments is not None and temperature is not None:
        moments = temperature_gradient(moments, upstream, saved, transform).to(temperature.dtype)
    return [grad for grad in (d_logits, moments) if grad is not None]


@_backward.register_fake
def _(upstream: list[Tensor | None], softmax: list[Tensor], *rest: Any) -> list[Tensor]:
    logits, _, temperature, _, needed = rest
    return [torch.empty_like(t) for t, n in zip((logits, temperature), needed, strict=True) if n]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, temperature, ctx.vocab, _, _ = inputs
    ctx.set_materialize_grads(False)  # None for an output nobody used
    ctx.mark_non_differentiable(*output[OUTPUTS:])
    ctx.save_for_backward(*output, logits, target, temperature)


def _apply_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    grads = iter(_backward(list(upstream[:OUTPUTS]), list(tensors[:SAVED]), *tensors[SAVED:], ctx.vocab, needed))
    d_logits, d_temperature = (next(grads) if n else None for n in needed)
    return d_logits, None, d_temperature, None, None, None


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(no_second_derivative)
