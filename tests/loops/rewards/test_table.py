"""One table of scores: functions of every form, what a step logs of their scores, and what it warns
of.
"""

import asyncio
import logging
import statistics

import pytest
import torch
from burnish.loops.rewards import (
    RewardFunction,
    RewardMonitor,
    batched,
    reward_metrics,
    score,
    score_samples,
)

A, B = (
    RewardFunction("a", lambda row, sample: 0, weight=1.0),
    RewardFunction("b", lambda row, sample: 0, weight=0.5),
)


@pytest.fixture
def samples(answer):
    """Two completions of one prompt, whose row the scheduler has left with them."""
    found = [answer(text, index=i) for i, text in enumerate(["4", "five"])]
    for sample in found:
        sample.row = {"prompt": "2+2=", "answer": "4"}
    return found


def test_weights_in_a_mapping_are_refused_with_the_place_where_they_belong(samples):
    with pytest.raises(
        ValueError,
        match=r"score: wanted a list, got a mapping; .* RewardFunction\(name, f, weight\)",
    ):
        score({"a": 1.0}, samples)


def test_functions_of_every_form_are_columns_of_one_table(samples):
    def of_text(completion, answer):
        return float(completion == answer)

    def of_rows(row, sample):
        return float(len(row["answer"]) == len(sample.text))

    def of_trl(prompts, completions, answer, **columns):
        return [len(completion) for completion in completions]

    async def of_prompt(prompt, completion, answer=None, scale=2.0):
        return scale * (prompt + completion == "2+2=4") if answer else None

    table = score(
        [
            RewardFunction("right", of_text, 3.0),
            RewardFunction("rows", of_rows, 0.5),
            of_trl,
            of_prompt,
        ],
        samples,
    )
    assert list(table.numbers) == ["right", "rows", "of_trl", "of_prompt"]
    assert table.reward.tolist() == [[1, 1, 1, 2], [0, 0, 4, 0]]
    assert table.weight.tolist() == [3, 0.5, 1, 1]
    assert table.total.tolist() == [3 + 0.5 + 1 + 2, 4]


def test_a_marked_function_keeps_its_name(samples):
    @batched
    def longest(rows, samples):
        return [float(len(sample.text)) for sample in samples]

    def of_trl(prompts, completions):
        return [0.0] * len(prompts)

    assert list(score([longest, of_trl], samples).numbers) == ["longest", "of_trl"]


def test_a_completion_is_scored_once_by_each_function(samples):
    calls = []

    def counted(completion):
        calls.append(completion)
        return 1.0

    score([counted], samples[:1])
    assert score([counted], samples).total.tolist() == [1, 1]
    assert calls == ["4", "five"]


def test_a_column_that_a_function_of_text_reads_must_be_there(samples):
    def grade(completion, solution):
        return 1.0

    with pytest.raises(
        ValueError, match=r"reward grade: .* the data has no column 'solution'; there are"
    ):
        score([grade], samples)
    assert score(
        [lambda row, sample: row["given"]], samples, [{"given": 1.0}, {"given": 2.0}]
    ).total.tolist() == [1, 2]


def test_a_function_that_fails_leaves_its_completion_without_a_total(samples):
    def fussy(completion):
        return float(completion)

    assert score([fussy], samples).total.isnan().tolist() == [False, True]
    assert samples[1].rewards == {"fussy": "error"}


class Watching(RewardMonitor):
    def __call__(self, rewards, samples):
        return super().__call__(score(rewards, samples), samples)


