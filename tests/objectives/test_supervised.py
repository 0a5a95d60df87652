"""Token objectives against their equations, and what their gradients are for."""

import math
from collections.abc import Callable

import pytest
import torch
from burnish import objectives as ob
from torch import Tensor

# Each objective, its tensors' names, its hyper-parameters, its equation for one token.
CASES = {
    "nll": (ob.nll, ("logp",), {}, lambda logp: -logp),
    "label_smoothed_nll": (
        ob.label_smoothed_nll,
        ("logp", "mean_logp"),
        {"label_smoothing": 0.1},
        lambda logp, mean_logp: -0.9 * logp - 0.1 * mean_logp,
    ),
    "dft": (ob.dft, ("logp",), {}, lambda logp: -math.exp(logp) * logp),
    "z_loss": (ob.z_loss, ("logsumexp",), {}, lambda logsumexp: logsumexp**2),
    "entropy_bonus": (ob.entropy_bonus, ("entropy",), {}, lambda entropy: -entropy),
}
every = pytest.mark.parametrize("name", CASES)


def tokens(name: str, shape: tuple[int, ...] = (5,)) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [-9 * torch.rand(shape, generator=draw, dtype=torch.float64) for _ in CASES[name][1]]


@every
def test_loss_equals_the_equation_at_any_shape(name: str) -> None:
    objective, _, hyper, equation = CASES[name]
    for shape in ((5,), (2, 3), ()):
        tensors = tokens(name, shape)
        loss, stats = objective(*tensors, **hyper)
        expected = [
            equation(*values)
            for values in zip(*(t.flatten().tolist() for t in tensors), strict=True)
        ]
        assert loss.shape == shape
        assert loss.flatten().tolist() == pytest.approx(expected, rel=1e-14)
        assert stats == {}


@every
def test_tokens_do_not_interact_and_gradients_stay_finite(name: str) -> None:
    objective, _, hyper, _ = CASES[name]
    for jacobian in torch.autograd.functional.jacobian(
        lambda *t: objective(*t, **hyper)[0], tuple(tokens(name))
    ):
        assert torch.equal(jacobian, jacobian.diagonal().diag())
    extreme = [torch.tensor([-2000.0, -0.0], requires_grad=True) for _ in CASES[name][1]]
    loss, _ = objective(*extreme, **hyper)
    gradients = torch.autograd.grad(loss.sum(), extreme)
    assert all(t.isfinite().all() for t in (loss, *gradients))


def test_smoothed_nll_is_cross_entropy_with_label_smoothing() -> None:
    logits = torch.randn(7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.arange(7)
    logp = logits.log_softmax(-1)
    loss, _ = ob.label_smoothed_nll(logp[target, target], logp.mean(-1), label_smoothing=0.2)
    expected = torch.nn.functional.cross_entropy(
        logits, target, label_smoothing=0.2, reduction="none"
    )
    torch.testing.assert_close(loss, expected)
    unsmoothed, _ = ob.label_smoothed_nll(logp[target, target], logp.mean(-1), label_smoothing=0.0)
    assert torch.equal(unsmoothed, ob.nll(logp[target, target])[0])


def slope(objective: Callable[[Tensor], tuple[Tensor, ob.Stats]], at: float) -> float:
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(objective(x)[0], x)
    return gradient.item()


def test_dft_has_the_gradient_of_the_likelihood() -> None:
    for logp in (-8.0, -0.5, -0.0):
        assert slope(ob.dft, logp) == pytest.approx(-math.exp(logp), rel=1e-14)


def test_z_loss_draws_the_normalizer_to_one_and_the_bonus_raises_entropy() -> None:
    assert slope(ob.z_loss, -3.0) < 0 == slope(ob.z_loss, 0.0) < slope(ob.z_loss, 3.0)
    assert slope(ob.entropy_bonus, 2.0) < 0


def test_smoothed_nll_says_what_is_wrong(as_users_run_it: None) -> None:
    three = torch.zeros(3)
    with pytest.raises(ValueError) as error:
        ob.label_smoothed_nll(three, torch.zeros(1), label_smoothing=0.1)
    assert (
        str(error.value)
        == "label_smoothed_nll: mean_logp must have the shape of logp, [3], got [1]"
    )
    for wrong in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError) as error:
            ob.label_smoothed_nll(three, three, label_smoothing=wrong)
        assert (
            str(error.value)
            == f"label_smoothed_nll: label_smoothing must be in [0, 1), got {wrong}"
        )
