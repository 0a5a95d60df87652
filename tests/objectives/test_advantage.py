"""Advantages against plain Python that knows a completion, its group and the batch; and what they
do not depend on.
"""

import itertools
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from burnish.objectives import advantage as adv
from torch import Tensor

NAN = math.nan
# Groups: 7 has four completions, one unscored; -3 has equal rewards; 5 two completions; 40 one; 9
# none scored; 0 one scored of two.
GROUP = [7, -3, 7, 40, 9, -3, 0, 7, 0, 9, 7, -3, 5, 5]
REWARD = [1.0, 0.1, -0.5, 2.5, NAN, 0.1, NAN, NAN, 0.3, NAN, 0.75, 0.1, 1.5, -0.25]
LENGTH = [3, 8, 1, 5, 2, 2, 9, 4, 6, 1, 7, 3, 2, 5]


def mean(x: list[float]) -> float:
    return statistics.mean(x)  # exact: the mean of equal numbers is that number


def std(x: list[float]) -> float:
    return statistics.stdev(x) if len(x) > 1 else 0.0


def z(x: list[float], eps: float = 1e-4) -> list[float]:
    """Whitened over all that is not NaN, which becomes 0."""
    known = [v for v in x if not math.isnan(v)]
    return [0.0 if math.isnan(v) else (v - mean(known)) / (std(known) + eps) for v in x]


def each(
    rule: Callable[[int, list[int], list[float], list[float]], float],
) -> Callable[..., list[float]]:
    """The rule for completion i, given the scored completions of its group (itself included), for
    every scored one.
    """

    def apply(reward: list[float], group: list[int], length: list[float]) -> list[float]:
        scored = [i for i, r in enumerate(reward) if not math.isnan(r)]
        mates = {i: [j for j in scored if group[j] == group[i]] for i in scored}
        return [
            rule(i, mates[i], reward, length) if i in mates else 0.0 for i in range(len(reward))
        ]

    return apply


@each
def group_scaled(i: int, mates: list[int], r: list[float], _: list[float]) -> float:
    own = [r[j] for j in mates]
    return (r[i] - mean(own)) / (std(own) + 1e-4)


@each
def batch_scaled(i: int, mates: list[int], r: list[float], _: list[float]) -> float:
    return (r[i] - mean([r[j] for j in mates])) / (std([v for v in r if not math.isnan(v)]) + 1e-4)


@each
def centered(i: int, mates: list[int], r: list[float], _: list[float]) -> float:
    return r[i] - mean([r[j] for j in mates])


@each
def against_the_others(i: int, mates: list[int], r: list[float], _: list[float]) -> float:
    others = [r[j] for j in mates if j != i]
    return r[i] - mean(others) if others else 0.0


@each
def against_the_long(i: int, mates: list[int], r: list[float], length: list[float]) -> float:
    return r[i] - math.fsum(length[j] * r[j] for j in mates) / math.fsum(length[j] for j in mates)


@each
def scaled_by_the_informative(i: int, mates: list[int], r: list[float], _: list[float]) -> float:
    groups: dict[int, list[float]] = {}
    for g, x in zip(GROUP, REWARD, strict=True):
        if not math.isnan(x):
            groups.setdefault(g, []).append(x)
    teaching = sum(len(of) for of in groups.values() if len(set(of)) > 1)
    return sum(map(len, groups.values())) / teaching * (r[i] - mean([r[j] for j in mates]))


@each
def best_of_three(i: int, mates: list[int], r: list[float], _: list[float]) -> float:
    others = [r[j] for j in mates if j != i]
    sets = list(itertools.combinations(others, min(2, len(others)))) if others else []
    return mean([max(r[i], *of) - max(of) for of in sets]) if sets else 0.0


def two_rewards(reward: Tensor, length: Tensor) -> Tensor:
    """Reward and length as a second one, for the same completions."""
    return torch.stack([reward, length.to(reward.dtype).where(~reward.isnan(), NAN)], 1)


def gdpo(reward: list[float], group: list[int], length: list[float]) -> list[float]:
    second = [NAN if math.isnan(r) else n for r, n in zip(reward, length, strict=True)]
    columns = [group_scaled(x, group, length) for x in (reward, second)]
    total = [a - 0.5 * b for a, b in zip(*columns, strict=True)]
    return z([NAN if math.isnan(r) else t for r, t in zip(reward, total, strict=True)])


def token_whitened(reward: list[float], group: list[int], length: list[float]) -> list[float]:
    """REINFORCE++-baseline of completions of `length` tokens, of which the first is returned."""
    deviation = [
        NAN if math.isnan(r) else d
        for r, d in zip(reward, centered(reward, group, length), strict=True)
    ]
    tokens = [d for d, n in zip(deviation, length, strict=True) for _ in range(int(n))]
    first = [int(math.fsum(length[:i])) for i in range(len(length))]
    return [z(tokens)[t] for t in first]


