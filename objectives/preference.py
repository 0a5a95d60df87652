"""Preference objectives: learn from pairs of completions to one prompt, one of them preferred.

    y_w, y_l     the chosen and the rejected completion to x
    log π(y|x)   log-probability of a whole completion in nats: the sum over its tokens
    a, b         log π(y_w|x)/π_ref(y_w|x) and log π(y_l|x)/π_ref(y_l|x), the log-ratios to the frozen reference
    h = a − b    the margin
    σ            the logistic function 1/(1 + e^−x)

``chosen, rejected, ref_chosen, ref_rejected`` are log π(y_w|x), log π(y_l|x), log π_ref(y_w|x), log
π_ref(y_l|x), all of one shape; β > 0 scales log-ratios to rewards: the larger, the closer the
optimum stays to the reference. Every function returns ``(loss, stats)`` with one entry per pair:
nothing is reduced here. ``stats`` holds the implicit rewards βa and βb, their difference, and
whether it is positive. Shapes that differ and hyper-parameters out of range raise ValueError.
Objectives without a reference are in `reference_free`.

Sums give more: Cal-DPO (arXiv:2412.14516) is `dpo` with β = 1 + `sppo_hard`, half of it in the
authors' code; MPO (arXiv:2411.10442) is `dpo` + `bco_pair` + nll; TPO (arXiv:2405.16681) is `cpo`,
or `simpo`, + nll of a third completion.
"""

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .numerics import power_score
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


def dpo(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
    label_smoothing: Noise = 0.0,
) -> tuple[PerPair, Stats]:
    """Direct preference optimization: logistic regression on the margin.

        ℓ = −(1 − ε) log σ(βh) − ε log σ(−βh)

    Args:
        label_smoothing: ε in [0, ½), the assumed share of pairs labeled the wrong way round.

    Paper: Rafailov et al. 2023, arXiv:2305.18290, Eq. 7 (ε = 0); ε > 0: Mitchell 2023,
    "conservative DPO", Eq. 3.
    """
    a, b, stats = log_ratios("dpo", chosen, rejected, ref_chosen, ref_rejected, beta)
    return logistic("dpo", beta * (a - b), label_smoothing), stats


def robust_dpo(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
    label_smoothing: Noise,
) -> tuple[PerPair, Stats]:
    """Robust DPO: over pairs of which a share ε is flipped, its mean is that of DPO over the clean
    pairs.

        ℓ = [−(1 − ε) log σ(βh) + ε log σ(−βh)] / (1 − 2ε)

    Args:
        label_smoothing: ε in [0, ½), the share of pairs labeled the wrong way round.

    Paper: Chowdhury et al. 2024, arXiv:2403.00409.
    """
    a, b, stats = log_ratios("robust_dpo", chosen, rejected, ref_chosen, ref_rejected, beta)
    within("robust_dpo", Noise, label_smoothing=label_smoothing)
    x = beta * (a - b)
    clean, flipped = -F.logsigmoid(x), -F.logsigmoid(-x)
    return ((1 - label_smoothing) * clean - label_smoothing * flipped) / (
        1 - 2 * label_smoothing
    ), stats


def ipo(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
) -> tuple[PerPair, Stats]:
    """Identity preference optimization: regress the margin to a finite target, so that it cannot
    run away.

        ℓ = (h − 1/(2β))²,  β being the paper's τ

    The paper's h is of summed log-probabilities. TRL divides each log-ratio by its completion's
    length: for that, pass per-token means.

    Paper: Azar et al. 2023, arXiv:2310.12036, Eq. 17.
    """
    a, b, stats = log_ratios("ipo", chosen, rejected, ref_chosen, ref_rejected, beta)
    return (a - b - 1 / (2 * beta)).square(), stats


def hinge(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
) -> tuple[PerPair, Stats]:
    """Hinge loss on the margin: pairs apart by more than 1/β are left alone.

        ℓ = max(0, 1 − βh),  β being the paper's γ

    Paper: Liu et al. 2023 (RSO), arXiv:2309.06657, "hinge-norm"; after SLiC-HF, Zhao et al. 2023,
    arXiv:2305.10425.
    """
    a, b, stats = log_ratios("hinge", chosen, rejected, ref_chosen, ref_rejected, beta)
    return F.relu(1 - beta * (a - b)), stats


