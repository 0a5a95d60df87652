"""Reward objectives: learn a score of completions, or of the steps of a solution, from what people
said of them.

    r    the score of a completion, a real number: only differences count, in nats of log-odds of being preferred
    z    the logit of a step being right
    σ    the logistic function 1/(1 + e^−x)

Every objective returns ``(loss, stats)`` with one entry per pair, completion or step: nothing is
reduced here. Shapes that differ raise ValueError. A score of another group or solution never enters
an entry.
"""

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from .numerics import log1mexp
from .sequence import sequence_length, sequence_mean
from .types import (
    FlatTokens,
    IntPerSequence,
    PerPair,
    PerSequence,
    PerToken,
    Positive,
    Range,
    SequenceIds,
    Stats,
    check_roles,
    flat,
    one_per,
    require,
    same_shape,
    within,
)

Histogram = Float[Tensor, "*tokens bins"]
Finite = Annotated[float, Range("finite", lambda x, _: -math.inf < x < math.inf)]
Above = Annotated[float, Range("finite, above low", lambda x, others: others["low"] < x < math.inf)]


def bradley_terry(
    chosen: PerPair, rejected: PerPair, margin: PerPair | float = 0.0
) -> tuple[PerPair, Stats]:
    """Bradley-Terry: the odds that a completion is preferred are e to the difference of the scores.

        ℓ = −log σ(r_w − r_l − m)

    Args:
        margin: m, one number or one per pair: by how much the chosen completion is better, where
            that is known.

    Paper: Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155; the margin: Touvron et al.
    2023 (Llama 2), arXiv:2307.09288.
    """
    same_shape("bradley_terry", chosen=chosen, rejected=rejected)
    one_per("bradley_terry", "pair", chosen=chosen)
    check_roles("bradley_terry", {"chosen": chosen, "rejected": rejected})
    if isinstance(margin, Tensor):
        same_shape("bradley_terry", chosen=chosen, margin=margin)
        check_roles("bradley_terry", {"chosen": chosen, "rejected": rejected}, margin=margin)
    else:
        require(
            "bradley_terry", -math.inf < margin < math.inf, "margin must be finite, got {}", margin
        )
    difference = chosen - rejected
    stats = {
        "mean_reward": ((chosen + rejected) / 2).detach(),
        "margin": difference.detach(),
        "accuracy": (difference > 0).to(difference.dtype),
    }
    return -F.logsigmoid(difference - margin), stats


def bradley_terry_ties(
    chosen: PerPair, rejected: PerPair, tied: Bool[Tensor, " pairs"], *, threshold: Positive
) -> tuple[PerPair, Stats]:
    """Bradley-Terry with ties: two completions whose scores differ by less than a threshold look
    alike to people.

        ℓ = −log σ(d − λ) of a pair that was decided, −log [1 − σ(d − λ) − σ(−d − λ)] of a tie,  d = r_w − r_l

    Args:
        tied: Bool; the two completions of a tie may be in either place.
        threshold: λ > 0, the logarithm of the model's θ, in units of the score.

    Paper: Rao and Kupper 1967; for reward models: Liu et al. 2024, arXiv:2410.05328.
    """
    same_shape("bradley_terry_ties", chosen=chosen, rejected=rejected, tied=tied)
    one_per("bradley_terry_ties", "pair", chosen=chosen)
    check_roles("bradley_terry_ties", {"chosen": chosen, "rejected": rejected})
    require(
        "bradley_terry_ties",
        tied.dtype == torch.bool,
        "tied must be a Bool tensor, got {}",
        tied.dtype,
    )
    within("bradley_terry_ties", Positive, threshold=threshold)
    difference = chosen - rejected
    won = F.logsigmoid(difference - threshold)
    lost = F.logsigmoid(-difference - threshold)
    # 1 − σ(d − λ) − σ(−d − λ) = (e^{2λ} − 1) σ(d − λ) σ(−d − λ)
    doubled = difference.new_full((), 2 * threshold)
    tie = doubled + log1mexp(-doubled) + won + lost
    right = torch.where(tied, difference.abs() < threshold, difference > 0)
    stats = {
        "mean_reward": ((chosen + rejected) / 2).detach(),
        "margin": difference.detach(),
        "accuracy": right.to(difference.dtype),
    }
    return -torch.where(tied, tie, won), stats