def reinforce_baseline(reward: Tensor, group: Tensor, length: Tensor) -> Tensor:
    sequence = torch.repeat_interleave(torch.arange(len(length)), length)
    tokens = adv.reinforce_plus_plus_baseline(reward, group, sequence)
    first = length.cumsum(0) - length
    assert torch.equal(tokens, tokens[first][sequence]), (
        "all tokens of a completion have its advantage"
    )
    return tokens[first]


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., list[float]]]] = {
    "group": (lambda r, g, n: adv.group_advantage(r, g), group_scaled),
    "batch": (lambda r, g, n: adv.group_advantage(r, g, scale="batch"), batch_scaled),
    "none": (lambda r, g, n: adv.group_advantage(r, g, scale="none"), centered),
    "rloo_advantage": (lambda r, g, n: adv.rloo_advantage(r, g), against_the_others),
    "opo_advantage": (adv.opo_advantage, against_the_long),
    "gpg_advantage": (lambda r, g, n: adv.gpg_advantage(r, g), scaled_by_the_informative),
    "max_at_k_advantage": (lambda r, g, n: adv.max_at_k_advantage(r, g, k=3), best_of_three),
    "gdpo_advantage": (
        lambda r, g, n: adv.gdpo_advantage(
            two_rewards(r, n), g, torch.tensor([1.0, -0.5], dtype=r.dtype)
        ),
        gdpo,
    ),
    "reinforce_plus_plus_baseline": (reinforce_baseline, token_whitened),
}
every = pytest.mark.parametrize("name", CASES)
GROUPED = ["group", "none", "rloo_advantage", "opo_advantage", "max_at_k_advantage"]
grouped_only = pytest.mark.parametrize("name", GROUPED)


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(REWARD, dtype=dtype), torch.tensor(GROUP), torch.tensor(LENGTH)


@every
def test_advantages_equal_their_equation(name: str) -> None:
    function, equation = CASES[name]
    actual = function(*tensors())
    assert actual.tolist() == pytest.approx(equation(REWARD, GROUP, LENGTH), rel=1e-12, abs=1e-14)
    assert actual.dtype == torch.float64


@every
def test_unscored_and_lone_completions_have_advantage_exactly_zero(name: str) -> None:
    actual = CASES[name][0](*tensors())
    silent = [i for i, r in enumerate(REWARD) if math.isnan(r) or GROUP[i] in (-3, 40, 0)]
    # their last step centers over the batch
    if name not in ("gdpo_advantage", "reinforce_plus_plus_baseline"):
        assert all(actual[i] == 0 for i in silent)
    assert all(actual[i] == 0 for i in silent if math.isnan(REWARD[i]))


@every
def test_an_unscored_completion_changes_no_other(name: str) -> None:
    function, _ = CASES[name]
    reward, group, length = tensors()
    scored = ~reward.isnan()
    torch.testing.assert_close(
        function(reward, group, length)[scored],
        function(reward[scored], group[scored], length[scored]),
        rtol=1e-13,
        atol=1e-15,
    )


@every
def test_order_of_completions_and_names_of_groups_do_not_matter(name: str) -> None:
    function, _ = CASES[name]
    reward, group, length = tensors()
    order = torch.tensor(random.Random(0).sample(range(len(REWARD)), len(REWARD)))
    renamed = torch.tensor([{7: -900, -3: 2**40, 40: 1, 9: 0, 0: 6, 5: 7}[g] for g in GROUP])
    expected = function(reward, group, length)
    torch.testing.assert_close(function(reward, renamed, length), expected, rtol=1e-13, atol=1e-15)
    shuffled = function(reward[order], group[order], length[order])
    torch.testing.assert_close(shuffled, expected[order], rtol=1e-12, atol=1e-14)


@every
def test_advantages_do_not_see_a_constant_added_to_all_rewards(name: str) -> None:
    function, _ = CASES[name]
    reward, group, length = tensors()
    torch.testing.assert_close(
        function(reward + 1024, group, length), function(reward, group, length), atol=1e-9, rtol=0
    )


@grouped_only
def test_groups_do_not_interact(name: str) -> None:
    function, _ = CASES[name]
    reward, group, length = tensors()
    whole = function(reward, group, length)
    for one in group.unique():
        member = group == one
        torch.testing.assert_close(
            function(reward[member], group[member], length[member]), whole[member]
        )
    # a constant added to one group changes nothing either
    torch.testing.assert_close(
        function(reward + 8.0 * (group == 7), group, length), whole, atol=1e-12, rtol=0
    )


@every
def test_advantages_are_constants(name: str) -> None:
    reward, group, length = tensors()
    assert not CASES[name][0](reward.requires_grad_(), group, length).requires_grad


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_of_any_size_give_finite_advantages(name: str, dtype: torch.dtype) -> None:
    function, _ = CASES[name]
    for scale in (1e-30, 1.0, 1e6, 1e15):
        reward, group, length = tensors(dtype)
        advantage = function(reward * scale, group, length)
        assert advantage.dtype == dtype
        assert advantage.isfinite().all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_are_no_signal_however_large(scale: Any, dtype: torch.dtype) -> None:
    # the mean of seven such rewards, rounded, is not the reward: a naive z-score is far from 0 here
    reward = torch.full((7,), 1e7 / 3, dtype=dtype)
    group = torch.zeros(7, dtype=torch.int64)
    assert not adv.group_advantage(reward, group, scale=scale, eps=0.0).any()
    assert not adv.rloo_advantage(reward, group).any()
    assert not adv.whiten(reward).any()
    assert adv.group_stats(reward, group)["frac_reward_zero_std"] == 1


def test_a_tiny_spread_on_a_large_reward_keeps_its_digits_in_float32() -> None:
    steps = torch.tensor([0.0, 0.0625, 0.125, 0.25])
    group = torch.zeros(4, dtype=torch.int64)
    assert torch.equal(adv.group_advantage(steps + 1e6, group), adv.group_advantage(steps, group))