@pytest.fixture
def scored(answer):
    def make(*rows, tasks=None):
        tasks = tasks or [i // 2 for i in range(len(rows))]
        samples = []
        for i, (scores, task) in enumerate(zip(rows, tasks, strict=True)):
            sample = answer(index=i, task=task)
            sample.rewards = dict(zip("ab", scores, strict=False))
            samples.append(sample)
        return samples

    return make


def test_the_matrix_is_what_objectives_take(scored):
    table = score([A, B], scored((1, 2), (None, 4)))
    torch.testing.assert_close(
        table.reward, torch.tensor([[1, 2], [torch.nan, 4]], dtype=torch.float64), equal_nan=True
    )
    assert table.group.tolist() == [0, 0] and table.weight.tolist() == [1.0, 0.5]
    assert table.total.tolist() == [2.0, 2.0]


def test_an_aborted_completion_is_compared_with_no_other_and_counts_in_metrics(scored):
    samples = scored((1, 2), (3, 4))
    samples[1].finish = "aborted"
    table = score([A, B], samples)
    assert table.total.isnan().tolist() == [False, True]
    assert reward_metrics(table)["reward"] == (2 + 5) / 2


def test_an_answer_that_a_reward_has_failed_at_is_unknown_to_all_of_them(scored):
    samples = scored(("timeout", 2), (None, 4), (3, None))
    nan = torch.nan
    expected = torch.tensor([[nan, nan], [nan, 4], [3, nan]], dtype=torch.float64)
    torch.testing.assert_close(score([A, B], samples).reward, expected, equal_nan=True)
    # decides nothing, so its failure is no reason to mask
    measured = RewardFunction("a", A.function, weight=0.0)
    assert score([measured, B], samples).reward[:2, 1].tolist() == [2, 4]


def test_metrics_tell_failures_from_what_does_not_apply(scored):
    samples = scored(("timeout", 2), (None, 4), (3, 0), ("error", 1), tasks=[0] * 4)
    metrics = reward_metrics(score([A, B], samples))
    assert {name: value for name, value in metrics.items() if "unscored" in name} == {
        "rewards/a/unscored": 3,
        "rewards/a/unscored/error": 1,
        "rewards/a/unscored/none": 1,
        "rewards/a/unscored/timeout": 1,
        "rewards/b/unscored": 0,
        "frac_unscored": 0.5,
    }
    assert metrics["rewards/b/mean"] == 7 / 4  # all that it gave
    assert metrics["reward"] == (2 + 3) / 2  # of the two answers whose worth is known


def test_metrics_have_the_names_and_values_of_the_peer(scored):
    samples = scored((1, 2), (0, None), (3, 0), (3, 0))
    metrics = reward_metrics(score([A, B], samples))
    total = [2.0, 0.0, 3.0, 3.0]
    expected = {
        "rewards/a/mean": 7 / 4,
        "rewards/a/std": statistics.stdev([1, 0, 3, 3]),
        "rewards/a/unscored": 0,
        "rewards/b/mean": 2 / 3,
        "rewards/b/std": statistics.stdev([2, 0, 0]),
        "rewards/b/unscored": 1,
        "rewards/b/unscored/none": 1,
        "reward": statistics.mean(total),
        "reward_std": statistics.stdev(total),
        "frac_reward_zero_std": 0.5,
        "frac_unscored": 0.0,
        "zero_std_groups": 1,
    }
    assert metrics == pytest.approx(expected)


def test_reasons_are_counted_by_name(answer):
    reward = RewardFunction("r", batched(lambda rows, samples: [None, float("nan"), None, 1.0]))
    samples = [answer(index=i) for i in range(4)]
    asyncio.run(score_samples([reward], [{}] * 4, samples))
    metrics = reward_metrics(score([reward], samples))
    assert metrics["rewards/r/unscored"] == 3
    assert metrics["rewards/r/unscored/none"] == 2 and metrics["rewards/r/unscored/nan"] == 1
    assert metrics["rewards/r/mean"] == 1.0 and metrics["rewards/r/std"] == 0.0


def test_what_nobody_scored_is_left_out_and_nothing_is_nan(scored):
    metrics = reward_metrics(score([A], scored((None,), (None,))))
    assert metrics == {
        "rewards/a/unscored": 2,
        "rewards/a/unscored/none": 2,
        "reward_std": 0,
        "frac_reward_zero_std": 0,
        "frac_unscored": 1,
        "zero_std_groups": 0,
    }
    assert reward_metrics(score([A], [])) == {"rewards/a/unscored": 0}


def test_an_exploding_score_is_reported_once_with_what_to_do(scored, caplog):
    watch = Watching(factor=100.0, patience=3)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert watch([A], scored((1.0,), (0.5,))) == []
        (problem,) = watch([A], scored((150.0,), (0.5,)))
        assert watch([A], scored((1e9,), (0.5,))) == []
    assert "reward a: a score of size 150, where 1 was usual; clip it" in problem
    assert [record.getMessage() for record in caplog.records] == [problem]


def test_growth_within_the_factor_is_not_reported(scored):
    watch = Watching(factor=100.0, patience=3)
    assert [watch([A], scored((float(scale),), (0.0,))) for scale in (1, 1, 1, 99, 99)] == [[]] * 5


def test_a_reward_that_another_drowns_is_reported(scored):
    watch = Watching(factor=100.0, patience=2)
    quiet = scored((1000.0, 1.0), (0.0, 0.0))  # with a weight of one half, 2000 times apart
    assert watch([A, B], quiet) == []
    (problem,) = watch([A, B], quiet)
    assert problem.startswith("reward b: varies by 0.353553 where a varies by 707.107")
    assert "gdpo_advantage" in problem
    assert watch([A, B], quiet) == []


def test_rewards_of_like_size_are_not_reported(scored):
    watch = Watching(factor=100.0, patience=1)
    assert watch([A, B], scored((50.0, 1.0), (0.0, 0.0))) == []


@pytest.mark.parametrize(
    ("given", "why"), [(None, "without a return statement"), ("nan", "the first time was logged")]
)
def test_a_function_that_never_scores_is_reported(given, why, scored):
    watch = Watching(patience=3)
    silent = scored((given,), (None,))
    assert watch([A], silent) == watch([A], silent) == []
    (problem,) = watch([A], silent)
    assert "reward a: gave no score in 3 steps in a row" in problem and why in problem


def test_answers_that_are_always_worth_the_same_are_reported(scored):
    watch = Watching(patience=2)
    # the sums are 2 in one group, and the other has one alone
    alike = scored((1, 2), (2, 0), (0, 1), (None, 1))
    assert watch([A, B], alike) == []
    (problem,) = watch([A, B], alike)
    assert problem.startswith(
        "rewards: all completions of a prompt were worth the same in 2 steps in a row"
    )
    dynamic_sampling, single = scored((1,), (2,), (1,), (1,)), scored((1,), (1,), tasks=[0, 1])
    # without others to the same prompt, nobody compares them
    for samples in (dynamic_sampling, single):
        watch = Watching(patience=1)
        assert watch([A], samples) == []


def test_an_unknown_answer_is_no_other_than_the_rest(scored):
    watch, samples = Watching(patience=1), scored((1, 2), (1, 2), ("timeout", 0), tasks=[0] * 3)
    (problem,) = watch([A, B], samples)
    assert problem.startswith("rewards: all completions of a prompt were worth the same")


def test_answers_that_are_always_cut_are_reported(scored):
    watch, samples = Watching(patience=2), scored((1,), (2,))
    samples[0].finish = "length"
    assert watch([A], samples) == watch([A], samples) == []
    samples[1].finish = "length"
    assert watch([A], samples) == []
    (problem,) = watch([A], samples)
    assert problem.startswith(
        "max_tokens: every completion was cut before its end in 2 steps in a row"
    )


def test_a_score_in_between_breaks_the_silence(scored):
    watch = Watching(patience=2)
    for scores in (None, 1.0, None):
        assert watch([A], scored((scores,))) == []


def test_a_name_is_no_reward_function():
    with pytest.raises(
        ValueError, match="reward: wanted a function, got 'math'; `resolve_rewards` makes those"
    ):
        score(["math"], [])