def exo(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
    label_smoothing: Annotated[float, Range("in (0, 0.5)", lambda x, _: 0 < x < 0.5)],
) -> tuple[PerPair, Stats]:
    """Efficient exact optimization on preferences: reverse KL from the policy's choice in the pair
    to the label.

        ℓ = σ(βh) log [σ(βh) / (1 − ε)] + σ(−βh) log [σ(−βh) / ε]

    Args:
        label_smoothing: ε in (0, ½), the label's probability that y_l is better; at 0 the
            divergence is infinite.

    Paper: Ji et al. 2024, arXiv:2402.00856.
    """
    a, b, stats = log_ratios("exo", chosen, rejected, ref_chosen, ref_rejected, beta)
    require(
        "exo",
        0 < label_smoothing < 0.5,
        "label_smoothing must be in (0, 0.5), got {}",
        label_smoothing,
    )
    x = beta * (a - b)
    # a tensor: torch.compile would compile anew for each math.log
    epsilon = x.new_full((), label_smoothing)
    prefers_chosen = x.sigmoid() * (F.logsigmoid(x) - torch.log1p(-epsilon))
    prefers_rejected = (-x).sigmoid() * (F.logsigmoid(-x) - torch.log(epsilon))
    return prefers_chosen + prefers_rejected, stats


def nca(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
) -> tuple[PerPair, Stats]:
    """Noise-contrastive alignment on pairs: y_w has a finite best reward, and its likelihood does
    not sink with y_l's.

        ℓ = −log σ(βa) − ½ log σ(−βa) − ½ log σ(−βb)

    Paper: Chen et al. 2024, arXiv:2402.05369.
    """
    a, b, stats = log_ratios("nca", chosen, rejected, ref_chosen, ref_rejected, beta)
    noise = F.logsigmoid(-beta * a) + F.logsigmoid(-beta * b)
    return -F.logsigmoid(beta * a) - 0.5 * noise, stats


def bco_pair(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
) -> tuple[PerPair, Stats]:
    """Binary classifier optimization on pairs: each completion on its own is classified as good or
    bad by its reward.

        ℓ = −log σ(βa) − log σ(−βb)

    The paper shifts both rewards by a running mean δ; here, as in TRL, δ = 0.

    Paper: Jung et al. 2024, arXiv:2404.04656.
    """
    a, b, stats = log_ratios("bco_pair", chosen, rejected, ref_chosen, ref_rejected, beta)
    return -F.logsigmoid(beta * a) - F.logsigmoid(-beta * b), stats


def sppo_hard(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
) -> tuple[PerPair, Stats]:
    """Self-play preference optimization with hard labels: y_w beats the policy's average completion
    surely, y_l never.

        ℓ = (a − 1/(2β))² + (b + 1/(2β))²,  β being the paper's 1/η and the reference its last iterate

    Paper: Wu et al. 2024, arXiv:2405.00675.
    """
    a, b, stats = log_ratios("sppo_hard", chosen, rejected, ref_chosen, ref_rejected, beta)
    target = 1 / (2 * beta)
    return (a - target).square() + (b + target).square(), stats


def apo_zero(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
) -> tuple[PerPair, Stats]:
    """Anchored preference optimization, for chosen completions better than the policy's own: y_w
    up, y_l down.

        ℓ = 1 − σ(βa) + σ(βb)

    Paper: D'Oosterlinck et al. 2024, arXiv:2408.06266.
    """
    a, b, stats = log_ratios("apo_zero", chosen, rejected, ref_chosen, ref_rejected, beta)
    return (-beta * a).sigmoid() + (beta * b).sigmoid(), stats


