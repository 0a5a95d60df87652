"""Policy objectives: make sampled tokens likelier the better they turned out than expected.

    π, π_old   the policy, and the one that the ratios are taken to: at the start of the step, or the sampler itself
    w, ρ = e^w log π − log π_old and π/π_old of one token
    A          advantage: how much better than expected; a constant. See `advantage`
    σ, sg      the logistic function, stop-gradient

Every function returns ``(loss, stats)``, nothing is reduced. Most are elementwise, of any shape,
without a mask: hand them sampled tokens only. `gspo` and `gmpo` return one entry per completion.
The loop's weights make the algorithm:

    PPO, DAPO          `clipped_surrogate`, every token alike; DAPO with ε_high 0.28; TRL's "bnpo", per micro-batch
    GRPO, Dr. GRPO     `clipped_surrogate`, 1/|o| a token; 1/L, L fixed        arXiv:2402.03300, arXiv:2503.20783
    CISPO, VESPO       `cispo`, `vespo`, every token alike
    SAPO, GSPO-token   `sapo`, `gspo_token`, 1/|o| a token
    GSPO, GMPO         `gspo`, `gmpo`, every completion alike
    LUSPO              `gspo`, |o| a completion, over their number    arXiv:2602.05261
    RLOO               `reinforce` of `sequence_sum`, every completion alike; TRL's is `clipped_surrogate` of the sums

An elementwise objective of sums or means over completions is its sequence-level form:
``sapo(sequence_mean(logp), ...)``. Sums of losses give more: Kimi's mirror descent
(arXiv:2501.12599), which verl calls dro, is `reinforce` + τ · k2 of `kl_estimate` to π_old, a PPO
step adds `value_loss` and `entropy_bonus`, on-policy distillation has A = sg(log π_teacher − log
π).

w is cut at 20, where ρ = e²⁰ ≈ 5e8: beyond, values stay at the cut and the gradient is zero,
instead of an overflow. Shapes that differ and hyper-parameters out of range raise ValueError;
math.inf turns a clip off.
"""

import math
from typing import Annotated, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from .numerics import log1mexp
from .sequence import sequence_mean, sequence_sum
from .types import (
    Bound,
    FlatTokens,
    PerSequence,
    PerToken,
    Positive,
    Range,
    SequenceIds,
    Share,
    Stats,
    check_roles,
    flat,
    one_per,
    require,
    same_shape,
    within,
)

LOG_RATIO_LIMIT = 20.0  # e^20 is half a billion: finite in float32, squared too


def reinforce(logp: PerToken, advantage: PerToken) -> tuple[PerToken, Stats]:
    """The policy gradient itself: ℓ = −A log π.

    Unbiased where π sampled the tokens; otherwise multiply by an importance weight of `correction`.

    Paper: Williams 1992; of whole completions: RLOO, Ahmadian et al. 2024, arXiv:2402.14740.
    """
    same_shape("reinforce", logp=logp, advantage=advantage)
    check_roles("reinforce", {"logp": logp}, advantage=advantage)
    return -advantage * logp, {}


def topr(logp: PerToken, old_logp: PerToken, advantage: PerToken) -> tuple[PerToken, Stats]:
    """Tapered off-policy REINFORCE: learn from old successes in full, from failures as far as π
    still commits them.

        ℓ = −A log π where A ≥ 0,  −sg(min(ρ, 1)) A log π where A < 0

    The paper's ρ is of whole completions: pass `sequence_sum` of both log-probabilities.

    Paper: Le Roux et al. 2025, arXiv:2503.14286.
    """
    same_shape("topr", logp=logp, old_logp=old_logp, advantage=advantage)
    check_roles("topr", {"logp": logp}, old_logp=old_logp, advantage=advantage)
    ratio = _ratio(logp - old_logp).detach()
    taper = torch.where(advantage < 0, ratio.clamp(max=1), 1.0)
    return -taper * advantage * logp, {"ratio": ratio}


