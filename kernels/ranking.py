"""The likeliest tokens of each row and the rank of its target, found tile by tile. Constants: no gradients.

Scale, soft cap and temperature keep the order of the logits, so it is c that is compared.
"""

import torch
from torch import Tensor

from .head import HeadFactors
from .precision import accumulation_dtype
from .sharding import gather_columns, sum_over
from .softmax import IMPOSSIBLE, LogitTransform, Softmax


class Ranking:
    """Results over the tiles so far.

    Args:
        top_k: how many of the likeliest tokens to keep, 0 for none.
        target: ``[N]``, as this rank numbers them, if their ranks are wanted.
        group: the ranks that the vocabulary is split over.
    """

    def __init__(self, head: HeadFactors, top_k: int, target: Tensor | None, vocab: int, group: str | None) -> None:
        n, like = len(head.hidden), head.hidden
        self.values = like.new_full((n, top_k), -torch.inf, dtype=accumulation_dtype(like.dtype))
        self.ids = torch.zeros(n, top_k, dtype=torch.int64, device=like.device)
        self.above = torch.zeros(0 if target is None else n, dtype=torch.int64, device=like.device)
        self.target, self.group = target, group
        if target is not None:
            self.bar = _logit(head, target, vocab, group)

    def update(self, tile: Tensor, rows: slice, columns: slice) -> None:
        if self.values.shape[1]:
            values, ids = tile.topk(min(self.values.shape[1], tile.shape[1]))
            values, ids = torch.cat((self.values[rows], values), 1), torch.cat((self.ids[rows], ids + columns.start), 1)
            self.values[rows], best = values.topk(self.values.shape[1])
            self.ids[rows] = ids.gather(1, best)
        if self.target is not None:
            # Computed in another order, the target's own logit may be a hair above itself.
            itself = torch.arange(columns.start, columns.stop, device=tile.device) == self.target[rows, None]
            self.above[rows] += ((tile > self.bar[rows, None]) & ~itself).sum(1)

    def finish(self, softmax: Softmax, transform: LogitTransform, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rank of the target, ids and log-probs of the likeliest; ids count from ``start``."""
        values, ids, above = self.values, self.ids + start, self.above
        if self.group is not None:
            values, best = gather_columns(values, self.group).topk(values.shape[1])
            ids, above = gather_columns(ids, self.group).gather(1, best), sum_over(above, self.group)
        z = transform.tempered(transform.capped(values))
        logprob = (z - softmax.shift[:, None]) - softmax.log_total[:, None]
        return above, ids, logprob.masked_fill_(z < IMPOSSIBLE, -torch.inf)


def _logit(head: HeadFactors, target: Tensor, vocab: int, group: str | None) -> Tensor:
    """``[N]``, c of the target, from the rank that holds it."""
    inside = (target >= 0) & (target < vocab)
    index, dtype = target.clamp(0, max(vocab - 1, 0)), accumulation_dtype(head.hidden.dtype)
    c = (head.hidden.to(dtype) * head.factor(head.weight[index]).to(dtype)).sum(1)
    if head.bias is not None:
        c = c + head.bias[index].to(dtype)
    if head.low is not None and head.up is not None:
        c = c + (head.low.to(dtype) * head.factor(head.up[index]).to(dtype)).sum(1)
    return sum_over(torch.where(inside, c, 0), group)