def apo_down(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
) -> tuple[PerPair, Stats]:
    """Anchored preference optimization, for chosen completions worse than the policy's own: both
    down, y_l further.

        ℓ = σ(βa) + 1 − σ(βh)

    Paper: D'Oosterlinck et al. 2024, arXiv:2408.06266.
    """
    a, b, stats = log_ratios("apo_down", chosen, rejected, ref_chosen, ref_rejected, beta)
    return (beta * a).sigmoid() + (-beta * (a - b)).sigmoid(), stats


def discopop(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
    tau: Annotated[float, Range("in (0, 1]", lambda x, _: 0 < x <= 1)] = 0.05,
) -> tuple[PerPair, Stats]:
    """DiscoPOP, the log-ratio modulated loss: logistic below a margin of zero, exponential above
    it.

        ℓ = −(1 − m) log σ(βh) + m e^−βh,  m = σ(βh/τ)

    The product m e^−βh is taken as exp(log m − βh): for τ ≤ 1 it is bounded even where e^−βh
    overflows, so nothing needs to be clipped.

    Args:
        tau: τ in (0, 1], the width of the passage from one loss to the other; 0.05 in the paper.

    Paper: Lu et al. 2024, arXiv:2406.08414.
    """
    a, b, stats = log_ratios("discopop", chosen, rejected, ref_chosen, ref_rejected, beta)
    require("discopop", 0 < tau <= 1, "tau must be in (0, 1], got {}", tau)
    x = beta * (a - b)
    exponential = torch.exp(F.logsigmoid(x / tau) - x)
    return -(-x / tau).sigmoid() * F.logsigmoid(x) + exponential, stats


def dpo_positive(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
    penalty: Margin,
) -> tuple[PerPair, Stats]:
    """DPO-Positive: DPO that also pays for a chosen completion which becomes less likely than under
    the reference.

        ℓ = −log σ(β (h − λ max(0, −a)))

    Args:
        penalty: λ ≥ 0; 5, 50 and 500 in the paper, 0 is `dpo`.

    Paper: Pal et al. 2024 (Smaug), arXiv:2402.13228.
    """
    a, b, stats = log_ratios("dpo_positive", chosen, rejected, ref_chosen, ref_rejected, beta)
    within("dpo_positive", Margin, penalty=penalty)
    return -F.logsigmoid(beta * (a - b - penalty * F.relu(-a))), stats


def length_regularized_dpo(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    length_chosen: PerPair,
    length_rejected: PerPair,
    *,
    beta: Positive,
    alpha: Margin,
) -> tuple[PerPair, Stats]:
    """Length-regularized DPO (R-DPO): the optimum of the reward less α for each token.

        ℓ = −log σ(βh + α (|y_w| − |y_l|))

    A pair whose chosen completion is the longer one needs less of a margin.

    Args:
        length_chosen, length_rejected: |y_w| and |y_l|, in tokens.
        alpha: α ≥ 0, in units of reward per token; 0 is `dpo`.

    Paper: Park et al. 2024, arXiv:2403.19159.
    """
    who = "length_regularized_dpo"
    a, b, stats = log_ratios(who, chosen, rejected, ref_chosen, ref_rejected, beta)
    same_shape(who, chosen=chosen, length_chosen=length_chosen, length_rejected=length_rejected)
    within(who, Margin, alpha=alpha)
    return -F.logsigmoid(beta * (a - b) + alpha * (length_chosen - length_rejected)), stats


def chi_po(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
    clip: Annotated[float, Range("> 0", lambda x, _: x > 0)] = math.inf,
) -> tuple[PerPair, Stats]:
    """χ²-preference optimization: DPO with a reward that grows with u itself, so that leaving the
    reference costs more.

        ℓ = −log σ(clip(β (φ(u_w) − φ(u_l)), −c, c)),  φ(u) = u + log u,  u_w = e^a, u_l = e^b

    The optimum of the reward under a KL and a χ² penalty. φ is taken less φ(1). Where u exceeds the
    cube root of the largest float, φ goes on along its tangent, see `numerics.power_score`.

    Args:
        clip: c > 0, twice the largest reward that there is; infinity is no clip. A pair beyond it
            has no gradient.

    Paper: Huang et al. 2024, arXiv:2407.13399.
    """
    require("chi_po", clip > 0, "clip must be > 0, got {}", clip)
    a, b, _ = log_ratios("chi_po", chosen, rejected, ref_chosen, ref_rejected, beta)
    chosen_reward = beta * (a + power_score(a, -1.0))
    rejected_reward = beta * (b + power_score(b, -1.0))
    margin = (chosen_reward - rejected_reward).clamp(-clip, clip)
    return -F.logsigmoid(margin), reward_stats(chosen_reward, rejected_reward)


