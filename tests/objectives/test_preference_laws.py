"""What the papers promise of objectives on pairs: where they rest, what they leave alone, what they
reduce to.
"""

import math
from typing import Any

import pytest
import torch
from burnish import objectives as ob
from torch import Tensor

SMOOTH = {"label_smoothing": 0.125}
at_the_reference = [
    torch.tensor([-3.0, -70.0], dtype=torch.float64),
    torch.tensor([-9.0, -20.0], dtype=torch.float64),
] * 2


def margins(*values: float) -> list[Tensor]:
    """Pairs with a = value, b = 0."""
    a = torch.tensor(values, dtype=torch.float64)
    zero = torch.zeros_like(a)
    return [a.requires_grad_(), zero.clone().requires_grad_(), zero, zero]


@pytest.mark.parametrize(
    ("objective", "hyper", "expected"),
    [
        (ob.dpo, {}, math.log(2)),
        (ob.dpo, SMOOTH, math.log(2)),
        (ob.robust_dpo, SMOOTH, math.log(2)),
        (ob.nca, {}, 2 * math.log(2)),
        (ob.bco_pair, {}, 2 * math.log(2)),
        (ob.apo_zero, {}, 1.0),
        (ob.apo_down, {}, 1.0),
        (ob.hinge, {}, 1.0),
        (ob.discopop, {}, (math.log(2) + 1) / 2),
        (ob.dpo_positive, {"penalty": 50.0}, math.log(2)),
        (ob.chi_po, {}, math.log(2)),
        (ob.aot, {}, math.log(2)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_reference_itself_has_the_loss_of_a_coin(
    objective: Any, hyper: dict[str, float], expected: float
) -> None:
    for b in (0.01, 0.1, 5.0):
        loss, _ = objective(*at_the_reference, beta=b, **hyper)
        torch.testing.assert_close(loss, torch.full_like(loss, expected))


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss.sum(), tensors, materialize_grads=True))


def test_dpo_positive_is_dpo_where_the_chosen_completion_has_become_no_less_likely() -> None:
    chosen, rejected, *reference = margins(-3.0, -0.1, 0.1, 3.0)
    dpo, _ = ob.dpo(chosen, rejected, *reference, beta=0.3)
    positive, _ = ob.dpo_positive(chosen, rejected, *reference, beta=0.3, penalty=5.0)
    assert torch.equal(positive[2:], dpo[2:])
    assert (positive[:2] > dpo[:2]).all()
    free, _ = ob.dpo_positive(chosen, rejected, *reference, beta=0.3, penalty=0.0)
    torch.testing.assert_close(free, dpo)
    by_chosen, by_rejected = gradients(positive, chosen, rejected)
    torch.testing.assert_close(-by_chosen / by_rejected, torch.tensor([6.0, 6, 1, 1]).double())


def test_length_regularized_dpo_is_the_optimum_of_a_reward_less_its_length() -> None:
    draw = torch.Generator().manual_seed(0)
    reward, reference = torch.randn(2, 5, generator=draw, dtype=torch.float64)
    length = torch.tensor([3.0, 80.0, 12.0, 40.0, 7.0], dtype=torch.float64)
    reference = reference.log_softmax(0)
    best = (reference + (reward - 0.02 * length) / 0.3).log_softmax(0)
    pairs = torch.combinations(torch.arange(5))
    both = [x[pairs[:, i]] for x in (best, reference, length) for i in (0, 1)]
    loss, _ = ob.length_regularized_dpo(*both, beta=0.3, alpha=0.02)
    # Bradley and Terry's, of the rewards alone
    difference = reward[pairs[:, 0]] - reward[pairs[:, 1]]
    torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(difference))


def test_chi_po_s_optimum_has_the_kl_and_the_chi_square_penalty() -> None:
    draw = torch.Generator().manual_seed(1)
    reference = torch.randn(5, generator=draw, dtype=torch.float64).log_softmax(0)
    logits = torch.randn(5, generator=draw, dtype=torch.float64)
    policy = logits.log_softmax(0)
    u = (policy - reference).exp()
    reward = 0.3 * (u + u.log())  # of which the policy is then the optimum

    def value(logits: Tensor) -> Tensor:
        p = logits.log_softmax(0)
        kl = (p.exp() * (p - reference)).sum()
        chi = (reference.exp() * ((p - reference).exp() - 1).square()).sum()
        return (p.exp() * reward).sum() - 0.3 * kl - 0.15 * chi

    assert torch.func.grad(value)(logits).abs().max() < 1e-12
    pairs = torch.combinations(torch.arange(5))
    both = [x[pairs[:, i]] for x in (policy, reference) for i in (0, 1)]
    loss, _ = ob.chi_po(*both, beta=0.3)
    torch.testing.assert_close(
        loss, -torch.nn.functional.logsigmoid(reward[pairs[:, 0]] - reward[pairs[:, 1]])
    )


