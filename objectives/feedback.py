"""Feedback objectives: learn from single completions, each of them marked desirable or undesirable.

    r    log π(y|x)/π_ref(y|x), the log-ratio of a whole completion to the frozen reference
    s    +1 if the completion is desirable, −1 if it is not
    σ    the logistic function 1/(1 + e^−x)

``logp, ref_logp`` are log π(y|x) and log π_ref(y|x), summed over the tokens, in nats; ``desirable``
is Bool, of the same shape, and may hold one class only. β > 0 scales log-ratios to rewards. The
reference points z₀ and δ mix completions, so they are arguments: one number each, found beforehand
over the whole step; no gradient passes through them. Every function returns ``(loss, stats)`` with
one entry per completion: nothing is reduced here. ``stats`` holds the reward βr and whether it lies
on its label's side of the reference point; their means over one class need a weighting of their
own. Shapes that differ and hyper-parameters out of range raise ValueError.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from .types import PerSequence, Positive, Stats, check_roles, one_per, require, same_shape, within


def kto(
    logp: PerSequence,
    ref_logp: PerSequence,
    desirable: Bool[Tensor, " sequences"],
    kl: Float[Tensor, ""],
    *,
    beta: Positive,
    desirable_weight: Positive = 1.0,
    undesirable_weight: Positive = 1.0,
) -> tuple[PerSequence, Stats]:
    """Kahneman-Tversky optimization: gains and losses are felt against a reference point, and ever
    less far from it.

        ℓ = λ (1 − σ(s β (r − z₀))),  λ = λ_D for a desirable completion and λ_U for an undesirable one

    Args:
        kl: z₀ ≥ 0, an estimate of the KL divergence from the reference to the policy, by `kto_kl`.
        desirable_weight, undesirable_weight: λ_D, λ_U > 0; they may also balance classes of unequal
            size.

    Paper: Ethayarajh et al. 2024, arXiv:2402.01306.
    """
    within(
        "kto", Positive, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    _check_scalar("kto", kl=kl)
    x, stats = _signed_reward("kto", logp, ref_logp, desirable, beta * kl, beta)
    regret = (-x).sigmoid()
    loss = torch.where(desirable, desirable_weight * regret, undesirable_weight * regret)
    return loss, stats | {"kl": _repeated(kl, x)}


def kto_kl(logp: PerSequence, ref_logp: PerSequence) -> Float[Tensor, ""]:
    """KTO's reference point z₀: how far the policy has moved, from completions that were given to
    other prompts.

        z₀ = max(0, mean_i log π(y_j|x_i)/π_ref(y_j|x_i)),  j ≠ i,  detached

    Pass the mismatched completions of the whole step: the maximum of a mean is not the mean of
    maxima. TRL's z₀ is that of a micro-batch. Without any completion z₀ is 0.

    Paper: Ethayarajh et al. 2024, arXiv:2402.01306.
    """
    same_shape("kto_kl", logp=logp, ref_logp=ref_logp)
    one_per("kto_kl", "completion", logp=logp)
    return F.relu((logp - ref_logp).detach().sum() / max(logp.numel(), 1))


def apo_zero_unpaired(
    logp: PerSequence,
    ref_logp: PerSequence,
    desirable: Bool[Tensor, " sequences"],
    *,
    beta: Positive,
    desirable_weight: Positive = 1.0,
    undesirable_weight: Positive = 1.0,
) -> tuple[PerSequence, Stats]:
    """Anchored preference optimization on single completions: desirable ones up from the reference,
    others down.

        ℓ = λ (1 − σ(s β r)),  λ as in `kto`; the paper has none

    It is `kto` with z₀ = 0, and the two halves of `preference.apo_zero`.

    Paper: D'Oosterlinck et al. 2024, arXiv:2408.06266.
    """
    within(
        "apo_zero_unpaired",
        Positive,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    x, stats = _signed_reward(
        "apo_zero_unpaired", logp, ref_logp, desirable, logp.new_zeros(()), beta
    )
    regret = (-x).sigmoid()
    return torch.where(desirable, desirable_weight * regret, undesirable_weight * regret), stats


def bco(
    logp: PerSequence,
    ref_logp: PerSequence,
    desirable: Bool[Tensor, " sequences"],
    delta: Float[Tensor, ""],
    *,
    beta: Positive,
) -> tuple[PerSequence, Stats]:
    """Binary classifier optimization: the reward, shifted, is the logit of a classifier of
    completions.

        ℓ = −log σ(s (β r − δ))

    Summed over a desirable and an undesirable completion it is an upper bound of their DPO loss,
    for any δ; the shift tightens it.

    Args:
        delta: δ, the running mean of the rewards βr (``stats["rewards"]``), of either class.

    Paper: Jung et al. 2024, arXiv:2404.04656. Its density ratios between the classes' prompts are
    weights of the mix.
    """
    _check_scalar("bco", delta=delta)
    x, stats = _signed_reward("bco", logp, ref_logp, desirable, delta, beta)
    return -F.logsigmoid(x), stats | {"delta": _repeated(delta, x)}


def dro(
    logp: PerSequence,
    ref_logp: PerSequence,
    value: PerSequence,
    reward: PerSequence,
    *,
    beta: Positive,
) -> tuple[PerSequence, Stats]:
    """Direct reward optimization: of rated completions, each rating is to be its prompt's value
    plus the reward βr.

        ℓ = ½ (R − V − βr)²,  β being the paper's τ

    At its minimum V is the prompt's soft value β log E_ref[e^{R/β}], and π the optimum of the
    reward under a KL penalty of β. Both V and π learn from it. With V constant, its gradient is β
    times the gradient of `reinforce` with advantage R − V plus β · k2 of `kl_estimate` to the
    reference, which verl calls dro. A*-PO (arXiv:2505.20686) is twice it, with V the constant
    `optimal_value` of the prompt.

    Args:
        value: V, the value of the prompt, of a value head or another model.
        reward: R, the rating, a constant.

    Paper: Richemond et al. 2024, arXiv:2405.19107.
    """
    same_shape("dro", logp=logp, ref_logp=ref_logp, value=value, reward=reward)
    one_per("dro", "completion", logp=logp)
    check_roles("dro", {"logp": logp, "value": value}, ref_logp=ref_logp, reward=reward)
    within("dro", Positive, beta=beta)
    implied = beta * (logp - ref_logp)
    error = reward - value - implied
    return 0.5 * error.square(), {
        "rewards": implied.detach(),
        "value": value.detach(),
        "error": error.detach().abs(),
    }


def _signed_reward(
    who: str, logp: Tensor, ref_logp: Tensor, desirable: Tensor, shift: Tensor, beta: float
) -> tuple[Tensor, Stats]:
    """s (βr − shift), positive where reward and label agree, and the statistics, after the checks
    all share.
    """
    same_shape(who, logp=logp, ref_logp=ref_logp, desirable=desirable)
    one_per(who, "completion", logp=logp)
    check_roles(who, {"logp": logp}, ref_logp=ref_logp)
    require(
        who,
        desirable.dtype == torch.bool,
        "desirable must be a Bool tensor, got {}",
        desirable.dtype,
    )
    within(who, Positive, beta=beta)
    reward = beta * (logp - ref_logp)
    above = reward - shift.detach()
    x = torch.where(desirable, above, -above)
    return x, {"rewards": reward.detach(), "rewards/accuracies": (x > 0).to(x.dtype)}


def _check_scalar(who: str, **value: Tensor) -> None:
    for name, tensor in value.items():
        require(
            who,
            tensor.ndim == 0,
            "{} must be one number, a 0-dim tensor, got {}",
            name,
            list(tensor.shape),
        )


def _repeated(value: Tensor, like: Tensor) -> Tensor:
    """The value once per completion, so that its weighted mean is itself."""
    return value.detach().to(like.dtype).expand_as(like)