def tdpo1(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    divergence_chosen: PerPair,
    divergence_rejected: PerPair,
    *,
    beta: Positive,
) -> tuple[PerPair, Stats]:
    """Token-level DPO: the reward of a completion includes how far the policy has moved at each of
    its tokens.

        ℓ = −log σ(β (h − D_l + D_w)),  D = Σ_t KL(π_ref(·|y_<t) ‖ π(·|y_<t)) over a completion's tokens

    Args:
        divergence_chosen, divergence_rejected: D_w and D_l in nats; their gradient counts.

    Paper: Zeng et al. 2024, arXiv:2404.11999, TDPO₁.
    """
    divergences = {
        "divergence_chosen": divergence_chosen,
        "divergence_rejected": divergence_rejected,
    }
    margin, stats = _token_margin(
        "tdpo1", chosen, rejected, ref_chosen, ref_rejected, divergences, beta
    )
    return -F.logsigmoid(beta * (margin - divergence_rejected + divergence_chosen)), stats


def tdpo2(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    divergence_chosen: PerPair,
    divergence_rejected: PerPair,
    *,
    beta: Positive,
    alpha: Margin,
) -> tuple[PerPair, Stats]:
    """Token-level DPO, second form: only what the policy does at rejected completions is pulled to
    the reference.

        ℓ = −log σ(β (h − α (D_l − sg(D_w)))),  D as in `tdpo1`

    Args:
        divergence_chosen, divergence_rejected: D_w, of which no gradient is taken, and D_l, in
            nats.
        alpha: α ≥ 0; 0.5 in the paper.

    Paper: Zeng et al. 2024, arXiv:2404.11999, TDPO₂.
    """
    divergences = {
        "divergence_chosen": divergence_chosen,
        "divergence_rejected": divergence_rejected,
    }
    margin, stats = _token_margin(
        "tdpo2", chosen, rejected, ref_chosen, ref_rejected, divergences, beta
    )
    within("tdpo2", Margin, alpha=alpha)
    return -F.logsigmoid(
        beta * (margin - alpha * (divergence_rejected - divergence_chosen.detach()))
    ), stats


def aot(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
    label_smoothing: Noise = 0.0,
) -> tuple[PerPair, Stats]:
    """Alignment via optimal transport: the policy's preferences should dominate the reference's,
    quantile by quantile.

        ℓ = −(1 − ε) log σ(βΔ) − ε log σ(−βΔ)
        Δ = log π(y_w|x)/π(y_l|x) minus the value of log π_ref(y_w|x)/π_ref(y_l|x) that has the same
        rank

    Ranks couple the pairs: pass all pairs of the step at once, not a micro-batch. Entry i is of the
    policy's pair i.

    Args:
        label_smoothing: ε in [0, ½).

    Paper: Melnyk et al. 2024, arXiv:2406.05882.
    """
    _, _, stats = log_ratios("aot", chosen, rejected, ref_chosen, ref_rejected, beta)
    preference = chosen - rejected
    delta = preference - _same_rank(preference, ref_chosen - ref_rejected)
    return logistic("aot", beta * delta, label_smoothing), stats


