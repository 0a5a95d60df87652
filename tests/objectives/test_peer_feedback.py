"""The same numbers as the peer for feedback, rewards and distillation: TRL 1.16's own code, run on
our tensors.

Its KTO estimates z₀ from one micro-batch and averages that over ranks; on one rank and one batch
that is ours. BCO, process rewards and MiniLLM are no longer in it.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from burnish.benchmarks.peer.trl_losses import fake_trainer, kto_loss, make_rows
from burnish.objectives import distillation as ds
from burnish.objectives import feedback as fb
from burnish.objectives import reward as rw
from torch import Tensor

pytest.importorskip("trl", reason="the peer is not installed")

ANSWERS = 8
MIXED = [True, False, False, True, True, False, False, False]


def draws(count: int, *shape: int, scale: float) -> list[Tensor]:
    """Negative numbers in float64, as leaves."""
    draw = torch.Generator().manual_seed(0)
    return [
        (-scale * torch.rand(shape, generator=draw, dtype=torch.float64)).requires_grad_()
        for _ in range(count)
    ]


def assert_same(ours: Tensor, theirs: Tensor, tensors: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(loss, tensors) for loss in (ours, theirs))
    for mine, peer in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, peer, rtol=1e-12, atol=1e-12)


def kto_trainer(
    logp: Tensor,
    ref_logp: Tensor,
    desirable: Tensor,
    mismatched: list[Tensor] | None,
    **settings: Any,
) -> tuple[Tensor, dict[str, list[float]]]:
    """KTOTrainer's loss and metrics of completions of one token."""
    return kto_loss(
        make_rows(logp.unsqueeze(1)), ref_logp, desirable, mismatched, beta=0.3, **settings
    )


@pytest.mark.parametrize(
    "labels", [MIXED, [True] * ANSWERS, [False] * ANSWERS], ids=["both", "desirable", "undesirable"]
)
@pytest.mark.parametrize("direction", [1, -1], ids=["z0", "clamped"])
def test_kto_equals_kto_trainer(labels: list[bool], direction: int) -> None:
    logp, ref_logp, *mismatched = draws(4, ANSWERS, scale=30)
    mismatched = mismatched[::direction]
    desirable = torch.tensor(labels)
    theirs, metrics = kto_trainer(
        logp,
        ref_logp,
        desirable,
        mismatched,
        loss_type="kto",
        desirable_weight=1.3,
        undesirable_weight=0.7,
    )
    kl = fb.kto_kl(*mismatched)
    ours, stats = fb.kto(
        logp, ref_logp, desirable, kl, beta=0.3, desirable_weight=1.3, undesirable_weight=0.7
    )
    assert_same(ours.mean(), theirs, [logp, ref_logp])
    assert metrics["kl"] == pytest.approx([kl.item()])
    for name, inside in (("rewards/chosen", desirable), ("rewards/rejected", ~desirable)):
        if inside.any():
            assert metrics[name] == pytest.approx([stats["rewards"][inside].mean().item()])


def test_the_two_directions_of_kto_are_a_positive_and_a_clamped_reference_point() -> None:
    _, _, *mismatched = draws(4, ANSWERS, scale=30)
    assert sorted(fb.kto_kl(*mismatched[::step]).item() > 0 for step in (1, -1)) == [False, True]


def test_apo_zero_unpaired_equals_kto_trainer() -> None:
    logp, ref_logp = draws(2, ANSWERS, scale=30)
    desirable = torch.tensor(MIXED)
    for weights in ({}, {"desirable_weight": 1.33, "undesirable_weight": 0.5}):
        theirs, _ = kto_trainer(
            logp, ref_logp, desirable, None, loss_type="apo_zero_unpaired", **weights
        )
        loss, _ = fb.apo_zero_unpaired(logp, ref_logp, desirable, beta=0.3, **weights)
        assert_same(loss.mean(), theirs, [logp, ref_logp])


