"""Every objective on pairs, with and without a reference, against its equation, its errors and its
paper's laws.

The equations stand here a second time, in 400-digit arithmetic on plain numbers, where nothing
needs to be stable.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from burnish import objectives as ob
from mpmath import mp, mpf
from torch import Tensor

WITH_REFERENCE = ("chosen", "rejected", "ref_chosen", "ref_rejected")
LENGTHS = (*WITH_REFERENCE, "length_chosen", "length_rejected")
DIVERGENCES = (*WITH_REFERENCE, "divergence_chosen", "divergence_rejected")
SUMS = ("chosen", "rejected")
MEANS = ("mean_chosen", "mean_rejected")


def sigma(x: mpf) -> mpf:
    return 1 / (1 + mp.exp(-x))


def bce(x: mpf, e: float = 0.0) -> mpf:
    """Cross-entropy of the probability sigma(x) against the label 1 - e."""
    return -(1 - mpf(e)) * mp.log(sigma(x)) - mpf(e) * mp.log(sigma(-x))


def kl(x: mpf, e: mpf) -> mpf:
    """KL divergence from a coin of probability sigma(x) to one of probability 1 - e."""
    return sigma(x) * mp.log(sigma(x) / (1 - e)) + sigma(-x) * mp.log(sigma(-x) / e)


def odds(m: mpf) -> mpf:
    return mp.exp(m) / (1 - mp.exp(m))


@dataclass(frozen=True)
class Case:
    """An objective, the tensors it takes, its hyper-parameters, and its equation for one pair."""

    objective: Callable[..., tuple[Tensor, ob.Stats]]
    inputs: tuple[str, ...]
    hyper: dict[str, Any]
    equation: Callable[..., mpf]  # of the log-ratios a, b, or of the two log-probabilities
    reward: Callable[[mpf], mpf]  # of a, b, or of a log-probability
    pairs_are_coupled: bool = field(default=False)

    @property
    def name(self) -> str:
        return self.objective.__name__

    @property
    def has_reference(self) -> bool:
        return self.inputs[:4] == WITH_REFERENCE

    def equation_of_inputs(self, *logps: float) -> mpf:
        if self.has_reference:
            chosen, rejected, ref_chosen, ref_rejected, *others = (mpf(x) for x in logps)
            return self.equation(chosen - ref_chosen, rejected - ref_rejected, *others)
        return self.equation(*(mpf(x) for x in logps))

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, ob.Stats]:
        return self.objective(*tensors, **self.hyper)


# as the floats below, not as the decimals
B, E, T, G, A = (mpf(x) for x in (0.3, 0.125, 0.05, 1.5, 0.25))
beta, smooth, gamma = {"beta": 0.3}, {"label_smoothing": 0.125}, {"gamma": 1.5}
linear = B.__mul__

CASES = [
    Case(ob.dpo, WITH_REFERENCE, beta, lambda a, b: bce(B * (a - b)), linear),
    Case(ob.dpo, WITH_REFERENCE, beta | smooth, lambda a, b: bce(B * (a - b), E), linear),
    Case(
        ob.robust_dpo,
        WITH_REFERENCE,
        beta | smooth,
        lambda a, b: ((1 - E) * bce(B * (a - b)) - E * bce(B * (b - a))) / (1 - 2 * E),
        linear,
    ),
    Case(ob.ipo, WITH_REFERENCE, beta, lambda a, b: (a - b - 1 / (2 * B)) ** 2, linear),
    Case(ob.hinge, WITH_REFERENCE, beta, lambda a, b: max(mpf(0), 1 - B * (a - b)), linear),
    Case(ob.exo, WITH_REFERENCE, beta | smooth, lambda a, b: kl(B * (a - b), E), linear),
    Case(
        ob.nca,
        WITH_REFERENCE,
        beta,
        lambda a, b: bce(B * a) + (bce(-B * a) + bce(-B * b)) / 2,
        linear,
    ),
    Case(ob.bco_pair, WITH_REFERENCE, beta, lambda a, b: bce(B * a) + bce(-B * b), linear),
    Case(
        ob.sppo_hard,
        WITH_REFERENCE,
        beta,
        lambda a, b: (a - 1 / (2 * B)) ** 2 + (b + 1 / (2 * B)) ** 2,
        linear,
    ),
    Case(ob.apo_zero, WITH_REFERENCE, beta, lambda a, b: 1 - sigma(B * a) + sigma(B * b), linear),
    Case(
        ob.apo_down,
        WITH_REFERENCE,
        beta,
        lambda a, b: sigma(B * a) + 1 - sigma(B * (a - b)),
        linear,
    ),
    Case(
        ob.discopop,
        WITH_REFERENCE,
        beta,
        lambda a, b: (
            (1 - sigma(B * (a - b) / T)) * bce(B * (a - b))
            + sigma(B * (a - b) / T) * mp.exp(-B * (a - b))
        ),
        linear,
    ),
    Case(
        ob.dpo_positive,
        WITH_REFERENCE,
        beta | {"penalty": 1.5},
        lambda a, b: bce(B * (a - b - G * max(mpf(0), -a))),
        linear,
    ),
    Case(
        ob.length_regularized_dpo,
        LENGTHS,
        beta | {"alpha": 0.25},
        lambda a, b, n, m: bce(B * (a - b) + A * (n - m)),
        linear,
    ),
    Case(
        ob.chi_po,
        WITH_REFERENCE,
        beta | {"clip": 10000.0},
        lambda a, b: bce(max(mpf(-10000), min(B * (a - b + mp.exp(a) - mp.exp(b)), mpf(10000)))),
        lambda r: B * (r + mp.exp(r) - 1),
    ),
    Case(ob.tdpo1, DIVERGENCES, beta, lambda a, b, c, d: bce(B * (a - b - d + c)), linear),
    Case(ob.cpo, SUMS, beta, lambda c, r: bce(B * (c - r)), linear),
    Case(ob.cpo, SUMS, beta | smooth, lambda c, r: bce(B * (c - r), E), linear),
    Case(ob.simpo, MEANS, beta | gamma, lambda c, r: bce(B * (c - r) - G), linear),
    Case(ob.simpo, MEANS, beta | gamma | smooth, lambda c, r: bce(B * (c - r) - G, E), linear),
    Case(
        ob.alpha_po,
        MEANS,
        beta | gamma | {"alpha": 0.25},
        lambda c, r: bce(B * (1 - mp.exp(c) ** -A) / A - B * (1 - mp.exp(r) ** -A) / A - G),
        lambda m: B * (1 - mp.exp(m) ** -A) / A,
    ),
    Case(
        ob.alpha_po,
        MEANS,
        beta | gamma | {"alpha": -0.25},
        lambda c, r: bce(B * (mp.exp(c) ** A - mp.exp(r) ** A) / A - G),
        lambda m: B * (mp.exp(m) ** A - 1) / A,
    ),
    Case(ob.orpo, MEANS, {}, lambda c, r: mp.log(1 + odds(r) / odds(c)), lambda m: m),
]
# One of its tensors is a constant, so that its gradient is not that of its equation.
TDPO2 = Case(
    ob.tdpo2,
    DIVERGENCES,
    beta | {"alpha": 0.25},
    lambda a, b, c, d: bce(B * (a - b - A * (d - c))),
    linear,
)
COUPLED = [
    Case(objective, WITH_REFERENCE, beta | smooth, NotImplemented, linear, pairs_are_coupled=True)
    for objective in (ob.aot, ob.aot_unpaired)
]


def names(cases: list[Case]) -> list[str]:
    return [
        "-".join([case.name, *(f"{k}={v}" for k, v in case.hyper.items() if k != "beta")])
        for case in cases
    ]


uncoupled = pytest.mark.parametrize("case", CASES, ids=names(CASES))
EVERY = [*CASES, TDPO2, *COUPLED]
every = pytest.mark.parametrize("case", EVERY, ids=names(EVERY))


@pytest.fixture(autouse=True)
def four_hundred_digits() -> Any:
    with mp.workdps(400):
        yield


def logps(case: Case, pairs: int = 6, seed: int = 0) -> list[Tensor]:
    """Ordinary log-probabilities, as leaves: sums of tens of nats, or means of one or two."""
    scale = 3.0 if case.inputs == MEANS else 30.0
    draw = torch.Generator().manual_seed(seed)
    values = -scale * torch.rand(len(case.inputs), pairs, generator=draw, dtype=torch.float64)
    return [row.clone().requires_grad_() for row in values]


def grid(case: Case, values: list[float], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """All combinations of the values, one to a pair."""
    rows = zip(*itertools.product(values, repeat=len(case.inputs)), strict=True)
    return [torch.tensor(row, dtype=dtype, requires_grad=True) for row in rows]


def columns(tensors: list[Tensor]) -> list[tuple[float, ...]]:
    return list(zip(*(t.tolist() for t in tensors), strict=True))


def close(actual: Tensor, expected: list[mpf], rtol: float = 1e-12, atol: float = 1e-290) -> None:
    """Relatively close, however small: only below 1e-290 doubles have too few digits left."""
    torch.testing.assert_close(
        actual.detach(),
        torch.tensor([float(x) for x in expected], dtype=torch.float64),
        rtol=rtol,
        atol=atol,
    )


@uncoupled
def test_loss_and_gradient_equal_the_equation(case: Case) -> None:
    tensors = logps(case)
    loss, _ = case(tensors)
    close(loss, [case.equation_of_inputs(*pair) for pair in columns(tensors)])

    gradients = torch.autograd.grad(loss.sum(), tensors)
    for i, gradient in enumerate(gradients):
        one = tuple(int(j == i) for j in range(len(tensors)))
        with mp.workdps(60):
            close(
                gradient,
                [mp.diff(case.equation_of_inputs, pair, one) for pair in columns(tensors)],
                rtol=1e-11,
            )


@uncoupled
def test_the_equation_holds_far_from_the_ordinary(case: Case) -> None:
    tensors = grid(
        case,
        [-600.0, -37.0, -1e-3, -1e-9] if case.inputs == MEANS else [-2000.0, -1990.0, -100.0, 0.0],
    )
    loss, _ = case(tensors)
    close(loss, [case.equation_of_inputs(*pair) for pair in columns(tensors)], rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every
def test_loss_stats_and_gradient_are_finite_everywhere(case: Case, dtype: torch.dtype) -> None:
    means = [-12000.0, -1000.0, -20.0, -1e-7, -1e-30, -0.0, 1e-8]
    tensors = grid(case, means if case.inputs == MEANS else [-12000.0, -2000.0, -1.0, 0.0], dtype)
    loss, stats = case(tensors)
    gradients = torch.autograd.grad(loss.sum(), tensors, materialize_grads=True)
    for tensor in (loss, *stats.values(), *gradients):
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()


@pytest.mark.parametrize("case", CASES + COUPLED, ids=names(CASES + COUPLED))
def test_gradcheck(case: Case) -> None:
    tensors = logps(case)
    policy = (
        tensors
        if case.name != "hinge"
        else [t.detach().mul(0.01).requires_grad_() for t in tensors]
    )  # off the kink
    assert torch.autograd.gradcheck(lambda *t: case(list(t))[0], policy)


@uncoupled
def test_pairs_do_not_interact(case: Case) -> None:
    tensors = logps(case, pairs=3)
    jacobians = torch.autograd.functional.jacobian(lambda *t: case(list(t))[0], tuple(tensors))
    for jacobian in jacobians:
        assert torch.equal(jacobian, jacobian.diagonal().diag())
    alone = torch.cat([case([t[i : i + 1] for t in tensors])[0] for i in range(3)])
    assert torch.equal(alone, case(tensors)[0])


@every
def test_stats_are_the_implicit_rewards_detached_and_shaped_like_the_loss(case: Case) -> None:
    tensors = logps(case)
    loss, stats = case(tensors)
    assert loss.requires_grad
    assert all(
        not s.requires_grad and s.shape == loss.shape and s.dtype == loss.dtype
        for s in stats.values()
    )

    arguments = columns(tensors)
    if case.has_reference:
        arguments = [(c - rc, r - rr) for c, r, rc, rr, *_ in arguments]
    rewards = [(case.reward(mpf(c)), case.reward(mpf(r))) for c, r in arguments]
    names = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"]
    divergences = [name for name in case.inputs if name.startswith("divergence")]
    assert list(stats) == names + divergences
    for name, given in zip(divergences, tensors[4:], strict=False):
        assert torch.equal(stats[name], given.detach())
    close(stats["rewards/chosen"], [c for c, _ in rewards])
    close(stats["rewards/rejected"], [r for _, r in rewards])
    close(stats["rewards/margins"], [c - r for c, r in rewards])
    assert stats["rewards/accuracies"].tolist() == [float(c > r) for c, r in rewards]
    assert 0 < stats["rewards/accuracies"].mean() < 1, "the draw must hold both kinds of pair"


@every
def test_a_tie_is_not_accurate(case: Case) -> None:
    same = [torch.tensor([-1.0])] * len(case.inputs)
    assert case(same)[1]["rewards/accuracies"].item() == 0


@every
def test_no_pairs_is_a_differentiable_zero(case: Case) -> None:
    tensors = [torch.zeros(0, requires_grad=True) for _ in case.inputs]
    loss, _ = case(tensors)
    loss.sum().backward()
    assert loss.shape == (0,)


@every
def test_no_silent_broadcast(case: Case, as_users_run_it: None) -> None:
    for i, name in enumerate(case.inputs):
        tensors = [torch.full((3,), -1.0) for _ in case.inputs]
        tensors[i] = torch.full((1,), -1.0)
        expected, got = ("[1]", "[3]") if i == 0 else ("[3]", "[1]")
        wrong = case.inputs[1] if i == 0 else name
        with pytest.raises(ValueError) as error:
            case(tensors)
        assert str(error.value) == (
            f"{case.name}: {wrong} must have the shape of {case.inputs[0]}, {expected}, got {got}"
        )


WITH_ALPHA = {
    reference: [c for c in EVERY if "alpha" in c.hyper and c.has_reference is reference]
    for reference in (True, False)
}
OUT_OF_RANGE = {
    "beta": (EVERY, [0.0, -0.1, math.nan, math.inf], "> 0"),
    "gamma": ([c for c in CASES if "gamma" in c.hyper], [-0.1, math.nan, math.inf], ">= 0"),
    "penalty": ([c for c in CASES if "penalty" in c.hyper], [-0.1, math.nan, math.inf], ">= 0"),
    "clip": ([c for c in CASES if "clip" in c.hyper], [0.0, -0.1, math.nan], "> 0"),
    "R-DPO's and TDPO's alpha": (WITH_ALPHA[True], [-0.1, math.nan], ">= 0"),
    "alpha": (WITH_ALPHA[False], [math.nan, math.inf, -math.inf], "finite"),
    "tau": ([c for c in CASES if c.name == "discopop"], [0.0, -1.0, 1.5, math.nan], "in (0, 1]"),
    "label_smoothing": (
        [c for c in CASES + COUPLED if "label_smoothing" in c.hyper and c.name != "exo"],
        [-0.1, 0.5, math.nan],
        "in [0, 0.5)",
    ),
    "exo's label_smoothing": (
        [c for c in CASES if c.name == "exo"],
        [0.0, -0.1, 0.5, math.nan],
        "in (0, 0.5)",
    ),
}


@pytest.mark.parametrize("what", OUT_OF_RANGE)
def test_hyper_parameters_out_of_range_are_named(what: str) -> None:
    cases, values, wanted = OUT_OF_RANGE[what]
    name = what.rpartition(" ")[2]
    for case, value in itertools.product(cases, values):
        if name == "beta" and "beta" not in case.hyper:
            continue
        with pytest.raises(ValueError) as error:
            case.objective(*logps(case), **(case.hyper | {name: value}))
        assert str(error.value) == f"{case.name}: {name} must be {wanted}, got {value}"


def test_the_table_holds_every_objective_on_pairs() -> None:
    from burnish.objectives import preference, reference_free

    public = {
        name
        for module in (preference, reference_free)
        for name, value in vars(ob).items()
        if getattr(value, "__module__", None) == module.__name__
    }
    assert public - {"f_divergence_score"} == {case.name for case in EVERY}


def test_tdpo2_equals_its_equation_and_takes_no_gradient_of_the_chosen_divergence() -> None:
    tensors = logps(TDPO2)
    loss, _ = TDPO2(tensors)
    close(loss, [TDPO2.equation_of_inputs(*pair) for pair in columns(tensors)])
    gradients = torch.autograd.grad(loss.sum(), tensors, materialize_grads=True)
    for i, gradient in enumerate(gradients):
        one = tuple(int(j == i) for j in range(len(tensors)))
        with mp.workdps(60):
            expected = [mp.diff(TDPO2.equation_of_inputs, pair, one) for pair in columns(tensors)]
        close(
            gradient,
            [mpf(0)] * 6 if DIVERGENCES[i] == "divergence_chosen" else expected,
            rtol=1e-11,
        )


def shuffled(x: Tensor, seed: int) -> Tensor:
    return x[torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(seed))]


def test_aot_equals_its_equation_over_sorted_preferences() -> None:
    c, r, rc, rr = (t.detach() for t in logps(COUPLED[0]))
    policy = sorted((c - r).tolist())
    reference = sorted((rc - rr).tolist())
    loss, _ = ob.aot(c, r, rc, rr, beta=0.3, label_smoothing=0.125)
    close(
        loss.sort().values,
        sorted(bce(B * (mpf(p) - mpf(q)), E) for p, q in zip(policy, reference, strict=True)),
    )
    by_pair = dict(zip(policy, reference, strict=True))
    close(loss, [bce(B * (mpf(p) - mpf(by_pair[p])), E) for p in (c - r).tolist()])
    again, _ = ob.aot(c, r, shuffled(rc, 1), shuffled(rr, 1), beta=0.3, label_smoothing=0.125)
    torch.testing.assert_close(again, loss)


def test_aot_unpaired_equals_its_equation_over_sorted_rewards() -> None:
    c, r, rc, rr = (t.detach() for t in logps(COUPLED[1]))
    by_chosen = dict(zip(sorted((c - rc).tolist()), sorted((r - rr).tolist()), strict=True))
    loss, _ = ob.aot_unpaired(c, r, rc, rr, beta=0.3, label_smoothing=0.125)
    close(loss, [bce(B * (mpf(a) - mpf(by_chosen[a])), E) for a in (c - rc).tolist()])
    again, _ = ob.aot_unpaired(
        c, shuffled(r, 1), rc, shuffled(rr, 1), beta=0.3, label_smoothing=0.125
    )
    torch.testing.assert_close(again, loss)


@pytest.mark.parametrize("case", COUPLED, ids=names(COUPLED))
def test_ranks_couple_the_pairs(case: Case) -> None:
    tensors = logps(case, pairs=4)
    loss, _ = case(tensors)
    alone = torch.cat([case([t[i : i + 1] for t in tensors])[0] for i in range(4)])
    assert not torch.isclose(loss.sum(), alone.sum())
    one = [t[:1] for t in tensors]
    for hyper in (beta, beta | smooth):  # one pair has one rank
        torch.testing.assert_close(case.objective(*one, **hyper)[0], ob.dpo(*one, **hyper)[0])


@pytest.mark.parametrize(
    ("hyper", "derivative"),
    [
        ({"divergence": "reverse_kl"}, lambda u: mp.log(u)),
        ({"divergence": "forward_kl"}, lambda u: 1 - 1 / u),
        ({"divergence": "js"}, lambda u: mp.log(2 * u / (1 + u))),
        ({"divergence": "alpha", "alpha": 0.25}, lambda u: (1 - u**-A) / A),
        ({"divergence": "alpha"}, lambda u: (1 - u ** mpf(-0.5)) / mpf(0.5)),
    ],
    ids=lambda value: value.get("divergence") if isinstance(value, dict) else "",
)
def test_f_divergence_score_equals_the_derivative_of_its_divergence(
    hyper: Any, derivative: Callable[[mpf], mpf]
) -> None:
    values = [-200.0, -31.0, -1.5, -1e-9, 0.0, 1e-9, 0.7, 40.0, 2000.0]
    r = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    score = ob.f_divergence_score(r, **hyper)
    # f′(1) = 0 is the sum of two numbers near 1
    close(score, [derivative(mp.exp(mpf(x))) for x in values], atol=1e-15)
    (slope,) = torch.autograd.grad(score.sum(), r)
    close(slope, [mp.diff(lambda x: derivative(mp.exp(x)), mpf(x)) for x in values], rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js", "alpha"])
def test_f_divergence_score_composes_with_dpo_at_extremes_without_losing_the_order(
    divergence: Any, dtype: torch.dtype
) -> None:
    a = torch.tensor([-1e4, -1e4 + 8, 0.0, 1e4, -1e4], dtype=dtype, requires_grad=True)
    b = torch.tensor([-1e4 + 8, -1e4, -1e4, -1e4, 1e4], dtype=dtype, requires_grad=True)
    zero = torch.zeros_like(a).detach()
    f_a, f_b = (ob.f_divergence_score(x, divergence=divergence, alpha=0.75) for x in (a, b))
    loss, stats = ob.dpo(f_a, f_b, zero, zero, beta=0.1)
    gradients = torch.autograd.grad(loss.sum(), (a, b))
    assert all(t.isfinite().all() for t in (loss, *stats.values(), *gradients))
    assert stats["rewards/accuracies"].tolist() == [0, 1, 1, 1, 0]
    assert gradients[0][0] < 0 < gradients[1][0]


def test_f_divergence_score_names_what_it_knows(as_users_run_it: None) -> None:
    wanted = r"^f_divergence_score: divergence must be reverse_kl, .* or alpha, got 'chi'$"
    with pytest.raises(ValueError, match=wanted):
        ob.f_divergence_score(torch.zeros(1), divergence="chi")  # type: ignore[arg-type]
    for alpha in (0.0, 1.0, math.nan):
        with pytest.raises(
            ValueError, match=rf"^f_divergence_score: alpha must be in \(0, 1\), got {alpha}$"
        ):
            ob.f_divergence_score(torch.zeros(1), divergence="alpha", alpha=alpha)
