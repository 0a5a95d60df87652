"""Advantages: how much better a completion, or a token, was than expected. Computed once, over the whole global batch.

    r_i          the reward of completion i; NaN if it is unknown
    group        which prompt a completion belongs to: any integers, in any order, groups of any size
    G_t          Σ_{k≥0} γ^k r_{t+k}, the return from token t to the end of its completion
    V_t          the value of the state before token t; 0 after the last token

A completion without a reward is masked: it enters no mean and no standard deviation, and its advantage is 0.
`group_stats` counts such completions. Standard deviations are unbiased (divided by n − 1), and 0 for a group of one. A
completion whose group holds no other reward, or only equal ones, has advantage exactly 0, whatever the size of the
rewards.

Results are detached, in the order of the completions given; that order and the groups' names do not matter. Tokens lie
as in `sequence`: flat, with sorted ids. Infinite rewards and shapes that differ raise ValueError.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .types import (
    FlatTokens,
    IntPerSequence,
    PerSequence,
    SequenceIds,
    Share,
    Stats,
    flat,
    one_per,
    require,
    same_shape,
    within,
)


@torch.no_grad()
def group_advantage(
    reward: PerSequence, group: IntPerSequence, *, scale: Literal["group", "batch", "none"] = "group", eps: float = 1e-4
) -> PerSequence:
    """GRPO's advantage: a completion against the others to its prompt.

        A_i = (r_i − mean_g r) / (s + ε)

    Args:
        scale: s is the standard deviation of the rewards in the completion's group (GRPO), or in the whole batch (Lite
            PPO); "none" does not divide at all (Dr. GRPO).
        eps: ε ≥ 0. The paper has none; 1e-4 is TRL's. Rewards that differ by less than it are scaled down by it.

    Paper: Shao et al. 2024, arXiv:2402.03300; "batch": Liu et al. 2025, arXiv:2508.08221; "none": Liu et al. 2025,
    arXiv:2503.20783.
    """
    _check("group_advantage", reward, group=group)
    deviation, std, _ = _spread(reward, group)
    match scale:
        case "group":
            return _ratio("group_advantage", deviation, std, eps)
        case "batch":
            return _ratio("group_advantage", deviation, _spread(reward, torch.zeros_like(group))[1], eps)
        case "none":
            return deviation.nan_to_num(nan=0.0)
    raise ValueError(f"group_advantage: scale must be group, batch or none, got {scale!r}")


@torch.no_grad()
def rloo_advantage(reward: PerSequence, group: IntPerSequence) -> PerSequence:
    """RLOO's advantage: the baseline is the mean reward of the other completions to the prompt.

        A_i = r_i − 1/(n − 1) Σ_{j≠i} r_j = n/(n − 1) (r_i − mean_g r)

    Paper: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024,
    arXiv:2402.14740.
    """
    _check("rloo_advantage", reward, group=group)
    deviation, _, count = _spread(reward, group)
    return (deviation * count / (count - 1).clamp(min=1)).nan_to_num(nan=0.0)


@torch.no_grad()
def opo_advantage(reward: PerSequence, group: IntPerSequence, length: IntPerSequence) -> PerSequence:
    """OPO's advantage: the baseline that minimizes the gradient's variance if that grows with a completion's length.

        A_i = r_i − Σ_g l r / Σ_g l

    verl gives a completion that is alone in its group its raw reward; here it gets 0.

    Paper: Hao et al. 2025, arXiv:2505.23585.
    """
    _check("opo_advantage", reward, group=group, length=length)
    index = torch.unique(group, return_inverse=True)[1]
    deviation, _, _ = _spread(reward, index)
    scored = length.to(reward.dtype).where(~reward.isnan(), torch.nan)
    baseline = _sum(scored * deviation, index) / _sum(scored, index).clamp(min=1)
    return (deviation - baseline).nan_to_num(nan=0.0)


@torch.no_grad()
def weighted_reward(reward: Float[Tensor, "sequences rewards"], weight: Float[Tensor, " rewards"]) -> PerSequence:
    """Several rewards as one: Σ_k w_k r_ik over those that apply; NaN if none does.

    NaN stands for a reward that does not apply to a completion, as in TRL: it is left out, as if it were 0. It does not
    stand for one that failed: what such a completion is worth is unknown, and its whole row must be NaN.

    Pass it to `group_advantage` to sum, then normalize.
    """
    _check_rewards("weighted_reward", reward, weight)
    return (reward * weight).nansum(1).where(~reward.isnan().all(1), torch.nan)


@torch.no_grad()
def gdpo_advantage(
    reward: Float[Tensor, "sequences rewards"],
    group: IntPerSequence,
    weight: Float[Tensor, " rewards"],
    *,
    eps: float = 1e-4,
) -> PerSequence:
    """GDPO's advantage: each reward is compared within the group by itself, so that none drowns another.

        z_ik = (r_ik − mean_g r_k) / (std_g r_k + ε)
        A = whiten(Σ_k w_k z_k)

    A reward that does not apply to a completion is NaN, is in no mean and no standard deviation, and counts as its
    group's mean; a completion with none is masked. So is one that a reward failed at, if its whole row is NaN.

    Args:
        weight: w_k, on rewards of unit variance.
        eps: as in `group_advantage`.

    Paper: Liu et al. 2026, arXiv:2601.05242.
    """
    _check_rewards("gdpo_advantage", reward, weight)
    scores = [group_advantage(r, group, scale="group", eps=eps) for r in reward.unbind(1)]
    total = torch.stack(scores, 1) @ weight
    return whiten(total.where(~reward.isnan().all(1), torch.nan), eps=eps)


@torch.no_grad()
def whiten(x: Float[Tensor, " units"], *, eps: float = 1e-4) -> Float[Tensor, " units"]:
    """Zero mean and unit variance over the batch: (x − mean x) / (std x + ε); a NaN is left out and becomes 0.

    PPO's whitened rewards keep their mean: add it back. An ε of 1e-4 is TRL's.
    """
    flat("whiten", x=x)
    _check_values("whiten", x)
    deviation, std, _ = _spread(x, torch.zeros_like(x, dtype=torch.int64))
    return _ratio("whiten", deviation, std, eps)


@torch.no_grad()
def kl_penalized_reward(reward: PerSequence, kl: FlatTokens, sequence: SequenceIds, *, beta: float) -> FlatTokens:
    """The reward of each token: a share of the divergence from the reference, and the completion's reward at its end.

        r_t = −β kl_t + [t is the last token of completion i] r_i

    A completion without a token has no place for its reward, so it is left out. The last token of an unscored
    completion is NaN. RLOO subtracts the penalty from whole completions: ``reward - beta * sequence_sum(kl, ...)``.

    Args:
        kl: log π/π_ref of each token, or another estimate of the divergence.
        beta: β ≥ 0.

    Paper: Ziegler et al. 2019, arXiv:1909.08593; per token: Ouyang et al. 2022, arXiv:2203.02155.
    """
    _check("kl_penalized_reward", reward)
    _check_tokens("kl_penalized_reward", sequence, kl=kl)
    require("kl_penalized_reward", 0 <= beta < math.inf, "beta must be >= 0, got {}", beta)
    last = torch.ones_like(sequence, dtype=torch.bool)
    last[:-1] = sequence[1:] != sequence[:-1]
    return torch.where(last, reward[sequence], 0.0) - beta * kl


@torch.no_grad()
def gae(
    reward: FlatTokens, value: FlatTokens, sequence: SequenceIds, *, gamma: float, lam: float
) -> tuple[FlatTokens, FlatTokens]:
    """Generalized advantage estimation, and the returns that the value function should learn.

        δ_t = r_t + γ V_{t+1} − V_t
        A_t = Σ_{k≥0} (γλ)^k δ_{t+k},  R_t = A_t + V_t

    All sums end with the completion. If one was cut off, add γ times the value of the state it was cut at to its last
    reward. The tokens of a completion with a NaN reward get A = 0 and R = V; leave them out before whitening.

    Args:
        gamma, lam: γ and λ in [0, 1]. λ = 0 is the one-step error, λ = 1 the return minus the value.

    Returns:
        Advantages and returns.

    Paper: Schulman et al. 2015, arXiv:1506.02438.
    """
    _check_tokens("gae", sequence, reward=reward, value=value)
    within("gae", Share, gamma=gamma, lam=lam)
    following = _shifted(value, sequence, 1)
    advantage = _discounted_sum(reward + gamma * following - value, sequence, gamma * lam)
    unscored = torch.isin(sequence, sequence[reward.isnan()])
    advantage = torch.where(unscored, 0.0, advantage)
    return advantage, advantage + value


@torch.no_grad()
def reinforce_plus_plus(
    reward: PerSequence,
    kl: FlatTokens,
    sequence: SequenceIds,
    *,
    beta: float,
    gamma: float = 1.0,
    eps: float = 1e-4,
) -> FlatTokens:
    """REINFORCE++'s advantage: the penalized return, whitened over all tokens; for one completion per prompt.

        A = whiten(G),  of the rewards r_t = −β kl_t + [t is the last token of completion i] r_i

    Args:
        kl: log π/π_ref of each token.
        beta: β ≥ 0.
        gamma: γ in [0, 1]; 1 in the paper.

    Paper: Hu et al. 2025, arXiv:2501.03262.
    """
    within("reinforce_plus_plus", Share, gamma=gamma)
    return whiten(_discounted_sum(kl_penalized_reward(reward, kl, sequence, beta=beta), sequence, gamma), eps=eps)


@torch.no_grad()
def reinforce_plus_plus_baseline(
    reward: PerSequence, group: IntPerSequence, sequence: SequenceIds, *, eps: float = 1e-4
) -> FlatTokens:
    """REINFORCE++-baseline's advantage: centered in the group, scaled over the batch; for groups of completions.

        A = whiten(r_i − mean_g r),  over all tokens t of all completions i

    The paper's penalty is a loss of its own: k2 of `kl_estimate`. As in verl and OpenRLHF tokens are whitened, so long
    completions count more.

    Paper: Hu et al. 2025, arXiv:2501.03262.
    """
    _check("reinforce_plus_plus_baseline", reward, group=group)
    return whiten(_spread(reward, group)[0][sequence], eps=eps)


@torch.no_grad()
def group_stats(reward: PerSequence, group: IntPerSequence) -> Stats:
    """Reward metrics of a step, one number each, under TRL's names where it has one.

        reward, reward_std     mean and standard deviation over the scored completions of the batch
        frac_reward_zero_std   share of groups that teach nothing, since no two of their rewards differ
        frac_unscored          share of completions without a reward

    A group that has no reward at all is not counted as a group. One with a single reward teaches nothing either; TRL
    counts it as if it did, and weighs groups by their size.
    """
    _check("group_stats", reward, group=group)
    scored = ~reward.isnan()
    silent = _spread(reward, group)[1] == 0
    groups = len(torch.unique(group[scored]))
    return {
        "reward": reward.nanmean(),
        "reward_std": _spread(reward, torch.zeros_like(group))[1].amax(),
        "frac_reward_zero_std": reward.new_tensor(len(torch.unique(group[scored & silent])) / max(groups, 1)),
        "frac_unscored": 1 - scored.to(reward.dtype).mean(),
    }


def _check(who: str, reward: Tensor, **others: Tensor) -> None:
    same_shape(who, reward=reward, **others)
    one_per(who, "completion", reward=reward)
    _check_values(who, reward)


def _check_values(who: str, reward: Tensor) -> None:
    require(who, reward.is_floating_point(), "values must be floats, got {}; convert them, .double()", reward.dtype)
    require(who, not bool(reward.isinf().any()), "values must be finite, or NaN where there is none, got inf")


def _check_rewards(who: str, reward: Tensor, weight: Tensor) -> None:
    _check_values(who, reward)
    require(
        who,
        reward.dim() == 2 and weight.shape == reward.shape[1:],
        f"reward must be [completions, rewards] with one weight per reward, got {list(reward.shape)} and "
        f"{list(weight.shape)}",
    )


def _check_tokens(who: str, sequence: Tensor, **tokens: Tensor) -> None:
    same_shape(who, sequence=sequence, **tokens)
    require(who, bool((sequence[1:] >= sequence[:-1]).all()), "sequence must be sorted: sort tokens by completion")


def _sum(x: Tensor, index: Tensor) -> Tensor:
    """At each entry, the sum over its group; a NaN does not count."""
    return x.new_zeros(x.shape).index_add(0, index, torch.where(x.isnan(), 0.0, x))[index]


def _spread(x: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """At each entry: x minus the mean of its group, NaN where x is; the unbiased standard deviation of the group, 0 in
    a group of one; and the number of its entries that are not NaN.

    The mean is taken above the group's lowest entry: the rounded mean of equal rewards is not always that reward, and a
    deviation of pure rounding, divided by a standard deviation of pure rounding, is an advantage of about 1.
    """
    index = torch.unique(group, return_inverse=True)[1]
    lowest = torch.full_like(x, math.inf).scatter_reduce(0, index, torch.where(x.isnan(), math.inf, x), "amin")
    above, count = x - lowest[index], _sum((~x.isnan()).to(x.dtype), index)
    deviation = above - _sum(above, index) / count
    return deviation, (_sum(deviation.square(), index) / (count - 1).clamp(min=1)).sqrt(), count


def _ratio(who: str, deviation: Tensor, std: Tensor, eps: float) -> Tensor:
    """deviation / (std + ε), 0 where there is no deviation at all."""
    require(who, 0 <= eps < math.inf, "eps must be >= 0, got {}", eps)
    return torch.where(std > 0, deviation / (std + eps), 0.0).nan_to_num(nan=0.0)


def _shifted(x: Tensor, sequence: Tensor, by: int) -> Tensor:
    """x_{t+by} at token t, or 0 where the sequence has ended by then."""
    later = torch.zeros_like(x)
    later[:-by] = torch.where(sequence[by:] == sequence[:-by], x[by:], 0.0)
    return later


def _discounted_sum(x: Tensor, sequence: Tensor, decay: float) -> Tensor:
    """Σ_{k≥0} decay^k x_{t+k} over the rest of each sequence.

    Sums of 1, 2, 4, ... tokens, each made of two of the one before: as many rounds as the longest sequence has binary
    digits, instead of one for each of its tokens.
    """
    reach = 1
    while bool((sequence[reach:] == sequence[:-reach]).any()):
        x = x + decay**reach * _shifted(x, sequence, reach)
        reach *= 2
    return x
