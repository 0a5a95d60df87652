"""Objectives on single completions: their equations in many digits, what they promise, and what
they refuse.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from burnish.objectives import feedback as fb
from burnish.objectives.policy import kl_estimate, reinforce
from burnish.objectives.preference import apo_zero, bco_pair, dpo
from mpmath import mp, mpf
from torch import Tensor

B, Z = mpf(0.3), mpf(1.75)  # as the floats below, not as the decimals


def sigma(x: mpf) -> mpf:
    return 1 / (1 + mp.exp(-x))


@dataclass(frozen=True)
class Case:
    """An objective, its reference point if it takes one, its hyper-parameters, and both halves of
    its equation.
    """

    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    point: dict[str, float]
    hyper: dict[str, float]
    desirable: Callable[[mpf], mpf]
    undesirable: Callable[[mpf], mpf]
    threshold: float  # of the reward, where it stops agreeing with the label

    @property
    def name(self) -> str:
        return self.objective.__name__

    def __call__(
        self, logp: Tensor, ref_logp: Tensor, desirable: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        point = [torch.tensor(value, dtype=logp.dtype) for value in self.point.values()]
        return self.objective(logp, ref_logp, desirable, *point, **self.hyper)

    def equation(self, label: bool) -> Callable[[float, float], mpf]:
        half = self.desirable if label else self.undesirable
        return lambda logp, ref_logp: half(mpf(logp) - mpf(ref_logp))


CASES = [
    Case(
        fb.kto,
        {"kl": 1.75},
        {"beta": 0.3},
        lambda r: 1 - sigma(B * (r - Z)),
        lambda r: 1 - sigma(B * (Z - r)),
        float(B * Z),
    ),
    Case(
        fb.kto,
        {"kl": 0.0},
        {"beta": 0.3, "desirable_weight": 1.1, "undesirable_weight": 0.3},
        lambda r: mpf(1.1) * (1 - sigma(B * r)),
        lambda r: mpf(0.3) * (1 - sigma(-B * r)),
        0.0,
    ),
    Case(
        fb.apo_zero_unpaired,
        {},
        {"beta": 0.3},
        lambda r: 1 - sigma(B * r),
        lambda r: sigma(B * r),
        0.0,
    ),
    Case(
        fb.bco,
        {"delta": 1.75},
        {"beta": 0.3},
        lambda r: -mp.log(sigma(B * r - Z)),
        lambda r: -mp.log(sigma(-(B * r - Z))),
        1.75,
    ),
]
every = pytest.mark.parametrize(
    "case", CASES, ids=["kto", "kto-weighted", "apo_zero_unpaired", "bco"]
)


@pytest.fixture(autouse=True)
def four_hundred_digits() -> Any:
    with mp.workdps(400):
        yield


def completions(
    count: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Ordinary completions of tens of nats, both classes in turn; the log-probabilities as
    leaves.
    """
    draw = torch.Generator().manual_seed(0)
    logp, ref_logp = (-30 * torch.rand(2, count, generator=draw, dtype=dtype)).unbind()
    return (
        logp.clone().requires_grad_(),
        ref_logp.clone().requires_grad_(),
        torch.arange(count) % 2 == 0,
    )


def close(actual: Tensor, expected: list[mpf], rtol: float = 1e-12) -> None:
    assert actual.tolist() == pytest.approx([float(x) for x in expected], rel=rtol, abs=1e-290)


def rows(*tensors: Tensor) -> list[tuple[Any, ...]]:
    return list(zip(*(t.tolist() for t in tensors), strict=True))


@every
def test_loss_and_gradient_equal_the_equation(case: Case) -> None:
    logp, ref_logp, desirable = completions()
    loss, _ = case(logp, ref_logp, desirable)
    close(loss, [case.equation(label)(p, q) for p, q, label in rows(logp, ref_logp, desirable)])
    gradients = torch.autograd.grad(loss.sum(), (logp, ref_logp))
    for gradient, one in zip(gradients, ((1, 0), (0, 1)), strict=True):
        with mp.workdps(60):
            expected = [
                mp.diff(case.equation(label), (p, q), one)
                for p, q, label in rows(logp, ref_logp, desirable)
            ]
        close(gradient, expected, rtol=1e-11)


