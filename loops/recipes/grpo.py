"""Policy optimization against the other completions of a prompt: GRPO and its relatives, RLOO among
them.

    A_i      (R_i − mean R) / std R, over the rewards R of the completions of its prompt, its group
    ρ_t      π(t) / π_old(t), the ratio of a token of completion i to the policy that sampled it
    loss     −min(ρ_t A_i, clip(ρ_t, 1 − ε, 1 + ε) A_i), weighted by 1 / length of the completion, + β KL(π, π_ref)

A variant is a row of the settings in which the papers differ: a loss, its weighting, and the
divisor of the advantage.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ...objectives import (
    corrected_kl_estimate,
    gdpo_advantage,
    group_advantage,
    kl_estimate,
    rloo_advantage,
    whiten,
)
from ..rl.buffer import RolloutBuffer
from ..rl.context import RLContext, open_rl
from ..rl.policy_gradient import policy_losses, train_policy
from ..runs.training import Training
from ..train.losses import Term
from ..train.mix import WEIGHTINGS, loss_name
from .settings import GRPO, VariantName

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
    return train_policy(
        context or open_rl(config),
        losses,
        advantages=partial(advantages, config=config),
        kl_in_reward=config.kl_as == "reward",
        dynamic_sampling=variant_of(config)["dynamic_sampling"],
    )


def variant_of(config: GRPO) -> dict[str, Any]:
    """The settings of the variant, overridden by the fields that are set."""
    fields = {name: getattr(config, name) for name in ("weighting", "scale", "dynamic_sampling")}
    return {
        **_GRPO,
        **VARIANTS[config.variant],
        **{name: value for name, value in fields.items() if value is not None},
    }


def advantages(rollout: RolloutBuffer, *, config: GRPO) -> dict[str, Tensor]:
    """Per-token advantages of each completion within its group."""
    scores, scale = rollout.scores, variant_of(config)["scale"]
    reward = scores.total
    if config.beta and config.kl_as == "reward":
        kl, _ = kl_estimate(rollout["old_logp"], rollout["ref_logp"], kind=config.kl or "k1")
        reward = reward - config.beta * rollout.sum(kl.double())
    if config.reward_aggregation == "normalize":
        advantage = gdpo_advantage(scores.reward, scores.group, scores.weight)
    elif config.variant != "rloo":
        advantage = group_advantage(reward, scores.group, scale=scale)
    else:
        advantage = rloo_advantage(reward, scores.group)
        if scale == "batch":
            advantage = whiten(advantage.where(~reward.isnan(), float("nan")))
    return {"advantage": advantage[rollout.sequence]}


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
    # The weighting, if set, must apply to some loss of tokens that has no weighting of its own.
    mix = config.loss if isinstance(config.loss, Mapping) else {}
    weighted = {
        loss_name(key)
        for key, entry in mix.items()
        if isinstance(entry, Mapping) and "weighting" in entry
    }
    if config.weighting and all(
        loss.unit != "tokens" or name in weighted for name, loss in losses.items()
    ):
        raise ValueError(
            f"weighting: {config.weighting} says how tokens count, and no loss would heed it: "
            + "; ".join(
                f"{name} has {'its own' if name in weighted else 'one entry per completion'}"
                for name in losses
            )
            + "; leave it out, or take a loss of tokens"
        )
    return losses