def clipped_surrogate(
    logp: PerToken,
    old_logp: PerToken,
    advantage: PerToken,
    *,
    clip_low: Bound = 0.2,
    clip_high: Bound = 0.2,
    ratio_cap: Annotated[
        float, Range(">= 1 + clip_high", lambda x, others: x >= 1 + others["clip_high"])
    ] = math.inf,
) -> tuple[PerToken, Stats]:
    """The surrogate of PPO, GRPO, DAPO: off-policy policy gradient, until a token has moved far
    enough.

        ℓ = −min( min(ρ, δ) A, clip(ρ, 1 − ε_low, 1 + ε_high) A )

    Args:
        clip_low, clip_high: ε_low, ε_high ≥ 0.
        ratio_cap: δ ≥ 1 + ε_high, the most that ρ counts where A < 0, which the clip alone leaves
            unbounded. It is δ of two-sided clipping and equally c of dual-clip PPO, −max(min(ρA,
            clip(ρ)A), cA) where A < 0: one function.

    Paper: Schulman et al. 2017, arXiv:1707.06347, Eq. 7; ε_low ≠ ε_high: DAPO, Yu et al. 2025,
    arXiv:2503.14476; ratio_cap: Ye et al. 2019, arXiv:1912.09729, and INTELLECT-2,
    arXiv:2505.07291.
    """
    same_shape("clipped_surrogate", logp=logp, old_logp=old_logp, advantage=advantage)
    check_roles("clipped_surrogate", {"logp": logp}, old_logp=old_logp, advantage=advantage)
    return _surrogate(
        "clipped_surrogate", logp - old_logp, advantage, clip_low, clip_high, ratio_cap
    )


def dppo(
    logp: PerToken, old_logp: PerToken, advantage: PerToken, *, clip_low: Bound, clip_high: Bound
) -> tuple[PerToken, Stats]:
    """Divergence PPO (binary total variation): the trust region is on probabilities, not on their
    ratio.

        ℓ = −ρA, but 0 where A > 0 and π − π_old > ε_high, or A < 0 and π_old − π > ε_low

    A rare token may become many times likelier, a frequent one may not lose half its mass. Where a
    token has left the region, its loss is 0 as its gradient is. prime-rl takes 0.2 for both, and
    adds 2e-3 · k2 of `kl_estimate` to π_old.

    Args:
        clip_low, clip_high: ε_low, ε_high ≥ 0, differences of probabilities; 1 is no limit.

    Paper: Qi et al. 2026, arXiv:2602.04879.
    """
    same_shape("dppo", logp=logp, old_logp=old_logp, advantage=advantage)
    check_roles("dppo", {"logp": logp}, old_logp=old_logp, advantage=advantage)
    within("dppo", Bound, clip_low=clip_low, clip_high=clip_high)
    ratio = _ratio(logp - old_logp)
    stats = clip_stats(logp.exp() - old_logp.exp(), advantage, -clip_low, clip_high)
    return -ratio * advantage * (1 - stats["clip_ratio/region"]), {"ratio": ratio.detach(), **stats}


def dppo_kl(
    logp: PerToken, old_logp: PerToken, advantage: PerToken, *, clip_low: Bound, clip_high: Bound
) -> tuple[PerToken, Stats]:
    """Divergence PPO (binary KL): as `dppo`, where how far a token has moved is a divergence of two
    coins.

        ℓ = −ρA, but 0 where A > 0, π > π_old and D > ε_high, or A < 0, π < π_old and D > ε_low
        D = π_old log π_old/π + (1 − π_old) log (1 − π_old)/(1 − π)

    verl's dppo_kl also caps ρ at 20, and adds 1e-8 to both of 1 − π.

    Args:
        clip_low, clip_high: ε_low, ε_high ≥ 0, in nats; infinity is no limit.

    Paper: Qi et al. 2026, arXiv:2602.04879.
    """
    same_shape("dppo_kl", logp=logp, old_logp=old_logp, advantage=advantage)
    check_roles("dppo_kl", {"logp": logp}, old_logp=old_logp, advantage=advantage)
    within("dppo_kl", Bound, clip_low=clip_low, clip_high=clip_high)
    ratio = _ratio(logp - old_logp)
    divergence = _kl_of_coins(old_logp.detach(), logp.detach())
    signed = torch.where(logp.detach() < old_logp, -divergence, divergence)
    stats = clip_stats(signed, advantage, -clip_low, clip_high)
    return -ratio * advantage * (1 - stats["clip_ratio/region"]), {"ratio": ratio.detach(), **stats}


