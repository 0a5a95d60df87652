"""Objectives on scores of completions and of steps: their equations, their laws, and what they
refuse.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from burnish.objectives import reward as rw
from mpmath import mp, mpf
from torch import Tensor


@pytest.fixture(autouse=True)
def four_hundred_digits() -> Any:
    with mp.workdps(400):
        yield


def sigma(x: mpf) -> mpf:
    return 1 / (1 + mp.exp(-x))


def cross_entropy(z: mpf, y: mpf) -> mpf:
    return -y * mp.log(sigma(z)) - (1 - y) * mp.log(sigma(-z))


def rao_kupper(x: mpf, y: mpf, theta: mpf) -> mpf:
    """Their probability of a tie, by the strengths of the two."""
    return (theta**2 - 1) * x * y / ((x + theta * y) * (y + theta * x))


LIMIT = mpf(0.75)
Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]
# Every elementwise objective with its equation and its statistics, as functions of the entries of
# its tensors.
CASES: dict[str, tuple[Objective, int, Callable[..., mpf], dict[str, Callable[..., mpf]]]] = {
    "bradley_terry": (
        rw.bradley_terry,
        3,
        lambda c, r, m: -mp.log(sigma(c - r - m)),
        {
            "mean_reward": lambda c, r, m: (c + r) / 2,
            "margin": lambda c, r, m: c - r,
            "accuracy": lambda c, r, m: c > r,
        },
    ),
    "bradley_terry-plain": (
        rw.bradley_terry,
        2,
        lambda c, r: -mp.log(sigma(c - r)),
        {
            "mean_reward": lambda c, r: (c + r) / 2,
            "margin": lambda c, r: c - r,
            "accuracy": lambda c, r: c > r,
        },
    ),
    "bradley_terry_ties-decided": (
        lambda c, r: rw.bradley_terry_ties(
            c, r, torch.zeros_like(c, dtype=torch.bool), threshold=0.75
        ),
        2,
        lambda c, r: -mp.log(sigma(c - r - LIMIT)),
        {
            "mean_reward": lambda c, r: (c + r) / 2,
            "margin": lambda c, r: c - r,
            "accuracy": lambda c, r: c > r,
        },
    ),
    "bradley_terry_ties-tied": (
        lambda c, r: rw.bradley_terry_ties(
            c, r, torch.ones_like(c, dtype=torch.bool), threshold=0.75
        ),
        2,
        lambda c, r: -mp.log(rao_kupper(mp.exp(c), mp.exp(r), mp.exp(LIMIT))),
        {
            "mean_reward": lambda c, r: (c + r) / 2,
            "margin": lambda c, r: c - r,
            "accuracy": lambda c, r: abs(c - r) < LIMIT,
        },
    ),
    "ordinal_preference": (
        lambda c, r, z: rw.ordinal_preference(c, r, z.sigmoid()),
        3,
        lambda c, r, z: cross_entropy(c - r, sigma(z)),
        {
            "mean_reward": lambda c, r, z: (c + r) / 2,
            "margin": lambda c, r, z: c - r,
            "accuracy": lambda c, r, z: (c > r) == (z > 0),
        },
    ),
    "centering": (rw.centering, 2, lambda c, r: (c + r) ** 2, {}),
    "score_regression": (
        rw.score_regression,
        2,
        lambda r, y: (r - y) ** 2,
        {"mean_reward": lambda r, y: r, "absolute_error": lambda r, y: abs(r - y)},
    ),
    "step_loss": (
        lambda z, y: rw.step_loss(z, y.sigmoid()),
        2,
        lambda z, y: cross_entropy(z, sigma(y)),
        {"accuracy": lambda z, y: (z > 0) == (y > 0)},
    ),
}
elementwise = pytest.mark.parametrize("name", CASES)


def scores(count: int = 8, size: int = 3, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (4 * torch.randn(size, generator=draw, dtype=torch.float64)).requires_grad_()
        for _ in range(count)
    ]


def close(actual: Tensor, expected: list[mpf], rtol: float = 1e-12) -> None:
    assert actual.tolist() == pytest.approx([float(x) for x in expected], rel=rtol, abs=1e-290)


def columns(tensors: list[Tensor]) -> list[tuple[mpf, ...]]:
    return [tuple(map(mpf, column)) for column in zip(*(t.tolist() for t in tensors), strict=True)]


@elementwise
def test_loss_and_gradient_equal_the_equation(name: str) -> None:
    objective, count, equation, _ = CASES[name]
    tensors = scores(count, size=8)
    loss, _ = objective(*tensors)
    close(loss, [equation(*column) for column in columns(tensors)])
    for i, gradient in enumerate(torch.autograd.grad(loss.sum(), tensors)):
        one = tuple(int(j == i) for j in range(count))
        with mp.workdps(60):
            close(
                gradient,
                [mp.diff(equation, column, one) for column in columns(tensors)],
                rtol=1e-10,
            )
    assert torch.autograd.gradcheck(lambda *t: objective(*t)[0], tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@elementwise
def test_loss_stats_and_gradient_are_finite_at_scores_of_ten_thousand(
    name: str, dtype: torch.dtype
) -> None:
    objective, count, equation, _ = CASES[name]
    grid = zip(*itertools.product([-1e4, -50.0, 0.0, 1e-7, 50.0, 1e4], repeat=count), strict=True)
    tensors = [torch.tensor(column, dtype=dtype, requires_grad=True) for column in grid]
    loss, stats = objective(*tensors)
    for tensor in (loss, *stats.values(), *torch.autograd.grad(loss.sum(), tensors)):
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()
    if dtype == torch.float64 and name not in (
        "step_loss",
        "ordinal_preference",
    ):  # whose label, σ of a score, is rounded to 0 or 1
        close(loss, [equation(*column) for column in columns(tensors)], rtol=1e-11)


@elementwise
def test_units_do_not_interact_and_stats_have_the_loss_s_shape(name: str) -> None:
    objective, count, _, statistics = CASES[name]
    tensors = scores(count, size=8)
    for jacobian in torch.autograd.functional.jacobian(lambda *t: objective(*t)[0], tuple(tensors)):
        assert torch.equal(jacobian, jacobian.diagonal().diag())
    loss, stats = objective(*tensors)
    assert list(stats) == list(statistics)
    assert all(
        not s.requires_grad and s.shape == loss.shape and s.dtype == loss.dtype
        for s in stats.values()
    )
    for stat, equation in statistics.items():
        close(stats[stat], [mpf(equation(*column)) for column in columns(tensors)])
    if "accuracy" in stats:
        assert 0 < stats["accuracy"].mean() < 1, "the draw must hold both kinds of unit"


@elementwise
def test_no_units_are_a_differentiable_zero(name: str) -> None:
    objective, count, _, _ = CASES[name]
    tensors = [torch.zeros(0, requires_grad=True) for _ in range(count)]
    loss, _ = objective(*tensors)
    loss.sum().backward()
    assert loss.shape == (0,)


def test_a_tie_is_not_accurate() -> None:
    same = torch.zeros(2)
    assert rw.bradley_terry(same, same, -1.0)[1]["accuracy"].tolist() == [0, 0]
    assert rw.step_loss(same, torch.tensor([True, False]))[1]["accuracy"].tolist() == [0, 0]
    no, yes = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    assert rw.bradley_terry_ties(same, same, no, threshold=1.0)[1]["accuracy"].tolist() == [0, 0]
    at_threshold = rw.bradley_terry_ties(same + 1, same, yes, threshold=1.0)
    assert at_threshold[1]["accuracy"].tolist() == [0, 0]
    assert rw.ordinal_preference(same, same, same + 1)[1]["accuracy"].tolist() == [0, 0]
    assert rw.ordinal_preference(same + 1, same, same + 0.5)[1]["accuracy"].tolist() == [0, 0]
    assert rw.step_loss(torch.tensor([1.0, -1.0]), same + 0.5)[1]["accuracy"].tolist() == [0, 0]


def test_bradley_terry_asks_for_the_margin_and_knows_scores_up_to_a_constant() -> None:
    chosen, rejected = scores(2)
    at_margin, _ = rw.bradley_terry(rejected + 1.5, rejected, 1.5)
    torch.testing.assert_close(at_margin, torch.full_like(at_margin, math.log(2)))
    one = rw.bradley_terry(chosen, rejected, 1.5)[0]
    torch.testing.assert_close(
        one, rw.bradley_terry(chosen, rejected, torch.full_like(chosen, 1.5))[0]
    )
    torch.testing.assert_close(one, rw.bradley_terry(chosen + 7, rejected + 7, 1.5)[0])
    shifted = rw.centering(chosen + 7, rejected + 7)[0]
    assert (shifted > rw.centering(chosen - rejected, rejected - chosen)[0]).all()


def test_a_regressed_score_rests_at_the_mean_of_what_people_said() -> None:
    said = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    score = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    loss, _ = rw.score_regression(score.expand(3), said)
    assert torch.autograd.grad(loss.sum(), score)[0] == 0
    spread = said.var(unbiased=False)
    torch.testing.assert_close(loss.mean(), spread)  # what no score explains
    lower, _ = rw.score_regression(torch.full_like(said, 2.5), said)
    torch.testing.assert_close(lower.mean(), spread + 0.25)


@pytest.mark.parametrize("threshold", [1e-3, 0.75, 30.0])
def test_a_pair_is_won_tied_or_lost(threshold: float) -> None:
    chosen, rejected = (x.detach() for x in scores(2, size=20))
    no, yes = torch.zeros(20, dtype=torch.bool), torch.ones(20, dtype=torch.bool)
    won, _ = rw.bradley_terry_ties(chosen, rejected, no, threshold=threshold)
    lost, _ = rw.bradley_terry_ties(rejected, chosen, no, threshold=threshold)
    tie, _ = rw.bradley_terry_ties(chosen, rejected, yes, threshold=threshold)
    torch.testing.assert_close(
        (-won).exp() + (-lost).exp() + (-tie).exp(), torch.ones(20, dtype=torch.float64)
    )
    torch.testing.assert_close(
        tie, rw.bradley_terry_ties(rejected, chosen, yes, threshold=threshold)[0]
    )


def test_ties_of_a_vanishing_threshold_are_bradley_terry_and_equal_scores_tie_best() -> None:
    chosen, rejected = (x.detach() for x in scores(2))
    no, yes = torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)
    decided, _ = rw.bradley_terry_ties(chosen, rejected, no, threshold=1e-12)
    torch.testing.assert_close(decided, rw.bradley_terry(chosen, rejected)[0])
    apart = torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)
    tie, _ = rw.bradley_terry_ties(apart, torch.zeros_like(apart), yes, threshold=0.75)
    assert tie.argmin() == 1


def test_an_ordinal_preference_rests_where_the_model_says_what_people_do() -> None:
    z = torch.tensor([0.5, 0.7, 0.95], dtype=torch.float64)
    chosen = z.logit().requires_grad_()
    loss, _ = rw.ordinal_preference(chosen, torch.zeros(3, dtype=torch.float64), z)
    (slope,) = torch.autograd.grad(loss.sum(), chosen)
    assert slope.abs().max() < 1e-15
    certain, _ = rw.ordinal_preference(chosen, chosen * 0, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(certain, rw.bradley_terry(chosen, chosen * 0)[0])


def normal(x: mpf) -> mpf:
    return (1 + mp.erf(x / mp.sqrt(2))) / 2


def shares(y: float, low: float, high: float, bins: int, spread: float) -> list[mpf]:
    """Of a normal distribution around y, within the bounds, in each bin."""
    y = min(max(y, low), high)
    edges = [mpf(low) + (mpf(high) - mpf(low)) * i / bins for i in range(bins + 1)]
    below = [normal((edge - mpf(y)) / mpf(spread)) for edge in edges]
    return [(b - a) / (below[-1] - below[0]) for a, b in itertools.pairwise(below)]


TARGETS = [-1.0, -0.93, 0.1, 0.5, 1.99, 2.0, 7.0, -40.0]


def test_hl_gauss_equals_its_equation_in_value_and_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(len(TARGETS), 6, generator=draw, dtype=torch.float64, requires_grad=True)
    target = torch.tensor(TARGETS, dtype=torch.float64)
    loss, stats = rw.hl_gauss(logits.log_softmax(-1), target, low=-1.0, high=2.0, sigma=0.3)
    (slope,) = torch.autograd.grad(loss.sum(), logits)
    logp, q = logits.log_softmax(-1).tolist(), logits.softmax(-1).tolist()
    for i, y in enumerate(TARGETS):
        p = [float(x) for x in shares(y, -1.0, 2.0, 6, 0.3)]
        expected = -math.fsum(a * b for a, b in zip(p, logp[i], strict=True))
        assert loss[i].item() == pytest.approx(expected, rel=1e-12)
        assert slope[i].tolist() == pytest.approx(
            [a - b for a, b in zip(q[i], p, strict=True)], abs=1e-12
        )
        mean = math.fsum(a * (-0.75 + 0.5 * k) for k, a in enumerate(q[i]))
        assert stats["mean_reward"][i].item() == pytest.approx(mean, rel=1e-12, abs=1e-15)
        assert stats["absolute_error"][i].item() == pytest.approx(abs(mean - y), rel=1e-12)
    assert list(stats) == ["mean_reward", "absolute_error"]
    assert not any(stat.requires_grad for stat in stats.values())
    assert torch.autograd.gradcheck(
        lambda x: rw.hl_gauss(x.log_softmax(-1), target, low=-1.0, high=2.0, sigma=0.3)[0], logits
    )


def test_what_hl_gauss_learns_is_read_off_by_the_mean_of_the_histogram() -> None:
    targets = [-0.5, -0.21, 0.0, 0.4, 1.5]
    learned = torch.tensor(
        [[float(p) for p in shares(y, -1.0, 2.0, 60, 0.0375)] for y in targets], dtype=torch.float64
    )
    logits = learned.log().clamp(min=-800).requires_grad_()
    target = torch.tensor(targets, dtype=torch.float64)
    loss, stats = rw.hl_gauss(logits.log_softmax(-1), target, low=-1.0, high=2.0, sigma=0.0375)
    (slope,) = torch.autograd.grad(loss.sum(), logits)
    assert slope.abs().max() < 1e-12
    torch.testing.assert_close(stats["mean_reward"], target, atol=1e-4, rtol=0)
    mean = rw.histogram_mean(logits.log_softmax(-1), low=-1.0, high=2.0)
    torch.testing.assert_close(mean.detach(), stats["mean_reward"])
    assert mean.requires_grad


def test_hl_gauss_of_a_narrow_normal_is_the_cross_entropy_of_the_bin() -> None:
    logp = torch.randn(2, 3, 4, dtype=torch.float64).log_softmax(-1)
    target = torch.full((2, 3), 0.3, dtype=torch.float64)
    loss, _ = rw.hl_gauss(logp, target, low=0.0, high=1.0, sigma=1e-6)
    torch.testing.assert_close(loss, -logp[..., 1])
    alone, _ = rw.hl_gauss(logp[1], target[1], low=0.0, high=1.0, sigma=1e-6)
    assert torch.equal(alone, loss[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hl_gauss_is_finite_for_targets_far_away_and_bins_of_no_mass(dtype: torch.dtype) -> None:
    target = torch.tensor([-1e30, -1.0, 0.0, 1.0, 1e30], dtype=dtype)
    logits = (
        torch.tensor([0.0, -2000.0, -1e4, 50.0], dtype=dtype).expand(5, 4).clone().requires_grad_()
    )
    for spread in (1e-6, 0.5, 1e6):
        loss, stats = rw.hl_gauss(logits.log_softmax(-1), target, low=-1.0, high=1.0, sigma=spread)
        (slope,) = torch.autograd.grad(loss.sum(), logits)
        assert all(x.isfinite().all() and x.dtype == dtype for x in (loss, slope, *stats.values()))
    impossible = torch.tensor([[0.0, -math.inf]], dtype=dtype, requires_grad=True)
    loss, _ = rw.hl_gauss(impossible, target[1:2], low=-1.0, high=1.0, sigma=1e-6)
    assert loss.item() == 0


# Three groups, one of a single completion, in any order; ranks need not be consecutive.
GROUP = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])
RANK = torch.tensor([2, 0, 3, 1, 0, 5, 0, 1])
SCORE = torch.tensor([0.5, 3.0, -2.0, -1.0, 9.0, 1.0, 1.5, 2.5], dtype=torch.float64)


def likelihood(best_first: list[float]) -> mpf:
    """The probability of choosing the best, then the next one of those left, and so on."""
    worth = [mp.exp(mpf(s)) for s in best_first]
    return mp.fprod(w / mp.fsum(worth[i:]) for i, w in enumerate(worth))


def test_plackett_luce_sums_to_the_negative_log_likelihood_of_each_ranking() -> None:
    score = SCORE.clone().requires_grad_()
    loss, _ = rw.plackett_luce(score, GROUP, RANK)
    for group in range(3):
        inside = group == GROUP
        best_first = SCORE[inside][RANK[inside].argsort()].tolist()
        assert loss[inside].sum().item() == pytest.approx(
            float(-mp.log(likelihood(best_first))), rel=1e-14
        )
    assert loss[[2, 4, 5]].tolist() == [0, 0, 0]  # nothing is left beside the last of a group
    assert torch.autograd.gradcheck(lambda s: rw.plackett_luce(s, GROUP, RANK)[0], score)


def test_plackett_luce_is_a_distribution_over_rankings() -> None:
    group, total = torch.zeros(4, dtype=torch.int64), 0.0
    for order in itertools.permutations(range(4)):
        total += math.exp(-rw.plackett_luce(SCORE[:4], group, torch.tensor(order))[0].sum().item())
    assert total == pytest.approx(1)


def test_plackett_luce_of_two_is_bradley_terry_and_its_order_of_rows_is_free() -> None:
    chosen, rejected = scores(2)
    group = torch.arange(3).repeat(2)
    loss, _ = rw.plackett_luce(
        torch.cat([chosen, rejected]), group, torch.tensor([0, 0, 0, 1, 1, 1])
    )
    torch.testing.assert_close(
        loss[:3], rw.bradley_terry(chosen, rejected)[0], rtol=1e-12, atol=1e-15
    )
    assert loss[3:].tolist() == [0, 0, 0]
    mixed = torch.tensor([5, 0, 3, 1, 7, 2, 6, 4])
    straight, _ = rw.plackett_luce(SCORE, GROUP, RANK)
    torch.testing.assert_close(
        rw.plackett_luce(SCORE[mixed], GROUP[mixed], RANK[mixed])[0], straight[mixed]
    )


def test_tied_completions_are_all_left_when_either_is_chosen() -> None:
    score = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss, stats = rw.plackett_luce(
        score, torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    )
    either = math.log(2 * math.e + math.exp(-1)) - 1
    assert loss.tolist() == pytest.approx([either, either, 0])
    (slope,) = torch.autograd.grad(loss.sum(), score)
    assert slope[0] == slope[1]
    assert stats["accuracy"].tolist() == [1, 1, 1]


def test_groups_do_not_interact() -> None:
    score = SCORE.clone().requires_grad_()
    jacobian = torch.autograd.functional.jacobian(
        lambda s: rw.plackett_luce(s, GROUP, RANK)[0], score
    )
    assert torch.equal(
        jacobian[GROUP[:, None] != GROUP], torch.zeros(64 - 16 - 1 - 9, dtype=torch.float64)
    )
    far = torch.where(GROUP == 1, 1e4, SCORE)
    assert torch.equal(
        rw.plackett_luce(far, GROUP, RANK)[0], rw.plackett_luce(SCORE, GROUP, RANK)[0]
    )


def test_the_accuracy_of_a_ranking_counts_the_completions_each_one_is_on_the_right_side_of() -> (
    None
):
    _, stats = rw.plackett_luce(SCORE.clone().requires_grad_(), GROUP, RANK)
    # 0 vs 3 is wrong in the first group; in the last, the worst-ranked is lowest, and the
    # best-ranked not highest
    assert stats["accuracy"].tolist() == pytest.approx(
        [2 / 3, 1, 1, 2 / 3, 0, 1, 1 / 2, 1 / 2], rel=1e-15
    )
    assert stats["mean_reward"].tolist() == SCORE.tolist()
    assert all(not s.requires_grad and s.dtype == SCORE.dtype for s in stats.values())
    equal, zero = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    assert rw.plackett_luce(equal, zero, torch.arange(3))[1]["accuracy"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plackett_luce_is_finite_at_scores_of_ten_thousand_and_of_nothing(
    dtype: torch.dtype,
) -> None:
    score = torch.tensor(
        [1e4, -1e4, 0.0, 1e4, 50.0, -50.0, 0.0, 1e-7], dtype=dtype, requires_grad=True
    )
    loss, stats = rw.plackett_luce(score, GROUP, RANK)
    (slope,) = torch.autograd.grad(loss.sum(), score)
    assert all(t.isfinite().all() and t.dtype == dtype for t in (loss, slope, *stats.values()))
    nothing = torch.zeros(0, dtype=torch.int64)
    loss, _ = rw.plackett_luce(score[:0], nothing, nothing)
    loss.sum().backward()
    assert loss.shape == (0,)


def test_hard_labels_are_probabilities_of_zero_and_one() -> None:
    logit = scores(1, size=4)[0]
    label = torch.tensor([True, False, False, True])
    hard, _ = rw.step_loss(logit, label)
    assert torch.equal(hard, rw.step_loss(logit, label.double())[0])
    close(
        hard,
        [
            -mp.log(sigma(mpf(z) if y else -mpf(z)))
            for z, y in zip(logit.tolist(), label.tolist(), strict=True)
        ],
    )


def test_a_soft_label_is_best_met_by_its_own_logit() -> None:
    label = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    logit = label.logit().requires_grad_()
    loss, _ = rw.step_loss(logit, label)
    (slope,) = torch.autograd.grad(loss.sum(), logit)
    assert slope.abs().max() < 1e-15
    entropy = -(label * label.log() + (1 - label) * (1 - label).log())
    torch.testing.assert_close(loss, entropy)


LENGTHS = [3, 0, 1, 4, 0]
SEQUENCE = torch.tensor([0, 0, 0, 2, 3, 3, 3, 3])
STEPS = torch.tensor([0.9, 0.2, 0.7, 1.0, 0.5, 0.0, 0.25, 0.8], dtype=torch.float64)
AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "prod": math.prod,
    "last": lambda p: p[-1],
    "mean": lambda p: math.fsum(p) / len(p),
}


@pytest.mark.parametrize("how", AGGREGATES)
def test_a_solution_s_score_is_of_its_own_steps_and_0_without_any(how: Any) -> None:
    score = rw.step_aggregate(STEPS, SEQUENCE, 5, how=how)
    expected = [AGGREGATES[how](p.tolist()) if len(p) else 0 for p in STEPS.split(LENGTHS)]
    assert score.tolist() == pytest.approx(expected, rel=1e-15)

    def function(x: Tensor) -> Tensor:
        return rw.step_aggregate(x, SEQUENCE, 5, how=how)

    jacobian = torch.autograd.functional.jacobian(function, STEPS)
    assert not jacobian[torch.arange(5)[:, None] != SEQUENCE].any()
    assert torch.autograd.gradcheck(function, STEPS.clone().requires_grad_())
    nothing = torch.zeros(0, requires_grad=True)
    empty = rw.step_aggregate(nothing, SEQUENCE[:0], 2, how=how)
    empty.sum().backward()
    assert empty.tolist() == [0, 0]


def test_aggregates_keep_their_order() -> None:
    prod, least, mean = (
        rw.step_aggregate(STEPS, SEQUENCE, 5, how=how) for how in ("prod", "min", "mean")
    )
    assert (prod <= least).all() and (least <= mean).all()


def test_400_elo_points_are_odds_of_ten() -> None:
    better, worse = rw.elo(torch.tensor([2.0 + math.log(10), 2.0], dtype=torch.float64))
    assert (better - worse).item() == pytest.approx(400)
    first, second = (t.detach() for t in scores(2))
    loss, _ = rw.bradley_terry(first, second)
    torch.testing.assert_close(
        (-loss).exp(), 1 / (1 + 10 ** ((rw.elo(second) - rw.elo(first)) / 400))
    )


THREE, ONE = torch.zeros(3), torch.zeros(1)
IDS, ID = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rw.bradley_terry(THREE, ONE),
            "bradley_terry: rejected must have the shape of chosen, [3], got [1]",
        ),
        (
            lambda: rw.bradley_terry(THREE, THREE, ONE),
            "bradley_terry: margin must have the shape of chosen, [3], got [1]",
        ),
        (
            lambda: rw.bradley_terry(THREE, THREE, math.nan),
            "bradley_terry: margin must be finite, got nan",
        ),
        (
            lambda: rw.bradley_terry(THREE, THREE, -math.inf),
            "bradley_terry: margin must be finite, got -inf",
        ),
        (
            lambda: rw.bradley_terry(THREE, THREE, math.inf),
            "bradley_terry: margin must be finite, got inf",
        ),
        (
            lambda: rw.bradley_terry_ties(THREE, THREE, THREE, threshold=1.0),
            "bradley_terry_ties: tied must be a Bool tensor, got torch.float32",
        ),
        (
            lambda: rw.bradley_terry_ties(THREE, ONE, THREE > 0, threshold=1.0),
            "bradley_terry_ties: rejected must have the shape of chosen, [3], got [1]",
        ),
        (
            lambda: rw.bradley_terry_ties(THREE, THREE, THREE > 0, threshold=0.0),
            "bradley_terry_ties: threshold must be > 0, got 0.0",
        ),
        (
            lambda: rw.ordinal_preference(THREE, THREE, ONE),
            "ordinal_preference: preference must have the shape of chosen, [3], got [1]",
        ),
        (
            lambda: rw.hl_gauss(THREE[:, None], ONE, low=0.0, high=1.0, sigma=0.1),
            "hl_gauss: logp must have the shape of target, [1], got [3]",
        ),
        (
            lambda: rw.hl_gauss(THREE[:, None], THREE, low=0.0, high=1.0, sigma=0.0),
            "hl_gauss: sigma must be > 0, got 0.0",
        ),
        (
            lambda: rw.hl_gauss(THREE[:, None], THREE, low=1.0, high=1.0, sigma=0.1),
            "hl_gauss: high must be finite, above low = 1.0, got 1.0",
        ),
        (
            lambda: rw.hl_gauss(THREE[:, None], THREE, low=1.0, high=math.inf, sigma=0.1),
            "hl_gauss: high must be finite, above low = 1.0, got inf",
        ),
        (
            lambda: rw.histogram_mean(THREE, low=-math.inf, high=1.0),
            "histogram_mean: low must be finite, got -inf",
        ),
        (
            lambda: rw.histogram_mean(THREE, low=math.inf, high=1.0),
            "histogram_mean: low must be finite, got inf",
        ),
        (
            lambda: rw.histogram_mean(THREE, low=0.0, high=math.inf),
            "histogram_mean: high must be finite, above low = 0.0, got inf",
        ),
        (
            lambda: rw.centering(THREE, ONE),
            "centering: rejected must have the shape of chosen, [3], got [1]",
        ),
        (
            lambda: rw.plackett_luce(THREE, ID, IDS),
            "plackett_luce: group must have the shape of score, [3], got [1]",
        ),
        (
            lambda: rw.plackett_luce(THREE, IDS, ID),
            "plackett_luce: rank must have the shape of score, [3], got [1]",
        ),
        (
            lambda: rw.score_regression(THREE, ONE),
            "score_regression: target must have the shape of score, [3], got [1]",
        ),
        (
            lambda: rw.step_loss(THREE, ONE),
            "step_loss: label must have the shape of logit, [3], got [1]",
        ),
        (
            lambda: rw.step_aggregate(THREE, ID, 1, how="min"),
            "step_aggregate: sequence must have the shape of step_score, [3], got [1]",
        ),
        (
            lambda: rw.step_aggregate(THREE, IDS, 1, how="max"),  # type: ignore[arg-type]
            "step_aggregate: how must be min, prod, last or mean, got 'max'",
        ),
    ],
)
def test_errors_name_the_function_and_what_it_got(
    call: Callable[[], object], message: str, as_users_run_it: None
) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