@every
def test_the_equation_holds_far_from_the_ordinary(case: Case) -> None:
    values = list(
        itertools.product([-2000.0, -1950.0, -100.0, 0.0], [-2000.0, -100.0, 0.0], [True, False])
    )
    logp, ref_logp, desirable = (torch.tensor(column) for column in zip(*values, strict=True))
    loss, _ = case(logp.double(), ref_logp.double(), desirable)
    close(loss, [case.equation(label)(p, q) for p, q, label in values], rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every
def test_loss_stats_and_gradient_are_finite_everywhere(case: Case, dtype: torch.dtype) -> None:
    values = list(
        itertools.product(
            [-12000.0, -2000.0, -50.0, -1e-7, 0.0], [-12000.0, -50.0, 0.0], [True, False]
        )
    )
    columns = list(zip(*values, strict=True))
    logp, ref_logp = (
        torch.tensor(column, dtype=dtype, requires_grad=True) for column in columns[:2]
    )
    loss, stats = case(logp, ref_logp, torch.tensor(columns[2]))
    for tensor in (loss, *stats.values(), *torch.autograd.grad(loss.sum(), (logp, ref_logp))):
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()


@every
def test_gradcheck(case: Case) -> None:
    logp, ref_logp, desirable = completions()
    assert torch.autograd.gradcheck(lambda p, q: case(p, q, desirable)[0], (logp, ref_logp))


@every
def test_completions_do_not_interact(case: Case) -> None:
    logp, ref_logp, desirable = completions()
    loss, _ = case(logp, ref_logp, desirable)
    for jacobian in torch.autograd.functional.jacobian(
        lambda p, q: case(p, q, desirable)[0], (logp, ref_logp)
    ):
        assert torch.equal(jacobian, jacobian.diagonal().diag())
    one_class = case(logp[desirable], ref_logp[desirable], desirable[desirable])[0]
    assert torch.equal(one_class, loss[desirable])


@every
def test_stats_are_rewards_and_agreement_detached_and_shaped_like_the_loss(case: Case) -> None:
    logp, ref_logp, desirable = completions()
    loss, stats = case(logp, ref_logp, desirable)
    assert loss.requires_grad
    assert all(
        not s.requires_grad and s.shape == loss.shape and s.dtype == loss.dtype
        for s in stats.values()
    )
    assert list(stats) == ["rewards", "rewards/accuracies", *case.point]
    rewards = [B * (mpf(p) - mpf(q)) for p, q, _ in rows(logp, ref_logp, desirable)]
    close(stats["rewards"], rewards)
    right = [
        (r > case.threshold) == label for r, label in zip(rewards, desirable.tolist(), strict=True)
    ]
    assert stats["rewards/accuracies"].tolist() == [float(x) for x in right]
    assert len(set(right)) == 2, "the draw must hold both kinds of completion"
    for name, value in case.point.items():
        assert stats[name].tolist() == [value] * len(desirable)


@every
def test_a_completion_at_the_reference_point_is_not_accurate(case: Case) -> None:
    one = torch.tensor([0.0, 0.0])
    point = [torch.zeros(())] * len(case.point)
    _, stats = case.objective(one, one, torch.tensor([True, False]), *point, **case.hyper)
    assert stats["rewards/accuracies"].tolist() == [0, 0]


@every
def test_no_completions_are_a_differentiable_zero(case: Case) -> None:
    logp = torch.zeros(0, requires_grad=True)
    loss, _ = case(logp, torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    loss.sum().backward()
    assert loss.shape == (0,)


@every
def test_desirable_completions_are_raised_and_undesirable_ones_lowered(case: Case) -> None:
    logp, ref_logp, desirable = completions()
    (slope,) = torch.autograd.grad(case(logp, ref_logp, desirable)[0].sum(), logp)
    assert torch.equal(slope < 0, desirable)


def test_no_gradient_passes_through_a_reference_point() -> None:
    logp, ref_logp, desirable = completions()
    for objective, name in ((fb.kto, "kl"), (fb.bco, "delta")):
        point = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        loss, stats = objective(logp, ref_logp, desirable, point, beta=0.3)
        assert torch.autograd.grad(loss.sum(), point, allow_unused=True) == (None,)
        assert not stats[name].requires_grad


def test_a_reference_point_of_another_precision_does_not_change_the_loss_s() -> None:
    logp, ref_logp, desirable = completions(dtype=torch.float32)
    for objective in (fb.kto, fb.bco):
        loss, stats = objective(
            logp, ref_logp, desirable, torch.tensor(0.5, dtype=torch.float64), beta=0.3
        )
        assert {loss.dtype, *(s.dtype for s in stats.values())} == {torch.float32}


def test_kto_feels_gains_and_losses_most_at_the_reference_point() -> None:
    r = torch.tensor([-40.0, -3.0, 1.75, 6.5, 40.0], dtype=torch.float64, requires_grad=True)
    zero, kl = torch.zeros(5, dtype=torch.float64), torch.tensor(1.75, dtype=torch.float64)
    for label, weight in ((True, 2.0), (False, 0.5)):
        desirable = torch.full((5,), label)
        loss, _ = fb.kto(
            r, zero, desirable, kl, beta=0.3, desirable_weight=2.0, undesirable_weight=0.5
        )
        assert loss.min() > 0 and loss.max() < weight
        assert loss[2].item() == pytest.approx(weight / 2)
        (slope,) = torch.autograd.grad(loss.sum(), r)
        assert slope.abs().argmax() == 2
        assert slope[2].abs().item() == pytest.approx(weight * 0.3 / 4)
        assert slope[1].item() == pytest.approx(slope[3].item())  # gains weigh as losses do


def test_single_completions_add_up_to_the_objectives_on_pairs() -> None:
    chosen, ref_chosen, _ = completions()
    rejected, ref_rejected, _ = (t.flip(0) for t in completions())
    good, bad = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
    zero = torch.zeros((), dtype=torch.float64)
    pairs: list[tuple[Any, Any, tuple[Tensor, ...]]] = [
        (fb.apo_zero_unpaired, apo_zero, ()),
        (fb.kto, apo_zero, (zero,)),
        (fb.bco, bco_pair, (zero,)),
    ]
    for unpaired, paired, point in pairs:
        up, _ = unpaired(chosen, ref_chosen, good, *point, beta=0.3)
        down, _ = unpaired(rejected, ref_rejected, bad, *point, beta=0.3)
        both, _ = paired(chosen, rejected, ref_chosen, ref_rejected, beta=0.3)
        torch.testing.assert_close(up + down, both, rtol=1e-14, atol=0)


@pytest.mark.parametrize("delta", [-3.0, 0.0, 0.7, 5.0])
def test_bco_bounds_dpo_from_above_whatever_the_shift(delta: float) -> None:
    chosen, ref_chosen, _ = completions()
    rejected, ref_rejected, _ = (t.flip(0) for t in completions())
    point = torch.tensor(delta, dtype=torch.float64)
    up, _ = fb.bco(chosen, ref_chosen, torch.ones(8, dtype=torch.bool), point, beta=0.3)
    down, _ = fb.bco(rejected, ref_rejected, torch.zeros(8, dtype=torch.bool), point, beta=0.3)
    assert (up + down > dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.3)[0]).all()


def test_kto_kl_is_the_mean_log_ratio_never_below_zero() -> None:
    logp, ref_logp, _ = completions()
    mean = math.fsum(p - q for p, q in rows(logp, ref_logp)) / 8
    kls = fb.kto_kl(logp, ref_logp), fb.kto_kl(ref_logp, logp)
    assert sorted(kl.item() for kl in kls) == pytest.approx([0, abs(mean)])
    assert all(kl.shape == () and not kl.requires_grad for kl in kls)
    # not the mean of max(0, ·), which is 1.5
    assert fb.kto_kl(torch.tensor([3.0, -1.0]), torch.zeros(2)) == 1
    assert fb.kto_kl(torch.zeros(0), torch.zeros(0)) == 0
    assert fb.kto_kl(torch.tensor([1e4]), torch.tensor([-1e4])) == 2e4


@every
def test_shapes_and_dtypes_that_do_not_fit_are_named(case: Case, as_users_run_it: None) -> None:
    good = {
        "logp": torch.zeros(3),
        "ref_logp": torch.zeros(3),
        "desirable": torch.ones(3, dtype=torch.bool),
    }
    good |= {name: torch.tensor(value) for name, value in case.point.items()}
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({"ref_logp": torch.zeros(1)}, "ref_logp must have the shape of logp, [3], got [1]"),
        (
            {"desirable": torch.ones(1, dtype=torch.bool)},
            "desirable must have the shape of logp, [3], got [1]",
        ),
        ({"desirable": torch.ones(3)}, "desirable must be a Bool tensor, got torch.float32"),
        *(
            ({name: torch.zeros(3)}, f"{name} must be one number, a 0-dim tensor, got [3]")
            for name in case.point
        ),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError) as error:
            case.objective(**(good | change), **case.hyper)
        assert str(error.value) == f"{case.name}: {message}"