def cispo(
    logp: PerToken,
    old_logp: PerToken,
    advantage: PerToken,
    *,
    clip_high: Bound,
    clip_low: Bound = math.inf,
) -> tuple[PerToken, Stats]:
    """Clipped importance weights: REINFORCE whose weight is bounded, so that no token loses its
    gradient.

        ℓ = −sg(clip(ρ, 1 − ε_low, 1 + ε_high)) A log π

    TRL's and ScaleRL's epsilon_high is the bound itself, 1 + ε_high here. ``cispo_clip_ratio``
    counts, as TRL does, tokens above it with A > 0, though the weight is clipped for either sign.

    Args:
        clip_high, clip_low: ε_high, ε_low ≥ 0; the paper runs without the lower bound.

    Paper: MiniMax-M1 2025, arXiv:2506.13585.
    """
    same_shape("cispo", logp=logp, old_logp=old_logp, advantage=advantage)
    check_roles("cispo", {"logp": logp}, old_logp=old_logp, advantage=advantage)
    within("cispo", Bound, clip_high=clip_high, clip_low=clip_low)
    ratio = _ratio(logp - old_logp).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = (ratio > 1 + clip_high) & (advantage > 0)
    return -weight * advantage * logp, {"ratio": ratio, "cispo_clip_ratio": clipped.to(ratio.dtype)}


def sapo(
    logp: PerToken,
    old_logp: PerToken,
    advantage: PerToken,
    *,
    tau_pos: Positive = 1.0,
    tau_neg: Positive = 1.05,
) -> tuple[PerToken, Stats]:
    """Soft adaptive policy optimization: the gradient fades smoothly as ρ leaves 1, by default
    faster where A ≤ 0.

        ℓ = −A σ(τ(ρ − 1)) 4/τ,  τ = τ_pos where A > 0, else τ_neg

    Its gradient at ρ = 1 is that of the policy gradient, whatever τ.

    Args:
        tau_pos, tau_neg: τ > 0; the larger, the narrower the trust region.

    Paper: Gao et al. 2025, arXiv:2511.20347.
    """
    same_shape("sapo", logp=logp, old_logp=old_logp, advantage=advantage)
    check_roles("sapo", {"logp": logp}, old_logp=old_logp, advantage=advantage)
    within("sapo", Positive, tau_pos=tau_pos, tau_neg=tau_neg)
    ratio = _ratio(logp - old_logp)
    tau = _by_sign(advantage > 0, ratio, tau_pos, tau_neg)
    return -advantage * (tau * (ratio - 1)).sigmoid() * (4 / tau), {"ratio": ratio.detach()}


def gspo(
    logp: FlatTokens,
    old_logp: FlatTokens,
    advantage: PerSequence,
    sequence: SequenceIds,
    *,
    clip_low: Bound,
    clip_high: Bound,
) -> tuple[PerSequence, Stats]:
    """Group sequence policy optimization: one ratio, one clip and one entry per completion.

        ℓ = −min( sA, clip(s, 1 − ε_low, 1 + ε_high) A ),  s = exp( (1/|o|) Σ_t w_t )

    Args:
        clip_low, clip_high: ε_low, ε_high ≥ 0. s moves far less than ρ: the paper takes 3e-4 and
            4e-4.

    Paper: Zheng et al. 2025, arXiv:2507.18071.
    """
    same_shape("gspo", logp=logp, old_logp=old_logp, sequence=sequence)
    _check_completions("gspo", logp, old_logp, advantage)
    log_ratio = sequence_mean(logp - old_logp, sequence, advantage.shape[0])
    return _surrogate("gspo", log_ratio, advantage, clip_low, clip_high)


