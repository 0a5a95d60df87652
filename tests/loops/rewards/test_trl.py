"""TRL's reward functions give here what they give there."""

import importlib.util
import warnings

import numpy as np
import pytest
import torch
from burnish.loops.rewards import RewardFunction, check_columns

CHAT = [{"role": "user", "content": "?"}]


def test_it_gets_the_arguments_that_it_would_get_there(answer, judging):
    seen = {}

    def function(prompts, completions, completion_ids, solution, difficulty=None, **columns):
        seen.update(locals())
        return [0.5, None]

    rows = [{"prompt": "1+1?", "solution": "2", "difficulty": 3, "source": "a"}] * 2
    samples = [answer("two", tokens=[7, 8]), answer("three", tokens=[9], index=1)]
    unscored = judging([RewardFunction("r", function)], rows, samples)
    assert [sample.rewards["r"] for sample in samples] == [0.5, None] and unscored == {
        ("r", "none"): 1
    }
    assert seen["prompts"] == ["1+1?"] * 2 and seen["completions"] == ["two", "three"]
    assert seen["completion_ids"] == [[7, 8], [9]]
    assert (
        seen["solution"] == ["2", "2"]
        and seen["difficulty"] == [3, 3]
        and seen["columns"]["source"] == ["a", "a"]
    )
    assert "prompt" not in seen["columns"]


def test_completions_are_messages_where_the_prompt_is(answer, judging):
    def function(completions, **columns):
        return [len(completion[0]["content"]) + 100 * len(completion) for completion in completions]

    said = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    samples = [answer("abc"), answer("a", messages=said)]
    judging([RewardFunction("r", function)], [{"prompt": CHAT}] * 2, samples)
    assert [sample.rewards["r"] for sample in samples] == [103, 201]


def test_an_async_one_is_awaited_and_one_without_keywords_gets_what_it_names(answer, judging):
    async def function(completions):
        return [1.0] * len(completions)

    sample = answer()
    judging([RewardFunction("r", function)], [{"prompt": "?", "source": "a"}], [sample])
    assert sample.rewards == {"r": 1.0}


def test_what_it_logs_is_kept_with_the_sample(answer, judging):
    def function(completions, log_extra, log_metric, **columns):
        log_extra("parsed", [7])
        log_metric("parse_rate", 0.5)
        return [1.0]

    sample = answer()
    assert judging([RewardFunction("r", function)], [{"prompt": "?"}], [sample]) == {}
    assert sample.info == {"parsed": 7, "parse_rate": 0.5}


def test_what_it_logs_becomes_plain_data_or_is_refused_by_name(answer, judging, caplog):
    def function(completions, log_extra, log_metric, **columns):
        log_extra("parsed", np.float32([0.5]))
        log_metric("rate", torch.tensor(2))
        log_extra("tree", [{1j}])
        return [1.0]

    sample = answer()
    assert judging([RewardFunction("r", function)], [{"prompt": "?"}], [sample]) == {
        ("r", "error"): 1
    }
    assert sample.info == {"parsed": 0.5, "rate": 2}
    assert [type(value) for value in sample.info.values()] == [float, int]
    assert "reward function, which logs 'tree': wanted numbers" in caplog.text
    assert 'log_extra("tree", [{1j}])' in caplog.text  # the line at fault


def test_a_column_in_its_signature_must_be_there():
    def function(completions, solution, hint="", **columns):
        return [1.0]

    with pytest.raises(
        ValueError, match=r"reward r: .* no column 'solution'; there are answer, prompt"
    ):
        check_columns([RewardFunction("r", function)], ["prompt", "answer"])


def test_one_that_needs_the_trainer_is_refused():
    def function(completions, trainer_state):
        return [1.0]

    with pytest.raises(
        ValueError, match="reward function: needs trainer_state, which only TRL's trainer has"
    ):
        RewardFunction("r", function)


def test_it_is_known_by_its_parameters():
    for written in (lambda completions, **columns: [], lambda prompts: []):
        assert RewardFunction("r", written).function.over == "step"
    for other in (lambda row, sample: 1.0, lambda rows, samples: [], max):
        assert RewardFunction("r", other).function is other


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="the package trl is not installed"
)
def test_its_own_rewards_run_and_agree_with_ours(answer, judging):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.rewards import (
            get_repetition_penalty_reward,
            get_soft_overlong_punishment,
            think_format_reward,
        )
    from burnish.loops.rewards.length import Repetition, SoftOverlong
    from burnish.loops.rewards.text import Format

    texts = [
        "<think>a</think>b",
        "<think>a<think></think>",
        "x <think>a</think>",
        "<think>\na\n</think>\nb\nc",
        "",
    ]
    ids = [[1, 2, 3, 4], [5] * 9, [1, 2, 1, 2, 1, 2, 7], list(range(10)), [4, 4]]
    samples = [
        answer(text, tokens=tokens, index=i)
        for i, (text, tokens) in enumerate(zip(texts, ids, strict=True))
    ]
    pairs = {
        "format": (Format(), think_format_reward),
        "repetition": (Repetition(n=2, penalty=1.0), get_repetition_penalty_reward(2, -1.0)),
        "soft_overlong": (SoftOverlong(limit=8, buffer=4), get_soft_overlong_punishment(8, 4)),
    }
    rewards = [
        RewardFunction(f"{whose} {name}", function)
        for name, both in pairs.items()
        for whose, function in zip(("ours", "theirs"), both, strict=True)
    ]
    assert judging(rewards, [{"prompt": CHAT}] * 5, samples) == {}
    for name in pairs:
        ours, theirs = (
            [sample.rewards[f"{whose} {name}"] for sample in samples]
            for whose in ("ours", "theirs")
        )
        assert ours == pytest.approx(theirs, abs=1e-12), name
        assert len(set(ours)) > 1
