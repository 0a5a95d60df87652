"""Our objectives as SkyRL's policy losses: import this file before the trainer is made, then set
trainer.algorithm.policy_loss_type to burnish_topr.
"""

from burnish.objectives import clipped_surrogate, topr
from skyrl.backends.skyrl_train.utils.ppo_utils import reduce_loss, register_policy_loss


def register(name, objective, settings_of=lambda config: {}):
    """Register an objective of tokens. ``settings_of`` reads its hyper-parameters from SkyRL's."""

    @register_policy_loss(name)
    def policy_loss(
        log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None
    ):
        mask = loss_mask.bool()
        tensors = log_probs[mask], old_log_probs[mask], advantages[mask]
        of_tokens, stats = objective(*tensors, **settings_of(config))
        loss = log_probs.new_zeros(log_probs.shape).masked_scatter(mask, of_tokens)
        clipped = stats.get("clip_ratio/region")
        share = 0.0 if clipped is None else clipped.mean().item()
        # A sum: SkyRL has divided the advantages already.
        return reduce_loss(loss, loss_mask), {"clip_ratio": share}


def clips(config):
    """The clips of SkyRL's regular loss."""
    return {"clip_low": config.eps_clip_low, "clip_high": config.eps_clip_high}


register("burnish_topr", topr)
register("burnish_surrogate", clipped_surrogate, clips)
