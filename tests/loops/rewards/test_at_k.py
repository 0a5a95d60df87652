"""avg@n and pass@k of held-out prompts, with their intervals."""

import itertools
import random

import pytest
from burnish.loops.rewards import RewardFunction
from burnish.loops.rewards.at_k import at_k_metrics, pass_at_k
from burnish.loops.rewards.table import score
from burnish.loops.rollouts.sample import Sample, VersionSpan


def table(rewards):
    """Of the rewards of each prompt's completions."""
    samples = []
    for task, of_prompt in enumerate(rewards):
        for index, reward in enumerate(of_prompt):
            spans = [VersionSpan(0, 0, 1)]
            given = {"right": reward}
            sample = Sample(task, index, [1], [2], [True], [-1.0], spans, "stop", rewards=given)
            samples.append(sample)
    return score([RewardFunction("right", None)], samples)


@pytest.mark.parametrize(("right", "drawn"), [(0, 5), (1, 5), (3, 5), (5, 5), (2, 7)])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_one(right, drawn):
    completions = [True] * right + [False] * (drawn - right)
    for k in range(1, drawn + 1):
        subsets = list(itertools.combinations(completions, k))
        assert pass_at_k(right, drawn, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("right", "drawn", "k"), [(1, 4, 5), (1, 4, 0), (5, 4, 1), (-1, 4, 1)])
def test_more_than_were_drawn_is_refused(right, drawn, k):
    with pytest.raises(ValueError, match=f"got right={right}, drawn={drawn}, k={k}"):
        pass_at_k(right, drawn, k)


def test_metrics_are_means_over_prompts():
    measured = at_k_metrics(table([[1, 0, 0, 0, 0, 0], [1, 1, 1, 0.5, 0, 0]]), 6, right_from=1.0)
    assert [name for name in measured if "/" not in name] == [
        *("avg@6", "pass@1", "pass@2", "pass@4", "pass@6"),
    ]
    assert measured["avg@6"] == pytest.approx((1 / 6 + 3.5 / 6) / 2)
    assert measured["pass@1"] == pytest.approx((1 / 6 + 3 / 6) / 2)
    assert measured["pass@4"] == pytest.approx((4 / 6 + 1) / 2)
    assert measured["pass@6"] == 1
    half = at_k_metrics(table([[0.5, 0.5], [0, 0]]), 2, right_from=0.5)
    assert half["pass@2"] == half["pass@1"] == 0.5


def test_a_completion_without_a_reward_is_unknown_and_not_wrong():
    measured = at_k_metrics(table([[1, None, "timeout"], [0, 1, 0]]), 3, right_from=1.0)
    assert measured["avg@3"] == pytest.approx((1 + 1 / 3) / 2)
    assert measured["pass@1"] == pytest.approx((1 + 1 / 3) / 2)
    assert measured["pass@2"] == pytest.approx(2 / 3)  # two of the first prompt are unknown
    assert at_k_metrics(table([[None, None]]), 2, right_from=1.0) == {}


def test_nineteen_in_twenty_intervals_hold_the_truth():
    rng, held, prompts = random.Random(0), 0, 40
    shares = [rng.random() for _ in range(2000)]
    truth = sum(shares) / len(shares)
    for _ in range(200):
        drawn = [[float(rng.random() < p) for _ in range(4)] for p in rng.sample(shares, prompts)]
        measured = at_k_metrics(table(drawn), 4, right_from=1.0)
        held += measured["avg@4/low"] <= truth <= measured["avg@4/high"]
    assert 0.9 < held / 200 < 0.99
    assert at_k_metrics(table(drawn), 4, 1.0) == measured  # the same once more
