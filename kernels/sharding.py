"""Collectives for a vocabulary that is split over ranks: a few numbers per row are exchanged, never
logits.

    m = max m_r        S = Σ S_r·e^(m_r − m)        M = Σ (M_r + (m_r − m)·S_r)·e^(m_r − m)

and the targets' logits, which one rank has and the others count as 0.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .softmax import SoftmaxState


def sum_over(x: Tensor, group: str | None) -> Tensor:
    """Σ over the ranks, in place where there are several; x itself without a group."""
    if group is not None:
        dist.all_reduce(x, group=_group(group))
    return x


def gather_columns(x: Tensor, group: str) -> Tensor:
    """``[N, ranks·k]`` of ``[N, k]`` on each rank."""
    ranks = _group(group)
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(parts, x.contiguous(), group=ranks)
    return torch.cat(parts, 1)


def combine(state: SoftmaxState, target: Tensor, vocab: int, group: str) -> SoftmaxState:
    """The sums over the whole vocabulary, from those over each rank's part.

    Raises:
        IndexError: if a target, numbered from this rank's first column on, is in the part of no
            rank, or of several.
    """
    shift, total, moment, chosen, linear, squares = state
    # Sums of e^(z − m_r) can't be added where ranks have different m_r: take all to the largest.
    top = shift.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=_group(group))
    drop = shift - top
    decay = drop.exp()
    inside = ((target >= 0) & (target < vocab)).to(total.dtype)
    parts = [total * decay, (moment + drop * total) * decay]
    if linear is not None:
        parts += [linear[:, 0] + drop * linear[:, 1], linear[:, 1]]
    if squares is not None:
        parts.append(squares * decay.square())
    # One collective for all of it: a few numbers per row.
    sums = sum_over(torch.cat((torch.stack(parts, 1), chosen, inside), 1), group)
    totals, chosen, holders = torch.split(sums, [len(parts), target.shape[1], target.shape[1]], 1)
    if not (holders == 1).all():
        raise IndexError(
            f"linear_logprob: every target must be in the shard of one rank, {int((holders != 1).sum())} of "
            f"{holders.numel()} are not; targets are numbered over the whole vocabulary, shards must cover it once"
        )
    total, moment, *extras = totals.unbind(1)
    pair = torch.stack((extras[0], extras[1]), 1) if linear is not None else None
    return SoftmaxState(
        top, total, moment, chosen, pair, extras[-1] if squares is not None else None
    )


def _group(name: str) -> dist.ProcessGroup:
    # operators take the name of a group, as torch's own collectives do
    resolve: Any = dist.distributed_c10d
    group: dist.ProcessGroup = resolve._resolve_process_group(name)
    return group
