"""Entropy control by covariance: a few tokens make the policy's entropy collapse; hold those back,
and no others.

    cov_t    (log π_t − mean log π) (A_t − mean A), the covariance of a token's log-probability and its advantage

A token that is already likely and turned out well, or unlikely and badly, has a large one. To first
order, the entropy falls by the mean of cov in a step of policy gradient. The means and the masks
couple tokens: pass all tokens of the step at once, the same on every rank.

    Clip-Cov    ``clip_cov_mask(cov, draw) * clipped_surrogate(...)``: a random few of large covariance get no gradient
    KL-Cov      `kl_cov` with ``kl_cov_mask(cov)``: the tokens of largest covariance are tied to π_old

Shapes that differ and hyper-parameters out of range raise ValueError.
"""

import torch
from jaxtyping import Bool
from torch import Tensor

from .policy import LOG_RATIO_LIMIT
from .types import PerToken, Positive, Share, Stats, check_roles, require, same_shape, within


@torch.no_grad()
def token_covariance(logp: PerToken, advantage: PerToken) -> PerToken:
    """The covariance of each token: its share in how fast the policy's entropy falls.

        cov_t = (log π_t − mean log π) (A_t − mean A)

    For Clip-Cov, verl leaves out tokens that the surrogate's clip stops: set them to −inf,
    ``covariance.masked_fill(stats["clip_ratio/region"] > 0, -math.inf)``.

    Paper: Cui et al. 2025, arXiv:2505.22617.
    """
    same_shape("token_covariance", logp=logp, advantage=advantage)
    return (logp - logp.mean()) * (advantage - advantage.mean())


@torch.no_grad()
def clip_cov_mask(
    covariance: PerToken,
    draw: PerToken,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> PerToken:
    """Clip-Cov's mask: 0 at a random few of the tokens with a large covariance, 1 at all others.

        I = ⌊rN⌋ of the tokens with ω_low < cov < ω_high, at random, and one at least

    Args:
        draw: one number per token, uniform in [0, 1): the tokens of the smallest are taken. Ranks
            must draw the same.
        share: r in [0, 1]; 0 takes no token.
        low, high: ω_low ≤ ω_high.

    Paper: Cui et al. 2025, arXiv:2505.22617.
    """
    same_shape("clip_cov_mask", covariance=covariance, draw=draw)
    within("clip_cov_mask", Share, share=share)
    require("clip_cov_mask", low <= high, "bounds must be low <= high, got {} and {}", low, high)
    eligible = (covariance > low) & (covariance < high)
    count = min(_share_of(covariance, share), int(eligible.sum()))
    order = torch.where(eligible, draw, torch.inf).flatten().argsort(stable=True)
    mask = torch.ones_like(covariance).flatten()
    mask[order[:count]] = 0
    return mask.view_as(covariance)


@torch.no_grad()
def kl_cov_mask(covariance: PerToken, *, share: float) -> Bool[Tensor, "*tokens"]:
    """KL-Cov's tokens: True at the share k of tokens with the largest covariance, and one at least.

    Of equal covariances the first ones are taken.

    Args:
        share: k in [0, 1]: 2e-4 and 2e-3 in the paper; 0 takes no token.

    Paper: Cui et al. 2025, arXiv:2505.22617.
    """
    within("kl_cov_mask", Share, share=share)
    order = covariance.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros_like(covariance, dtype=torch.bool).flatten()
    mask[order[: _share_of(covariance, share)]] = True
    return mask.view_as(covariance)


def kl_cov(
    logp: PerToken,
    old_logp: PerToken,
    advantage: PerToken,
    penalized: Bool[Tensor, "*tokens"],
    *,
    beta: Positive = 1.0,
) -> tuple[PerToken, Stats]:
    """KL-Cov: policy gradient without a clip, and a penalty for leaving π_old at the tokens of
    largest covariance.

        ℓ = −ρA + [t is penalized] β |log π − log π_old|

    The paper writes a KL divergence; its code, and verl's, have the absolute log-ratio.

    Args:
        penalized: Bool, by `kl_cov_mask`.
        beta: β > 0; 1 in the paper.

    Paper: Cui et al. 2025, arXiv:2505.22617.
    """
    same_shape("kl_cov", logp=logp, old_logp=old_logp, advantage=advantage, penalized=penalized)
    check_roles("kl_cov", {"logp": logp}, old_logp=old_logp, advantage=advantage)
    require(
        "kl_cov",
        penalized.dtype == torch.bool,
        "penalized must be a Bool tensor, got {}",
        penalized.dtype,
    )
    within("kl_cov", Positive, beta=beta)
    log_ratio = logp - old_logp
    ratio = log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()
    penalty = torch.where(penalized, beta * log_ratio.abs(), 0.0)
    return -ratio * advantage + penalty, {
        "ratio": ratio.detach(),
        "kl_cov/penalty": penalty.detach(),
    }


def _share_of(x: Tensor, share: float) -> int:
    """How many entries a share of them is: at least one, unless the share is 0."""
    return max(1, int(share * x.numel())) if share > 0 else 0
