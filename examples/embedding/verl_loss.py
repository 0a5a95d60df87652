"""Our objectives as verl's policy losses: import this file where the actor is made, then set
actor_rollout_ref.actor.policy_loss.loss_mode to burnish_topr.
"""

from burnish.objectives import clipped_surrogate, topr
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss


def register(name, objective, settings_of=lambda config: {}):
    """Register an objective of tokens. ``settings_of`` reads its hyper-parameters from verl's."""

    @register_policy_loss(name)
    def policy_loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode="token-mean",
        config=None,
        rollout_is_weights=None,
    ):
        mask = response_mask.bool()
        tensors = log_prob[mask], old_log_prob[mask], advantages[mask]
        of_tokens, stats = objective(*tensors, **settings_of(config))
        loss = log_prob.new_zeros(log_prob.shape).masked_scatter(mask, of_tokens)
        if rollout_is_weights is not None:
            loss = loss * rollout_is_weights
        total = agg_loss(loss, response_mask, loss_agg_mode, **config.global_batch_info)
        return total, {f"actor/{key}": value.mean().item() for key, value in stats.items()}


def clips(config):
    """The clips of verl's vanilla loss."""
    bounds = {"clip_low": config.clip_ratio_low, "clip_high": config.clip_ratio_high}
    return {**bounds, "ratio_cap": config.clip_ratio_c}


register("burnish_topr", topr)
register("burnish_surrogate", clipped_surrogate, clips)
