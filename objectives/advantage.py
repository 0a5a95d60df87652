"""Advantages: how much better a completion, or a token, was than expected. Computed once, over the
whole global batch.

    r_i          the reward of completion i; NaN if it is unknown
    group        which prompt a completion belongs to: any integers, in any order, groups of any size
    G_t          Σ_{k≥0} γ^k r_{t+k}, the return from token t to the end of its completion
    V_t          the value of the state before token t; 0 after the last token

A completion without a reward is masked: it enters no mean and no standard deviation, and its
advantage is 0. `group_stats` counts such completions. Standard deviations are unbiased (divided by
n − 1), and 0 for a group of one. A completion whose group holds no other reward, or only equal
ones, has advantage exactly 0, whatever the size of the rewards.

Results are detached, in the order of the completions given; that order and the groups' names do not
matter. Tokens lie as in `sequence`: flat, with sorted ids. Infinite rewards and shapes that differ
raise ValueError.
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
    Positive,
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
    reward: PerSequence,
    group: IntPerSequence,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
) -> PerSequence:
    """GRPO's advantage: a completion against the others to its prompt.

        A_i = (r_i − mean_g r) / (s + ε)

    Args:
        scale: s is the standard deviation of the rewards in the completion's group (GRPO), or in
            the whole batch (Lite PPO); "none" does not divide at all (Dr. GRPO).
        eps: ε ≥ 0. The paper has none; 1e-4 is TRL's. Rewards that differ by less than it are
            scaled down by it.

    Paper: Shao et al. 2024, arXiv:2402.03300; "batch": Liu et al. 2025, arXiv:2508.08221; "none":
    Liu et al. 2025, arXiv:2503.20783.
    """
    _check("group_advantage", reward, group=group)
    deviation, std, _ = _spread(reward, group)
    match scale:
        case "group":
            return _ratio("group_advantage", deviation, std, eps)
        case "batch":
            return _ratio(
                "group_advantage", deviation, _spread(reward, torch.zeros_like(group))[1], eps
            )
        case "none":
            return deviation.nan_to_num(nan=0.0)
    raise ValueError(f"group_advantage: scale must be group, batch or none, got {scale!r}")


@torch.no_grad()
def rloo_advantage(reward: PerSequence, group: IntPerSequence) -> PerSequence:
    """RLOO's advantage: the baseline is the mean reward of the other completions to the prompt.

        A_i = r_i − 1/(n − 1) Σ_{j≠i} r_j = n/(n − 1) (r_i − mean_g r)

    Paper: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al.
    2024, arXiv:2402.14740.
    """
    _check("rloo_advantage", reward, group=group)
    deviation, _, count = _spread(reward, group)
    return (deviation * count / (count - 1).clamp(min=1)).nan_to_num(nan=0.0)


@torch.no_grad()
def opo_advantage(
    reward: PerSequence, group: IntPerSequence, length: IntPerSequence
) -> PerSequence:
    """OPO's advantage: the baseline that minimizes the gradient's variance if that grows with a
    completion's length.

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
def gpg_advantage(reward: PerSequence, group: IntPerSequence) -> PerSequence:
    """GPG's advantage: centered in the group, and larger the more completions teach nothing.

        A_i = N/(N − M) (r_i − mean_g r),  where M of the N completions are in groups of equal rewards

    A mean over all completions is then one over those that have a gradient. verl's counts
    completions whose reward is not 0 instead of N − M.

    Paper: Chu et al. 2025, arXiv:2504.02546, with its F_norm of 1; the loss is `reinforce`.
    """
    _check("gpg_advantage", reward, group=group)
    deviation, std, _ = _spread(reward, group)
    scored = ~reward.isnan()
    informative = scored & (std > 0)
    return (deviation * scored.sum() / informative.sum().clamp(min=1)).nan_to_num(nan=0.0)


@torch.no_grad()
def maxrl_advantage(reward: PerSequence, group: IntPerSequence) -> PerSequence:
    """MaxRL's advantage: the more, the rarer a success is, so that the likelihood of success is
    what grows.

        A_i = (r_i − mean_g r) / mean_g r,  0 where mean_g r = 0

    In expectation its gradient is that of the first n − 1 terms of log p = −Σ_k (1 − p)^k / k, p
    being the probability of a success and n the size of the group.

    Args:
        reward: 0 or 1, or another number ≥ 0.

    Paper: Tajwar et al. 2026, arXiv:2602.02710.
    """
    _check("maxrl_advantage", reward, group=group)
    require(
        "maxrl_advantage", not bool((reward < 0).any()), "rewards must be >= 0, got a negative one"
    )
    deviation, _, _ = _spread(reward, group)
    mean = reward - deviation
    return torch.where(mean > 0, deviation / mean, 0.0)  # an unknown mean is not above 0 either