def ordinal_preference(
    chosen: PerPair, rejected: PerPair, preference: PerPair
) -> tuple[PerPair, Stats]:
    """Bradley-Terry with degrees: people say how much better a completion is, slightly or by far,
    or that neither is.

        ℓ = −z log σ(d) − (1 − z) log σ(−d),  d = r_w − r_l

    Args:
        preference: z in [0, 1], the share of people who would prefer the chosen completion: 1 is
            `bradley_terry`, ½ a tie.

    Paper: Liu et al. 2024, arXiv:2411.12843.
    """
    same_shape("ordinal_preference", chosen=chosen, rejected=rejected, preference=preference)
    one_per("ordinal_preference", "pair", chosen=chosen)
    check_roles(
        "ordinal_preference", {"chosen": chosen, "rejected": rejected}, preference=preference
    )
    difference = chosen - rejected
    loss = -preference * F.logsigmoid(difference) - (1 - preference) * F.logsigmoid(-difference)
    stats = {
        "mean_reward": ((chosen + rejected) / 2).detach(),
        "margin": difference.detach(),
        "accuracy": (difference * (preference - 0.5) > 0).to(difference.dtype),
    }
    return loss, stats


def centering(chosen: PerPair, rejected: PerPair) -> tuple[PerPair, Stats]:
    """Keep the scores, which preferences determine up to a constant only, near zero: ℓ = (r_w +
    r_l)².

    Paper: Eisenstein et al. 2023, arXiv:2312.09244, with coefficient 0.01.
    """
    same_shape("centering", chosen=chosen, rejected=rejected)
    one_per("centering", "pair", chosen=chosen)
    check_roles("centering", {"chosen": chosen, "rejected": rejected})
    return (chosen + rejected).square(), {}


def plackett_luce(
    score: PerSequence, group: IntPerSequence, rank: IntPerSequence
) -> tuple[PerSequence, Stats]:
    """Plackett-Luce: a ranking is a sequence of choices, each of the best among the completions
    that are left.

        ℓ_i = log Σ_{j: rank_j ≥ rank_i} e^{r_j} − r_i,  j in the group of i

    The sum over a group is the negative log-likelihood of its ranking; two completions are
    `bradley_terry`. Completions of equal rank are all left when either is chosen (Breslow's
    treatment of ties), which is best when they score alike. Memory grows with the square of the
    number of completions in the call. ``stats["accuracy"]`` is the share of the completions of
    other rank in its group that completion i stands on the right side of, 0 where there is none.

    Args:
        group: int64, the group of completions to one prompt that each completion belongs to.
        rank: int64, 0 = best.

    Paper: Plackett 1975; Luce 1959; ties: Breslow 1974.
    """
    same_shape("plackett_luce", score=score, group=group, rank=rank)
    one_per("plackett_luce", "completion", score=score)
    check_roles("plackett_luce", {"score": score})
    together = group[:, None] == group
    left = together & (rank >= rank[:, None])
    loss = score.expand(left.shape).masked_fill(~left, -math.inf).logsumexp(1) - score

    ranked = together & (rank != rank[:, None])
    right = ranked & ((score[:, None] - score).sign() == (rank - rank[:, None]).sign())
    accuracy = right.to(score.dtype).sum(1) / ranked.sum(1).clamp(min=1)
    return loss, {"mean_reward": score.detach(), "accuracy": accuracy}


def score_regression(score: PerSequence, target: PerSequence) -> tuple[PerSequence, Stats]:
    """Regress the score to a rating: ℓ = (r − y)².

    Paper: Wang et al. 2024 (HelpSteer2), arXiv:2406.08673.
    """
    same_shape("score_regression", score=score, target=target)
    one_per("score_regression", "completion", score=score)
    check_roles("score_regression", {"score": score}, target=target)
    error = score - target
    return error.square(), {"mean_reward": score.detach(), "absolute_error": error.detach().abs()}