def test_kto_kl_refuses_to_broadcast(as_users_run_it: None) -> None:
    with pytest.raises(
        ValueError, match=r"^kto_kl: ref_logp must have the shape of logp, \[3\], got \[1\]$"
    ):
        fb.kto_kl(torch.zeros(3), torch.zeros(1))


@every
def test_hyper_parameters_out_of_range_are_named(case: Case) -> None:
    names = (
        {"beta", "desirable_weight", "undesirable_weight"} if case.objective is fb.kto else {"beta"}
    )
    for name, value in itertools.product(names, [0.0, -0.1, math.nan, math.inf]):
        changed = Case(case.objective, case.point, case.hyper | {name: value}, sigma, sigma, 0)
        with pytest.raises(ValueError) as error:
            changed(*completions())
        assert str(error.value) == f"{case.name}: {name} must be > 0, got {value}"


def rated(count: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Log-probabilities of policy and reference, values and ratings; all as leaves but the
    ratings.
    """
    logp, ref_logp, _ = completions(count, dtype)
    value, reward = torch.randn(2, count, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return [logp, ref_logp.detach(), value.requires_grad_(), reward]


def test_dro_equals_its_equation_in_value_and_gradients() -> None:
    logp, ref_logp, value, reward = tensors = rated()
    loss, stats = fb.dro(*tensors, beta=0.3)
    error = [mpf(r) - mpf(v) - B * (mpf(p) - mpf(q)) for p, q, v, r in rows(*tensors)]
    close(loss, [e**2 / 2 for e in error])
    by_logp, by_value = torch.autograd.grad(loss.sum(), (logp, value))
    close(by_logp, [-B * e for e in error])
    close(by_value, [-e for e in error])
    assert list(stats) == ["rewards", "value", "error"]
    close(stats["rewards"], [B * (mpf(p) - mpf(q)) for p, q, *_ in rows(*tensors)])
    close(stats["error"], [abs(e) for e in error])
    assert torch.equal(stats["value"], value.detach())
    assert all(not stat.requires_grad and stat.shape == loss.shape for stat in stats.values())
    assert torch.autograd.gradcheck(
        lambda p, v: fb.dro(p, ref_logp, v, reward, beta=0.3)[0], (logp, value)
    )


def test_dro_has_its_minimum_at_the_optimum_of_the_penalized_reward() -> None:
    draw = torch.Generator().manual_seed(2)
    reference = torch.randn(5, generator=draw, dtype=torch.float64).log_softmax(0)
    reward = torch.randn(5, generator=draw, dtype=torch.float64)
    value = 0.3 * (reference + reward / 0.3).logsumexp(0)
    best = (reference + (reward - value) / 0.3).requires_grad_()
    assert best.exp().sum().item() == pytest.approx(1)
    loss, _ = fb.dro(best, reference, value.expand(5), reward, beta=0.3)
    assert loss.max() < 1e-28
    nearby, _ = fb.dro(best + 0.01, reference, value.expand(5), reward, beta=0.3)
    assert nearby.min() > 1e-7


def test_dro_with_a_constant_value_is_policy_gradient_with_a_quadratic_penalty() -> None:
    logp, ref_logp, value, reward = rated()
    value = value.detach()
    (slope,) = torch.autograd.grad(fb.dro(logp, ref_logp, value, reward, beta=0.3)[0].sum(), logp)
    gradient, _ = reinforce(logp, reward - value)
    penalty, _ = kl_estimate(logp, ref_logp, kind="k2")
    (expected,) = torch.autograd.grad((gradient + 0.3 * penalty).sum(), logp)
    torch.testing.assert_close(slope, 0.3 * expected)


def test_completions_do_not_interact_in_dro_and_its_extremes_are_finite() -> None:
    for dtype in (torch.float32, torch.float64):
        tensors = rated(dtype=dtype)
        whole, _ = fb.dro(*tensors, beta=0.3)
        alone = torch.cat([fb.dro(*(t[i : i + 1] for t in tensors), beta=0.3)[0] for i in range(8)])
        assert torch.equal(whole, alone)
        far = torch.full((1,), -12000.0, dtype=dtype, requires_grad=True)
        loss, stats = fb.dro(far, far.detach() * 0, far * 1, far.detach(), beta=10.0)
        (slope,) = torch.autograd.grad(loss.sum(), far)
        assert all(x.isfinite().all() and x.dtype == dtype for x in (loss, slope, *stats.values()))


def test_dro_names_what_does_not_fit(as_users_run_it: None) -> None:
    good = {name: torch.zeros(3) for name in ("logp", "ref_logp", "value", "reward")}
    for name in ("ref_logp", "value", "reward"):
        with pytest.raises(
            ValueError, match=rf"^dro: {name} must have the shape of logp, \[3\], got \[1\]$"
        ):
            fb.dro(**(good | {name: torch.zeros(1)}), beta=0.3)
    for beta in (0.0, -0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"^dro: beta must be > 0, got {beta}$"):
            fb.dro(**good, beta=beta)
