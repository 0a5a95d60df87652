"""Distillation objectives: bring the student's next-token distribution to the teacher's.

    S, T    the student's and the teacher's distribution over the vocabulary at one position
    p, q    the teacher's and the student's probability of the token that was sampled there

The divergences take ``logp, teacher_logp``: log S and log T, [..., vocabulary], normalized over the
last dimension, in nats. For a temperature τ pass ``log_softmax(logits / τ)`` of both; no factor τ²
is applied here. A token of probability zero (−inf, as in a padded vocabulary) adds nothing and
passes no gradient. Only where a KL divergence is infinite by definition, since its second
distribution lacks a token that the first one has, does it come out as +inf. The teacher is not
detached. Objectives on sampled tokens take log-probabilities of those alone.

Every function returns ``(loss, stats)`` with one entry per token: nothing is reduced here. Shapes
that differ and hyper-parameters out of range raise ValueError. Where the vocabulary is too large to
hold, `burnish.kernels` has the same divergences per token, from hidden states.

Sums give more: the symmetric (Jeffreys) divergence is `forward_kl` + `reverse_kl`, DistiLLM-2
(arXiv:2503.07067) `skew_forward_kl` on completions of the teacher + `skew_reverse_kl` on those of
the student, GOLD's hybrid loss a divergence of the tokens that both tokenizers have + `uld` of the
others.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .numerics import log_remainder
from .sequence import sequence_length, sequence_sum
from .types import (
    FlatTokens,
    Margin,
    PerToken,
    Positive,
    SequenceIds,
    Share,
    Stats,
    check_roles,
    flat,
    require,
    same_shape,
    within,
)

Distributions = Float[Tensor, "*tokens vocabulary"]


def forward_kl(logp: Distributions, teacher_logp: Distributions) -> tuple[PerToken, Stats]:
    """Forward KL divergence, the classic: the student must cover whatever the teacher may say.

        ℓ = KL(T‖S) = Σ_v T_v (log T_v − log S_v)

    Paper: Hinton et al. 2015, arXiv:1503.02531.
    """
    same_shape("forward_kl", logp=logp, teacher_logp=teacher_logp)
    check_roles("forward_kl", {"logp": logp}, teacher_logp=teacher_logp)
    return _kl(teacher_logp, logp), {}


def reverse_kl(logp: Distributions, teacher_logp: Distributions) -> tuple[PerToken, Stats]:
    """Reverse KL divergence: the student must not say what the teacher would not.

        ℓ = KL(S‖T) = Σ_v S_v (log S_v − log T_v)

    Paper: Gu et al. 2023 (MiniLLM), arXiv:2306.08543; per token: Agarwal et al. 2023,
    arXiv:2306.13649.
    """
    same_shape("reverse_kl", logp=logp, teacher_logp=teacher_logp)
    check_roles("reverse_kl", {"logp": logp}, teacher_logp=teacher_logp)
    return _kl(logp, teacher_logp), {}


def generalized_jsd(
    logp: Distributions, teacher_logp: Distributions, *, beta: float
) -> tuple[PerToken, Stats]:
    """Generalized Jensen-Shannon divergence, between forward and reverse KL, and bounded.

        ℓ = β KL(T‖M) + (1 − β) KL(S‖M),  M = βT + (1 − β)S

    At the ends, where this would vanish, it is `forward_kl` (β = 0) and `reverse_kl` (β = 1), as in
    TRL: the limits of ℓ/β and ℓ/(1 − β). So a small β needs a learning rate larger by 1/β.

    Args:
        beta: β in [0, 1], the teacher's share in M.

    Paper: Agarwal et al. 2023 (GKD), arXiv:2306.13649, Eq. 1.
    """
    same_shape("generalized_jsd", logp=logp, teacher_logp=teacher_logp)
    check_roles("generalized_jsd", {"logp": logp}, teacher_logp=teacher_logp)
    within("generalized_jsd", Share, beta=beta)
    if beta == 0:
        return forward_kl(logp, teacher_logp)
    if beta == 1:
        return reverse_kl(logp, teacher_logp)
    mixture = _mixture(teacher_logp, logp, beta)
    return beta * _kl(teacher_logp, mixture) + (1 - beta) * _kl(logp, mixture), {}


def skew_forward_kl(
    logp: Distributions, teacher_logp: Distributions, *, alpha: float
) -> tuple[PerToken, Stats]:
    """Skew KL divergence: forward KL to a student that is helped by the teacher, and so bounded by
    −log α.

        ℓ = KL(T ‖ αT + (1 − α)S)

    Args:
        alpha: α in (0, 1), 0.1 in the paper; towards 0 it is `forward_kl`.

    Paper: Ko et al. 2024 (DistiLLM), arXiv:2402.03898.
    """
    same_shape("skew_forward_kl", logp=logp, teacher_logp=teacher_logp)
    check_roles("skew_forward_kl", {"logp": logp}, teacher_logp=teacher_logp)
    _check_alpha("skew_forward_kl", alpha)
    return _kl(teacher_logp, _mixture(teacher_logp, logp, alpha)), {}


def skew_reverse_kl(
    logp: Distributions, teacher_logp: Distributions, *, alpha: float
) -> tuple[PerToken, Stats]:
    """Skew reverse KL divergence: reverse KL to a teacher that admits some of the student, bounded
    by −log α.

        ℓ = KL(S ‖ αS + (1 − α)T)

    Args:
        alpha: α in (0, 1), 0.1 in the paper; towards 0 it is `reverse_kl`.

    Paper: Ko et al. 2024 (DistiLLM), arXiv:2402.03898.
    """
    same_shape("skew_reverse_kl", logp=logp, teacher_logp=teacher_logp)
    check_roles("skew_reverse_kl", {"logp": logp}, teacher_logp=teacher_logp)
    _check_alpha("skew_reverse_kl", alpha)
    return _kl(logp, _mixture(logp, teacher_logp, alpha)), {}


def alpha_beta_divergence(
    logp: Distributions, teacher_logp: Distributions, *, alpha: Positive, beta: Positive
) -> tuple[PerToken, Stats]:
    """α-β divergence: two knobs for what forward and reverse KL weigh differently, tokens and
    errors.

        ℓ = −1/(αβ) Σ_v [ T^α S^β − α/(α + β) T^(α + β) − β/(α + β) S^(α + β) ]

    A large α weighs the tokens that the teacher favors, a large β those of the student. Towards β →
    0 with α = 1 it is `forward_kl`, towards α → 0 with β = 1 `reverse_kl`, and with α + β = 1 an
    α-divergence; at ½ and ½ it is four times the squared Hellinger distance.

    Args:
        alpha, beta: α, β > 0: 0.2 and 0.7 in most of the paper's experiments.

    Paper: Wang et al. 2025 (ABKD), arXiv:2505.04560; the divergence: Cichocki et al. 2011.
    """
    same_shape("alpha_beta_divergence", logp=logp, teacher_logp=teacher_logp)
    check_roles("alpha_beta_divergence", {"logp": logp}, teacher_logp=teacher_logp)
    within("alpha_beta_divergence", Positive, alpha=alpha, beta=beta)
    total = alpha + beta
    # With the larger of T and S taken out, what is left is of their ratio: exactly 0 where they are
    # equal.
    lowest = torch.finfo(logp.dtype).min / 2  # of −inf and −inf there is no ratio
    student = logp.clamp(min=lowest)
    teacher = teacher_logp.clamp(min=lowest)
    larger = torch.maximum(student, teacher)
    log_ratio = -(student - teacher).abs()
    power = torch.where(student > teacher, torch.full_like(student, alpha), beta)
    rest = power / total * torch.expm1(total * log_ratio) - torch.expm1(power * log_ratio)
    return ((total * larger).exp() * rest).sum(-1) / (alpha * beta), {}


def taid(logp: Distributions, teacher_logp: Distributions, *, t: Share) -> tuple[PerToken, Stats]:
    """TAID: forward KL to a teacher that starts as the student itself and becomes the teacher as t
    goes to 1.

        ℓ = KL(P_t ‖ S),  P_t = softmax((1 − t) sg(log S) + t log T)

    t = 1 is `forward_kl`; at t = 0 there is no gradient. The paper raises t as fast as the loss
    falls.

    Args:
        t: in [0, 1], how far the teacher has come.

    Paper: Shing et al. 2025, arXiv:2501.16937.
    """
    same_shape("taid", logp=logp, teacher_logp=teacher_logp)
    check_roles("taid", {"logp": logp}, teacher_logp=teacher_logp)
    within("taid", Share, t=t)
    lowest = torch.finfo(logp.dtype).min / 2  # −inf · 0 is no number
    student = logp.detach().clamp(min=lowest)
    teacher = teacher_logp.clamp(min=lowest)
    between = ((1 - t) * student + t * teacher).log_softmax(-1)
    return _kl(between, logp), {}


def uld(
    logp: Distributions, teacher_logp: Float[Tensor, "*tokens teacher_vocabulary"]
) -> tuple[PerToken, Stats]:
    """Universal logit distillation, across tokenizers: how likely the likeliest token is, the
    second likeliest, and so on, whichever tokens these are.

        ℓ = Σ_i |S_(i) − T_(i)|,  S_(i), T_(i) the i-th largest probability; 0 beyond the smaller vocabulary

    In [0, 2], and never more than Σ_v |S_v − T_v|. It is what two tokenizers leave to compare: pass
    the distributions at which both texts stand at the same character. GOLD (TRL) passes only the
    tokens that one of the vocabularies lacks, whose probabilities then add up to less than 1.

    Args:
        teacher_logp: log T over the teacher's own vocabulary.

    Paper: Boizard et al. 2024, arXiv:2402.12030.
    """
    same_shape("uld", logp=logp[..., 0], teacher_logp=teacher_logp[..., 0])
    check_roles("uld", {"logp": logp}, teacher_logp=teacher_logp)
    student = logp.exp().sort(-1, descending=True).values
    teacher = teacher_logp.exp().sort(-1, descending=True).values
    missing = teacher.shape[-1] - student.shape[-1]
    student = F.pad(student, (0, max(missing, 0)))
    teacher = F.pad(teacher, (0, max(-missing, 0)))
    return (student - teacher).abs().sum(-1), {}


def with_tail(logp: Float[Tensor, "*tokens k"]) -> Float[Tensor, "*tokens k+1"]:
    """Add the rest of the vocabulary as one more token, so that k log-probabilities are a
    distribution.

        [log p_1, …, log p_k]  ->  [log p_1, …, log p_k, log(1 − Σ p_i)]

    Composes with every divergence: take the teacher's top k, the student's log-probabilities of the
    same k tokens, and both with their tails. The result is a lower bound of the divergence over the
    whole vocabulary. A rest below the machine epsilon ε of the dtype, or below zero, is rounding,
    and is read as ε.
    """
    return torch.cat([logp, log_remainder(logp.logsumexp(-1, keepdim=True))], -1)


def sampled_reverse_kl(logp: PerToken, teacher_logp: PerToken) -> tuple[PerToken, Stats]:
    """On-policy distillation: reverse KL from the sampled tokens alone, by policy gradient.

        ℓ = sg(log q − log p) log q

    Over tokens that the student sampled, the mean of its gradient is that of the per-token
    `reverse_kl`, and the mean of ``stats["reverse_kl"]`` = log q − log p is the divergence itself;
    its negative is the reward or advantage for any other policy objective.

    Args:
        logp: log q, under the student, of tokens sampled from it; teacher_logp: log p, of the same
            tokens.

    Paper: Gu et al. 2023 (MiniLLM), arXiv:2306.08543, the single step of its Eq. 3 by sampling.
    """
    same_shape("sampled_reverse_kl", logp=logp, teacher_logp=teacher_logp)
    check_roles("sampled_reverse_kl", {"logp": logp}, teacher_logp=teacher_logp)
    log_ratio = (logp - teacher_logp).detach()
    return log_ratio * logp, {"reverse_kl": log_ratio}


def iw_opd(
    logp: FlatTokens,
    teacher_logp: FlatTokens,
    sequence: SequenceIds,
    *,
    gamma: Margin = 0.5,
) -> tuple[FlatTokens, Stats]:
    """Importance-weighted on-policy distillation: tokens count more, the less their prefix has left
    what the teacher would say.

        ℓ_t = sg(w_t a_t) log q_t,  a_t = log q_t − log p_t
        w_t = 1 + γ (1 − Σ_{s<t} |a_s| / Σ_s |a_s|)

    γ = 0 is `sampled_reverse_kl`. The first token has w = 1 + γ, as have all tokens of a completion
    where student and teacher agree.

    Args:
        logp: log q, under the student, of tokens sampled from it; teacher_logp: log p, of the same
            tokens.
        gamma: γ ≥ 0; 0.5 is TRL's.

    Paper: Xie et al. 2026, arXiv:2606.22600, Algorithm 1, as in TRL's code.
    """
    same_shape("iw_opd", logp=logp, teacher_logp=teacher_logp, sequence=sequence)
    flat("iw_opd", logp=logp)
    check_roles("iw_opd", {"logp": logp}, teacher_logp=teacher_logp)
    within("iw_opd", Margin, gamma=gamma)
    log_ratio = (logp - teacher_logp).detach()
    distance = log_ratio.abs()
    sequences = int(sequence.max()) + 1 if len(sequence) else 0
    later = _sum_of_later(distance, sequence, sequences)
    total = sequence_sum(distance, sequence, sequences)[sequence]
    # 1 − (total − later − own)/total, of which nothing is left to divide where all agree
    left = torch.where(total > 0, (later + distance) / total.where(total > 0, 1), 1.0)
    weight = 1 + gamma * left
    return weight * log_ratio * logp, {"reverse_kl": log_ratio, "importance": weight}


def minillm(
    divergence: FlatTokens,
    logp: FlatTokens,
    teacher_logp: FlatTokens,
    sequence: SequenceIds,
    sequences: int,
    *,
    alpha: float,
) -> tuple[FlatTokens, Stats]:
    """MiniLLM: reverse KL of whole completions by policy gradient; each token also counts for the
    tokens after it.

        ℓ_t = sg(w_t) [KL_t(S‖T) − sg(R_t) log q_t]
        R_t = mean_{t' > t} (log p_t' − log q_t'),  0 for the last token
        w_t = q_t / (αp_t + (1 − α)q_t)

    The single step is exact, over the vocabulary; the long run is normalized by length; w_t, the
    weight of one step, stands for the product up to t. The paper prints 1/(T − t − 1) before a sum
    of T − t terms; here it is their mean.

    Args:
        divergence: KL_t(S‖T) at each token, by `reverse_kl`.
        logp: log q, under the student, of the sampled tokens; teacher_logp: log p, of the same
            tokens.
        alpha: α in [0, 1), the teacher's share in the mixture that the tokens were sampled from:
            0.2 in the paper, 0 if the student sampled alone.

    Paper: Gu et al. 2023, arXiv:2306.08543, Eq. 7. Its pretraining loss is another term of the mix.
    """
    same_shape(
        "minillm", divergence=divergence, logp=logp, teacher_logp=teacher_logp, sequence=sequence
    )
    flat("minillm", logp=logp)
    check_roles("minillm", {"divergence": divergence, "logp": logp}, teacher_logp=teacher_logp)
    require("minillm", 0 <= alpha < 1, "alpha must be in [0, 1), got {}", alpha)
    reward = (teacher_logp - logp).detach()
    ratio = reward.exp().clamp(max=torch.finfo(reward.dtype).max)  # 0 · inf is no number
    weight = 1 / (alpha * ratio + (1 - alpha))
    loss = weight * (divergence - _mean_of_later(reward, sequence, sequences) * logp)
    return loss, {"reverse_kl": -reward, "importance": weight}


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Σ_v P_v (log P_v − log Q_v) over the last dimension, with 0 · anything = 0 in value and
    gradient.
    """
    mass = first.exp()
    return (mass * torch.where(mass > 0, first - second, 0)).sum(-1)


def _mixture(first: Tensor, second: Tensor, share: float) -> Tensor:
    """log(aP + (1 − a)Q). A log-probability of −inf becomes the lowest finite number, whose
    gradient is no NaN.
    """
    first, second = (x.clamp(min=torch.finfo(x.dtype).min) for x in (first, second))
    # a tensor: torch.compile would compile anew for each math.log
    weight = first.new_full((), share)
    return torch.logaddexp(first + torch.log(weight), second + torch.log1p(-weight))


def _mean_of_later(x: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """For each token, the mean of x over the later tokens of its sequence; 0 for the last one."""
    length = sequence_length(sequence, sequences)
    later = length[sequence] - _position(length, sequence) - 1
    return _sum_of_later(x, sequence, sequences) / later.clamp(min=1)


def _position(length: Tensor, sequence: Tensor) -> Tensor:
    """The place of each token in its sequence, from 0."""
    place = torch.arange(len(sequence), device=sequence.device)
    return place - (length.cumsum(0) - length)[sequence]


def _sum_of_later(x: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """For each token, the sum of x over the later tokens of its sequence."""
    position = _position(sequence_length(sequence, sequences), sequence)
    # One row to a sequence, so that no sum runs across two of them; one column more, for what
    # follows the last token.
    rows = x.new_zeros(sequences, int(position.max()) + 2 if x.numel() else 1)
    rows[sequence, position] = x
    return rows.flip(1).cumsum(1).flip(1)[sequence, position + 1]


def _check_alpha(who: str, alpha: float) -> None:
    require(who, 0 < alpha < 1, "alpha must be in (0, 1), got {}", alpha)
