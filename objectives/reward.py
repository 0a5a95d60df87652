"""Reward objectives: learn a score of completions, or of the steps of a solution, from what people said of them.

    r    the score of a completion, a real number: only differences count, in nats of log-odds of being preferred
    z    the logit of a step being right
    σ    the logistic function 1/(1 + e^−x)

Every objective returns ``(loss, stats)`` with one entry per pair, completion or step: nothing is reduced here. Shapes
that differ raise ValueError. A score of another group or solution never enters an entry.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from .sequence import sequence_length, sequence_mean
from .types import (
    FlatTokens,
    IntPerSequence,
    PerPair,
    PerSequence,
    PerToken,
    SequenceIds,
    Stats,
    check_roles,
    one_per,
    require,
    same_shape,
)


def bradley_terry(chosen: PerPair, rejected: PerPair, margin: PerPair | float = 0.0) -> tuple[PerPair, Stats]:
    """Bradley-Terry: the odds that a completion is preferred are e to the difference of the scores.

        ℓ = −log σ(r_w − r_l − m)

    Args:
        margin: m, one number or one per pair: by how much the chosen completion is better, where that is known.

    Paper: Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155; the margin: Touvron et al. 2023 (Llama 2),
    arXiv:2307.09288.
    """
    same_shape("bradley_terry", chosen=chosen, rejected=rejected)
    one_per("bradley_terry", "pair", chosen=chosen)
    check_roles("bradley_terry", {"chosen": chosen, "rejected": rejected})
    if isinstance(margin, Tensor):
        same_shape("bradley_terry", chosen=chosen, margin=margin)
    else:
        require("bradley_terry", -math.inf < margin < math.inf, "margin must be finite, got {}", margin)
    difference = chosen - rejected
    stats = {
        "mean_reward": ((chosen + rejected) / 2).detach(),
        "margin": difference.detach(),
        "accuracy": (difference > 0).to(difference.dtype),
    }
    return -F.logsigmoid(difference - margin), stats


def centering(chosen: PerPair, rejected: PerPair) -> tuple[PerPair, Stats]:
    """Keep the scores, which preferences determine up to a constant only, near zero: ℓ = (r_w + r_l)².

    Paper: Eisenstein et al. 2023, arXiv:2312.09244, with coefficient 0.01.
    """
    same_shape("centering", chosen=chosen, rejected=rejected)
    one_per("centering", "pair", chosen=chosen)
    check_roles("centering", {"chosen": chosen, "rejected": rejected})
    return (chosen + rejected).square(), {}


def plackett_luce(score: PerSequence, group: IntPerSequence, rank: IntPerSequence) -> tuple[PerSequence, Stats]:
    """Plackett-Luce: a ranking is a sequence of choices, each of the best among the completions that are left.

        ℓ_i = log Σ_{j: rank_j ≥ rank_i} e^{r_j} − r_i,  j in the group of i

    The sum over a group is the negative log-likelihood of its ranking; two completions are `bradley_terry`. Completions
    of equal rank are all left when either is chosen (Breslow's treatment of ties), which is best when they score alike.
    Memory grows with the square of the number of completions in the call. ``stats["accuracy"]`` is the share of the
    completions of other rank in its group that completion i stands on the right side of, 0 where there is none.

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


def step_loss(logit: PerToken, label: PerToken | Bool[Tensor, "*tokens"]) -> tuple[PerToken, Stats]:
    """Process reward: is this step of the solution right? Cross-entropy at the end of each step.

        ℓ = −y log σ(z) − (1 − y) log σ(−z)

    Args:
        label: y, Bool, or the probability in [0, 1] that the step is right, as estimated from rollouts.

    Paper: Uesato et al. 2022, arXiv:2211.14275; Lightman et al. 2023, arXiv:2305.20050; soft labels: Wang et al. 2023
    (Math-Shepherd), arXiv:2312.08935.
    """
    same_shape("step_loss", logit=logit, label=label)
    check_roles("step_loss", {"logit": logit}, label=label)
    y = label.to(logit.dtype)
    loss = -y * F.logsigmoid(logit) - (1 - y) * F.logsigmoid(-logit)
    return loss, {"accuracy": (logit * (y - 0.5) > 0).to(loss.dtype)}


def step_aggregate(
    step_score: FlatTokens, sequence: SequenceIds, sequences: int, *, how: Literal["min", "prod", "last", "mean"]
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

    Paper: Lightman et al. 2023, arXiv:2305.20050 (prod, min); Snell et al. 2024, arXiv:2408.03314 (last).
    """
    same_shape("step_aggregate", step_score=step_score, sequence=sequence)
    length = sequence_length(sequence, sequences)
    match how:
        case "min" | "prod":
            operation, neutral = ("amin", math.inf) if how == "min" else ("prod", 1.0)
            reduced = step_score.new_full((sequences,), neutral).scatter_reduce(0, sequence, step_score, operation)
            return torch.where(length > 0, reduced, 0)
        case "last":
            end = length.cumsum(0) - 1
            return step_score.new_zeros(sequences).masked_scatter(length > 0, step_score[end[length > 0]])
        case "mean":
            return sequence_mean(step_score, sequence, sequences)
    raise ValueError(f"step_aggregate: how must be min, prod, last or mean, got {how!r}")


def elo(score: PerSequence) -> PerSequence:
    """Scores in Elo points, 400/ln 10 to the nat: 400 points apart, the better completion wins ten times as often."""
    return score * (400 / math.log(10))
