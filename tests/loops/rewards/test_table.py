"""Rewards from Python: functions of every form into one table, each called once for a completion."""

import pytest
from burnish.loops.rewards import RewardFunction, score


@pytest.fixture
def samples(answer):
    """Two completions of one prompt, whose row the scheduler has left with them."""
    found = [answer(text, index=i) for i, text in enumerate(["4", "five"])]
    for sample in found:
        sample.row = {"prompt": "2+2=", "answer": "4"}
    return found


def test_functions_of_every_form_are_columns_of_one_table(samples):
    def of_text(completion, answer):
        return float(completion == answer)

    def of_rows(row, sample):
        return float(len(row["answer"]) == len(sample.text))

    def of_trl(prompts, completions, answer, **columns):
        return [len(completion) for completion in completions]

    async def of_prompt(prompt, completion, answer=None, scale=2.0):
        return scale * (prompt + completion == "2+2=4") if answer else None

    table = score([of_text, RewardFunction("rows", of_rows, 0.5), of_trl, of_prompt], samples)
    assert table.names == ["of_text", "rows", "of_trl", "of_prompt"]
    assert table.reward.tolist() == [[1, 1, 1, 2], [0, 0, 4, 0]]
    assert table.weight.tolist() == [1, 0.5, 1, 1]
    assert table.total.tolist() == [1 + 0.5 + 1 + 2, 4]


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

    with pytest.raises(ValueError, match="reward grade: needs the column 'solution', and the data has"):
        score([grade], samples)
    assert score([lambda row, sample: row["given"]], samples, [{"given": 1.0}, {"given": 2.0}]).total.tolist() == [1, 2]


def test_a_function_that_fails_leaves_its_completion_without_a_total(samples):
    def fussy(completion):
        return float(completion)

    assert score([fussy], samples).total.isnan().tolist() == [False, True]
    assert samples[1].rewards == {"fussy": "error"}
