"""Corrections for samples that another policy drew: an engine with other kernels, or weights of
some steps ago.

    μ            the behavior policy: what the sampler drew a token with, at its temperature
    π_old        the policy at the start of the step, in the trainer
    π            the policy now
    w_t, ρ_t     the log-ratio log π_old(t) − log μ(t), and the ratio e^w_t

`token_log_ratio`, `sequence_log_ratio` and `geometric_log_ratio` say how far off a token is, or its
whole completion; `truncated_importance`, `masked_importance` and `importance_mask` make a weight or
a mask of such a log-ratio. These multiply:
``truncated_importance(token, cap=2.0) * importance_mask(geometric, low=0.99, high=1.01)``.

All of them have an entry per token and no gradient: what the caller writes is ``weight * loss``.
Log-ratios are clamped to ±20, as in verl. A token whose μ is unknown (NaN) counts as drawn from
π_old, as in TRL. Tokens lie as in `sequence`. Shapes that differ and bounds out of range raise
ValueError.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from .policy import LOG_RATIO_LIMIT, clip_stats
from .sequence import sequence_mean, sequence_sum
from .types import (
    FlatTokens,
    PerSequence,
    PerToken,
    Positive,
    SequenceIds,
    Share,
    Stats,
    flat,
    one_per,
    require,
    same_shape,
    within,
)


@torch.no_grad()
def token_log_ratio(old_logp: PerToken, behavior_logp: PerToken) -> PerToken:
    """w_t, for each token by itself: little variance, but blind to what the tokens before it
    did.
    """
    return _log_ratio("token_log_ratio", old_logp, behavior_logp).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )


@torch.no_grad()
def sequence_log_ratio(
    old_logp: FlatTokens, behavior_logp: FlatTokens, sequence: SequenceIds
) -> FlatTokens:
    """Σ_t w_t of the token's completion: its weight is unbiased, and its variance grows with the
    length.
    """
    w = _log_ratio("sequence_log_ratio", old_logp, behavior_logp)
    same_shape("sequence_log_ratio", old_logp=old_logp, sequence=sequence)
    return sequence_sum(w, sequence, _sequences(sequence))[sequence].clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )


@torch.no_grad()
def geometric_log_ratio(
    old_logp: FlatTokens, behavior_logp: FlatTokens, sequence: SequenceIds
) -> FlatTokens:
    """(1/|y|) Σ_t w_t of the token's completion: the log of the geometric mean of its ratios.

    It does not grow with the length. Bounds on it lie close to 1, such as 0.99 and 1.01.
    """
    w = _log_ratio("geometric_log_ratio", old_logp, behavior_logp)
    same_shape("geometric_log_ratio", old_logp=old_logp, sequence=sequence)
    return sequence_mean(w, sequence, _sequences(sequence))[sequence].clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )


@torch.no_grad()
def truncated_importance(log_ratio: PerToken, *, cap: float, floor: float = 0.0) -> PerToken:
    """Truncated importance sampling: the weight min(ρ, C).

    Args:
        log_ratio: of tokens (TIS), or of completions.
        cap: C > 0; 2 is common, and infinity plain importance sampling.
        floor: a lower bound on the weight, in [0, C]. The papers have none; TRL's clip_min.

    Paper: Ionides 2008, "Truncated Importance Sampling"; Espeholt et al. 2018 (IMPALA),
    arXiv:1802.01561; between engine and trainer: Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training".
    """
    require("truncated_importance", cap > 0, "cap must be > 0, got {}", cap)
    require(
        "truncated_importance",
        0 <= floor <= cap,
        "floor must be in [0, cap], got {} with cap {}",
        floor,
        cap,
    )
    return log_ratio.exp().clamp(floor, cap)


@torch.no_grad()
def masked_importance(log_ratio: PerToken, *, low: float = 0.5, high: float = 5.0) -> PerToken:
    """IcePop: the weight ρ where α ≤ ρ ≤ β, and 0 where the mismatch is larger than that.

    Args:
        log_ratio: of tokens (IcePop), or of completions (masked importance sampling).
        low, high: α and β, 0 ≤ α ≤ β.

    Paper: Ling team 2025 (Ring-1T), arXiv:2510.18855; of completions: Liu et al. 2025, "When Speed
    Kills Stability".
    """
    inside = _inside("masked_importance", log_ratio, low, high)
    return torch.where(inside, log_ratio.exp(), 0.0)


@torch.no_grad()
def importance_mask(log_ratio: PerToken, *, low: float, high: float) -> PerToken:
    """1 where low ≤ ρ ≤ high, else 0: rejection without a weight.

    Paper: Liu et al. 2025, "When Speed Kills Stability": sequence and geometric-mean rejection.
    """
    return _inside("importance_mask", log_ratio, low, high).to(log_ratio.dtype)


@torch.no_grad()
def decoupled_ratio(
    proximal_logp: PerToken, behavior_logp: PerToken, *, cap: float = math.inf
) -> PerToken:
    """Decoupled PPO's weight of the clipped surrogate: it stays close to a proximal policy, not to
    who drew the sample.

        ℓ = π_prox/μ · clipped_surrogate(log π, log π_prox, A)

    Args:
        proximal_logp: log π_prox, of the policy at the start of the step (or an average of recent
            ones).
        cap: tokens with a larger ratio are left out (weight 0). The paper leaves none out; AReaL's
            code does above 5.

    Paper: Hilton et al. 2021, arXiv:2110.00641; for language models: Fu et al. 2025 (AReaL),
    arXiv:2505.24298.
    """
    require("decoupled_ratio", cap > 0, "cap must be > 0, got {}", cap)
    same_shape("decoupled_ratio", proximal_logp=proximal_logp, behavior_logp=behavior_logp)
    return masked_importance(token_log_ratio(proximal_logp, behavior_logp), low=0.0, high=cap)


@torch.no_grad()
def off_policy_mask(
    logp: FlatTokens,
    behavior_logp: FlatTokens,
    advantage: PerSequence,
    sequence: SequenceIds,
    *,
    threshold: float,
) -> FlatTokens:
    """DeepSeek-V3.2's mask: bad completions that the policy has become unlikely to give teach it
    nothing.

        0 where A_i < 0 and (1/|y|) Σ_t (log μ − log π) > δ, else 1

    Args:
        threshold: δ, in nats per token.

    Paper: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556.
    """
    w = _log_ratio("off_policy_mask", logp, behavior_logp)
    same_shape("off_policy_mask", logp=logp, sequence=sequence)
    flat("off_policy_mask", logp=logp)
    one_per("off_policy_mask", "completion", advantage=advantage)
    # Only NaN is not itself.
    require(
        "off_policy_mask", threshold == threshold, "threshold must be a number, got {}", threshold
    )
    drift = -sequence_mean(w, sequence, advantage.shape[0])
    return ((advantage >= 0) | (drift <= threshold))[sequence].to(w.dtype)


@torch.no_grad()
def veto_mask(
    old_logp: FlatTokens, behavior_logp: FlatTokens, sequence: SequenceIds, *, threshold: float
) -> FlatTokens:
    """verl's veto: a completion with a single token that π_old would all but never draw (ρ_t <
    threshold) counts 0.

    Args:
        threshold: > 0, such as 1e-4.

    Source: Liu et al. 2025, "When Speed Kills Stability"; verl's rollout correction.
    """
    w = _log_ratio("veto_mask", old_logp, behavior_logp)
    same_shape("veto_mask", old_logp=old_logp, sequence=sequence)
    flat("veto_mask", old_logp=old_logp)
    within("veto_mask", Positive, threshold=threshold)
    vetoed = sequence[w < math.log(threshold)]
    return (~torch.isin(sequence, vetoed)).to(w.dtype)


@torch.no_grad()
def m2po_mask(
    logp: FlatTokens, behavior_logp: FlatTokens, advantage: FlatTokens, *, threshold: float = 0.04
) -> FlatTokens:
    """M2PO's mask: leave out as few outliers as bring the second moment of the log-ratio down to τ.

        M₂ = mean (log π/μ)²,  over the tokens already moved the way their advantage points: A log π/μ > 0

    Of those, the largest are left out until the rest has M₂ ≤ τ; equal ones go together, so order
    does not matter. All others are kept: as in PPO's clip, only moving on is limited. Pass all
    tokens of the step at once. AReaL's mask looks at all tokens instead; the authors' code turns
    the mask into bounds for PPO's clip.

    Args:
        threshold: τ > 0; 0.04 in the paper.

    Paper: Zheng et al. 2025, arXiv:2510.01161.
    """
    w = _log_ratio("m2po_mask", logp, behavior_logp)
    same_shape("m2po_mask", logp=logp, advantage=advantage)
    flat("m2po_mask", logp=logp)
    within("m2po_mask", Positive, threshold=threshold)
    moved = advantage * w > 0
    square = w[moved].square()
    ordered = square.sort().values
    moment = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=w.device)
    mask = torch.ones_like(w)
    mask[moved] = (moment[torch.searchsorted(ordered, square, right=True) - 1] <= threshold).to(
        w.dtype
    )
    return mask


@torch.no_grad()
def total_variation_mask(
    logp: PerToken, behavior_logp: PerToken, advantage: PerToken, *, low: float, high: float
) -> PerToken:
    """DPPO's mask (Binary-TV): a token whose probability has moved far enough the way its advantage
    points stops there.

        0 where A > 0 and π − μ > high, or A < 0 and μ − π > low; else 1

    The trust region of `dppo`, around the sampler. For use in place of a clip, on π/μ.

    Args:
        low, high: in [0, 1]; prime-rl has 0.2 for both.

    Paper: Qi et al. 2026, arXiv:2602.04879.
    """
    w = _log_ratio("total_variation_mask", logp, behavior_logp)
    same_shape("total_variation_mask", logp=logp, advantage=advantage)
    within("total_variation_mask", Share, low=low, high=high)
    moved = logp.exp() - (logp - w).exp()
    return 1 - clip_stats(moved, advantage, -low, high)["clip_ratio/region"]


@torch.no_grad()
def sampler_mismatch(old_logp: PerToken, behavior_logp: PerToken) -> Stats:
    """Distance between trainer and sampler at each token; the means are the metrics, of the first
    also the maximum.

        sampling/logp_difference    |w|, not clamped
        sampling/importance_ratio   ρ; 1 on average if μ covers π_old
        sampling/kl                 −w, whose mean estimates KL(μ‖π_old) (k1)
        sampling/kl_k3              ρ − 1 − w, the same with less variance
        sampling/chi_square         ρ² − 1, whose mean estimates χ²(π_old‖μ), the variance of the weights

    For whole completions pass their `sequence_sum` of both; for the difference of log-perplexities,
    their `sequence_mean`. Leave out tokens whose μ is unknown: a NaN stays one, since to count it
    as 0 would understate the mismatch.
    """
    same_shape("sampler_mismatch", old_logp=old_logp, behavior_logp=behavior_logp)
    exact = old_logp - behavior_logp
    w = exact.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "sampling/logp_difference": exact.abs(),
        "sampling/importance_ratio": w.exp(),
        "sampling/kl": -exact,
        "sampling/kl_k3": torch.expm1(w) - w,
        "sampling/chi_square": torch.expm1(2 * w),
    }


@torch.no_grad()
def bound_stats(log_ratio: PerToken, *, low: float, high: float) -> Stats:
    """1 where a ratio is outside its bounds, else 0; the means are the shares that are truncated or
    masked.
    """
    inside = _inside("bound_stats", log_ratio, low, high)
    return {
        "sampling/clip_ratio/low": (log_ratio.exp() < low).to(log_ratio.dtype),
        "sampling/clip_ratio/high": (log_ratio.exp() > high).to(log_ratio.dtype),
        "sampling/clip_ratio/region": (~inside).to(log_ratio.dtype),
    }


@torch.no_grad()
def effective_sample_size(weight: Float[Tensor, " units"]) -> Float[Tensor, ""]:
    """(Σ w)² / Σ w²: how many equally weighted samples would be worth as much; N if all are equal,
    0 if all are 0.

    Source: Kish 1965, "Survey Sampling".
    """
    flat("effective_sample_size", weight=weight)
    proper = (weight >= 0) & weight.isfinite()
    require("effective_sample_size", bool(proper.all()), "weights must be finite and >= 0")
    tiny = torch.finfo(weight.dtype).tiny
    share = weight / weight.sum().clamp(min=tiny)
    return share.sum() / share.square().sum().clamp(min=tiny)


def _log_ratio(who: str, logp: Tensor, behavior_logp: Tensor) -> Tensor:
    """log π − log μ, 0 where μ is unknown."""
    same_shape(who, logp=logp, behavior_logp=behavior_logp)
    return torch.where(behavior_logp.isnan(), 0.0, logp - behavior_logp)


def _sequences(sequence: Tensor) -> int:
    return int(sequence.max()) + 1 if len(sequence) else 0


def _inside(who: str, log_ratio: Tensor, low: float, high: float) -> Tensor:
    require(who, 0 <= low <= high, "bounds must be 0 <= low <= high, got {} and {}", low, high)
    ratio = log_ratio.exp()
    return (ratio >= low) & (ratio <= high)