@torch.no_grad()
def remax_advantage(reward: PerSequence, greedy_reward: PerSequence) -> PerSequence:
    """ReMax's advantage: the baseline is the reward of the greedy completion to the prompt, which
    is not trained on.

        A_i = r_i − r(greedy completion)

    A completion has advantage 0 if either reward is unknown.

    Args:
        greedy_reward: for each completion, the reward of the completion to its prompt at
            temperature 0.

    Paper: Li et al. 2023, arXiv:2310.10505.
    """
    _check("remax_advantage", reward, greedy_reward=greedy_reward)
    _check_values("remax_advantage", greedy_reward)
    return (reward - greedy_reward).nan_to_num(nan=0.0)


@torch.no_grad()
def max_at_k_advantage(reward: PerSequence, group: IntPerSequence, *, k: int) -> PerSequence:
    """Advantage for the best of k completions (pass@k, if rewards are 0 and 1): what completion i
    adds to k − 1 others.

        A_i = mean over the sets T of k − 1 others of  max(r_i, max_T r) − max_T r

    For every k, its policy gradient is 1/k of an unbiased estimate of the gradient of E[max of k
    rewards]. With k the size of the group, the best completion has its lead over the second and all
    others have 0: verl's grpo_passk, but for the standard deviation that it divides by. Memory
    grows with the square of the number of completions.

    Args:
        k: k ≥ 2; in a group of fewer scored completions, their number.

    Paper: Tang et al. 2025, arXiv:2503.19595 (k = n); any k: Walder and Karkhanis 2025,
    arXiv:2505.15201.
    """
    _check("max_at_k_advantage", reward, group=group)
    require("max_at_k_advantage", k >= 2, "k must be >= 2, got {}; k = 1 is rloo_advantage", k)
    scored = ~reward.isnan()
    together = (group[:, None] == group) & scored[:, None] & scored
    place = torch.arange(len(reward), device=reward.device)
    worse = (reward < reward[:, None]) | ((reward == reward[:, None]) & (place < place[:, None]))
    below = together & worse  # [i, j]: j stands below i; equal ones by their place

    others = (together.sum(1) - 1).to(torch.float64)
    size = others.clamp(max=k - 1)
    rank = below.sum(1).to(torch.float64)
    # T has its maximum at j, if its other k − 2 members are among those below j.
    chance = (
        _log_choose(rank[None, :], size[:, None] - 1) - _log_choose(others, size)[:, None]
    ).exp()
    lead = torch.where(below, (reward[:, None] - reward) * chance.to(reward.dtype), 0.0)
    return lead.sum(1)


@torch.no_grad()
def optimal_value(reward: PerSequence, group: IntPerSequence, *, beta: float) -> PerSequence:
    """The value of a prompt under the optimum of a reward with a KL penalty, from completions of
    the reference.

        V* = β log mean_g e^{r/β}

    A*-PO regresses to it: its loss is twice `dro`, with V* as the constant value and a β of its
    own. A completion without a reward has the value of its group; a group without any has NaN.

    Args:
        reward: of completions that the reference sampled, several to a prompt.
        beta: β > 0, the strength of the penalty.

    Paper: Brantley et al. 2025, arXiv:2505.20686.
    """
    _check("optimal_value", reward, group=group)
    within("optimal_value", Positive, beta=beta)
    index = torch.unique(group, return_inverse=True)[1]
    known = ~reward.isnan()
    highest = -_lowest(-reward, index)
    # with the highest taken out, no power overflows
    power = torch.where(known, ((reward - highest) / beta).exp(), math.nan)
    count = _sum(known.to(reward.dtype), index)
    value = highest + beta * (_sum(power, index) / count).log()
    return torch.where(count > 0, value, math.nan)


