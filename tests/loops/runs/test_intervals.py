"""Evaluations and checkpoints by steps, by shares of all steps, and at the ends of epochs."""

import json

import burnish
import pytest
from tiny import save_model, sums, write_rows

PAIRS = sums(10)
MESSAGES = [{"messages": pair["prompt"] + pair["chosen"]} for pair in PAIRS]
PROMPTS = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in PAIRS]


@pytest.fixture
def settings(tmp_path):
    model = str(save_model(tmp_path / "start"))
    data = str(write_rows(tmp_path / "rows.jsonl", MESSAGES))
    return {
        "model": model,
        "data": data,
        "output": str(tmp_path / "run"),
        "batch_size": 4,
        "epochs": 3,
    }


@pytest.mark.parametrize(
    ("every", "wanted"),
    [
        ("epoch", [3, 5, 8]),  # 10 rows, of which the 10th, 20th and 30th are in these steps of 4
        (0.3, [3, 6, 8]),  # of 8 steps, rounded up, as in transformers' Trainer
        (0.01, [1, 2, 3, 4, 5, 6, 7, 8]),
        (5, [5, 8]),
        (None, [8]),
    ],
)
def test_evaluations_and_checkpoints_come_when_their_interval_ends(
    every, wanted, settings, tmp_path
):
    held_out = {"eval_data": MESSAGES[:2], "eval_every": every, "save_every": every}
    burnish.sft(**settings, **held_out, keep=9, dtype="bfloat16").train()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, *wanted]
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in wanted]


def test_an_epoch_of_prompts_ends_with_the_rollout_of_the_last_one(settings, tmp_path):
    rollouts = {
        "prompts_per_rollout": 4,
        "minibatches": 2,
        "group_size": 2,
        "max_tokens": 2,
        "epochs": 2,
    }
    online = {
        "data": PROMPTS,
        "rewards": {"length": {"target": 1}},
        "save_every": "epoch",
        "keep": 9,
    }
    del settings["batch_size"]
    burnish.grpo(**{**settings, **online, **rollouts}).train()
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == ["step-00000005", "step-00000010"]  # 2 prompts a step


def test_an_extended_run_evaluates_by_its_new_length(settings, tmp_path):
    held_out = {"eval_data": MESSAGES[:2], "eval_every": 0.5}
    burnish.sft(**{**settings, "epochs": 1}, **held_out).train()
    burnish.sft(**settings, **held_out, resume=True).train()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 2, 3, 4, 8]


@pytest.mark.parametrize("name", ["eval_every", "save_every"])
def test_an_epoch_of_streamed_data_is_refused_as_an_interval(name, settings):
    with pytest.raises(ValueError, match=f"{name}: an epoch of streamed data has no known length"):
        burnish.sft(**settings, streaming=True, steps=2, **{name: "epoch"})


@pytest.mark.parametrize("every", ["epochs", 0, -1, 0.0, 1.5])
def test_what_is_no_interval_is_refused(every, settings):
    with pytest.raises(ValueError, match=r"sft: eval_every: must be .*, got "):
        burnish.sft(**settings, eval_every=every)
