"""The definition in plain torch: differentiable by ordinary autograd, in every precision, and the
only oracle.

It materializes ``[N, V]`` and it reads like the equations. Everything else in this folder has to
agree with it.
"""

import math
from collections.abc import Collection
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .backend import accumulation_dtype, check_values, rounded
from .head import Head

Extra = Literal["mean_logprob", "log_sum_squares", "top1", "rank"]
EXTRAS: tuple[Extra, ...] = get_args(Extra)


class TopK(NamedTuple):
    """The likeliest tokens of each row, likeliest first: ids and log-probs, each ``[N, k]``,
    constants.
    """

    ids: Tensor
    logprob: Tensor


class Logprobs(NamedTuple):
    """Numbers per token in nats, each ``[N]``; ``logprob`` has the shape of the target.

    What was not asked for is None. The first five are differentiable, the last three are constants.
    """

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor
    mean_logprob: Tensor | None = None
    log_sum_squares: Tensor | None = None
    top1: Tensor | None = None
    rank: Tensor | None = None
    top_k: TopK | None = None


def linear_logprob(
    hidden: Tensor, head: Head, target: Tensor, *, temperature: float | Tensor, vocab: int,
    outputs: Collection[Extra], top_k: int | None = None, compute_dtype: torch.dtype | None = None,
) -> Logprobs:  # fmt: skip
    """``logits_logprob`` of the head's logits."""
    logits = head_logits(hidden, head, vocab, accumulation_dtype(hidden.dtype), compute_dtype)
    return logits_logprob(
        logits, target, temperature=temperature, vocab=vocab, outputs=outputs, top_k=top_k
    )


def linear_divergence(
    student_hidden: Tensor, student: Head, teacher_hidden: Tensor, teacher: Head, *, beta: float,
    temperature: float | Tensor, vocab: int, compute_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Generalized Jensen-Shannon divergence of softmax(logits / temperature) of the teacher T and
    the student S.
    """
    check_values("linear_divergence", None, vocab, temperature)
    dtype = accumulation_dtype(student_hidden.dtype)
    heads = (student_hidden, student), (teacher_hidden, teacher)
    s, t = (
        log_softmax(head_logits(hidden, head, vocab, dtype, compute_dtype), temperature)[0]
        for hidden, head in heads
    )
    if beta == 0:
        return _kl(t, s)
    if beta == 1:
        return _kl(s, t)
    impossible = s.isneginf() & t.isneginf()
    parts = (
        s.masked_fill(impossible, 0.0) + math.log1p(-beta),
        t.masked_fill(impossible, 0.0) + math.log(beta),
    )
    mixture = torch.logaddexp(*parts)
    return beta * _kl(t, mixture) + (1 - beta) * _kl(s, mixture)


def logits_logprob(
    logits: Tensor, target: Tensor, *, temperature: float | Tensor, vocab: int, outputs: Collection[Extra] = (),
    top_k: int | None = None,
) -> Logprobs:  # fmt: skip
    """log p = log softmax(logits / temperature): its target entries, −Σ p log p, and its
    normalizer.

    If asked for, the mean of log p over the tokens that are possible, log Σ p², the likeliest
    token, how many others are likelier than the target, and the k likeliest.
    """
    check_values("logits_logprob", target, vocab, temperature)
    logits = logits[:, :vocab].to(accumulation_dtype(logits.dtype))
    logp, normalizer = log_softmax(logits, temperature)
    impossible = logp.isneginf()
    finite = logp.masked_fill(impossible, 0.0)
    columns = target if target.ndim == 2 else target[:, None]
    return Logprobs(
        logp.gather(1, columns).reshape(target.shape),
        -(logp.exp() * finite).sum(-1),
        normalizer,
        mean_logprob=finite.sum(-1) / (~impossible).sum(-1) if "mean_logprob" in outputs else None,
        log_sum_squares=(2 * logp).logsumexp(-1) if "log_sum_squares" in outputs else None,
        top1=logits.argmax(-1) if "top1" in outputs else None,
        rank=(logits > logits.gather(1, columns)).sum(-1) if "rank" in outputs else None,
        top_k=None if top_k is None else TopK(*reversed(logp.detach().topk(top_k))),
    )


def head_logits(
    hidden: Tensor,
    head: Head,
    vocab: int,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """``[N, vocab]``, before the temperature: sums in ``dtype`` of products of rounded factors."""
    compute = compute_dtype or hidden.dtype

    def factor(t: Tensor) -> Tensor:
        return rounded(t, compute).to(dtype)

    hidden, adapter = factor(hidden), head.adapter
    logits = hidden @ factor(head.weight[:vocab]).t()
    if head.bias is not None:
        logits = logits + head.bias[:vocab].to(dtype)
    if adapter is not None:
        down, up, scaling = adapter
        logits = logits + factor(scaling * (hidden @ factor(down).t())) @ factor(up[:vocab]).t()
    return head.transform()(logits)


def log_softmax(logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) and its normalizer."""
    # −inf/temperature has the right value but a NaN derivative, so impossible tokens bypass it, as
    # they do 0·log 0.
    impossible = logits.isneginf()
    rows = temperature[:, None].to(logits.dtype) if isinstance(temperature, Tensor) else temperature
    scores = (logits.masked_fill(impossible, 0.0) / rows).masked_fill(impossible, -torch.inf)
    return scores.log_softmax(-1), scores.logsumexp(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Σ eᵖ(p − q), infinite where q rules out what p allows."""
    impossible = p.isneginf()
    return (p.exp() * (p.masked_fill(impossible, 0.0) - q.masked_fill(impossible, 0.0))).sum(-1)
