"""The examples of rewards and environments in the docstrings of their rooms work as printed."""

import asyncio
import re
import textwrap

import pytest
from burnish.loops import environments, rewards
from burnish.loops.rollouts.sample import Sample, VersionSpan


@pytest.fixture
def example(tmp_path, monkeypatch):
    """``example(room, module)`` writes the code of a room's docstring to a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def example(room, module):
        code = re.search(rf"{module}.py:\n\n(.*?)\nand in the configuration", room.__doc__, re.S)[1]
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))

    return example


def sample(text, tokens=3):
    logprobs, spans = [0.0] * tokens, [VersionSpan(0, 0, tokens)]
    return Sample(0, 0, [1], list(range(tokens)), [True] * tokens, logprobs, spans, "stop", text)


def test_rewards_of_ones_own(example):
    example(rewards, "my_rewards")
    spec = {"my_rewards:right": 1.0, "my_rewards:Short": {"weight": 0.1, "longest": 50}}
    right, short = rewards.resolve_rewards(spec)
    samples = [sample("4"), sample("5", tokens=60)]
    asyncio.run(rewards.score_samples([right, short], [{"answer": "4"}] * 2, samples))
    assert [each.rewards for each in samples] == [
        {"right": 1.0, "Short": 0.0},
        {"right": 0.0, "Short": -0.2},
    ]


def test_an_environment_of_ones_own(example):
    example(environments, "my_games")
    game = environments.resolve_environment({"my_games:Doubling": {"turns": 2}})()
    assert game.reset({"number": 3}) == [{"role": "user", "content": "Double 3."}]
    first, second = game.step(sample("6")), game.step(sample("13"))
    assert (first.observation, first.done, first.reward) == ("And 6?", False, 1.0)
    assert (second.done, second.reward) == (True, 0.0)
