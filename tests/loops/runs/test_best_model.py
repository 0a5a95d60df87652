"""With load_best_model_at_end, a run ends with the weights of its best step, whatever its
layout.
"""

import json
from pathlib import Path

import pytest
from burnish.loops.config import Lora
from burnish.loops.recipes.settings import SFT
from burnish.loops.recipes.sft import open_sft
from burnish.loops.runs import checkpoint
from burnish.loops.runs.checkpoint import CheckpointError
from forked import run_forked
from safetensors.torch import load_file
from sharded import prepare as prepare_start
from shared import made_once
from tiny import save_model, sums, write_rows

# The loss falls from the first step on, so the first of the later ones has the highest.
FIRST = {
    "eval_data": 4,
    "eval_every": 1,
    "keep_best": "max:eval/loss",
    "load_best_model_at_end": True,
}


@pytest.fixture
def settings(tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(12)]
    data = write_rows(tmp_path / "messages.jsonl", rows)
    model = save_model(tmp_path / "start")
    fields = {
        "model": str(model),
        "data": str(data),
        "eval_data": 4,
        "batch_size": 2,
        "learning_rate": 1e-2,
    }
    return {**fields, "steps": 3, "schedule": "constant"}


def weights(run, file="model/model.safetensors"):
    return load_file(Path(run) / file)


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"lora": Lora(r=4)},
        {"dtype": "bfloat16", "weights_dtype": "bfloat16"},
        {"optimizer": "schedule_free_adamw"},
    ],
    ids=["plain", "adapters", "bfloat16", "schedule_free"],
)
def test_the_model_is_that_of_the_best_step(settings, tmp_path, capsys, change):
    if "optimizer" in change:
        pytest.importorskip("schedulefree")
    one = {**settings, **change, "output": str(tmp_path / "one"), "steps": 1}
    three = {**settings, **change, **FIRST, "output": str(tmp_path / "three")}
    last = {**three, "output": str(tmp_path / "last"), "load_best_model_at_end": False}
    for fields in (one, last, three):
        open_sft(SFT(**fields)).train()
    assert same(weights(tmp_path / "three"), weights(tmp_path / "one"))
    assert not same(weights(tmp_path / "three"), weights(tmp_path / "last"))
    if "lora" in change:
        adapter = "adapter/adapter_model.safetensors"
        assert same(weights(tmp_path / "three", adapter), weights(tmp_path / "one", adapter))
    card = (tmp_path / "three/model/README.md").read_text()
    assert "The weights are those of step 1, the best by `max:eval/loss`." in card
    assert "the model of step 1, the best by max:eval/loss, is in" in capsys.readouterr().out


@pytest.mark.parametrize("shards", [1, 2], ids=["copies", "shards"])
def test_two_ranks_end_with_the_best_step_as_well(tmp_path, tmp_path_factory, shards):
    start = made_once(tmp_path_factory, "sharded-start", prepare_start)
    names = ["sft", "dpo_adapters", "sft_bfloat16"]
    whole = [(name, str(tmp_path / name / "whole"), {"steps": 3, **FIRST}) for name in names]
    train(start, shards, whole)
    steps = {name: best_step(tmp_path / name / "whole") for name in names}
    assert all(step < 3 for step in steps.values())
    short = [
        (name, str(tmp_path / name / "short"), {"steps": steps[name], "eval_data": 4})
        for name in names
    ]
    train(start, shards, short)
    for name in names:
        assert same(weights(tmp_path / name / "whole"), weights(tmp_path / name / "short")), name


def train(start, shards, runs):
    for status, printed in run_forked(2, "sharded", str(start), shards, runs):
        assert status == 0, printed[-3000:]


def best_step(run):
    """The step after which the loss of the held-out data was highest."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return max(lines[1:], key=lambda line: line["eval/loss"])["step"]


def test_a_damaged_best_checkpoint_ends_the_run_and_the_last_model_can_be_had(
    settings, tmp_path, monkeypatch
):
    fields = {**settings, **FIRST, "output": str(tmp_path / "run")}
    wait = checkpoint.Saver.wait

    def damage(saver):
        wait(saver)
        for shard in (tmp_path / "run/checkpoints/step-00000001").glob("shard-*"):
            shard.write_bytes(shard.read_bytes()[:-1] + b"x")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.Saver, "wait", damage)
        with pytest.raises(
            CheckpointError,
            match=r"step 1 is damaged: shard-0.*--load_best_model_at_end false writes",
        ):
            open_sft(SFT(**fields)).train()
    assert not (tmp_path / "run/model").exists()
    open_sft(SFT(**{**fields, "resume": True, "load_best_model_at_end": False})).train()
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_an_end_with_the_best_wants_a_metric(settings):
    with pytest.raises(
        ValueError,
        match="load_best_model_at_end: wanted a metric to be the best by; give keep_best",
    ):
        SFT(**settings, load_best_model_at_end=True).refuse_contradictions()