def aot_unpaired(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    *,
    beta: Positive,
    label_smoothing: Noise = 0.0,
) -> tuple[PerPair, Stats]:
    """Alignment via optimal transport between the rewards of all chosen and of all rejected
    completions.

        ℓ = −(1 − ε) log σ(βΔ) − ε log σ(−βΔ),  Δ = a minus the value of b that has the same rank

    Which rejected completion stands beside which chosen one does not matter, so they may come from
    different prompts. Ranks couple the pairs: pass all completions of the step at once, not a
    micro-batch. Entry i is of chosen completion i.

    Args:
        label_smoothing: ε in [0, ½).

    Paper: Melnyk et al. 2024, arXiv:2406.05882.
    """
    a, b, stats = log_ratios("aot_unpaired", chosen, rejected, ref_chosen, ref_rejected, beta)
    return logistic("aot_unpaired", beta * (a - _same_rank(a, b)), label_smoothing), stats


def f_divergence_score(
    log_ratio: Tensor,
    *,
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"],
    alpha: float = 0.5,
) -> Tensor:
    """f-DPO's reward: f′(u) of the ratio u = π/π_ref, for another f-divergence than DPO's reverse
    KL.

        reverse_kl   log u
        forward_kl   1 − 1/u
        js           log 2u/(1 + u)
        alpha        (1 − u^−α) / α,  between reverse_kl (α → 0) and forward_kl (α → 1)

    Constants are left out, since only differences count: f′(1) = 0. TRL's coefficient is 1 − α.
    Where 1/u or u^−α is beyond the cube root of the largest float, the score goes on along its
    tangent, finite in value and gradient. Composes with every objective on log-ratios: with f =
    f_divergence_score, ``dpo(f(a), f(b), zero, zero, beta=...)``.

    Args:
        log_ratio: a or b, of any shape.
        alpha: α in (0, 1), read by the α-divergence only.

    Paper: Wang et al. 2023, arXiv:2309.16240.
    """
    require("f_divergence_score", 0 < alpha < 1, "alpha must be in (0, 1), got {}", alpha)
    match divergence:
        case "reverse_kl":
            return log_ratio
        case "forward_kl":
            return power_score(log_ratio, 1.0)
        case "js":
            return math.log(2) + F.logsigmoid(log_ratio)
        case "alpha":
            return power_score(log_ratio, alpha)
    raise ValueError(
        f"f_divergence_score: divergence must be reverse_kl, forward_kl, js or alpha, got {divergence!r}"
    )


def log_ratios(
    who: str,
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor, Stats]:
    """a, b and the statistics of the rewards βa and βb, after the checks that all objectives
    share.
    """
    same_shape(
        who, chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected
    )
    one_per(who, "pair", chosen=chosen)
    check_roles(
        who,
        {"chosen": chosen, "rejected": rejected},
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    within(who, Positive, beta=beta)
    a = chosen - ref_chosen
    b = rejected - ref_rejected
    return a, b, reward_stats(beta * a, beta * b)


def _token_margin(
    who: str,
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    divergences: dict[str, Tensor],
    beta: float,
) -> tuple[Tensor, Stats]:
    """The margin h of token-level DPO and its statistics, with the two sums of divergences."""
    a, b, stats = log_ratios(who, chosen, rejected, ref_chosen, ref_rejected, beta)
    same_shape(who, chosen=chosen, **divergences)
    return a - b, {**stats, **{name: each.detach() for name, each in divergences.items()}}


def logistic(who: str, x: Tensor, label_smoothing: float) -> Tensor:
    """−(1 − ε) log σ(x) − ε log σ(−x)."""
    within(who, Noise, label_smoothing=label_smoothing)
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def reward_stats(chosen_reward: Tensor, rejected_reward: Tensor) -> Stats:
    """Implicit rewards, their margin and accuracy (a tie counts as wrong), under TRL's names."""
    margin = (chosen_reward - rejected_reward).detach()
    return {
        "rewards/chosen": chosen_reward.detach(),
        "rewards/rejected": rejected_reward.detach(),
        "rewards/margins": margin,
        "rewards/accuracies": (margin > 0).to(margin.dtype),
    }


def _same_rank(x: Tensor, y: Tensor) -> Tensor:
    """For each x_i, the value among y whose rank is that of x_i among x; ties keep their order."""
    rank = x.argsort(stable=True).argsort(stable=True)
    return y.sort(stable=True).values[rank]
