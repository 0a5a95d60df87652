"""The definition in plain torch: differentiable by ordinary autograd, in every precision, and the only oracle.

It materializes ``[N, V]`` and it reads like the equations. Everything else in this folder has to agree with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_rows

Adapter = tuple[Tensor, Tensor, float]


class Logprobs(NamedTuple):
    """Three numbers per token, each ``[N]``, each differentiable, in nats."""

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 stays float64; everything else is computed in float32: logits are never rounded to 16 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    """``logits_logprob`` of ``scale·(hidden·Wᵀ + bias + scaling·(hidden·Aᵀ)·Bᵀ)``, soft-capped."""
    dtype = accumulation_dtype(hidden.dtype)
    hidden = hidden.to(dtype)
    logits = hidden @ weight[:vocab].to(dtype).t()
    if bias is not None:
        logits = logits + bias[:vocab].to(dtype)
    if adapter is not None:
        down, up, scaling = adapter
        logits = logits + scaling * (hidden @ down.to(dtype).t()) @ up[:vocab].to(dtype).t()
    logits = scale * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits_logprob(logits, target, temperature=temperature, vocab=vocab)


def logits_logprob(logits: Tensor, target: Tensor, *, temperature: float | Tensor, vocab: int) -> Logprobs:
    """log p = log softmax(logits / temperature): its target entry, −Σ p log p, and its normalizer."""
    check_rows(target, temperature, vocab)
    logits = logits[:, :vocab].to(accumulation_dtype(logits.dtype))
    # −inf/temperature and 0·log 0 have the right values but NaN derivatives, so impossible tokens bypass both.
    impossible = logits.isneginf()
    rows = temperature[:, None].to(logits.dtype) if isinstance(temperature, Tensor) else temperature
    scores = (logits.masked_fill(impossible, 0.0) / rows).masked_fill(impossible, -torch.inf)
    logp = scores.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(impossible, 0.0)).sum(-1)
    return Logprobs(logp.gather(1, target[:, None])[:, 0], entropy, scores.logsumexp(-1))
