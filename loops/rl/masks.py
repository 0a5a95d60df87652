"""Masks by name: which tokens or completions the losses of the advantage leave out.

    of the rollout       high_entropy, clip_cov, m2po, and the tokens that the loss kl_cov penalizes
    of each step         off_policy, veto, total_variation

Masks of the first kind compare all tokens with each other. They are computed once, over the whole
rollout, from the policy that begins it, so that the split into micro-batches and ranks does not
matter. Masks of the second kind judge a token or a completion by itself, from the policy as it is
now. Several masks multiply; a token that is left out still counts in the denominators.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...objectives import (
    clip_cov_mask,
    high_entropy_mask,
    kl_cov_mask,
    m2po_mask,
    off_policy_mask,
    token_covariance,
    total_variation_mask,
    veto_mask,
)
from ..train.losses import Term, tensors_needed
from .buffer import RolloutBuffer
from .settings import ROLLOUT_MASKS, TOKEN_MASKS, PolicyGradientConfig


def check_masks(config: PolicyGradientConfig, losses: Mapping[str, Term]) -> None:
    """Raise ValueError for a hyper-parameter out of range, and for a mask of tokens that a loss of
    completions could not heed.
    """
    none = torch.zeros(0, dtype=torch.float64)
    empty = none.long()
    for name in config.masks:
        if name in ROLLOUT_MASKS:
            _of_rollout(name, config, none, none, none, none, none)
        else:
            _of_step(name, config, none, none, none, none, none, empty)
    of_tokens = sorted(TOKEN_MASKS & config.masks.keys())
    for name, loss in losses.items():
        if of_tokens and loss.unit == "sequences" and loss.factor == "correction":
            raise ValueError(
                f"masks: {of_tokens[0]} leaves out tokens, and {name} has one entry per completion; "
                "use off_policy or veto, or a loss of tokens"
            )


def needs_start(config: PolicyGradientConfig, losses: Mapping[str, Term]) -> bool:
    """Whether a mask compares all tokens of a rollout under the policy that begins it."""
    return bool(ROLLOUT_MASKS & config.masks.keys()) or penalizes(losses)


def penalizes(losses: Mapping[str, Term]) -> bool:
    """Whether a loss takes the tokens that KL-Cov penalizes."""
    return "penalized" in tensors_needed(losses)


def rollout_masks(
    rollout: RolloutBuffer,
    advantage: Tensor,
    config: PolicyGradientConfig,
    losses: Mapping[str, Term],
) -> dict[str, Tensor]:
    """The columns ``rollout_mask``, the product of the masks of the rollout, and ``penalized``, as
    far as something reads them.

    Args:
        advantage: of each token of the rollout.
    """
    columns: dict[str, Tensor] = {}
    logp, sampled, entropy = rollout["old_logp"], rollout["sampled_logp"], rollout["old_entropy"]
    names = [name for name in config.masks if name in ROLLOUT_MASKS]
    if names:
        draw = uniform(len(advantage), config.seed, rollout.version).to(logp.dtype)
        masks = [
            _of_rollout(name, config, logp, sampled, advantage, entropy, draw) for name in names
        ]
        columns["rollout_mask"] = torch.stack(masks).prod(0)
    if penalizes(losses):
        covariance = token_covariance(logp, advantage.to(logp.dtype))
        columns["penalized"] = kl_cov_mask(covariance, share=config.kl_cov_share)
    return columns


def uniform(count: int, seed: int, rollout: int) -> Tensor:
    """float64 [count], uniform in [0, 1): the same on every rank, and in a run that is resumed."""
    bits = np.random.Philox(np.random.SeedSequence([seed, 2, rollout])).random_raw(count)
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)


def step_mask(
    config: PolicyGradientConfig,
    now: Tensor,
    start: Tensor,
    sampled: Tensor,
    advantage: Tensor,
    of_completion: Tensor,
    sequence: Tensor,
    rollout_mask: Tensor | None,
) -> Tensor:
    """[tokens], the product of all masks at the tokens of a micro-batch.

    Args:
        now, start, sampled: log-probs under the policy now, at the start of the rollout, and under
            the sampler.
        advantage, of_completion: of each token, and of each completion.
        rollout_mask: the column of `rollout_masks`; None without such masks.
    """
    mask = torch.ones_like(now) if rollout_mask is None else rollout_mask.to(now.dtype)
    for name in config.masks:
        if name not in ROLLOUT_MASKS:
            mask = mask * _of_step(
                name, config, now, start, sampled, advantage, of_completion, sequence
            )
    return mask


def _of_rollout(
    name: str,
    config: PolicyGradientConfig,
    logp: Tensor,
    sampled: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    draw: Tensor,
) -> Tensor:
    settings = config.masks[name]
    advantage = advantage.to(logp.dtype)
    if name == "high_entropy":
        return high_entropy_mask(entropy, **settings).to(logp.dtype)
    if name == "clip_cov":
        return clip_cov_mask(token_covariance(logp, advantage), draw, **settings)
    assert name == "m2po"
    return m2po_mask(logp, sampled, advantage, **settings)


def _of_step(
    name: str,
    config: PolicyGradientConfig,
    now: Tensor,
    start: Tensor,
    sampled: Tensor,
    advantage: Tensor,
    of_completion: Tensor,
    sequence: Tensor,
) -> Tensor:
    settings = config.masks[name]
    if name == "off_policy":
        return off_policy_mask(now, sampled, of_completion, sequence, **settings)
    if name == "veto":
        return veto_mask(start, sampled, sequence, **settings)
    assert name == "total_variation"
    return total_variation_mask(now, sampled, advantage, **settings)
