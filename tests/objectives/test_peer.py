"""The same numbers as the peer: values and gradients of TRL 1.16's own code, run on our tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from burnish import objectives as ob
from peer import dpo_trainer_loss
from torch import Tensor

pytest.importorskip("trl", reason="the peer is not installed")

PAIRS = 8


def logps(scale: float) -> list[Tensor]:
    """chosen, rejected, ref_chosen, ref_rejected; float64, as leaves."""
    draw = torch.Generator().manual_seed(0)
    return [
        (-scale * torch.rand(PAIRS, generator=draw, dtype=torch.float64)).requires_grad_()
        for _ in range(4)
    ]


def assert_same(ours: Tensor, theirs: Tensor, tensors: list[Tensor], rtol: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=rtol, atol=rtol)
    gradients = (torch.autograd.grad(loss, tensors) for loss in (ours, theirs))
    for mine, peer in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, peer, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("name", "objective", "label_smoothing"),
    [
        ("sigmoid", ob.dpo, None),
        ("robust", ob.robust_dpo, 0.1),
        ("ipo", ob.ipo, None),
        ("hinge", ob.hinge, None),
        ("exo_pair", ob.exo, 0.1),
        ("nca_pair", ob.nca, None),
        ("bco_pair", ob.bco_pair, None),
        ("sppo_hard", ob.sppo_hard, None),
        ("aot", ob.aot, 0.1),
        ("aot_unpaired", ob.aot_unpaired, 0.1),
        ("apo_zero", ob.apo_zero, None),
        ("apo_down", ob.apo_down, None),
        ("discopop", ob.discopop, None),
    ],
)
def test_losses_against_a_reference_equal_dpo_trainer(
    name: str, objective: Any, label_smoothing: float | None
) -> None:
    tensors = logps(scale=30)
    hyper = {} if label_smoothing is None else {"label_smoothing": label_smoothing}
    ours, _ = objective(*tensors, beta=0.3, **hyper)
    # exo_pair holds its ε in float32
    rtol = 1e-7 if name == "exo_pair" else 1e-12
    assert_same(ours.mean(), dpo_trainer_loss(tensors, loss_types=[name], **hyper), tensors, rtol)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js"])
def test_f_scores_equal_dpo_trainer(divergence: Any) -> None:
    tensors = logps(scale=5)
    zero = torch.zeros(PAIRS, dtype=torch.float64)
    scores = (
        ob.f_divergence_score(tensors[i] - tensors[i + 2], divergence=divergence) for i in (0, 1)
    )
    ours, _ = ob.dpo(*scores, zero, zero, beta=0.3)
    theirs = {"js": "js_divergence"}.get(divergence, divergence)
    assert_same(ours.mean(), dpo_trainer_loss(tensors, f_divergence_type=theirs), tensors)


@pytest.mark.parametrize(
    ("ours", "settings"),
    [
        (
            lambda c, r: ob.cpo(c, r, beta=2.0, label_smoothing=0.1),
            {"loss_type": "sigmoid", "alpha": 0.0},
        ),
        (
            lambda c, r: ob.simpo(c, r, beta=2.0, gamma=0.5, label_smoothing=0.1),
            {"loss_type": "simpo", "alpha": 0.0},
        ),
        (
            lambda c, r: ob.alpha_po(c, r, beta=2.0, gamma=0.5, alpha=0.25),
            {"loss_type": "simpo", "alpha": 0.25, "label_smoothing": 0.0},
        ),
    ],
    ids=["cpo", "simpo", "alpha_po"],
)
def test_reference_free_losses_and_rewards_equal_cpo_trainer(
    ours: Any, settings: dict[str, Any]
) -> None:
    cpo_trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    tensors = logps(scale=3)[:2]
    trainer = SimpleNamespace(
        **{"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.1, **settings},
        accelerator=SimpleNamespace(device="cpu"),
    )
    loss, chosen_rewards, rejected_rewards = cpo_trainer.cpo_loss(trainer, *tensors)
    mine, stats = ours(*tensors)
    assert_same(mine.sum(), loss.sum(), tensors)
    torch.testing.assert_close(stats["rewards/chosen"], chosen_rewards)
    torch.testing.assert_close(stats["rewards/rejected"], rejected_rewards)


def test_orpo_equals_orpo_trainer() -> None:
    orpo_trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    tensors = logps(scale=3)[:2]
    trainer = SimpleNamespace(beta=1.0, accelerator=SimpleNamespace(device="cpu"))
    log_sigmoid, *_ = orpo_trainer.odds_ratio_loss(trainer, *tensors)
    # the peer works in float32
    assert_same(ob.orpo(*tensors)[0].sum(), -log_sigmoid.sum(), tensors, rtol=1e-5)