@pytest.mark.parametrize("with_margin", [True, False])
@pytest.mark.parametrize("coefficient", [None, 0.01])
def test_reward_losses_and_metrics_equal_reward_trainer(
    with_margin: bool, coefficient: float | None
) -> None:
    from trl import RewardTrainer

    chosen, rejected, margin = draws(3, ANSWERS, scale=5)
    trainer = fake_trainer(args=SimpleNamespace(center_rewards_coefficient=coefficient))
    inputs = {
        "attention_mask": torch.ones(2 * ANSWERS, 2),
        **({"margin": margin.detach()} if with_margin else {}),
    }
    output = SimpleNamespace(logits=torch.cat([chosen, rejected]).unsqueeze(1))
    theirs = RewardTrainer.compute_loss(trainer, lambda **_: output, inputs)

    loss, stats = rw.bradley_terry(chosen, rejected, margin.detach() if with_margin else 0.0)
    ours = loss.mean()
    if coefficient is not None:
        ours = ours + coefficient * rw.centering(chosen, rejected)[0].mean()
    assert_same(ours, theirs, [chosen, rejected])
    for name, stat in stats.items():
        assert trainer._metrics["train"][name] == pytest.approx([stat.mean().item()])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_generalized_jsd_equals_gkd_trainer(beta: float, temperature: float) -> None:
    gkd_trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    student, teacher = draws(2, 5, 11, scale=8)
    theirs = gkd_trainer.generalized_jsd_loss(
        student, teacher, beta=beta, temperature=temperature, reduction="none"
    )
    ours, _ = ds.generalized_jsd(
        *((logits / temperature).log_softmax(-1) for logits in (student, teacher)), beta=beta
    )
    torch.testing.assert_close(ours, theirs.sum(-1), rtol=1e-12, atol=1e-12)
    assert_same(ours.sum(), theirs.sum(), [student, teacher])


@pytest.mark.parametrize("teacher_vocabulary", [7, 11, 16])
def test_uld_equals_the_loss_of_gold_trainer(teacher_vocabulary: int) -> None:
    """Its ULD: a mean over a completion's aligned tokens, then over completions, of padded rows in
    which the teacher's tokenizer makes other lengths.
    """
    module = pytest.importorskip("trl.experimental.gold.gold_trainer")
    config = SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=0.7,
        uld_student_temperature=2.0,
        uld_teacher_temperature=1.5,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        use_extended_uld=False,
        uld_token_merge_strategy="observed",
    )
    (logits,) = draws(1, 3, 6, 11, scale=3)
    (teacher,) = draws(1, 3, 7, teacher_vocabulary, scale=3)
    starts, sizes, teacher_sizes = [1, 2, 1], [5, 3, 1], [4, 5, 2]
    labels = torch.full((3, 6), -100)
    teacher_labels = torch.full((3, 7), -100)
    for row, start in enumerate(starts):
        labels[row, start : start + sizes[row]] = 1
        teacher_labels[row, start : start + teacher_sizes[row]] = 1
    teacher = teacher.detach()
    theirs = module.ULDLoss(config)(
        logits, teacher, labels, teacher_labels, labels.abs(), teacher_labels.abs()
    )
    means = []
    for row, start in enumerate(starts):
        shared = slice(start, start + min(sizes[row], teacher_sizes[row]))
        loss, _ = ds.uld(
            (logits[row, shared] / 2.0).log_softmax(-1),
            (teacher[row, shared] / 1.5).log_softmax(-1),
        )
        means.append(loss.mean())
    assert_same(0.7 * torch.stack(means).mean(), theirs, [logits])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_generalized_jsd_equals_the_divergence_of_sdft_and_sdpo(alpha: float) -> None:
    module = pytest.importorskip("trl.experimental.sdft.loss_utils")
    student, teacher = (logits.log_softmax(-1) for logits in draws(2, 5, 11, scale=8))
    student, teacher = student.detach().requires_grad_(), teacher.detach()
    theirs = module.compute_divergence(student, teacher, alpha)
    ours, _ = ds.generalized_jsd(student, teacher, beta=alpha)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same(ours.sum(), theirs.sum(), [student])
