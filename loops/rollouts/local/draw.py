"""Drawing tokens: one number in [0, 1) per row decides, so that a row's token does not depend on its company."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..sample import SamplingParams

_ELEMENTS = 1 << 24  # logits that are turned into probabilities at once
_ELEMENTS_CPU = 1 << 19  # beyond which memory is mapped, and given back, for every token anew


class Drawn(NamedTuple):
    token: Tensor  # int64 [rows]
    logprob: Tensor  # [rows], under the distribution that it was drawn from


def uniforms(seed: int, count: int) -> list[float]:
    """The numbers that decide the tokens of the answer with this seed."""
    generator = torch.Generator().manual_seed(seed)
    numbers: list[float] = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    return numbers


def draw(logits: Tensor, uniform: Sequence[float], sampling: Sequence[SamplingParams]) -> Drawn:
    """One token per row of ``logits`` [rows, V], by inversion of its cumulative distribution.

        i = min { i : Σ_{j≤i} p_j > u Σ_j p_j },   p = softmax(logits / T) over what top_k and then top_p leave

    A row of temperature 0 takes its likeliest token, and its log-prob is that of temperature 1.
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    elements = _ELEMENTS_CPU if logits.device.type == "cpu" else _ELEMENTS
    size = max(1, elements // logits.shape[1])
    parts = [
        _draw(logits[i : i + size].to(precision), uniform[i : i + size], sampling[i : i + size])
        for i in range(0, len(logits), size)
    ]
    return parts[0] if len(parts) == 1 else Drawn(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _draw(logits: Tensor, uniform: Sequence[float], sampling: Sequence[SamplingParams]) -> Drawn:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    kinds = set(sampling)
    if any(how.temperature not in (0.0, 1.0) for how in kinds):
        logits = logits / column([how.temperature or 1.0 for how in sampling]).to(logits.dtype)
    if any(how.temperature and (how.top_k or how.top_p < 1) for how in kinds):
        top_k = column([how.top_k * bool(how.temperature) for how in sampling])
        top_p = column([how.top_p if how.temperature else 1.0 for how in sampling])
        logits = _likeliest(logits, top_k, top_p)
    highest = logits.amax(-1, keepdim=True)
    cumulative = (logits - highest).exp_().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    threshold = column(list(uniform)) * total
    token = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[1] - 1)
    if any(how.temperature == 0 for how in kinds):
        greedy = column([how.temperature for how in sampling]) == 0
        token = torch.where(greedy, logits.argmax(-1, keepdim=True), token)
    logprob = (logits.gather(1, token) - highest).double() - total.log()
    return Drawn(token[:, 0], logprob[:, 0].to(logits.dtype))


def _likeliest(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logits with -inf for what is not among the likeliest k, nor then among those that make up p."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probability = ordered.softmax(-1, dtype=torch.float64)
    before = probability.cumsum(-1) - probability
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ordered)