def test_chi_po_leaves_pairs_beyond_its_clip_alone_and_has_none_by_default() -> None:
    chosen, rejected, *reference = margins(-2.0, 0.0, 3.0)
    loss, _ = ob.chi_po(chosen, rejected, *reference, beta=1.0, clip=2.5)
    (by_chosen,) = gradients(loss, chosen)
    assert torch.equal(by_chosen == 0, torch.tensor([True, False, True]))
    free, _ = ob.chi_po(chosen, rejected, *reference, beta=1.0)
    assert (gradients(free, chosen)[0] != 0).all()


def test_tdpo_is_dpo_where_divergences_are_equal_and_its_forms_agree_at_alpha_one() -> None:
    chosen, rejected, *reference = margins(-2.0, 0.5, 3.0)
    small, large = torch.tensor([0.5, 2.0, 7.0]).double(), torch.tensor([1.5, 2.5, 9.0]).double()
    dpo, _ = ob.dpo(chosen, rejected, *reference, beta=0.3)
    torch.testing.assert_close(
        ob.tdpo1(chosen, rejected, *reference, small, small, beta=0.3)[0], dpo
    )
    torch.testing.assert_close(
        ob.tdpo2(chosen, rejected, *reference, small, large, beta=0.3, alpha=0.0)[0], dpo
    )
    first, _ = ob.tdpo1(chosen, rejected, *reference, small, large, beta=0.3)
    second, _ = ob.tdpo2(chosen, rejected, *reference, small, large, beta=0.3, alpha=1.0)
    torch.testing.assert_close(first, second)
    assert (first > dpo).all()


def test_cal_dpo_is_the_sum_that_the_page_says() -> None:
    chosen, rejected, *reference = margins(-2.0, 0.5, 3.0)
    a, b = chosen, rejected
    equation = -torch.nn.functional.logsigmoid(a - b) + (a - 1 / 0.6) ** 2 + (b + 1 / 0.6) ** 2
    calibrated, _ = ob.sppo_hard(chosen, rejected, *reference, beta=0.3)
    torch.testing.assert_close(
        ob.dpo(chosen, rejected, *reference, beta=1.0)[0] + calibrated, equation
    )


@pytest.mark.parametrize("margin", [-40.0, -0.7, 0.0, 3.0])
def test_robust_dpo_is_unbiased_under_flipped_labels(margin: float) -> None:
    chosen, rejected, *reference = margins(margin)
    straight, _ = ob.robust_dpo(chosen, rejected, *reference, beta=0.3, label_smoothing=0.2)
    flipped, _ = ob.robust_dpo(rejected, chosen, *reference, beta=0.3, label_smoothing=0.2)
    clean, _ = ob.dpo(chosen, rejected, *reference, beta=0.3)
    torch.testing.assert_close(0.8 * straight + 0.2 * flipped, clean)


