"""The logits of a language-model head for sampling, as exact as those that log-probs are made of.

    c = h·Wᵀ + b + u·Bᵀ        cap(scale·c)

rounded like every product of a head (README.md), so that a sampler and a trainer with the same hidden states see the
same distribution. ``[N, V]`` is what they are: meant for the few rows of a decoding step.
"""

import torch
from torch import Tensor

from .checks import checked_vocab
from .head import Head, HeadFactors, as_head, check_head
from .passes import COLUMNS, vocabulary_spans
from .precision import accumulation_dtype, autocast_dtype, check_compute_dtype


@torch.no_grad()
def linear_logits(
    hidden: Tensor, head: Tensor | Head, *, vocab: int | None = None, compute_dtype: torch.dtype | None = None
) -> Tensor:
    """Logits ``[N, vocab]`` before any temperature: constants, in float32, in float64 for float64 hidden states.

    Args:
        hidden: ``[N, D]``.
        head: W ``[V, D]`` alone, or a ``Head`` without a shard.
        vocab: how many rows of W are not padding; by default all.
        compute_dtype: what factors are rounded to, as in ``linear_logprob``.

    Raises:
        ValueError: if shapes or devices disagree, or the head is a shard.
    """
    who, head = "linear_logits", as_head(head)
    check_head(who, hidden, head)
    check_compute_dtype(who, compute_dtype)
    vocab = checked_vocab(who, vocab, len(head.weight))
    if head.shard is not None:
        raise ValueError(f"{who}: the head must hold its whole vocabulary, got a shard; gather its weight before")
    compute = compute_dtype or autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        factors = HeadFactors.of(hidden, head, compute).rounded()
        logits = hidden.new_empty(len(hidden), vocab, dtype=accumulation_dtype(hidden.dtype))
        at_once = head.weight.dtype == factors.hidden.dtype  # else in spans, so that little of W is ever there twice
        for columns in vocabulary_spans(vocab, vocab if at_once else COLUMNS, hidden.device):
            factors.columns(columns).logits(slice(None), logits[:, columns])
        return head.transform().capped(logits)
