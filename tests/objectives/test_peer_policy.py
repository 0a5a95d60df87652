"""The same numbers as the peer: every GRPO loss of TRL 1.16, RLOO's and GMPO's, by its own
``_compute_loss``.

TRL holds padded rows and reduces inside; the weights that its reductions amount to stand here by
hand, one to a token.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from burnish.benchmarks.peer.trl_losses import make_rows, policy_loss
from burnish.objectives import policy
from burnish.objectives.sequence import sequence_mean, sequence_sum
from torch import Tensor

pytest.importorskip("trl", reason="the peer is not installed")

LENGTHS = torch.tensor([5, 1, 3, 4, 2, 5])
ANSWERS, LONGEST, LIMIT = 6, 5, 8
MASK = torch.arange(LONGEST) < LENGTHS[:, None]
SEQUENCE = torch.arange(ANSWERS)[:, None].expand(-1, LONGEST)[MASK]
ADVANTAGE = torch.tensor([1.5, -0.5, -2.0, 0.7, 0.0, -1.1], dtype=torch.float64)
LOW, HIGH = 0.2, 0.28

# What TRL's reduction gives each token of an answer; its "bnpo" divides by the tokens at hand, here
# all of them.
EACH = torch.ones(ANSWERS, dtype=torch.float64)
WEIGHT = {
    "grpo": EACH / (ANSWERS * LENGTHS),
    "sapo": EACH / (ANSWERS * LENGTHS),
    "dr_grpo": EACH / (ANSWERS * LIMIT),
    "luspo": EACH / ANSWERS,
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), EACH / LENGTHS.sum()),
}


def draw(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(
        ANSWERS, LONGEST, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


OLD = -1 - draw(0).abs()
REF = OLD + draw(1, 0.3)
LOGP = OLD + draw(2, 0.8)
ENTROPY = draw(3).abs()


def flat(padded: Tensor) -> Tensor:
    return padded[MASK]


def theirs(
    trainer: Any, logp: Tensor, args: dict[str, Any], **settings: Any
) -> tuple[Tensor, dict[str, list[float]]]:
    """The trainer's own loss and metrics, of a policy whose log-probabilities are given."""
    inputs = {
        "completion_mask": MASK.long(),
        "advantages": ADVANTAGE,
        "old_per_token_logps": OLD,
        "old_logps": (OLD * MASK).sum(1),
        "ref_per_token_logps": REF,
        "num_items_in_batch": LENGTHS.sum(),
    }
    settings = {"epsilon_low": LOW, "epsilon_high": HIGH, "max_completion_length": LIMIT} | settings
    return policy_loss(trainer, make_rows(logp, MASK), inputs, ENTROPY, args, **settings)


def grpo(
    logp: Tensor, args: dict[str, Any] | None = None, **settings: Any
) -> tuple[Tensor, dict[str, list[float]]]:
    from trl import GRPOTrainer

    return theirs(GRPOTrainer, logp, args or {}, **settings)


def assert_same(
    mine: Callable[[Tensor], Tensor], peer: Callable[[Tensor], Tensor], rtol: float = 1e-12
) -> None:
    """Equal values, and equal gradients by the log-probability of every token."""
    logp = LOGP.clone().requires_grad_()
    ours, other = mine(flat(logp)), peer(logp)
    torch.testing.assert_close(ours, other, rtol=rtol, atol=rtol)
    gradients = [torch.autograd.grad(loss, logp)[0] for loss in (ours, other)]
    torch.testing.assert_close(*gradients, rtol=rtol, atol=rtol)
    assert gradients[0][MASK].any() and not gradients[0][~MASK].any()


def objective(
    loss_type: str, tensors: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, policy.Stats]:
    match loss_type:
        case "cispo":  # TRL's epsilon_high is the bound, ours how far it lies above 1
            return policy.cispo(*tensors, clip_high=HIGH)
        case "sapo":
            return policy.sapo(*tensors)
    return policy.clipped_surrogate(*tensors, clip_low=LOW, clip_high=HIGH)


def ours(loss_type: str, level: str, logp: Tensor) -> Tensor:
    """One objective, weighed. On the level of answers it is that of their means; an answer weighs
    as its tokens do.
    """
    each = WEIGHT[loss_type]
    if loss_type == "vespo":
        return (each[SEQUENCE] * policy.vespo(logp, flat(OLD), ADVANTAGE, SEQUENCE)[0]).sum()
    if level == "token":
        loss, _ = objective(loss_type, (logp, flat(OLD), ADVANTAGE[SEQUENCE]))
        return (each[SEQUENCE] * loss).sum()
    mean, old = (sequence_mean(x, SEQUENCE, ANSWERS) for x in (logp, flat(OLD)))
    return (each * LENGTHS * objective(loss_type, (mean, old, ADVANTAGE))[0]).sum()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", WEIGHT)