@torch.no_grad()
def optimal_token_advantage(
    reward: FlatTokens,
    logp: FlatTokens,
    log_sum_squares: FlatTokens,
    sequence: SequenceIds,
    group: IntPerSequence,
) -> FlatTokens:
    """The optimal token baseline's advantage: at each position, a baseline that minimizes the
    gradient's variance.

        A_t = G_t − Σ_g G_t W_t / Σ_g W_t,  sums over the completions of the group that have a token t
        W_t = Σ_{s ≤ t} (1 − 2π_s + Σ_v π_s(v)²)

    Each term of W is the squared norm of ∂ log π/∂ logits. At positions that only one completion
    reaches, the baseline is 0, as in verl; verl gives a completion that is alone in its group its
    return, too, which here gets 0. Positions are counted over trained tokens: for conversations
    this is verl's tir_optimal_token_baseline.

    Args:
        reward: r_t of each token, such as `kl_penalized_reward`; NaN anywhere masks a completion.
        logp, log_sum_squares: log π_t and log Σ_v π_t(v)² of the policy that sampled.

    Paper: Li et al. 2026, arXiv:2602.07078.
    """
    who = "optimal_token_advantage"
    _check_tokens(who, sequence, reward=reward, logp=logp, log_sum_squares=log_sum_squares)
    _check_values(who, reward)
    returns = _discounted_sum(reward, sequence, 1.0)
    returns = returns.masked_fill(torch.isin(sequence, sequence[returns.isnan()]), math.nan)
    norm = (1 - 2 * logp.exp() + log_sum_squares.exp()).clamp(min=0)
    weight = (
        _discounted_sum(norm.flip(0), sequence.flip(0), 1.0)
        .flip(0)
        .where(~returns.isnan(), math.nan)
    )

    position = torch.arange(len(sequence), device=sequence.device) - torch.searchsorted(
        sequence, sequence
    )
    longest = int(position.max()) + 1 if len(position) else 0
    of_group = torch.unique(group, return_inverse=True)[1][sequence]
    index = torch.unique(of_group * longest + position, return_inverse=True)[1]
    lowest = _lowest(returns, index)  # above it equal returns differ by exactly 0
    above = returns - lowest
    tiny = torch.finfo(reward.dtype).tiny
    baseline = _sum(above * weight, index) / _sum(weight, index).clamp(min=tiny)

    known = (~returns.isnan()).to(reward.dtype)
    first = known * (position == 0)
    in_group = _sum(first, of_group)
    reached = _sum(known, index)
    advantage = torch.where(reached > 1, above - baseline, returns)
    return torch.where(in_group > 1, advantage, 0.0).nan_to_num(nan=0.0)


@torch.no_grad()
def weighted_reward(
    reward: Float[Tensor, "sequences rewards"], weight: Float[Tensor, " rewards"]
) -> PerSequence:
    """Several rewards as one: Σ_k w_k r_ik over those that apply; NaN if none does.

    NaN stands for a reward that does not apply to a completion, as in TRL: it is left out, as if it
    were 0. It does not stand for one that failed: what such a completion is worth is unknown, and
    its whole row must be NaN.

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
    """GDPO's advantage: each reward is compared within the group by itself, so that none drowns
    another.

        z_ik = (r_ik − mean_g r_k) / (std_g r_k + ε)
        A = whiten(Σ_k w_k z_k)

    A reward that does not apply to a completion is NaN, is in no mean and no standard deviation,
    and counts as its group's mean; a completion with none is masked. So is one that a reward failed
    at, if its whole row is NaN.

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
    """Zero mean and unit variance over the batch: (x − mean x) / (std x + ε); a NaN is left out and
    becomes 0.

    PPO's whitened rewards keep their mean: add it back. An ε of 1e-4 is TRL's.
    """
    flat("whiten", x=x)
    _check_values("whiten", x)
    deviation, std, _ = _spread(x, torch.zeros_like(x, dtype=torch.int64))
    return _ratio("whiten", deviation, std, eps)