def test_epsilon_reaches_every_standard_deviation() -> None:
    reward, group = (
        torch.tensor([1.0, 3.0, 0.0, 8.0], dtype=torch.float64),
        torch.tensor([0, 0, 1, 1]),
    )
    scores = [z([1.0, 3.0], eps=0.5), z([0.0, 8.0], eps=0.5)]
    one = torch.ones(1, dtype=torch.float64)
    both = adv.gdpo_advantage(reward[:, None], group, one, eps=0.5)
    assert both.tolist() == pytest.approx(z(scores[0] + scores[1], eps=0.5), rel=1e-12)
    baseline = adv.reinforce_plus_plus_baseline(reward, group, torch.arange(4), eps=0.5)
    assert baseline.tolist() == pytest.approx(z([-1.0, 1.0, -4.0, 4.0], eps=0.5), rel=1e-12)


def test_without_epsilon_group_advantages_have_unit_variance_whatever_the_scale() -> None:
    reward = torch.tensor([0.0, 1e-9, 5e-9, 2e-9, 1e9, 3e9], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    advantage = adv.group_advantage(reward, group, eps=0.0)
    assert advantage[:4].std().item() == pytest.approx(1)
    assert advantage[4:].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert adv.group_advantage(reward, group)[:4].abs().max() < 1e-4
    # a difference too small to square counts as none
    assert not adv.group_advantage((reward * 1e-30).float()[:4], group[:4], eps=0.0).any()


def test_rloo_advantage_sums_to_zero_and_is_a_scaled_deviation() -> None:
    reward, group, _ = tensors()
    advantage = adv.rloo_advantage(reward, group)
    for one in group.unique():
        assert advantage[group == one].sum().item() == pytest.approx(0, abs=1e-14)
    seven = torch.tensor([i for i, g in enumerate(GROUP) if g == 7])
    assert torch.allclose(
        advantage[seven], 3 / 2 * adv.group_advantage(reward, group, scale="none")[seven]
    )


def test_optimal_baseline_of_equal_lengths_is_the_mean_and_weighted_advantages_sum_to_zero() -> (
    None
):
    reward, group, length = tensors()
    plain = adv.group_advantage(reward, group, scale="none")
    torch.testing.assert_close(adv.opo_advantage(reward, group, torch.full_like(length, 5)), plain)
    weighted = length * adv.opo_advantage(reward, group, length)
    assert weighted[group == 7].sum().item() == pytest.approx(0, abs=1e-13)
    torch.testing.assert_close(adv.opo_advantage(reward, group, torch.zeros_like(length)), plain)
    empty = adv.opo_advantage(torch.tensor([0.0, 4.0]), torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert empty.tolist() == [-4, 0]


def test_gpg_is_the_deviation_over_the_completions_that_teach() -> None:
    reward, group, _ = tensors()
    deviation = adv.group_advantage(reward, group, scale="none")
    share = sum(not math.isnan(r) for r in REWARD) / 5  # of groups 7 and 5
    torch.testing.assert_close(adv.gpg_advantage(reward, group), share * deviation)
    silent = torch.tensor([0.1, 0.1, 0.1])
    assert not adv.gpg_advantage(silent, torch.zeros(3, dtype=torch.int64)).any()


def outcomes(p: float, n: int) -> list[tuple[float, list[int]]]:
    """All results of n trials that succeed with probability p, and their probabilities."""
    return [
        (math.prod(p if r else 1 - p for r in of), list(of))
        for of in itertools.product((0, 1), repeat=n)
    ]


def expected_gradient(advantage: Callable[[Tensor], Tensor], p: float, n: int) -> float:
    """Of a policy of one logit whose action 1 succeeds, by that logit: the mean over completions of
    A ∇ log π.
    """
    total = 0.0
    for chance, results in outcomes(p, n):
        reward = torch.tensor(results, dtype=torch.float64)
        total += chance * float((advantage(reward) * (reward - p)).mean())
    return total


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_maxrl_follows_the_likelihood_of_success_to_the_order_of_its_group(
    p: float, n: int
) -> None:
    group = torch.zeros(n, dtype=torch.int64)
    of_logit = p * (1 - p)  # dp/dlogit
    terms = sum((1 - p) ** (k - 1) for k in range(1, n))  # the derivative of −Σ (1 − p)^k / k
    actual = expected_gradient(lambda reward: adv.maxrl_advantage(reward, group), p, n)
    assert actual == pytest.approx(of_logit * terms, rel=1e-12)


@pytest.mark.parametrize(("n", "k"), [(2, 2), (4, 2), (4, 3), (5, 5)])
@pytest.mark.parametrize("p", [0.1, 0.7])
def test_max_at_k_follows_pass_at_k(p: float, n: int, k: int) -> None:
    group = torch.zeros(n, dtype=torch.int64)
    slope = k * (1 - p) ** (k - 1) * p * (1 - p)  # of 1 − (1 − p)^k
    actual = expected_gradient(lambda reward: adv.max_at_k_advantage(reward, group, k=k), p, n)
    assert k * actual == pytest.approx(slope, rel=1e-12)


def test_max_at_the_size_of_the_group_is_the_lead_of_the_best() -> None:
    reward, group = torch.tensor([1.0, 4.0, 2.5, 3.0, 3.0]), torch.tensor([0, 0, 0, 1, 1])
    assert adv.max_at_k_advantage(reward, group, k=100).tolist() == [0, 1.5, 0, 0, 0]


def maxrl(reward: list[float], group: list[int]) -> list[float]:
    known = {
        g: [r for r, h in zip(reward, group, strict=True) if g == h and not math.isnan(r)]
        for g in group
    }
    scored = [(r, mean(known[g]) if known[g] else 0.0) for r, g in zip(reward, group, strict=True)]
    return [0.0 if math.isnan(r) or not m else (r - m) / m for r, m in scored]


def test_maxrl_equals_its_equation_and_masks_what_is_unscored() -> None:
    reward = [1.0, 0.0, NAN, 0.0, 0.0, 0.5, 0.25, 2.0, NAN]
    group = [1, 1, 1, 2, 2, 3, 3, 4, 5]
    actual = adv.maxrl_advantage(
        torch.tensor(reward, dtype=torch.float64, requires_grad=True), torch.tensor(group)
    )
    assert actual.tolist() == pytest.approx(maxrl(reward, group), rel=1e-14)
    assert not actual.requires_grad
    order = torch.tensor([8, 3, 0, 5, 2, 7, 1, 4, 6])
    shuffled = adv.maxrl_advantage(
        torch.tensor(reward, dtype=torch.float64)[order], torch.tensor(group)[order]
    )
    torch.testing.assert_close(shuffled, actual[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_maxrl_of_rewards_of_any_size_is_finite(dtype: torch.dtype) -> None:
    for size in (1e-37, 1.0, 1e30):
        advantage = adv.maxrl_advantage(
            size * torch.tensor([1.0, 0, 0], dtype=dtype), torch.zeros(3).long()
        )
        torch.testing.assert_close(advantage, torch.tensor([2.0, -1.0, -1.0], dtype=dtype))


def test_remax_subtracts_the_greedy_reward_where_both_are_known() -> None:
    reward = torch.tensor([1.0, 0.5, NAN, 2.0], requires_grad=True)
    advantage = adv.remax_advantage(reward, torch.tensor([0.25, 1.0, 0.0, NAN]))
    assert advantage.tolist() == [0.75, -0.5, 0, 0]
    assert not advantage.requires_grad


def optimal_token(
    reward: list[list[float]], pi: list[list[float]], squares: list[list[float]], group: list[int]
) -> list[float]:
    """The loop over completions and positions."""
    scored = [not any(map(math.isnan, of)) for of in reward]
    returns = [[math.fsum(of[t:]) for t in range(len(of))] for of in reward]
    norms = [
        [1 - 2 * p + s for p, s in zip(*of, strict=True)] for of in zip(pi, squares, strict=True)
    ]
    weights = [[math.fsum(of[: t + 1]) for t in range(len(of))] for of in norms]
    found = []
    for i, of in enumerate(returns):
        mates = [j for j, g in enumerate(group) if g == group[i] and scored[j]]
        for t in range(len(of)):
            reach = [j for j in mates if len(returns[j]) > t]
            total = math.fsum(weights[j][t] for j in reach)
            baseline = (
                math.fsum(returns[j][t] * weights[j][t] for j in reach) / total
                if len(reach) > 1
                else 0.0
            )
            found.append(of[t] - baseline if scored[i] and len(mates) > 1 else 0.0)
    return found


def token_draw() -> tuple[list[int], list[int], Tensor, Tensor, Tensor]:
    """Six completions, one of them without a token; group 4 is alone, group 2 has an unscored
    one.
    """
    lengths, group = [3, 5, 0, 2, 4, 2, 3], [2, 2, 2, 2, 3, 4, 3]
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    pi, other, reward = torch.rand(3, total, generator=generator, dtype=torch.float64)
    squares = pi.square() + (1 - pi).square() * other
    reward[9] = NAN  # in the fourth completion
    return lengths, group, reward, pi, squares


def test_the_optimal_token_baseline_equals_the_loop_over_positions() -> None:
    lengths, group, reward, pi, squares = token_draw()
    sequence = torch.arange(7).repeat_interleave(torch.tensor(lengths))
    arguments = reward, pi.log(), squares.log(), sequence
    actual = adv.optimal_token_advantage(*arguments, torch.tensor(group))
    parts = [[of.tolist() for of in x.split(lengths)] for x in (reward, pi, squares)]
    assert actual.tolist() == pytest.approx(optimal_token(*parts, group), rel=1e-12, abs=1e-14)
    renamed = torch.tensor([{2: -7, 3: 2**40, 4: 0}[g] for g in group])
    torch.testing.assert_close(adv.optimal_token_advantage(*arguments, renamed), actual)


def test_the_optimal_token_baseline_minimizes_the_variance_of_the_gradient() -> None:
    pi = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    action = torch.tensor([0, 0, 1, 2])  # as often as they are likely
    reward = torch.tensor([1.0, 1.0, -2.0, 5.0], dtype=torch.float64)
    score = torch.eye(3, dtype=torch.float64)[action] - pi  # ∂ log π/∂ logits
    one_each = torch.arange(4)
    squares = pi.square().sum().log().expand(4)
    advantage = adv.optimal_token_advantage(
        reward, pi[action].log(), squares, one_each, torch.zeros(4).long()
    )
    baseline = reward - advantage
    assert torch.allclose(baseline, baseline[0])

    def variance(b: Tensor) -> Tensor:
        gradient = (reward - b)[:, None] * score
        return (gradient - gradient.mean(0)).square().sum()

    least = variance(baseline[0])
    assert all(variance(baseline[0] + change) > least for change in (-0.1, -1e-3, 1e-3, 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_optimal_token_baseline_is_finite_and_silent_where_rewards_are_equal(
    dtype: torch.dtype,
) -> None:
    sequence = torch.tensor([0, 0, 1, 1])
    for logp in (-2000.0, -1e-30, 0.0):
        for end in (0.1, 1e30):
            reward = torch.tensor([0.0, end, 0.0, end], dtype=dtype)
            at = torch.full((4,), logp, dtype=dtype)
            advantage = adv.optimal_token_advantage(
                reward, at, 2 * at, sequence, torch.zeros(2).long()
            )
            assert advantage.tolist() == [0, 0, 0, 0] and advantage.dtype == dtype
    none = torch.zeros(0, dtype=dtype)
    assert adv.optimal_token_advantage(none, none, none, sequence[:0], sequence[:0]).shape == (0,)


def test_total_reward_weighs_what_could_be_scored() -> None:
    reward = torch.tensor([[1.0, NAN, 3.0], [NAN, NAN, NAN], [0.0, 2.0, -1.0]], dtype=torch.float64)
    total = adv.weighted_reward(reward, torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64))
    assert total[[0, 2]].tolist() == [3.5, 1.5]
    assert total[1].isnan()


def test_gdpo_keeps_rewards_apart_that_their_sum_confuses() -> None:
    # twice a right completion of bad form, or a wrong one of good form: the sum is the same
    reward = torch.tensor([[1.0, 0.0], [0.0, 0.2], [0.2, 0.0], [0.0, 1.0]], dtype=torch.float64)
    group = torch.zeros(4, dtype=torch.int64)
    ones = torch.ones(2, dtype=torch.float64)
    assert len(set(adv.group_advantage(adv.weighted_reward(reward, ones), group).tolist())) == 2
    rare = torch.tensor(
        [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]],
        dtype=torch.float64,
    )
    group = torch.zeros(6, dtype=torch.int64)
    advantage = adv.gdpo_advantage(rare, group, ones)
    assert advantage[3] > advantage[1], "right is rarer than well-formed, so it counts more"
    assert adv.weighted_reward(rare, ones)[3] == adv.weighted_reward(rare, ones)[1]


def test_gdpo_counts_a_missing_reward_as_the_mean_of_its_group() -> None:
    reward = torch.tensor([[1.0, 0.0], [3.0, NAN], [5.0, 4.0], [NAN, NAN]], dtype=torch.float64)
    filled = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 4.0]], dtype=torch.float64)
    group, weight = torch.zeros(4, dtype=torch.int64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    z1, z2 = z([1.0, 3.0, 5.0]), z([0.0, NAN, 4.0])
    expected = [*z([a + b for a, b in zip(z1, z2, strict=True)]), 0.0]
    assert adv.gdpo_advantage(reward, group, weight).tolist() == pytest.approx(expected, rel=1e-12)
    assert filled.mean() == reward[:3].nanmean(0).mean()


def test_whitening_leaves_zero_mean_and_unit_variance_and_skips_nan() -> None:
    x = torch.tensor([3.0, NAN, -1.0, 10.0, 4.0], dtype=torch.float64)
    white = adv.whiten(x, eps=0.0)
    assert white.tolist() == pytest.approx(z(x.tolist(), eps=0.0), rel=1e-13)
    assert adv.whiten(x).tolist() == pytest.approx(z(x.tolist()), rel=1e-13)
    known = white[~x.isnan()]
    assert known.mean().item() == pytest.approx(0, abs=1e-15)
    assert known.std().item() == pytest.approx(1)
    torch.testing.assert_close(adv.whiten(1000 - 7 * x, eps=0.0), -white)
    assert adv.whiten(torch.tensor([NAN, 5.0])).tolist() == [0, 0]
    assert adv.whiten(torch.zeros(0)).shape == (0,)


LENGTHS = {0: 5, 2: 1, 3: 17, 7: 64, 8: 2}  # of the completions that have tokens
SEQUENCE = torch.tensor([i for i, n in LENGTHS.items() for _ in range(n)])
TOKENS = len(SEQUENCE)


def draw(seed: int) -> Tensor:
    return torch.randn(TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def completions(x: Tensor) -> list[list[float]]:
    return [part.tolist() for part in x.split(list(LENGTHS.values()))]


def naive_gae(r: list[float], v: list[float], gamma: float, lam: float) -> list[float]:
    following, running, out = 0.0, 0.0, []
    for reward, value in zip(reversed(r), reversed(v), strict=True):
        running = reward + gamma * following - value + gamma * lam * running
        following = value
        out.append(running)
    return out[::-1]


def naive_return(r: list[float], gamma: float) -> list[float]:
    return naive_gae(r, [0.0] * len(r), gamma, 1.0)


def naive_penalized(reward: list[float], kl: Tensor, beta: float) -> list[list[float]]:
    parts = zip(LENGTHS, completions(kl), strict=True)
    return [[-beta * k for k in part[:-1]] + [reward[i] - beta * part[-1]] for i, part in parts]


@pytest.mark.parametrize(
    ("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (1.0, 0.0), (0.0, 0.9), (0.5, 0.5), (1.0, 0.97)]
)
def test_gae_equals_the_loop_over_tokens(gamma: float, lam: float) -> None:
    reward, value = draw(0), draw(1)
    advantage, returns = adv.gae(reward, value, SEQUENCE, gamma=gamma, lam=lam)
    pairs = zip(completions(reward), completions(value), strict=True)
    expected = [a for r, v in pairs for a in naive_gae(r, v, gamma, lam)]
    assert advantage.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-13)
    torch.testing.assert_close(returns, advantage + value)


def test_gae_at_lambda_1_is_return_minus_value_and_at_0_the_error_of_one_step() -> None:
    reward, value = draw(0), draw(1)
    advantage, returns = adv.gae(reward, value, SEQUENCE, gamma=0.9, lam=1.0)
    to_go = torch.tensor(
        [g for r in completions(reward) for g in naive_return(r, 0.9)], dtype=torch.float64
    )
    torch.testing.assert_close(returns, to_go)
    torch.testing.assert_close(advantage, to_go - value)
    advantage, returns = adv.gae(reward, value, SEQUENCE, gamma=0.9, lam=0.0)
    following = torch.tensor(
        [v for part in completions(value) for v in [*part[1:], 0.0]], dtype=torch.float64
    )
    torch.testing.assert_close(returns, reward + 0.9 * following)
    torch.testing.assert_close(advantage, reward + 0.9 * following - value)


def test_gae_of_the_true_value_is_zero() -> None:
    reward = draw(0)
    value = torch.tensor(
        [g for r in completions(reward) for g in naive_return(r, 0.9)], dtype=torch.float64
    )
    advantage, _ = adv.gae(reward, value, SEQUENCE, gamma=0.9, lam=0.7)
    assert advantage.abs().max() < 1e-13


def test_a_cut_completion_is_bootstrapped_through_its_last_reward() -> None:
    reward, value = torch.tensor([0.5, -1.0, 2.0, 0.25]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    one = torch.zeros(4, dtype=torch.int64)
    whole, _ = adv.gae(reward, value, one, gamma=0.9, lam=0.0)
    cut = reward[:2].clone()
    cut[1] += 0.9 * value[2]
    torch.testing.assert_close(adv.gae(cut, value[:2], one[:2], gamma=0.9, lam=0.0)[0], whole[:2])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 255, 256, 257, 3000])
def test_gae_reaches_to_the_end_of_a_completion_of_any_length(length: int) -> None:
    reward = torch.zeros(length, dtype=torch.float64)
    reward[-1] = 1.0
    advantage, _ = adv.gae(
        reward,
        torch.zeros_like(reward),
        torch.zeros(length, dtype=torch.int64),
        gamma=1.0,
        lam=0.99,
    )
    expected = [0.99 ** (length - 1 - t) for t in range(length)]
    assert advantage.tolist() == pytest.approx(expected, rel=1e-11)


def test_completions_do_not_interact_in_gae() -> None:
    reward, value = draw(0), draw(1)
    for spoiled in (math.inf, 1e300):
        broken = torch.where(SEQUENCE == 3, spoiled, reward)
        for before, after in zip(
            adv.gae(reward, value, SEQUENCE, gamma=1.0, lam=0.95),
            adv.gae(broken, value, SEQUENCE, gamma=1.0, lam=0.95),
            strict=True,
        ):
            assert torch.equal(before[SEQUENCE != 3], after[SEQUENCE != 3])


def test_gae_of_an_unscored_completion_is_zero_and_its_returns_are_its_values() -> None:
    reward, value = draw(0), draw(1)
    unscored = reward.clone()
    unscored[10] = NAN  # in the middle of completion 3
    advantage, returns = adv.gae(unscored, value, SEQUENCE, gamma=1.0, lam=0.95)
    other, _ = adv.gae(reward, value, SEQUENCE, gamma=1.0, lam=0.95)
    assert not advantage[SEQUENCE == 3].any()
    assert torch.equal(returns[SEQUENCE == 3], value[SEQUENCE == 3])
    assert torch.equal(advantage[SEQUENCE != 3], other[SEQUENCE != 3])


def test_penalized_rewards_put_the_completions_reward_on_its_last_token() -> None:
    reward = [0.5, 99.0, -2.0, 1.0, 9.0, 9.0, 9.0, NAN, 0.25]  # 1 and 4 to 6 have no tokens
    kl = draw(2)
    actual = adv.kl_penalized_reward(
        torch.tensor(reward, dtype=torch.float64), kl, SEQUENCE, beta=0.1
    )
    expected = [r for part in naive_penalized(reward, kl, 0.1) for r in part]
    assert actual.tolist() == pytest.approx(expected, rel=1e-15, nan_ok=True)
    assert actual.isnan().sum() == 1
    plain = adv.kl_penalized_reward(
        torch.tensor(reward, dtype=torch.float64), kl, SEQUENCE, beta=0.0
    )
    assert plain[SEQUENCE == 0].tolist() == [0, 0, 0, 0, 0.5]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_whitens_penalized_returns_over_tokens(gamma: float) -> None:
    reward = [0.5, 0.0, -2.0, 1.0, 0.0, 0.0, 0.0, NAN, 0.25]
    kl = draw(2)
    actual = adv.reinforce_plus_plus(
        torch.tensor(reward, dtype=torch.float64), kl, SEQUENCE, beta=0.1, gamma=gamma, eps=1e-3
    )
    expected = z(
        [g for r in naive_penalized(reward, kl, 0.1) for g in naive_return(r, gamma)], eps=1e-3
    )
    assert actual.tolist() == pytest.approx(expected, rel=1e-11)
    assert not actual[SEQUENCE == 7].any()
    if gamma == 1.0:
        default = adv.reinforce_plus_plus(
            torch.tensor(reward, dtype=torch.float64), kl, SEQUENCE, beta=0.1
        )
        torch.testing.assert_close(default, actual, rtol=1e-2, atol=0)
        assert not torch.equal(default, actual)


def test_token_advantages_are_constants_and_exist_without_tokens() -> None:
    reward, value = draw(0).requires_grad_(), draw(1).requires_grad_()
    completion = torch.ones(9, dtype=torch.float64, requires_grad=True)
    results = [
        *adv.gae(reward, value, SEQUENCE, gamma=1.0, lam=0.95),
        adv.kl_penalized_reward(completion, value, SEQUENCE, beta=0.1),
        adv.reinforce_plus_plus(completion, value, SEQUENCE, beta=0.1),
        adv.weighted_reward(completion[:, None], completion[:1]),
    ]
    assert not any(x.requires_grad for x in results)
    none, nowhere = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert adv.gae(none, none, nowhere, gamma=1.0, lam=0.95)[0].shape == (0,)
    assert adv.reinforce_plus_plus(torch.ones(2), none, nowhere, beta=0.1).shape == (0,)


def test_group_stats_count_what_teaches_nothing() -> None:
    reward, group, _ = tensors()
    stats = {name: value.item() for name, value in adv.group_stats(reward, group).items()}
    scored = [r for r in REWARD if not math.isnan(r)]
    assert stats == {
        "reward": pytest.approx(mean(scored)),
        "reward_std": pytest.approx(std(scored)),
        # -3, 40 and 0, not 7 and 5; 9 has no reward at all
        "frac_reward_zero_std": pytest.approx(3 / 5),
        "frac_unscored": pytest.approx(4 / 14),
    }


def test_group_stats_of_a_batch_without_any_reward() -> None:
    stats = adv.group_stats(torch.full((4,), NAN), torch.tensor([0, 0, 1, 1]))
    assert stats["frac_unscored"] == 1
    assert stats["frac_reward_zero_std"] == 0
    assert stats["reward"].isnan()


def call(function: Callable[..., Any], *tensors: Tensor, **hyper: Any) -> Callable[[], Any]:
    return lambda: function(*tensors, **hyper)


R, G, S = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1])
UNSORTED = torch.tensor([0, 2, 1])
INFINITE = torch.tensor([1.0, math.inf, NAN])
SHAPE = "must have the shape of {}, [{}], got [{}]"
FINITE = "values must be finite, or NaN where there is none, got inf"
SORTED = "sequence must be sorted: sort tokens by completion"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            call(adv.group_advantage, R, G[:2]),
            f"group_advantage: group {SHAPE.format('reward', 3, 2)}",
        ),
        (call(adv.group_advantage, INFINITE, G), f"group_advantage: {FINITE}"),
        (call(adv.group_advantage, -INFINITE, G), f"group_advantage: {FINITE}"),
        (
            call(adv.group_advantage, R, G, scale="std"),
            "group_advantage: scale must be group, batch or none, got 'std'",
        ),
        *(
            (
                call(adv.group_advantage, R, G, eps=eps),
                f"group_advantage: eps must be >= 0, got {eps}",
            )
            for eps in (-1e-9, NAN, math.inf)
        ),
        (
            call(adv.group_advantage, R, G, scale="batch", eps=-1.0),
            "group_advantage: eps must be >= 0, got -1.0",
        ),
        (
            call(adv.rloo_advantage, R, G[:1]),
            f"rloo_advantage: group {SHAPE.format('reward', 3, 1)}",
        ),
        (call(adv.rloo_advantage, INFINITE, G), f"rloo_advantage: {FINITE}"),
        (
            call(adv.opo_advantage, R, G, G[:1]),
            f"opo_advantage: length {SHAPE.format('reward', 3, 1)}",
        ),
        (
            call(adv.opo_advantage, R, G[:1], G),
            f"opo_advantage: group {SHAPE.format('reward', 3, 1)}",
        ),
        (call(adv.gpg_advantage, R, G[:1]), f"gpg_advantage: group {SHAPE.format('reward', 3, 1)}"),
        (
            call(adv.maxrl_advantage, R - 1.5, G),
            "maxrl_advantage: rewards must be >= 0, got a negative one",
        ),
        (
            call(adv.maxrl_advantage, R, G[:1]),
            f"maxrl_advantage: group {SHAPE.format('reward', 3, 1)}",
        ),
        (
            call(adv.remax_advantage, R, R[:1]),
            f"remax_advantage: greedy_reward {SHAPE.format('reward', 3, 1)}",
        ),
        (call(adv.remax_advantage, R, INFINITE), f"remax_advantage: {FINITE}"),
        (
            call(adv.max_at_k_advantage, R, G, k=1),
            "max_at_k_advantage: k must be >= 2, got 1; k = 1 is rloo_advantage",
        ),
        (
            call(adv.optimal_token_advantage, R, R[:1], R, S, G[:2]),
            f"optimal_token_advantage: logp {SHAPE.format('sequence', 3, 1)}",
        ),
        (
            call(adv.optimal_token_advantage, R, R, R, UNSORTED, G[:2]),
            f"optimal_token_advantage: {SORTED}",
        ),
        (
            call(adv.optimal_token_advantage, INFINITE, R, R, S, G[:2]),
            f"optimal_token_advantage: {FINITE}",
        ),
        (
            call(adv.gae, R[:2], R, S, gamma=1.0, lam=1.0),
            f"gae: reward {SHAPE.format('sequence', 3, 2)}",
        ),
        (call(adv.whiten, INFINITE), f"whiten: {FINITE}"),
        (call(adv.whiten, R, eps=-1.0), "whiten: eps must be >= 0, got -1.0"),
        (
            call(adv.weighted_reward, R[:, None], R),
            "weighted_reward: reward must be [completions, rewards] with one weight per reward, got [3, 1] and [3]",
        ),
        (
            call(adv.gdpo_advantage, R, G, R[:0]),
            "gdpo_advantage: reward must be [completions, rewards] with one weight per reward, got [3] and [0]",
        ),
        (call(adv.gdpo_advantage, INFINITE[:, None], G, R[:1]), f"gdpo_advantage: {FINITE}"),
        (
            call(adv.gae, R, R[:2], S, gamma=1.0, lam=1.0),
            f"gae: value {SHAPE.format('sequence', 3, 2)}",
        ),
        (call(adv.gae, R, R, UNSORTED, gamma=1.0, lam=1.0), f"gae: {SORTED}"),
        *(
            (
                call(adv.gae, R, R, S, gamma=gamma, lam=lam),
                f"gae: {name} must be in [0, 1], got {got}",
            )
            for gamma, lam, name, got in (
                (1.5, 1.0, "gamma", 1.5),
                (1.0, -0.1, "lam", -0.1),
                (NAN, 1.0, "gamma", NAN),
            )
        ),
        (
            call(adv.kl_penalized_reward, R, R[:1], S, beta=0.1),
            f"kl_penalized_reward: kl {SHAPE.format('sequence', 3, 1)}",
        ),
        (call(adv.kl_penalized_reward, R, R, UNSORTED, beta=0.1), f"kl_penalized_reward: {SORTED}"),
        (call(adv.kl_penalized_reward, INFINITE, R, S, beta=0.1), f"kl_penalized_reward: {FINITE}"),
        *(
            (
                call(adv.kl_penalized_reward, R, R, S, beta=beta),
                f"kl_penalized_reward: beta must be >= 0, got {beta}",
            )
            for beta in (-0.1, NAN, math.inf)
        ),
        (
            call(adv.reinforce_plus_plus, R, R, S, beta=0.1, gamma=1.1),
            "reinforce_plus_plus: gamma must be in [0, 1], got 1.1",
        ),
        (
            call(adv.reinforce_plus_plus_baseline, R, G[:1], S),
            f"reinforce_plus_plus_baseline: group {SHAPE.format('reward', 3, 1)}",
        ),
        (call(adv.group_stats, R, G[:1]), f"group_stats: group {SHAPE.format('reward', 3, 1)}"),
    ],
)
def test_errors_name_the_function_and_what_it_got(
    wrong: Callable[[], Any], message: str, as_users_run_it: None
) -> None:
    with pytest.raises(ValueError) as error:
        wrong()
    assert str(error.value) == message


