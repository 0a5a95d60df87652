"""Policy optimization relative to a prompt's other completions: GRPO, RLOO and relatives.

    A_i      (R_i − mean R) / std R, over the rewards R of the completions of its prompt, its group
    ρ_t      π(t) / π_old(t), the ratio of a token of completion i to the policy that sampled it
    loss     −min(ρ_t A_i, clip(ρ_t, 1 − ε, 1 + ε) A_i), weighted by 1 / length of the completion,
             + β KL(π, π_ref)

A variant is a row of the settings in which the papers differ: a loss, its weighting, and the
divisor of the advantage.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels import Extra
from ...objectives import (
    corrected_kl_estimate,
    gdpo_advantage,
    gpg_advantage,
    group_advantage,
    kl_estimate,
    kl_penalized_reward,
    max_at_k_advantage,
    maxrl_advantage,
    opo_advantage,
    optimal_token_advantage,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax_advantage,
    rloo_advantage,
    whiten,
)
from ..rewards.scoring import RewardFunction
from ..rewards.table import score
from ..rl.buffer import RolloutBuffer
from ..rl.context import RLContext, open_rl
from ..rl.policy_gradient import policy_losses, refuse_completion_losses, train_policy
from ..runs.training import Training
from ..train.losses import Term
from ..train.mix import WEIGHTINGS, loss_name
from .settings import GRPO, AdvantageName, VariantName

_TIGHT = {"clip_low": 3e-4, "clip_high": 4e-4}
_GRPO = {
    "loss": "clipped_surrogate",
    "weighting": "length_normalized",
    "scale": "group",
    "dynamic_sampling": False,
}
VARIANTS: dict[VariantName, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"weighting": "fixed_length", "scale": "none"},
    "dapo": {
        "weighting": "token_mean",
        "dynamic_sampling": True,
        "loss_kwargs": {"clip_high": 0.28},
    },
    "cispo": {"loss": "cispo", "weighting": "token_mean", "loss_kwargs": {"clip_high": 5.0}},
    "gspo": {"loss": "gspo", "loss_kwargs": _TIGHT},
    "gspo_token": {"loss": "gspo_token", "loss_kwargs": _TIGHT},
    "gmpo": {"loss": "gmpo"},
    "sapo": {"loss": "sapo"},
    "vespo": {"loss": "vespo", "weighting": "token_mean"},
    "dppo": {
        "loss": "dppo",
        "weighting": "token_mean",
        "loss_kwargs": {"clip_low": 0.2, "clip_high": 0.2},
    },
    # Its gradient at the sampling policy is that of REINFORCE, as in the paper.
    "rloo": {"loss": "completion_surrogate", "scale": "none"},
}


def open_grpo(config: GRPO, context: RLContext | None = None) -> Training:
    """Open a run that is ready to train, in ``context`` if it is already open."""
    losses = grpo_losses(config)
    at_start: tuple[Extra, ...] = ()
    if config.baseline == "optimal_token":
        at_start = ("log_sum_squares",)
    context = context or open_rl(config)
    greedy: dict[str, Any] = {}
    if config.samples_greedily:
        greedy = {"report": partial(greedy_metrics, rewards=context.rewards)}
    return train_policy(
        context,
        losses,
        advantages=partial(advantages, config=config, rewards=context.rewards),
        kl_in_reward=config.kl_as == "reward",
        at_start=at_start,
        dynamic_sampling=variant_of(config)["dynamic_sampling"],
        **greedy,
    )


def variant_of(config: GRPO) -> dict[str, Any]:
    """The settings of the variant, overridden by the fields that are set."""
    settings = {**_GRPO, **VARIANTS[config.variant]}
    for name in ("weighting", "scale", "dynamic_sampling"):
        value = getattr(config, name)
        if value is not None:
            settings[name] = value
    return settings


def advantages(
    rollout: RolloutBuffer, *, config: GRPO, rewards: Sequence[RewardFunction] = ()
) -> dict[str, Tensor]:
    """The advantage of each token of the rollout.

    Args:
        rewards: the functions that have scored it, with their weights; for the baseline remax.
    """
    scores = rollout.scores
    kl_in_reward = config.beta > 0 and config.kl_as == "reward"
    if config.reward_aggregation == "normalize":
        advantage = gdpo_advantage(scores.reward, scores.group, scores.weight)
        return {"advantage": advantage[rollout.sequence]}
    kl = torch.zeros(len(rollout.sequence), dtype=scores.total.dtype)
    if kl_in_reward:
        estimate = kl_estimate(rollout["old_logp"], rollout["ref_logp"], kind=config.kl or "k1")[0]
        kl = estimate.double()
    if config.baseline in _OF_TOKENS:
        return {"advantage": _OF_TOKENS[config.baseline](rollout, kl, config)}
    reward = scores.total
    if kl_in_reward:
        reward = reward - config.beta * rollout.sum(kl)
    advantage = _of_completions(rollout, reward, config, rewards)
    return {"advantage": advantage[rollout.sequence]}


def _of_completions(
    rollout: RolloutBuffer, reward: Tensor, config: GRPO, rewards: Sequence[RewardFunction]
) -> Tensor:
    """[completions], by the configured baseline."""
    group = rollout.scores.group
    scale = variant_of(config)["scale"]
    match config.baseline:
        case "group":
            return group_advantage(reward, group, scale=scale)
        case "rloo":
            advantage = rloo_advantage(reward, group)
        case "opo":
            advantage = opo_advantage(reward, group, rollout.lengths)
        case "gpg":
            advantage = gpg_advantage(reward, group)
        case "maxrl":
            advantage = maxrl_advantage(reward, group)
        case "remax":
            advantage = remax_advantage(reward, greedy_reward(rollout, rewards))
        case _:
            k = config.advantage_k or config.group_size
            advantage = max_at_k_advantage(reward, group, k=k)
    return whiten(advantage.where(~reward.isnan(), math.nan)) if scale == "batch" else advantage


def greedy_reward(rollout: RolloutBuffer, rewards: Sequence[RewardFunction]) -> Tensor:
    """float64 [completions], the reward of the greedy completion to the same prompt; NaN where it
    has none.
    """
    greedy = [replace(sample, **sample.info["greedy"]) for sample in rollout.samples]
    return score(rewards, greedy).total


def greedy_metrics(
    rollout: RolloutBuffer, *, rewards: Sequence[RewardFunction]
) -> Mapping[str, float]:
    """The mean reward of greedy completions, ``reward/greedy``."""
    mean = float(greedy_reward(rollout, rewards).nanmean())
    return {} if math.isnan(mean) else {"reward/greedy": mean}


def _optimal_token(rollout: RolloutBuffer, kl: Tensor, config: GRPO) -> Tensor:
    """[tokens], by the optimal token baseline."""
    sequence = rollout.sequence
    reward = kl_penalized_reward(rollout.scores.total, kl, sequence, beta=config.beta)
    logp = rollout["old_logp"].double()
    squares = rollout["old_log_sum_squares"].double()
    group = rollout.scores.group
    advantage = optimal_token_advantage(reward, logp, squares, sequence, group)
    return whiten(advantage) if variant_of(config)["scale"] == "batch" else advantage


def _reinforce_plus_plus(rollout: RolloutBuffer, kl: Tensor, config: GRPO) -> Tensor:
    """[tokens], the penalized return within the context, whitened over the batch."""
    reward = rollout.scores.total[rollout.completion_of]
    return reinforce_plus_plus(reward, kl, rollout.context, beta=config.beta)


def _reinforce_plus_plus_baseline(rollout: RolloutBuffer, kl: Tensor, config: GRPO) -> Tensor:
    """[tokens], centered in the group and whitened over the batch."""
    reward = rollout.scores.total - config.beta * rollout.sum(kl)
    return reinforce_plus_plus_baseline(reward, rollout.scores.group, rollout.sequence)


_OF_TOKENS: dict[AdvantageName, Callable[[RolloutBuffer, Tensor, GRPO], Tensor]] = {
    "optimal_token": _optimal_token,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
}


def grpo_losses(config: GRPO) -> dict[str, Term]:
    """The losses of this configuration; ValueError if none heeds a setting."""
    variant = variant_of(config)
    weigh = WEIGHTINGS[variant["weighting"]]
    if variant["weighting"] == "fixed_length":
        weigh = partial(weigh, length=config.max_tokens)
    loss_kwargs = variant.get("loss_kwargs", {})
    estimate = corrected_kl_estimate if config.use_bias_correction_kl else kl_estimate
    kl_loss = estimate if config.kl_as == "loss" else None
    losses = policy_losses(config, variant["loss"], loss_kwargs, weigh, kl_loss=kl_loss)
    if config.advantage_differs:
        refuse_completion_losses(config.baseline, losses)
    if config.weighting:
        _require_heeded_weighting(config, losses)
    return losses


def _require_heeded_weighting(config: GRPO, losses: Mapping[str, Term]) -> None:
    """Raise ValueError unless a loss of tokens has no weighting of its own, and takes this one."""
    mix = config.loss if isinstance(config.loss, Mapping) else {}
    weighted = set()
    for key, entry in mix.items():
        if isinstance(entry, Mapping) and "weighting" in entry:
            weighted.add(loss_name(key))
    reasons = []
    for name, loss in losses.items():
        if loss.unit == "tokens" and name not in weighted:
            return
        has = "its own" if name in weighted else "one entry per completion"
        reasons.append(f"{name} has {has}")
    problem = f"{config.weighting} says how tokens count, and no loss would heed it"
    fix = "leave it out, or take a loss of tokens"
    raise ValueError(f"weighting: {problem}: {'; '.join(reasons)}; {fix}")
