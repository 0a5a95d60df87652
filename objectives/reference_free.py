"""Preference objectives that need no reference policy: the policy's own log-probabilities are the
rewards.

    z          log π(y_w|x) − log π(y_l|x) of whole completions, summed over their tokens
    m_w, m_l   (1/|y|) log π(y|x), the per-token means of both completions

``chosen, rejected`` are the sums and ``mean_chosen, mean_rejected`` the means, in nats, both of one
shape. As in `preference`, every function returns ``(loss, stats)`` with one entry per pair, and
shapes that differ or hyper-parameters out of range raise ValueError. ``stats`` holds the rewards
each function names.
"""

import math
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from .numerics import log_odds, power_score
from .preference import logistic, reward_stats
from .types import (
    Margin,
    Noise,
    PerPair,
    Positive,
    Range,
    Stats,
    check_roles,
    one_per,
    require,
    same_shape,
    within,
)


def cpo(
    chosen: PerPair, rejected: PerPair, *, beta: Positive, label_smoothing: Noise = 0.0
) -> tuple[PerPair, Stats]:
    """Contrastive preference optimization: DPO against a uniform reference.

        ℓ = −(1 − ε) log σ(βz) − ε log σ(−βz),  rewards β log π

    The paper adds the negative log-likelihood of y_w: total = cpo + α · nll. It has no ε.

    Args:
        label_smoothing: ε in [0, ½).

    Paper: Xu et al. 2024, arXiv:2401.08417.
    """
    _check_pairs("cpo", chosen=chosen, rejected=rejected)
    within("cpo", Positive, beta=beta)
    return logistic("cpo", beta * (chosen - rejected), label_smoothing), reward_stats(
        beta * chosen, beta * rejected
    )


def simpo(
    mean_chosen: PerPair,
    mean_rejected: PerPair,
    *,
    beta: Positive,
    gamma: Margin,
    label_smoothing: Noise = 0.0,
) -> tuple[PerPair, Stats]:
    """Simple preference optimization: rewards βm, normalized by length, that should differ by more
    than γ.

        ℓ = −(1 − ε) log σ(x) − ε log σ(−x),  x = β(m_w − m_l) − γ

    Args:
        gamma: γ ≥ 0, the target margin in units of reward (the authors' scripts set γ/β).
        label_smoothing: ε in [0, ½), 0 in the paper.

    Paper: Meng et al. 2024, arXiv:2405.14734.
    """
    _check_pairs("simpo", mean_chosen=mean_chosen, mean_rejected=mean_rejected)
    within("simpo", Positive, beta=beta)
    within("simpo", Margin, gamma=gamma)
    x = beta * (mean_chosen - mean_rejected) - gamma
    return logistic("simpo", x, label_smoothing), reward_stats(
        beta * mean_chosen, beta * mean_rejected
    )


def alpha_po(
    mean_chosen: PerPair,
    mean_rejected: PerPair,
    *,
    beta: Positive,
    gamma: Margin,
    alpha: Annotated[float, Range("finite", lambda x, _: -math.inf < x < math.inf)],
) -> tuple[PerPair, Stats]:
    """AlphaPO: SimPO with the logarithm in its reward bent into a power of the probability.

        ℓ = −log σ(r_w − r_l − γ),  r = β (1 − e^−αm) / α

    α → 0 is SimPO. The reward is computed with expm1, so it does not cancel at small α. For α > 0
    it falls exponentially in −m: where e^−αm is beyond the cube root of the largest float (e²⁹ in
    float32, e²³⁶ in float64), as for summed log-probabilities of −1000, it goes on along its
    tangent. There the order of two completions, a finite loss and a finite gradient are kept, the
    exact size is not.

    Args:
        gamma: γ ≥ 0, the target margin in units of reward.
        alpha: α, any finite number.

    Paper: Gupta et al. 2025, arXiv:2501.03884.
    """
    _check_pairs("alpha_po", mean_chosen=mean_chosen, mean_rejected=mean_rejected)
    within("alpha_po", Positive, beta=beta)
    within("alpha_po", Margin, gamma=gamma)
    require("alpha_po", -math.inf < alpha < math.inf, "alpha must be finite, got {}", alpha)
    chosen_reward = beta * power_score(mean_chosen, alpha)
    rejected_reward = beta * power_score(mean_rejected, alpha)
    return -F.logsigmoid(chosen_reward - rejected_reward - gamma), reward_stats(
        chosen_reward, rejected_reward
    )


def orpo(mean_chosen: PerPair, mean_rejected: PerPair) -> tuple[PerPair, Stats]:
    """Odds ratio preference optimization: the preference term, to be added to the likelihood of
    y_w.

        ℓ = −log σ(log [odds(y_w) / odds(y_l)]),  odds = p/(1 − p),  p = e^m,  rewards m

    total = nll + λ · orpo; λ is a coefficient of the mix, and so the rewards are without it. A mean
    log-probability closer to zero than machine epsilon is read as epsilon: no odds are infinite and
    no gradient is lost at p = 1.

    Paper: Hong et al. 2024, arXiv:2403.07691.
    """
    _check_pairs("orpo", mean_chosen=mean_chosen, mean_rejected=mean_rejected)
    log_odds_ratio = log_odds(mean_chosen) - log_odds(mean_rejected)
    return -F.logsigmoid(log_odds_ratio), reward_stats(mean_chosen, mean_rejected)


def _check_pairs(who: str, **pairs: Tensor) -> None:
    same_shape(who, **pairs)
    one_per(who, "pair", **pairs)
    check_roles(who, pairs)
