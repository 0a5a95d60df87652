"""Tasks of reasoning-gym: what the rows hold is enough for the verifier, in any process."""

import json

import pytest
from burnish.loops.rewards.reasoning_gym import ReasoningGym, reasoning_gym_rows

pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import DATASETS

# two that take seconds to begin; a mixture of others
LEFT_OUT = {"arc_agi", "knight_swap", "composite"}
TASKS = sorted(set(DATASETS) - LEFT_OUT)


def test_every_task_gives_1_to_its_own_answer(answer):
    differing = []
    for task in TASKS:
        (row,) = reasoning_gym_rows(task, 1, seed=3)
        stored = json.loads(json.dumps(row))  # as a file of rows does
        if stored["answer"] is None:  # several answers are right, and none is given
            continue
        if ReasoningGym()(stored, answer(f"So: <answer>{row['answer']}</answer>")) != 1.0:
            differing.append(task)
    assert differing == []


def test_tuples_and_numbers_as_keys_survive():
    from burnish.loops.rewards.reasoning_gym import _decoded, _encoded

    value = {"grid": ((1, 2), [3]), 4: {"a": None, "b": [{}, ()]}, "text": "x"}
    assert json.loads(json.dumps(_encoded(value)), object_hook=_decoded) == value


def test_the_last_tag_is_the_answer_and_none_is_wrong(answer):
    (row,) = reasoning_gym_rows("chain_sum", 1, seed=0)
    right = row["answer"]
    assert ReasoningGym()(row, answer(f"<answer>0</answer> no <answer> {right} </answer>")) == 1.0
    assert ReasoningGym()(row, answer(f"<answer>{right}</answer> no <answer>x</answer>")) < 1.0
    assert ReasoningGym()(row, answer(str(right))) == ReasoningGym()(row, answer("")) == 0.0
    assert ReasoningGym(tag="")(row, answer(f" {right}\n")) == 1.0


def test_rows_are_prompts_in_our_layout():
    rows = reasoning_gym_rows(
        "chain_sum", 3, seed=1, instruction="Say it in tags.", min_terms=2, max_terms=2
    )
    assert len({row["prompt"][0]["content"] for row in rows}) == 3
    for row in rows:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert row["prompt"][0]["content"].endswith("\nSay it in tags.")
        assert row["task"] == "chain_sum"
    assert rows == reasoning_gym_rows(
        "chain_sum", 3, seed=1, instruction="Say it in tags.", min_terms=2, max_terms=2
    )


def test_no_such_task_or_option_names_the_nearest():
    with pytest.raises(ValueError, match="no task 'chain_sums', did you mean 'chain_sum'"):
        reasoning_gym_rows("chain_sums", 1, seed=0)
    with pytest.raises(
        ValueError, match="reasoning_gym chain_sum: no setting 'min_term', did you mean 'min_terms'"
    ):
        reasoning_gym_rows("chain_sum", 1, seed=0, min_term=2)


def test_its_rows_are_what_the_reward_asks_for():
    assert set(ReasoningGym().columns) <= set(reasoning_gym_rows("chain_sum", 1, seed=0)[0])