def gspo_token(
    logp: FlatTokens,
    old_logp: FlatTokens,
    advantage: FlatTokens,
    sequence: SequenceIds,
    *,
    clip_low: Bound,
    clip_high: Bound,
) -> tuple[FlatTokens, Stats]:
    """GSPO for advantages that differ from token to token. One entry per token.

        ℓ_t = −min( s_t A_t, clip(s_t, 1 − ε_low, 1 + ε_high) A_t ),  s_t = sg(s) π_t / sg(π_t)

    Where a completion has one advantage, the mean over its tokens has the value and the gradient of
    `gspo`.

    Paper: Zheng et al. 2025, arXiv:2507.18071.
    """
    same_shape("gspo_token", logp=logp, old_logp=old_logp, advantage=advantage, sequence=sequence)
    flat("gspo_token", logp=logp)
    check_roles("gspo_token", {"logp": logp}, old_logp=old_logp, advantage=advantage)
    completion = torch.unique_consecutive(sequence, return_inverse=True)[1]
    log_ratio = sequence_mean((logp - old_logp).detach(), completion, logp.shape[0])[completion]
    return _surrogate(
        "gspo_token", log_ratio + (logp - logp.detach()), advantage, clip_low, clip_high
    )


def gmpo(
    logp: FlatTokens,
    old_logp: FlatTokens,
    advantage: PerSequence,
    sequence: SequenceIds,
    *,
    clip_low: Bound = 0.4,
    clip_high: Bound = 0.4,
) -> tuple[PerSequence, Stats]:
    """Geometric-mean policy optimization: tokens are clipped one by one, then their ratios
    multiply.

    One entry per completion.

        ℓ = −A exp( (1/|o|) Σ_t ŵ_t ),  ŵ = min(w, ε_high) where A > 0, max(w, −ε_low) where A < 0

    The clip statistics are shares of the completion's tokens, ``ratio`` the geometric mean.

    Args:
        clip_low, clip_high: ε_low, ε_high ≥ 0, bounds of w and not of ρ: the paper's (e^−0.4,
            e^0.4).

    Paper: Zhao et al. 2025, arXiv:2507.20673.
    """
    same_shape("gmpo", logp=logp, old_logp=old_logp, sequence=sequence)
    _check_completions("gmpo", logp, old_logp, advantage)
    within("gmpo", Bound, clip_low=clip_low, clip_high=clip_high)
    log_ratio, of_token = logp - old_logp, advantage[sequence]
    clipped = torch.where(
        of_token > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    ratio = _ratio(sequence_mean(clipped, sequence, advantage.shape[0]))
    stats = clip_stats(log_ratio, of_token, -clip_low, clip_high)
    shares = {
        name: sequence_mean(share, sequence, advantage.shape[0]) for name, share in stats.items()
    }
    return -advantage * ratio, {"ratio": ratio.detach(), **shares}


def vespo(
    logp: FlatTokens,
    old_logp: FlatTokens,
    advantage: PerSequence,
    sequence: SequenceIds,
    *,
    k_pos: Positive = 2.0,
    lambda_pos: Positive = 3.0,
    k_neg: Positive = 3.0,
    lambda_neg: Positive = 2.0,
) -> tuple[FlatTokens, Stats]:
    """Variational sequence-level soft policy optimization: REINFORCE, weighted by how near the
    completion still is.

        ℓ_t = −sg(φ) A log π_t,  φ = exp(λ + kW − λe^W),  W = Σ_t w_t

    k, λ = k_pos, λ_pos where A ≥ 0, else k_neg, λ_neg. One entry per token. φ is 1 at W = 0 and
    vanishes far on either side, so W needs no clamp, which the authors' code and TRL have. Where
    they multiply e^W by an importance weight against the sampler, let old_logp be the sampler's
    log-probabilities.

    Args:
        k_pos, lambda_pos, k_neg, lambda_neg: > 0; the defaults are those of the authors' code.

    Paper: Shen et al. 2026, arXiv:2602.10693.
    """
    same_shape("vespo", logp=logp, old_logp=old_logp, sequence=sequence)
    _check_completions("vespo", logp, old_logp, advantage)
    within(
        "vespo", Positive, k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg
    )
    log_ratio = sequence_sum((logp - old_logp).detach(), sequence, advantage.shape[0])
    k = _by_sign(advantage >= 0, log_ratio, k_pos, k_neg)
    decay = _by_sign(advantage >= 0, log_ratio, lambda_pos, lambda_neg)
    phi = (k * log_ratio - decay * log_ratio.expm1()).exp()
    return -(phi * advantage)[sequence] * logp, {"vespo/phi_seq": phi[sequence]}


def value_loss(
    value: PerToken, old_value: PerToken, target: PerToken, *, clip: Bound = 0.2
) -> tuple[PerToken, Stats]:
    """Squared error of the critic, no better than that of a value which moved by at most ε.

        ℓ = ½ max( (V − R)², (clip(V, V_old − ε, V_old + ε) − R)² )

    Args:
        target: R, the return: advantage + V_old, of `gae`.
        clip: ε ≥ 0, in units of the value.

    Paper: Schulman et al. 2017, arXiv:1707.06347, has the squared error; the clip is of OpenAI's
    code for it.
    """
    same_shape("value_loss", value=value, old_value=old_value, target=target)
    check_roles("value_loss", {"value": value}, old_value=old_value, target=target)
    within("value_loss", Bound, clip=clip)
    error = (value - target).square()
    clipped = (value.clamp(old_value - clip, old_value + clip) - target).square()
    stats = {"value": value.detach(), "clip_ratio/value": (clipped > error).to(error.dtype)}
    return 0.5 * torch.maximum(error, clipped), stats


def kl_estimate(
    logp: PerToken, ref_logp: PerToken, *, kind: Literal["k1", "k2", "k3"]
) -> tuple[PerToken, Stats]:
    """KL(π ‖ π_ref) from one sampled token, as a loss or, detached, as a penalty on the reward. d =
    log π − log π_ref.

        k1 = d             unbiased; its gradient as a loss is zero on average, so use it in the reward
        k2 = ½ d²          biased; its gradient is the KL's
        k3 = e^−d + d − 1  unbiased and ≥ 0; its gradient is that of the forward KL(π_ref ‖ π)

    All of it holds for tokens that π sampled; see `corrected_kl_estimate`. In k3, d is cut at −20,
    where its gradient would make single tokens outweigh a batch.

    Source: Schulman 2020, joschu.net/blog/kl-approx.html; in GRPO's loss: k3, arXiv:2402.03300.
    """
    same_shape("kl_estimate", logp=logp, ref_logp=ref_logp)
    check_roles("kl_estimate", {"logp": logp}, ref_logp=ref_logp)
    kl = _kl("kl_estimate", logp - ref_logp, kind)
    return kl, {"kl": kl.detach()}


def corrected_kl_estimate(
    logp: PerToken, old_logp: PerToken, ref_logp: PerToken, *, kind: Literal["k1", "k2", "k3"]
) -> tuple[PerToken, Stats]:
    """`kl_estimate` for tokens that π_old sampled: ℓ = ρ · kl.

    With k1 and k3 both value and gradient are then unbiased, on-policy too, since the gradient
    flows through ρ.

    Paper: DeepSeek-V3.2 2025, arXiv:2512.02556, Eq. 7 (k3); TRL's use_bias_correction_kl.
    """
    same_shape("corrected_kl_estimate", logp=logp, old_logp=old_logp, ref_logp=ref_logp)
    check_roles("corrected_kl_estimate", {"logp": logp}, old_logp=old_logp, ref_logp=ref_logp)
    kl = _ratio(logp - old_logp) * _kl("corrected_kl_estimate", logp - ref_logp, kind)
    return kl, {"kl": kl.detach()}


def high_entropy_mask(entropy: PerToken, *, quantile: float) -> Bool[Tensor, "*tokens"]:
    """True at the share ρ of tokens with the highest entropy, where a text could have taken another
    turn.

    The threshold couples tokens: pass the entropies of the whole step. The mask multiplies the
    policy loss or its weights, whose denominators still count every token. Ties at the threshold
    are all kept, and always one token.

    Args:
        quantile: ρ in [0, 1]; 0.2 in the paper. TRL's top_entropy_quantile.

    Paper: Wang et al. 2025, arXiv:2506.01939.
    """
    within("high_entropy_mask", Share, quantile=quantile)
    if entropy.numel() == 0:
        return torch.zeros_like(entropy, dtype=torch.bool)
    # torch.quantile's threshold lies between two entropies and keeps the same tokens, but refuses
    # large batches.
    below = entropy.numel() - 1 - int(quantile * (entropy.numel() - 1))
    return entropy >= entropy.flatten().kthvalue(below + 1).values


def _check_completions(who: str, logp: Tensor, old_logp: Tensor, advantage: Tensor) -> None:
    """Check what objectives of whole completions take: flat tokens, and one advantage per
    completion.
    """
    flat(who, logp=logp)
    one_per(who, "completion", advantage=advantage)
    check_roles(who, {"logp": logp}, old_logp=old_logp, advantage=advantage)


def _surrogate(
    who: str,
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    ratio_cap: float = math.inf,
) -> tuple[Tensor, Stats]:
    within(who, Bound, clip_low=clip_low, clip_high=clip_high)
    require(
        who,
        ratio_cap >= 1 + clip_high,
        "ratio_cap must be >= 1 + clip_high = {}, got {}",
        1 + clip_high,
        ratio_cap,
    )
    ratio = _ratio(log_ratio)
    moved = ratio.clamp(max=ratio_cap) * advantage
    ratio = ratio.detach()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    # The minimum of the two. A token at the bound still learns; what torch says of the gradients of
    # `minimum` and `clamp` there differs by its version.
    loss = -torch.where(clipped < moved, clipped, moved)
    return loss, {"ratio": ratio, **clip_stats(ratio, advantage, 1 - clip_low, 1 + clip_high)}


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()


def _kl_of_coins(first: Tensor, second: Tensor) -> Tensor:
    """KL divergence of two coins, by their log-probabilities of heads; infinite if only the second
    is certain.
    """
    first = first.clamp(max=0)
    second = second.clamp(max=0)
    other_side = -torch.expm1(first)
    heads = first.exp() * (first - second)
    tails = other_side * (log1mexp(first) - log1mexp(second))
    return heads + torch.where(other_side > 0, tails, 0.0)


def _kl(who: str, difference: Tensor, kind: str) -> Tensor:
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            # Of e^−d − 1 and d all but the square cancels; expm1 leaves its digits.
            difference = difference.clamp(min=-LOG_RATIO_LIMIT)
            return torch.expm1(-difference) + difference
    raise ValueError(f"{who}: kind must be k1, k2 or k3, got {kind!r}")


def clip_stats(moved: Tensor, advantage: Tensor, low: float, high: float) -> Stats:
    """Flags of the tokens whose gradient the clip stops: down with A < 0, up with A > 0, either."""
    is_low, is_high = (moved < low) & (advantage < 0), (moved > high) & (advantage > 0)
    flags = {
        "clip_ratio/low": is_low,
        "clip_ratio/high": is_high,
        "clip_ratio/region": is_low | is_high,
    }
    return {name: flag.to(moved.dtype) for name, flag in flags.items()}


def _by_sign(condition: Tensor, like: Tensor, positive: float, negative: float) -> Tensor:
    """One of two numbers, in the precision of ``like``: torch.where of two floats is float32."""
    return torch.where(condition, torch.full_like(like, positive), negative)
