"""A function of the user's chooses the rows of the next rollout, from the rewards so far."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rewards.scoring import RewardFunction
from burnish.loops.rl.curriculum import Curriculum, resolve_order
from burnish.loops.rollouts.sample import Sample, VersionSpan
from online import Killed, dying_in_step, lines, prepare, stored, under_torchrun
from safetensors.torch import load_file

REWARD = [RewardFunction("right", lambda row, sample: 0.0)]


def group(task, *rewards):
    """The group of a task whose completions have these rewards."""
    spans = [VersionSpan(0, 0, 1)]
    return [
        Sample(task, i, [1], [5], [True], [-1.0], spans, "stop", "", rewards={"right": reward})
        for i, reward in enumerate(rewards)
    ]


def told(history):
    """As lists, without NaN."""
    values = (history.asked, history.seen, history.reward, history.varied)
    return [np.nan_to_num(value, nan=-1.0).tolist() for value in values]


def test_a_row_is_known_by_the_means_of_its_groups_and_how_many_varied() -> None:
    histories = []

    def order(history):
        histories.append(history)
        return [2, 0, 1]

    curriculum = Curriculum(order, 3, 2)
    assert [curriculum(task) for task in range(4)] == [2, 0, 2, 0]
    # a completion without a score counts in nothing; a group without any is none
    groups = [group(0, 1.0, 0.0, None), group(1, None, None), group(2, 0.0, 0.0)]
    curriculum.observe(groups, REWARD)
    assert curriculum(4) == 2
    assert told(histories[0]) == [[0] * 3, [0] * 3, [-1.0] * 3, [-1.0] * 3]
    assert told(histories[1])[0] == [1, 0, 1]
    assert told(histories[2]) == [[2, 0, 2], [0, 0, 2], [-1.0, -1.0, 0.25], [-1.0, -1.0, 0.5]]
    assert [history.choice for history in histories] == [0, 1, 2]


def test_what_was_chosen_stays_and_a_row_that_comes_again_is_left_out() -> None:
    chosen = iter([[1, 1, 1, 0, 2], torch.tensor([3, 2, 3]), np.array([0, 3]), iter([2, 1])])
    curriculum = Curriculum(lambda history: next(chosen), 4, 2)
    assert [curriculum(task) for task in (0, 5, 3, 1, 7, 0)] == [1, 3, 2, 0, 1, 1]
    assert curriculum.unsent() == [1, 0, 3, 2, 0, 3, 2, 1]
    assert curriculum.unsent() == []


def test_rows_of_the_history_go_evenly_through_the_data_in_another_order_each_time() -> None:
    curriculum = Curriculum(lambda history: history.rows, 6, 4, seed=3)
    rows = [curriculum(task) for task in range(24)]
    assert sorted(rows[:12]) == sorted([*range(6)] * 2) == sorted(rows[12:])
    assert rows[:12] != rows[12:]
    plain = Curriculum(lambda history: history.rows, 6, 4, shuffle=False)
    assert [plain(task) for task in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_what_the_function_writes_into_the_history_is_not_remembered() -> None:
    def order(history):
        for values in (history.asked, history.seen, history.reward, history.varied):
            values[:] = 7
        return history.rows

    curriculum = Curriculum(order, 3, 1)
    curriculum(0)
    assert curriculum.asked.sum() == 1
    assert curriculum.seen.sum() == 0


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (None, "wanted the indices of rows, best first, such as history.rows, got NoneType"),
        ([0.5, 1.0, 2.0], "wanted the indices of rows"),
        (np.array([True, False, True]), "wanted the indices of rows"),
        ([[0, 1], [2, 3]], "wanted the indices of rows"),
        ([], "it chose 0 different rows, and a rollout takes 2; put others behind them"),
        ([1, 1], "it chose 1 different rows"),
        ([0, 4], "there are rows 0 to 3, it chose 4"),
        ([-1, 0], "there are rows 0 to 3, it chose -1"),
    ],
)
def test_rows_that_can_not_be_taken_are_refused(chosen, says) -> None:
    with pytest.raises(ValueError, match=says):
        Curriculum(lambda history: chosen, 4, 2)(0)


def test_a_function_that_raises_an_error_is_named_with_its_line() -> None:
    with pytest.raises(
        ValueError, match=r"order: .*test_curriculum.py line \d+: ZeroDivisionError"
    ):
        Curriculum(lambda history: 1 / 0, 4, 2)(0)


def test_more_rows_than_there_are_and_other_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="takes 8 different rows, and the data has 4"):
        Curriculum(lambda history: history.rows, 4, 8)
    with pytest.raises(ValueError, match=r"order online:even: wanted a function of \(history\)"):
        resolve_order("online:even")
    with pytest.raises(ValueError, match="order: no 'hardest'"):
        resolve_order("hardest")
    with pytest.raises(ValueError, match="wanted one name, got a:b, c:d"):
        resolve_order({"a:b": {}, "c:d": {}})


def test_a_state_of_other_data_is_refused() -> None:
    state = Curriculum(lambda history: history.rows, 4, 2).state_dict()
    with pytest.raises(ValueError, match="had 4 rows, and the data has 5"):
        Curriculum(lambda history: history.rows, 5, 2).load_state_dict(state)


@pytest.fixture
def fields(tmp_path):
    """Of a run that asks what went worst."""
    return {
        **prepare(tmp_path),
        "order": "online:worst_first",
        "output": str(tmp_path / "run"),
        "dynamic_sampling": True,
        "group_size": 2,
        "steps": 4,
        "save_every": 2,
    }


def train(fields):
    open_grpo(GRPO(**fields)).train()
    return stored(Path(fields["output"]))


def rewards_of(samples):
    """The mean reward of each prompt in these samples."""
    rewards = {}
    for sample in samples:
        rewards.setdefault(tuple(sample["prompt"]), []).append(sample["rewards"]["even"])
    return {prompt: math.fsum(values) / len(values) for prompt, values in rewards.items()}


def test_a_run_asks_what_the_function_chose_by_its_rewards(fields) -> None:
    fields |= {"dynamic_sampling": False, "steps": 2}
    samples = train(fields)
    first = rewards_of(sample for sample in samples if sample["task"] < 4)
    second = rewards_of(sample for sample in samples if sample["task"] >= 4)
    bad = {prompt for prompt, reward in first.items() if reward < 0.5}
    good = {prompt for prompt, reward in first.items() if reward > 0.5}
    assert len(first) == len(second) == 4
    assert bad and good
    assert bad <= set(second)
    assert not good & set(second)


def test_a_killed_run_asks_the_same_and_ends_with_the_same_weights(fields, tmp_path) -> None:
    undisturbed = train({**fields, "output": str(tmp_path / "undisturbed")})
    with dying_in_step(4), pytest.raises(Killed):
        train(fields)
    samples = train({**fields, "resume": True})
    asked = {(sample["task"], tuple(sample["prompt"])) for sample in undisturbed}
    assert len({prompt for _, prompt in asked}) < len(asked)
    assert {(sample["task"], tuple(sample["prompt"])) for sample in samples} == asked
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    expected = load_file(tmp_path / "undisturbed" / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("before", [None, "online:worst_first"])
def test_a_run_is_resumed_with_the_order_that_it_had(fields, before) -> None:
    train({**fields, "order": before, "steps": 2})
    after = "online:worst_first" if before is None else None
    with pytest.raises(ValueError, match=r"was run with order=.*, now it is .*; set it back"):
        train({**fields, "order": after, "resume": True})


@pytest.mark.parametrize("in_flight", [None, 6])
def test_rows_are_chosen_when_a_task_begins_also_while_the_trainer_trains(
    fields, in_flight
) -> None:
    fields |= {"dynamic_sampling": False, "max_staleness": 1, "in_flight": in_flight}
    with dying_in_step(4), pytest.raises(Killed):
        train(fields)
    samples = train({**fields, "resume": True})
    assert len(lines(Path(fields["output"]))) == 4
    prompts = {}
    for sample in samples:
        prompts.setdefault(sample["task"], set()).add(tuple(sample["prompt"]))
    assert len(prompts) >= 16
    # those that the first process had begun, and the checkpoint knew, have the same row in the next
    assert all(len(prompts[task]) == 1 for task in range(12 if in_flight is None else 10))


@pytest.mark.slow
def test_two_ranks_ask_what_one_asks(fields, tmp_path) -> None:
    fields |= {"dtype": "float64", "steps": 3, "save_every": 9}
    outcome = under_torchrun(2, fields, 120)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    samples = stored(Path(fields["output"]))
    alone = train({**fields, "output": str(tmp_path / "alone")})
    assert [sample["prompt"] for sample in samples] == [sample["prompt"] for sample in alone]
    rows = [json.loads(Path(f"{fields['output']}-rows{rank}.json").read_text()) for rank in (0, 1)]
    assert len(rows[0]) >= 12
    assert rows[0] == rows[1]
