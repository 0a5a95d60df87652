"""The logits of a language-model head, for drawing from them, as exact as those that log-probs are made of.

    c = h·Wᵀ + b + u·Bᵀ        cap(scale·c)

rounded like every product of a head (README.md), so that a sampler and a trainer with the same hidden states see the
same distribution. ``[N, V]`` is what they are: meant for the few rows of a decoding step.
"""

import torch
from torch import Tensor

from .checks import checked_vocab
from .head import Head, accumulation_dtype, autocast_dtype, check_compute_dtype, check_head
from .operands import operands
from .tiled import COLUMNS
from .tiles import Transform, vocabulary_spans


@torch.no_grad()
def linear_logits(
    hidden: Tensor, head: Head, *, vocab: int | None = None, compute_dtype: torch.dtype | None = None
) -> Tensor:
    """Logits ``[N, vocab]`` before any temperature: constants, in float32, in float64 for float64 hidden states.

    Args:
        hidden: ``[N, D]``.
        head: weight, bias, scale, soft cap and adapter; no shard.
        vocab: how many rows of W are not padding; all of them if not given.
        compute_dtype: what factors are rounded to, as in ``linear_logprob``.

    Raises:
        ValueError: if shapes or devices disagree, or the head is a shard.
    """
    who = "linear_logits"
    check_head(who, hidden, head)
    check_compute_dtype(who, compute_dtype)
    vocab = checked_vocab(who, vocab, len(head.weight))
    if head.shard is not None:
        raise ValueError(f"{who}: the head must hold its whole vocabulary, got a shard; gather its weight before")
    compute = compute_dtype or autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        given = operands(hidden, head, compute).rounded()
        logits = hidden.new_empty(len(hidden), vocab, dtype=accumulation_dtype(hidden.dtype))
        whole = head.weight.dtype == given.hidden.dtype  # else spans, so that little of W is ever there twice
        for columns in vocabulary_spans(vocab, vocab if whole else COLUMNS, hidden.device):
            given.columns(columns).logits(slice(None), logits[:, columns])
        return Transform(head.scale, head.softcap, None).capped(logits)