@pytest.mark.parametrize(
    ("objective", "hyper", "best"),
    [
        (ob.ipo, {}, 1 / 0.6),
        (ob.dpo, SMOOTH, math.log(7) / 0.3),  # σ(βh) = 1 − ε
        (ob.exo, SMOOTH, math.log(7) / 0.3),
        (ob.nca, {}, math.log(2) / 0.3),  # σ(βa) = 2/3: a finite reward
        (ob.sppo_hard, {}, 1 / 0.6),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_best_margin_is_finite_and_where_the_paper_puts_it(
    objective: Any, hyper: dict[str, float], best: float
) -> None:
    tensors = margins(best - 1, best, best + 1)
    loss, _ = objective(*tensors, beta=0.3, **hyper)
    (slope,) = torch.autograd.grad(loss.sum(), tensors[0])
    assert slope[0] < 0 < slope[2]
    assert abs(slope[1]) < 1e-12
    if objective in (ob.ipo, ob.exo):
        assert loss[1].abs() < 1e-12


def test_hinge_leaves_pairs_alone_beyond_its_margin() -> None:
    tensors = margins(0.0, 3.0, 4.0)  # 1/β = 3⅓
    loss, _ = ob.hinge(*tensors, beta=0.3)
    (slope,) = torch.autograd.grad(loss.sum(), tensors[0])
    assert slope.tolist() == pytest.approx([-0.3, -0.3, 0.0])


def test_apo_zero_lifts_the_chosen_completion_and_apo_down_lowers_it() -> None:
    for objective, sign in ((ob.apo_zero, -1), (ob.apo_down, 1)):
        chosen = torch.zeros(1, requires_grad=True)
        rejected = torch.full((1,), -2.0, requires_grad=True)
        loss, _ = objective(chosen, rejected, torch.zeros(1), torch.zeros(1), beta=1.0)
        loss.backward()
        assert chosen.grad is not None and rejected.grad is not None
        assert chosen.grad.sign() == sign
        assert rejected.grad > 0


def test_discopop_is_dpo_below_its_margin_and_exponential_above() -> None:
    tensors = margins(-20.0, 20.0)
    loss, _ = ob.discopop(*tensors, beta=0.3)
    assert loss[0].item() == pytest.approx(ob.dpo(*tensors, beta=0.3)[0][0].item(), rel=1e-12)
    assert loss[1].item() == pytest.approx(math.exp(-6), rel=1e-12)


def test_discopop_needs_no_clipping_up_to_tau_1() -> None:
    tensors = margins(-4000.0, -2.0, 2.0)
    loss, _ = ob.discopop(*tensors, beta=0.3, tau=1.0)
    logistic, _ = ob.dpo(*tensors, beta=0.3)
    # m e^−x = σ(x) e^−x = σ(−x), so ℓ = σ(−x) (1 − log σ(x))
    torch.testing.assert_close(loss, torch.sigmoid(-0.3 * tensors[0]) * (1 + logistic))


def test_cpo_is_dpo_against_a_uniform_reference() -> None:
    chosen, rejected = torch.tensor([[-3.0, -29.0, -8.0], [-5.0, -1.0, -8.5]], dtype=torch.float64)
    uniform = torch.full_like(chosen, -12.5)
    torch.testing.assert_close(
        ob.cpo(chosen, rejected, beta=0.3)[0],
        ob.dpo(chosen, rejected, uniform, uniform, beta=0.3)[0],
    )


def test_simpo_is_undecided_at_its_target_margin() -> None:
    rejected = torch.tensor([-2.0, -0.7], dtype=torch.float64)
    loss, _ = ob.simpo(rejected + 1.5 / 0.3, rejected, beta=0.3, gamma=1.5)
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(2)))
    without, _ = ob.simpo(rejected, rejected + 1, beta=0.3, gamma=0.0)
    assert torch.equal(without, ob.cpo(rejected, rejected + 1, beta=0.3)[0])


@pytest.mark.parametrize("alpha", [0.0, 1e-12, -1e-12])
def test_alpha_po_is_simpo_as_alpha_goes_to_zero(alpha: float) -> None:
    means = [
        torch.tensor([-0.2, -1.1], dtype=torch.float64),
        torch.tensor([-0.9, -0.3], dtype=torch.float64),
    ]
    loss, _ = ob.alpha_po(*means, beta=2.5, gamma=0.5, alpha=alpha)
    torch.testing.assert_close(loss, ob.simpo(*means, beta=2.5, gamma=0.5)[0], rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alpha_po_keeps_the_order_of_summed_log_probabilities(dtype: torch.dtype) -> None:
    worse, better = torch.tensor([-1001.0], dtype=dtype), torch.tensor([-1000.0], dtype=dtype)
    for chosen, rejected, wrong in ((better, worse, False), (worse, better, True)):
        chosen = chosen.clone().requires_grad_()
        loss, stats = ob.alpha_po(chosen, rejected, beta=2.5, gamma=0.1, alpha=0.25)
        loss.backward()
        assert chosen.grad is not None
        assert (loss > 1) == wrong == (chosen.grad < 0) == (stats["rewards/accuracies"] == 0)


def test_orpo_of_equal_completions_is_log_2_and_near_certainty_pushes_hard() -> None:
    rejected = torch.tensor([-1e-3, -0.0], requires_grad=True)
    loss, _ = ob.orpo(torch.full((2,), -1e-3), rejected)
    loss.sum().backward()
    assert rejected.grad is not None
    assert loss[0].item() == pytest.approx(math.log(2))
    assert rejected.grad[0].item() == pytest.approx(500, rel=1e-2)  # ½ / (1 − p)
    assert 1e6 < rejected.grad[1] < 1e7  # 1 / ε of float32