@pytest.mark.parametrize("reward", [torch.tensor([1, 0]), torch.tensor([True, False])], ids=str)
def test_rewards_that_are_no_floats_are_refused_by_their_type(reward: Tensor) -> None:
    with pytest.raises(
        ValueError, match=rf"whiten: values must be floats, got {reward.dtype}; convert them"
    ):
        # the suite checks the types of arguments before a function can
        adv._check("whiten", reward)


def test_the_optimal_value_equals_its_equation() -> None:
    reward, group, _ = tensors()
    value = adv.optimal_value(reward, group, beta=0.7)
    for i, name in enumerate(GROUP):
        known = [r for r, g in zip(REWARD, GROUP, strict=True) if g == name and not math.isnan(r)]
        if not known:
            assert math.isnan(value[i])
            continue
        expected = 0.7 * math.log(math.fsum(math.exp(r / 0.7) for r in known) / len(known))
        assert value[i].item() == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_the_optimal_value_lies_between_the_mean_and_the_best_and_never_overflows() -> None:
    reward = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    group = torch.zeros(3, dtype=torch.int64)
    assert adv.optimal_value(reward, group, beta=1e6)[0].item() == pytest.approx(5 / 3, rel=1e-5)
    assert adv.optimal_value(reward, group, beta=1e-3)[0].item() == pytest.approx(4, rel=1e-3)
    far = adv.optimal_value(1e30 * reward.float(), group, beta=1e-3)
    assert far.isfinite().all()
    same = adv.optimal_value(torch.full((3,), 0.1), group, beta=0.3)
    torch.testing.assert_close(same, torch.full((3,), 0.1))


def test_completions_of_other_groups_do_not_move_an_optimal_value() -> None:
    reward, group, _ = tensors()
    other = torch.where(group == 7, reward + 5, reward)
    mine, moved = (adv.optimal_value(r, group, beta=0.5) for r in (reward, other))
    assert torch.equal(mine[group == 5], moved[group == 5])
    assert not torch.equal(mine[group == 7], moved[group == 7])


def test_an_optimal_value_wants_a_positive_beta() -> None:
    reward, group, _ = tensors()
    with pytest.raises(ValueError, match="optimal_value: beta must be > 0, got 0"):
        adv.optimal_value(reward, group, beta=0.0)