def hl_gauss(
    logp: Histogram, target: PerToken, *, low: Finite, high: Above, sigma: Positive
) -> tuple[PerToken, Stats]:
    """HL-Gauss: learn a number by classification, of the bins of a histogram; for values, scores
    and ratings.

        ℓ = −Σ_i p_i log q_i,  p_i = share of a normal distribution around the target y in bin i, within [low, high]

    A target outside the range counts as its nearer end. Read the number off by `histogram_mean`.

    Args:
        logp: log q, [..., bins], normalized over the bins of equal width between ``low`` and
            ``high``.
        target: y, a number.
        sigma: σ > 0, in units of y; 0.75 of a bin's width in the paper.

    Paper: Farebrother et al. 2024, arXiv:2403.03950, after Imani and White 2018.
    """
    same_shape("hl_gauss", target=target, logp=logp[..., 0])
    check_roles("hl_gauss", {"logp": logp}, target=target)
    within("hl_gauss", Positive, sigma=sigma)
    _check_bounds("hl_gauss", low, high)
    y = target.clamp(low, high)
    bins = logp.shape[-1]
    edges = low + (high - low) / bins * torch.arange(bins + 1, dtype=logp.dtype, device=logp.device)
    below = torch.special.ndtr((edges - y[..., None]) / sigma)
    share = below.diff(dim=-1) / (below[..., -1:] - below[..., :1])
    loss = -torch.where(share > 0, share * logp, 0.0).sum(-1)
    mean = histogram_mean(logp.detach(), low=low, high=high)
    return loss, {"mean_reward": mean, "absolute_error": (mean - target.detach()).abs()}


def histogram_mean(logp: Histogram, *, low: Finite, high: Above) -> PerToken:
    """The number that a histogram stands for, Σ_i q_i c_i, c_i being the middle of bin i.

    Args:
        logp: log q, [..., bins], normalized over the bins of equal width between ``low`` and
            ``high``.

    Raises:
        ValueError: if the bounds are no finite numbers, or low ≥ high.
    """
    _check_bounds("histogram_mean", low, high)
    width = (high - low) / logp.shape[-1]
    place = torch.arange(logp.shape[-1], dtype=logp.dtype, device=logp.device)
    return logp.exp() @ (low + width * (place + 0.5))


def step_loss(logit: PerToken, label: PerToken | Bool[Tensor, "*tokens"]) -> tuple[PerToken, Stats]:
    """Process reward: is this step of the solution right? Cross-entropy at the end of each step.

        ℓ = −y log σ(z) − (1 − y) log σ(−z)

    Args:
        label: y, Bool, or the probability in [0, 1] that the step is right, as estimated from
            rollouts.

    Paper: Uesato et al. 2022, arXiv:2211.14275; Lightman et al. 2023, arXiv:2305.20050; soft
    labels: Wang et al. 2023 (Math-Shepherd), arXiv:2312.08935.
    """
    same_shape("step_loss", logit=logit, label=label)
    check_roles("step_loss", {"logit": logit}, label=label)
    y = label.to(logit.dtype)
    loss = -y * F.logsigmoid(logit) - (1 - y) * F.logsigmoid(-logit)
    return loss, {"accuracy": (logit * (y - 0.5) > 0).to(loss.dtype)}


def step_aggregate(
    step_score: FlatTokens,
    sequence: SequenceIds,
    sequences: int,
    *,
    how: Literal["min", "prod", "last", "mean"],
) -> PerSequence:
    """From the steps' probabilities of being right to one score of the solution.

        min     its weakest step
        prod    the probability that all steps are right, were they independent; falls with their number
        last    its last step, which has seen all others
        mean    the average step

    A solution without steps scores 0, and so is never picked for having nothing wrong.

    Args:
        step_score: probabilities, σ(z).
        sequence: int64, sorted: the solution each step belongs to.

    Raises:
        ValueError: if the shapes differ or ``how`` is none of these.

    Paper: Lightman et al. 2023, arXiv:2305.20050 (prod, min); Snell et al. 2024, arXiv:2408.03314
    (last).
    """
    same_shape("step_aggregate", step_score=step_score, sequence=sequence)
    flat("step_aggregate", step_score=step_score)
    length = sequence_length(sequence, sequences)
    match how:
        case "min" | "prod":
            operation, neutral = ("amin", math.inf) if how == "min" else ("prod", 1.0)
            reduced = step_score.new_full((sequences,), neutral).scatter_reduce(
                0, sequence, step_score, operation
            )
            return torch.where(length > 0, reduced, 0)
        case "last":
            end = length.cumsum(0) - 1
            return step_score.new_zeros(sequences).masked_scatter(
                length > 0, step_score[end[length > 0]]
            )
        case "mean":
            return sequence_mean(step_score, sequence, sequences)
    raise ValueError(f"step_aggregate: how must be min, prod, last or mean, got {how!r}")


def elo(score: PerSequence) -> PerSequence:
    """Scores in Elo points, 400/ln 10 to the nat: 400 points apart, the better completion wins ten
    times as often.
    """
    return score * (400 / math.log(10))


def _check_bounds(who: str, low: float, high: float) -> None:
    within(who, Finite, low=low)
    require(who, low < high < math.inf, "high must be finite, above low = {}, got {}", low, high)
