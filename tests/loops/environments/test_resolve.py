"""Names of environments, and conversations of one turn."""

import asyncio
import sys

import pytest
from burnish.loops.environments import MultiTurnSource, Tools, resolve_environment, turns_for
from burnish.loops.environments.games import GuessNumber, SingleTurn
from burnish.loops.rewards.reasoning_gym import reasoning_gym_rows


def test_a_name_makes_a_new_environment_for_each_conversation():
    make = resolve_environment("guess_number")
    first, second = make(), make()
    assert isinstance(first, GuessNumber) and first is not second


def test_settings_are_those_of_the_environment():
    make = resolve_environment({"guess_number": {"guesses": 3}})
    assert make().guesses == 3
    tools = resolve_environment({"tools": {"tools": ["calculator"], "seconds": 1.0}})()
    assert isinstance(tools, Tools) and list(tools.tools) == ["calculator"] and tools.seconds == 1.0


@pytest.mark.parametrize("of", ["def", "async def"])
def test_what_is_made_to_be_looked_at_is_closed_too(of, tmp_path, monkeypatch, tokenizer):
    (tmp_path / "my_sandbox.py").write_text(
        "opened, closed = [], []\nclass Sandbox:\n    schemas = []\n    def __init__(self): opened.append(self)\n"
        f"    def reset(self, row): ...\n    def step(self, answer): ...\n    {of} close(self): closed.append(self)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_sandbox", raising=False)

    async def in_a_notebook():
        turns_for(resolve_environment("my_sandbox:Sandbox"), tokenizer)

    turns_for(resolve_environment("my_sandbox:Sandbox"), tokenizer)
    asyncio.run(in_a_notebook())
    import my_sandbox

    assert len(my_sandbox.opened) == 4 and my_sandbox.closed == my_sandbox.opened


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gues_number", "environment: no 'gues_number', did you mean 'guess_number'"),
        (
            {"guess_number": {"guess": 3}},
            "environment guess_number: no setting 'guess', did you mean 'guesses'",
        ),
        ({"tools": {"tools": ["calculater"]}}, "tool: no 'calculater', did you mean 'calculator'"),
        ({"guess_number": {}, "tools": {}}, "wanted one name, got guess_number, tools"),
        (
            "my_environment_here:Half",
            r"has no function step; wanted reset\(row\) and step\(completion\)",
        ),
    ],
)
def test_mistakes_are_answered_with_what_was_meant(spec, message, tmp_path, monkeypatch):
    (tmp_path / "my_environment_here.py").write_text(
        "class Half:\n    def reset(self, row):\n        return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message):
        resolve_environment(spec)


def test_a_task_of_reasoning_gym_is_a_conversation_of_one_turn(
    tokenizer, turns, scripted, request_for
):
    pytest.importorskip("reasoning_gym")
    (row,) = reasoning_gym_rows("chain_sum", 1, seed=0)
    answers = [f"<answer>{row['answer']}</answer>", "<answer>-</answer>", ""]
    source = scripted(tokenizer, lambda index, turn: answers[index])
    make = resolve_environment("reasoning_gym")
    samples = asyncio.run(
        MultiTurnSource(source, make, lambda task: row, turns).sample(request_for(0, 1, 2))
    )
    rewards = [sample.info["environment_reward"] for sample in samples]
    assert rewards[0] == 1.0 and rewards[1] < 0.5 and rewards[2] == 0.0
    assert all(sample.info["turns"] == 1 and all(sample.trained) for sample in samples)


def test_any_reward_makes_an_environment_of_one_turn(tokenizer, turns, scripted, request_for):
    async def reward(row, sample):
        return float(sample.text == row["answer"])

    row = {"prompt": "Say a.", "answer": "a"}
    source = scripted(tokenizer, lambda index, turn: "ab"[index])
    conversations = MultiTurnSource(source, lambda: SingleTurn(reward), lambda task: row, turns)
    samples = asyncio.run(conversations.sample(request_for(0, 1)))
    assert [sample.info["environment_reward"] for sample in samples] == [1.0, 0.0]
    assert samples[0].prompt == turns.prompt([{"role": "user", "content": "Say a."}])
