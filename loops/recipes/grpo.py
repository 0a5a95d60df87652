"""Policy optimization against the other answers to a prompt: GRPO and its relatives, RLOO among them.

A variant is a row of settings: which surrogate, which weighting, which advantage. Each of them can be set on its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ...objectives import gdpo_advantage, group_advantage, kl_estimate, rloo_advantage, sequence_sum, whiten
from ..rl.buffer import RolloutBuffer
from ..rl.policy_gradient import surrogate_terms, train_policy
from ..rl.settings import Weighting
from ..rl.setup import open_rl
from ..train import weighting as weights
from ..train.losses import Term
from .settings import GRPO, Name, Scale

Baseline = Literal["group", "leave_one_out"]


@dataclass(frozen=True)
class Variant:
    """What the papers differ in."""

    loss: str = "clipped_surrogate"
    weighting: Weighting = "sequence_mean"
    scale: Scale = "group"
    baseline: Baseline = "group"
    dynamic_sampling: bool = False
    loss_kwargs: Mapping[str, float] = field(default_factory=dict)


_TIGHT = {"clip_low": 3e-4, "clip_high": 4e-4}
VARIANTS: dict[Name, Variant] = {
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


def run_grpo(config: GRPO) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    terms, variant = grpo_terms(config)
    return train_policy(
        config,
        open_rl(config),
        terms,
        advantages=partial(advantages, config=config, variant=variant),
        in_reward=config.kl_as == "reward",
        dynamic_sampling=variant.dynamic_sampling,
    )


def grpo_terms(config: GRPO) -> tuple[dict[str, Term], Variant]:
    """The losses of this configuration, and what else its variant says.

    Raises:
        ValueError: if settings contradict each other.
    """
    given = {name: getattr(config, name) for name in ("weighting", "scale", "dynamic_sampling")}
    variant = replace(VARIANTS[config.variant], **{name: value for name, value in given.items() if value is not None})
    if config.group_size < 2:
        raise ValueError(
            f"group_size: an answer is compared with the others to its prompt, wanted >= 2, got {config.group_size}; "
            "ppo learns from single answers"
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
    weigh: Any = {
        "token_mean": weights.token_mean,
        "sequence_mean": weights.sequence_mean,
        "fixed_length": partial(weights.fixed_length, length=config.max_tokens),
    }[variant.weighting]
    terms = surrogate_terms(config, variant.loss, variant.loss_kwargs, weigh, kl_loss=config.kl_as == "loss")
    _check_weighting(config, terms)
    return terms, variant


def _check_weighting(config: GRPO, terms: Mapping[str, Term]) -> None:
    """A weighting of tokens that is given must have a loss of tokens to go to, without a weighting of its own."""
    mix = config.loss if isinstance(config.loss, Mapping) else {}
    own = {name for name, entry in mix.items() if isinstance(entry, Mapping) and "weighting" in entry}
    if config.weighting is None or any(term.unit == "tokens" and name not in own for name, term in terms.items()):
        return
    raise ValueError(
        f"weighting: {config.weighting} says how tokens count, and no loss would heed it: "
        + "; ".join(f"{name} has {'its own' if name in own else 'one entry per completion'}" for name in terms)
        + "; leave it out, or take a loss of tokens"
    )


def advantages(rollout: RolloutBuffer, *, config: GRPO, variant: Variant) -> dict[str, Tensor]:
    """Of each answer against the others to its prompt, one column [tokens]."""
    judged, sequence = rollout.judged, rollout.sequence
    if config.reward_aggregation == "normalize":
        return {"advantage": gdpo_advantage(judged.reward, judged.group, judged.weight)[sequence]}
    reward = rollout.reward
    if config.beta and config.kl_as == "reward":
        kl, _ = kl_estimate(rollout.columns["old_logp"], rollout.columns["ref_logp"], kind=config.kl or "k1")
        reward = reward - config.beta * sequence_sum(kl.double(), sequence, len(reward))
    if variant.baseline == "leave_one_out":
        found = rloo_advantage(reward, judged.group)
        found = whiten(found.where(~reward.isnan(), float("nan"))) if variant.scale == "batch" else found
    else:
        found = group_advantage(reward, judged.group, scale=variant.scale)
    return {"advantage": found[sequence]}
