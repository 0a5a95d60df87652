"""Supervised objectives: make given tokens likely.

    p      the policy's probability of the token that follows; logp = log p, in nats
    Z      Σ e^logit over the vocabulary; logsumexp = log Z

All are elementwise, of any shape, and take no mask: hand them trained tokens only.
Every function returns ``(loss, stats)`` with one entry per token: nothing is reduced here.
"""

from typing import Annotated

from .types import PerToken, Range, Stats, same_shape, within

Uniform = Annotated[float, Range("in [0, 1)", lambda x, _: 0 <= x < 1)]  # share of the mass


def nll(logp: PerToken) -> tuple[PerToken, Stats]:
    """Negative log-likelihood, the objective of supervised fine-tuning: ℓ = −log p."""
    return -logp, {}


def label_smoothed_nll(
    logp: PerToken, mean_logp: PerToken, *, label_smoothing: Uniform
) -> tuple[PerToken, Stats]:
    """Cross-entropy against a target that gives ε of its mass to the whole vocabulary, evenly.

        ℓ = −(1 − ε) log p − ε · mean_v log p_v

    Args:
        mean_logp: the mean of log p_v over all V tokens of the vocabulary, the target among them.
        label_smoothing: ε in [0, 1).

    Raises:
        ValueError: if the shapes differ or ε is out of range.

    Paper: Szegedy et al. 2016, arXiv:1512.00567.
    """
    same_shape("label_smoothed_nll", logp=logp, mean_logp=mean_logp)
    within("label_smoothed_nll", Uniform, label_smoothing=label_smoothing)
    return -(1 - label_smoothing) * logp - label_smoothing * mean_logp, {}


def dft(logp: PerToken) -> tuple[PerToken, Stats]:
    """Dynamic fine-tuning: the likelihood itself, not its logarithm, so rare tokens do not dominate
    the gradient.

        ℓ = −sg(p) log p,  whose gradient is −∇p

    Paper: Wu et al. 2025, arXiv:2508.05629.
    """
    return -logp.detach().exp() * logp, {}


def z_loss(logsumexp: PerToken) -> tuple[PerToken, Stats]:
    """Keep the softmax normalizer near one, where low-precision logits are safe: ℓ = (log Z)².

    Paper: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, with coefficient 1e-4.
    """
    return logsumexp.square(), {}


def entropy_bonus(entropy: PerToken) -> tuple[PerToken, Stats]:
    """Keep the policy from collapsing: added with a positive coefficient, it raises the entropy.

        ℓ = −H

    Paper: Williams and Peng 1991; Mnih et al. 2016, arXiv:1602.01783.
    """
    return -entropy, {}