@torch.no_grad()
def kl_penalized_reward(
    reward: PerSequence, kl: FlatTokens, sequence: SequenceIds, *, beta: float
) -> FlatTokens:
    """The reward of each token: a share of the divergence from the reference, and the completion's
    reward at its end.

        r_t = −β kl_t + [t is the last token of completion i] r_i

    A completion without a token has no place for its reward, so it is left out. The last token of
    an unscored completion is NaN. RLOO subtracts the penalty from whole completions:
    ``reward - beta * sequence_sum(kl, ...)``.

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

    All sums end with the completion. If one was cut off, add γ times the value of the state it was
    cut at to its last reward. The tokens of a completion with a NaN reward get A = 0 and R = V;
    leave them out before whitening.

    Args:
        gamma, lam: γ and λ in [0, 1]. λ = 0 is the one-step error, λ = 1 the return minus the
            value.

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
    """REINFORCE++'s advantage: the penalized return, whitened over all tokens; for one completion
    per prompt.

        A = whiten(G),  of the rewards r_t = −β kl_t + [t is the last token of completion i] r_i

    Args:
        kl: log π/π_ref of each token.
        beta: β ≥ 0.
        gamma: γ in [0, 1]; 1 in the paper.

    Paper: Hu et al. 2025, arXiv:2501.03262.
    """
    within("reinforce_plus_plus", Share, gamma=gamma)
    return whiten(
        _discounted_sum(kl_penalized_reward(reward, kl, sequence, beta=beta), sequence, gamma),
        eps=eps,
    )


@torch.no_grad()
def reinforce_plus_plus_baseline(
    reward: PerSequence, group: IntPerSequence, sequence: SequenceIds, *, eps: float = 1e-4
) -> FlatTokens:
    """REINFORCE++-baseline's advantage: centered in the group, scaled over the batch; for groups of
    completions.

        A = whiten(r_i − mean_g r),  over all tokens t of all completions i

    The paper's penalty is a loss of its own: k2 of `kl_estimate`. As in verl and OpenRLHF tokens
    are whitened, so long completions count more.

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

    A group that has no reward at all is not counted as a group. One with a single reward teaches
    nothing either; TRL counts it as if it did, and weighs groups by their size.
    """
    _check("group_stats", reward, group=group)
    scored = ~reward.isnan()
    silent = _spread(reward, group)[1] == 0
    groups = len(torch.unique(group[scored]))
    return {
        "reward": reward.nanmean(),
        "reward_std": _spread(reward, torch.zeros_like(group))[1].amax(),
        "frac_reward_zero_std": reward.new_tensor(
            len(torch.unique(group[scored & silent])) / max(groups, 1)
        ),
        "frac_unscored": 1 - scored.to(reward.dtype).mean(),
    }


def _check(who: str, reward: Tensor, **others: Tensor) -> None:
    same_shape(who, reward=reward, **others)
    one_per(who, "completion", reward=reward)
    _check_values(who, reward)


def _check_values(who: str, reward: Tensor) -> None:
    require(
        who,
        reward.is_floating_point(),
        "values must be floats, got {}; convert them, .double()",
        reward.dtype,
    )
    require(
        who,
        not bool(reward.isinf().any()),
        "values must be finite, or NaN where there is none, got inf",
    )


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
    flat(who, **tokens)
    require(
        who,
        bool((sequence[1:] >= sequence[:-1]).all()),
        "sequence must be sorted: sort tokens by completion",
    )


def _sum(x: Tensor, index: Tensor) -> Tensor:
    """At each entry, the sum over its group; a NaN does not count."""
    return x.new_zeros(x.shape).index_add(0, index, torch.where(x.isnan(), 0.0, x))[index]


def _lowest(x: Tensor, index: Tensor) -> Tensor:
    """At each entry, the lowest of its group; a NaN does not count."""
    known = torch.where(x.isnan(), math.inf, x)
    return torch.full_like(x, math.inf).scatter_reduce(0, index, known, "amin")[index]


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """log of the binomial coefficient; −inf where k > n or k < 0."""
    inside = (k >= 0) & (k <= n)
    k = torch.where(inside, k, 0.0)
    return torch.where(
        inside, torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1), -math.inf
    )


def _spread(x: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """At each entry: x minus the mean of its group, NaN where x is; the unbiased standard deviation
    of the group, 0 in a group of one; and the number of its entries that are not NaN.

    The mean is taken above the group's lowest entry: the rounded mean of equal rewards is not
    always that reward, and a deviation of pure rounding, divided by a standard deviation of pure
    rounding, is an advantage of about 1.
    """
    index = torch.unique(group, return_inverse=True)[1]
    above = x - _lowest(x, index)
    count = _sum((~x.isnan()).to(x.dtype), index)
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

    Sums of 1, 2, 4, ... tokens, each made of two of the one before: as many rounds as the longest
    sequence has binary digits, instead of one for each of its tokens.
    """
    reach = 1
    while bool((sequence[reach:] == sequence[:-reach]).any()):
        x = x + decay**reach * _shifted(x, sequence, reach)
        reach *= 2
    return x
