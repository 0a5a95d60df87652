"""Policy optimization against the other completions of a prompt: GRPO and its relatives, RLOO among them.

A variant is a row of settings: a loss, its weighting, and the advantage. Each of them can be set on its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ...objectives import gdpo_advantage, group_advantage, kl_estimate, rloo_advantage, whiten
from ..rl.buffer import RolloutBuffer
from ..rl.context import RLContext, open_rl
from ..rl.policy_gradient import policy_losses, train_policy
from ..train import weighting as weights
from ..train.losses import Term
from .settings import GRPO, VariantName


@dataclass(frozen=True)
class Variant:
    """Settings that the papers differ in."""

    loss: str = "clipped_surrogate"
    weighting: Literal["token_mean", "sequence_mean", "fixed_length"] = "sequence_mean"
    scale: Literal["group", "batch", "none"] = "group"
    baseline: Literal["group", "leave_one_out"] = "group"
    dynamic_sampling: bool = False
    loss_kwargs: Mapping[str, float] = field(default_factory=dict)


_TIGHT = {"clip_low": 3e-4, "clip_high": 4e-4}
VARIANTS: dict[VariantName, Variant] = {
    "grpo": Variant(),
    "dr_grpo": Variant(weighting="fixed_length", scale="none"),
    "dapo": Variant(weighting="token_mean", dynamic_sampling=True, loss_kwargs={"clip_high": 0.28}),
    "cispo": Variant("cispo", "token_mean", loss_kwargs={"clip_high": 5.0}),
    "gspo": Variant("gspo", loss_kwargs=_TIGHT),
    "gspo_token": Variant("gspo_token", loss_kwargs=_TIGHT),
    "gmpo": Variant("gmpo"),
    "sapo": Variant("sapo"),
    "vespo": Variant("vespo", "token_mean"),
    "dppo": Variant("dppo", "token_mean", loss_kwargs={"clip_low": 0.2, "clip_high": 0.2}),
    # Its gradient at the policy that sampled is REINFORCE's, which is all that the paper needs.
    "rloo": Variant("completion_surrogate", scale="none", baseline="leave_one_out"),
}


def variant_of(config: GRPO) -> Variant:
    """The settings of the variant, with the fields that are set in their place."""
    chosen = {name: getattr(config, name) for name in ("weighting", "scale", "dynamic_sampling")}
    return replace(VARIANTS[config.variant], **{name: value for name, value in chosen.items() if value is not None})


def run_grpo(config: GRPO, context: RLContext | None = None) -> dict[str, float]:
    """Train, in a context that is open already if one is given; returns the metrics of the last step."""
    losses = grpo_losses(config)
    context = context or open_rl(config)
    return train_policy(
        context,
        losses,
        advantages=partial(advantages, config=config),
        kl_in_reward=config.kl_as == "reward",
        dynamic_sampling=variant_of(config).dynamic_sampling,
    )


def grpo_losses(config: GRPO) -> dict[str, Term]:
    """The losses of this configuration.

    Raises:
        ValueError: if settings contradict each other.
    """
    _check(config)
    variant = variant_of(config)
    weigh: Any = {
        "token_mean": weights.token_mean,
        "sequence_mean": weights.sequence_mean,
        "fixed_length": partial(weights.fixed_length, length=config.max_tokens),
    }[variant.weighting]
    losses = policy_losses(config, variant.loss, variant.loss_kwargs, weigh, kl_loss=config.kl_as == "loss")
    _check_weighting(config, losses)
    return losses


def advantages(rollout: RolloutBuffer, *, config: GRPO) -> dict[str, Tensor]:
    """Per-token advantages of each completion within its group."""
    scores, variant = rollout.scores, variant_of(config)
    if config.reward_aggregation == "normalize":
        return {"advantage": gdpo_advantage(scores.reward, scores.group, scores.weight)[rollout.sequence]}
    reward = scores.total
    if config.beta and config.kl_as == "reward":
        kl, _ = kl_estimate(rollout["old_logp"], rollout["ref_logp"], kind=config.kl or "k1")
        reward = reward - config.beta * rollout.sum(kl.double())
    if variant.baseline == "group":
        advantage = group_advantage(reward, scores.group, scale=variant.scale)
    else:
        advantage = rloo_advantage(reward, scores.group)
        if variant.scale == "batch":
            advantage = whiten(advantage.where(~reward.isnan(), float("nan")))
    return {"advantage": advantage[rollout.sequence]}


def _check(config: GRPO) -> None:
    variant = variant_of(config)
    if config.group_size < 2:
        raise ValueError(
            f"group_size: a completion is compared with the others of its prompt, wanted >= 2, got {config.group_size};"
            " ppo learns from single completions"
        )
    if variant.baseline == "leave_one_out" and variant.scale == "group":
        raise ValueError("scale: a group's standard deviation does not go with rloo's baseline; use batch or none")
    if config.reward_aggregation == "normalize" and (
        variant.baseline != "group" or (config.beta and config.kl_as == "reward")
    ):
        raise ValueError(
            "reward_aggregation: normalize compares each reward within the group by itself, which leaves no place for "
            "another baseline or for the divergence; use a variant other than rloo, and kl_as loss"
        )


def _check_weighting(config: GRPO, losses: Mapping[str, Term]) -> None:
    """A weighting of tokens that is set must apply to some loss of tokens without a weighting of its own."""
    mix = config.loss if isinstance(config.loss, Mapping) else {}
    weighted = {name for name, entry in mix.items() if isinstance(entry, Mapping) and "weighting" in entry}
    if config.weighting is None or any(loss.unit == "tokens" and name not in weighted for name, loss in losses.items()):
        return
    raise ValueError(
        f"weighting: {config.weighting} says how tokens count, and no loss would heed it: "
        + "; ".join(f"{name} has {'its own' if name in weighted else 'one entry per completion'}" for name in losses)
        + "; leave it out, or take a loss of tokens"
    )
