"""Logits in memory: made by ``linear_logits``, for sampling, and their log-probs, as in
``linear_logprob``.

    c = h·Wᵀ + b + u·Bᵀ        cap(scale·c)

rounded like every product of a head (README.md), so that a sampler and a trainer with the same
hidden states see the same distribution. ``[N, V]`` is what they are: meant for the few rows of a
decoding step.

``logits_logprob`` moves the logits once forward, and the logits and their gradient once backward.
Triton has a row in each program; torch takes a few rows at a time, while they are in the cache.
"""

from typing import Any

import torch
from torch import Tensor

from . import reference, softmax
from .backend import (
    Backend,
    accumulation_dtype,
    check_outputs,
    check_tensors,
    check_types,
    check_values,
    checked_dtype,
    checked_vocab,
    choose_backend,
)
from .head import Head, HeadFactors, checked_head
from .passes import COLUMNS, WAITS, no_second_derivative, spans, vocabulary_spans
from .reference import EXTRAS, Extra, Logprobs, TopK
from .softmax import (
    NEVER,
    OUTPUTS,
    SAVED,
    LogitTransform,
    Softmax,
    SoftmaxState,
    rows_of,
    run,
)

LOGITS_AT_ONCE = 2**20


@torch.no_grad()
def linear_logits(
    hidden: Tensor,
    head: Tensor | Head,
    *,
    vocab: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Logits ``[N, vocab]`` before any temperature: constants, in float32, in float64 for float64
    hidden states.

    Args:
        hidden: ``[N, D]``.
        head: W ``[V, D]`` alone, or a ``Head`` without a shard.
        vocab: how many rows of W are not padding; by default all.
        compute_dtype: what factors are rounded to, as in ``linear_logprob``.

    Raises:
        ValueError: if shapes or devices disagree, or the head is a shard.
    """
    who = "linear_logits"
    head = checked_head(who, hidden, head)
    compute = checked_dtype(who, compute_dtype, hidden, None)
    vocab = checked_vocab(who, vocab, len(head.weight))
    if head.shard is not None:
        raise ValueError(
            f"{who}: the head must hold its whole vocabulary, got a shard; gather its weight before"
        )
    with torch.autocast(hidden.device.type, enabled=False):
        factors = HeadFactors.of(hidden, head, compute).rounded()
        logits = hidden.new_empty(len(hidden), vocab, dtype=accumulation_dtype(hidden.dtype))
        # else in spans, so that little of W is ever there twice
        at_once = head.weight.dtype == factors.hidden.dtype
        for columns in vocabulary_spans(vocab, vocab if at_once else COLUMNS, hidden.device):
            factors.columns(columns).logits(slice(None), logits[:, columns])
        return head.transform().capped(logits)


def logits_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab: int | None = None,
    outputs: tuple[Extra, ...] = (),
    top_k: int | None = None,
    backend: Backend = "auto",
) -> Logprobs:
    """Log-probs of targets under softmax(logits / temperature), differentiable once.

    Args:
        logits: ``[N, V]``, in any floating-point dtype; −inf forbids a token.
        target: int64 ``[N]``, or ``[N, k]`` for k tokens of each row; ``logprob`` has its shape.
        temperature: T > 0, one number or ``[N]``, one per token.
        vocab: columns from here on are padding and have probability 0.
        outputs, top_k: further fields of ``Logprobs`` to compute, as in ``linear_logprob``.
        backend: as in ``linear_logprob``; "fused" is "triton", since there is no product to fuse.

    Raises:
        ValueError: if shapes disagree, or a hyper-parameter is out of range.
        IndexError: if a target is outside ``[0, vocab)``.
    """
    check_types("logits_logprob", logits=logits, target=target)
    if logits.ndim != 2:
        raise ValueError(f"logits_logprob: logits must be [N, V], got {list(logits.shape)}")
    who = "logits_logprob"
    tensors = {
        "logits": (logits, list(logits.shape)),
        "target": (target, [len(logits), *target.shape[1:2]]),
    }
    check_tensors(who, tensors, {"temperature": temperature})
    vocab = checked_vocab(who, vocab, logits.shape[1])
    check_outputs(who, outputs, EXTRAS, target, top_k, vocab)
    backend = choose_backend(who, backend, logits)
    if backend == "reference":
        options: Any = {
            "temperature": temperature,
            "vocab": vocab,
            "outputs": outputs,
            "top_k": top_k,
        }
        return reference.logits_logprob(logits, target, **options)
    if backend != "torch" and logits.stride(1) != 1:
        logits = logits.contiguous()  # the kernels read the numbers of a row one after the other
    columns, rows = (
        target if target.ndim == 2 else target[:, None],
        softmax.per_row(temperature, logits),
    )
    mean, squares = "mean_logprob" in outputs, "log_sum_squares" in outputs
    logprob, entropy, logsumexp, means, log_sum_squares, *_ = _forward(
        logits, columns, rows, vocab, mean, squares, backend != "torch"
    )
    z = logits.detach()[:, :vocab]
    return Logprobs(
        logprob.reshape(target.shape),
        entropy,
        logsumexp,
        mean_logprob=means if mean else None,
        log_sum_squares=log_sum_squares if squares else None,
        top1=z.argmax(1) if "top1" in outputs else None,
        rank=(z > z.gather(1, columns)).sum(1) if "rank" in outputs else None,
        top_k=None if top_k is None else _likeliest(z, top_k, rows, logsumexp),
    )


@torch.no_grad()
def _likeliest(z: Tensor, k: int, temperature: Tensor | None, logsumexp: Tensor) -> TopK:
    values, ids = z.topk(k)
    values = values.to(logsumexp.dtype)
    return TopK(
        ids, (values if temperature is None else values / temperature[:, None]) - logsumexp[:, None]
    )


def _precise(logits: Tensor, rows: slice, vocab: int) -> Tensor:
    """A few rows in the accumulation dtype, free to be overwritten; −inf becomes finite, see
    ``NEVER``.
    """
    return logits[rows, :vocab].to(accumulation_dtype(logits.dtype)).clamp(min=NEVER)


@torch.library.custom_op("burnish::logits_logprob", mutates_args=(), tags=WAITS)
def _forward(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    vocab: int,
    mean: bool,
    squares: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``Softmax``."""
    check_values("logits_logprob", target, vocab, temperature)
    transform = LogitTransform(temperature=temperature)
    like = logits.new_empty(0, dtype=accumulation_dtype(logits.dtype))
    state = SoftmaxState.start(target, like, mean, squares)
    if triton:
        from . import triton_softmax

        triton_softmax.fold_(logits[:, :vocab], target, state, transform)
    for rows in [] if triton else spans(len(logits), max(1, LOGITS_AT_ONCE // vocab)):
        tile = _precise(logits, rows, vocab)
        sums = rows_of(state, rows)
        rest = target[rows], sums, rows_of(transform, rows)
        sums.store_(run(softmax.fold, tile, *rest, width=vocab, logits=len(logits) * vocab))
    results = softmax.finish(state)
    softmax.rule_out_(results)
    return results


@_forward.register_fake
def _(logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, mean, squares, _ = rest
    return Softmax.empty(target, logits, mean, squares)


@torch.library.custom_op("burnish::logits_logprob_backward", mutates_args=())
def _backward(
    upstream: list[Tensor | None], results: list[Tensor], logits: Tensor, target: Tensor,
    temperature: Tensor | None, vocab: int, triton: bool, needed: list[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients of logits and temperature, those of them that are needed."""
    saved = Softmax(*results)
    transform = LogitTransform(temperature=temperature)
    arriving = softmax.coefficients(upstream, saved, transform)
    d_logits = torch.empty_like(logits) if needed[0] else None
    moments = torch.zeros_like(saved.shift) if needed[1] else None
    if d_logits is not None:
        d_logits[:, vocab:] = 0
    if triton:
        from . import triton_softmax

        out = torch.empty_like(logits) if d_logits is None else d_logits
        tile, out = logits[:, :vocab], out[:, :vocab]
        triton_softmax.backward_tile_(
            tile, target, saved.shift, arriving, transform, out, moments=moments
        )
    for rows in [] if triton else spans(len(logits), max(1, LOGITS_AT_ONCE // vocab)):
        tile, here = _precise(logits, rows, vocab), rows_of(arriving, rows)
        dz = torch.empty_like(tile)
        rest = saved.shift[rows], here, rows_of(transform, rows), moments is not None, dz
        moment = run(softmax.backward_tile, tile, *rest, width=vocab, logits=len(logits) * vocab)
        if moments is not None and moment is not None:
            moments[rows] = moment
        if d_logits is not None:
            softmax.add_target_(dz, target[rows], here.gain)
            d_logits[rows, :vocab] = dz
    if moments is not None and temperature is not None:
        moments = softmax.temperature_gradient(moments, upstream, saved, transform).to(
            temperature.dtype
        )
    return [grad for grad in (d_logits, moments) if grad is not None]


@_backward.register_fake
def _(upstream: list[Tensor | None], results: list[Tensor], *rest: Any) -> list[Tensor]:
    logits, _, temperature, _, _, needed = rest
    return [torch.empty_like(t) for t, n in zip((logits, temperature), needed, strict=True) if n]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, temperature, ctx.vocab, _, _, ctx.triton = inputs
    ctx.set_materialize_grads(False)  # None for an output that is not used
    ctx.mark_non_differentiable(*output[OUTPUTS:])
    ctx.save_for_backward(*output, logits, target, temperature)


def _apply_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    grads = iter(
        _backward(
            list(upstream[:OUTPUTS]),
            list(tensors[:SAVED]),
            *tensors[SAVED:],
            ctx.vocab,
            ctx.triton,
            needed,
        )
    )
    d_logits, d_temperature = (next(grads) if n else None for n in needed)
    return d_logits, None, d_temperature, *(None,) * 4


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(no_second_derivative)