def test_every_loss_type_at_both_levels_of_importance(loss_type: str, level: str) -> None:
    def peer(logp: Tensor) -> Tensor:
        bound = {"epsilon_high": 1 + HIGH} if loss_type == "cispo" else {}
        return grpo(logp, loss_type=loss_type, importance_sampling_level=level, **bound)[0]

    # TRL holds SAPO's temperatures in float32
    assert_same(
        lambda logp: ours(loss_type, level, logp), peer, rtol=1e-7 if loss_type == "sapo" else 1e-12
    )


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "dapo"])
def test_gspo_is_the_surrogate_at_the_level_of_answers(loss_type: str) -> None:
    def mine(logp: Tensor) -> Tensor:
        loss, _ = policy.gspo(logp, flat(OLD), ADVANTAGE, SEQUENCE, clip_low=LOW, clip_high=HIGH)
        return (WEIGHT[loss_type] * LENGTHS * loss).sum()

    assert_same(
        mine, lambda logp: grpo(logp, loss_type=loss_type, importance_sampling_level="sequence")[0]
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("corrected", [False, True])
def test_kl_in_the_loss_with_and_without_bias_correction(corrected: bool, level: str) -> None:
    def mine(logp: Tensor) -> Tensor:
        kl, _ = policy.kl_estimate(logp, flat(REF), kind="k3")
        if corrected and level == "token":
            kl, _ = policy.corrected_kl_estimate(logp, flat(OLD), flat(REF), kind="k3")
        elif (
            corrected
        ):  # each token's by the ratio of its answer: not unbiased, and so not a function of ours
            kl = kl * sequence_mean(logp - flat(OLD), SEQUENCE, ANSWERS).exp()[SEQUENCE]
        return ours("grpo", level, logp) + 0.3 * (WEIGHT["grpo"][SEQUENCE] * kl).sum()

    def peer(logp: Tensor) -> Tensor:
        return grpo(
            logp, {"use_bias_correction_kl": corrected}, beta=0.3, importance_sampling_level=level
        )[0]

    assert_same(mine, peer)


def test_two_sided_clip() -> None:
    def mine(logp: Tensor) -> Tensor:
        loss, _ = policy.clipped_surrogate(
            logp, flat(OLD), ADVANTAGE[SEQUENCE], clip_low=LOW, clip_high=HIGH, ratio_cap=1.4
        )
        return (WEIGHT["dapo"][SEQUENCE] * loss).sum()

    assert_same(mine, lambda logp: grpo(logp, {"delta": 1.4}, loss_type="dapo")[0])
    assert not torch.isclose(mine(flat(LOGP)), ours("dapo", "token", flat(LOGP))), (
        "the cap must matter"
    )


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_entropy_mask(share: float) -> None:
    def mine(logp: Tensor) -> Tensor:
        loss, _ = objective("grpo", (logp, flat(OLD), ADVANTAGE[SEQUENCE]))
        return (
            WEIGHT["grpo"][SEQUENCE]
            * policy.high_entropy_mask(flat(ENTROPY), quantile=share)
            * loss
        ).sum()

    assert_same(mine, lambda logp: grpo(logp, top_entropy_quantile=share)[0])


def test_off_policy_mask_multiplies_the_loss() -> None:
    kept = (ADVANTAGE >= 0) | (sequence_mean(flat(OLD - LOGP), SEQUENCE, ANSWERS) <= 0.05)
    assert not kept.all()

    def mine(logp: Tensor) -> Tensor:
        loss, _ = objective("grpo", (logp, flat(OLD), ADVANTAGE[SEQUENCE]))
        return (WEIGHT["grpo"][SEQUENCE] * kept[SEQUENCE] * loss).sum()

    assert_same(mine, lambda logp: grpo(logp, off_policy_mask_threshold=0.05)[0])


def test_rloo_is_the_surrogate_of_whole_answers() -> None:
    from trl import RLOOTrainer

    def mine(logp: Tensor) -> Tensor:
        sums = (sequence_sum(x, SEQUENCE, ANSWERS) for x in (logp, flat(OLD)))
        loss, _ = policy.clipped_surrogate(*sums, ADVANTAGE, clip_low=LOW, clip_high=HIGH)
        return loss.sum() / ANSWERS

    assert_same(mine, lambda logp: theirs(RLOOTrainer, logp, {})[0])


def test_gmpo() -> None:
    trainer = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer

    def mine(logp: Tensor) -> Tensor:
        loss, _ = policy.gmpo(logp, flat(OLD), ADVANTAGE, SEQUENCE, clip_low=LOW, clip_high=HIGH)
        return loss.sum() / ANSWERS

    assert_same(mine, lambda logp: theirs(trainer, logp, {})[0])


def mean(x: Tensor) -> list[float]:
    return [pytest.approx(x.mean().item(), rel=1e-6)]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_are_means_of_the_stats(level: str) -> None:
    _, metrics = grpo(LOGP, importance_sampling_level=level, beta=0.1)
    tensors = (flat(LOGP), flat(OLD))
    if level == "token":
        _, stats = objective("grpo", (*tensors, ADVANTAGE[SEQUENCE]))
    else:
        _, stats = policy.gspo(*tensors, ADVANTAGE, SEQUENCE, clip_low=LOW, clip_high=HIGH)
    for name in ("clip_ratio/low", "clip_ratio/high", "clip_ratio/region"):
        assert metrics[f"{name}_mean"] == mean(stats[name])
    assert stats["clip_ratio/region"].any()
    assert metrics["kl"] == mean(policy.kl_estimate(flat(LOGP), flat(REF), kind="k3")[1]["kl"])


def test_metrics_of_cispo_and_vespo() -> None:
    _, metrics = grpo(LOGP, loss_type="cispo", epsilon_high=1 + HIGH)
    _, stats = objective("cispo", (flat(LOGP), flat(OLD), ADVANTAGE[SEQUENCE]))
    assert metrics["cispo_clip_ratio"] == mean(stats["cispo_clip_ratio"])
    assert stats["cispo_clip_ratio"].any()

    _, metrics = grpo(LOGP, loss_type="vespo")
    _, stats = policy.vespo(flat(LOGP), flat(OLD), ADVANTAGE, SEQUENCE)
    one_of_each = stats["vespo/phi_seq"][LENGTHS.cumsum(0) - 1]  # TRL's is a mean over answers
    assert metrics["vespo/phi_seq_mean"] == mean(one_of_each)
