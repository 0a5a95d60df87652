"""A checkpoint becomes the model that a run which ends there leaves."""

import json
from pathlib import Path

import pytest
import torch
from burnish.loops.cli import main
from burnish.loops.cli.export import _KINDS, export
from burnish.loops.recipes import RECIPES, settings_of
from burnish.loops.recipes.settings import SFT
from burnish.loops.recipes.sft import open_sft
from forked import run_forked
from safetensors.torch import load_file
from sharded import prepare as prepare_start
from shared import made_once
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

KINDS = [
    "sft",
    "sft_bfloat16",
    "dpo_tied",
    "dpo_adapters",
    "reward",
    "reward_adapters",
    "prm",
    "ppo",
    "ppo_critic",
]


@pytest.fixture
def settings(tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(12)]
    data = write_rows(tmp_path / "messages.jsonl", rows)
    # the template ends answers with another token
    model = save_model(tmp_path / "start", eos="<|start|>")
    fields = {
        "model": str(model),
        "data": str(data),
        "eval_data": 4,
        "batch_size": 2,
        "learning_rate": 1e-2,
    }
    fields |= {
        "eval_every": 1,
        "save_every": 1,
        "keep": 9,
        "keep_best": "max:eval/loss",
        "schedule": "constant",
    }
    return {**fields, "output": str(tmp_path / "run"), "steps": 3}


def assert_same_files(exported, left):
    """Both directories hold the same files with the same content; weights by value and dtype, bit
    for bit.
    """
    card = {"README.md"}  # of the run; peft writes one of its own
    names = {path.name for path in left.iterdir()} - card
    assert {path.name for path in exported.iterdir() if path.is_file()} - card == names
    for name in sorted(names):
        if name == "adapter_config.json":  # its target modules are a set
            ours, theirs = (json.loads((each / name).read_text()) for each in (exported, left))
            assert {**ours, "target_modules": None} == {**theirs, "target_modules": None}
            assert set(ours["target_modules"]) == set(theirs["target_modules"])
            continue
        if not name.endswith(".safetensors"):
            assert (exported / name).read_bytes() == (left / name).read_bytes(), name
            continue
        ours, theirs = load_file(exported / name), load_file(left / name)
        assert ours.keys() == theirs.keys()
        for key, weight in theirs.items():
            assert ours[key].dtype == weight.dtype and ours[key].equal(weight), key


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Runs of every kind of model on two ranks, each with half of the weights."""
    start = made_once(tmp_path_factory, "sharded-start", prepare_start)

    def make(folder):
        orders = {"save_every": 1, "keep": 9}
        whole = [(name, str(folder / name), orders) for name in KINDS]
        short = [
            (name, str(folder / f"{name}-short"), {"steps": 2})
            for name in KINDS
            if "ppo" not in name
        ]
        for status, printed in run_forked(2, "sharded", str(start), 2, whole + short):
            assert status == 0, printed[-3000:]

    return made_once(tmp_path_factory, "exported-runs", make)


@pytest.mark.parametrize("name", KINDS)
def test_shards_of_two_ranks_become_the_model_that_the_run_left(runs, tmp_path, name):
    run = runs / name
    step, out = export(run, tmp_path / "out")
    assert step == max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert_same_files(out, run / "model")
    assert (out / "adapter").exists() == ("adapters" in name)
    if "adapters" in name:
        assert_same_files(out / "adapter", run / "adapter")
    if name == "ppo":
        head, left = (
            load_file(where / "value_head.safetensors") for where in (out / "values", run)
        )
        assert head.keys() == left.keys() and all(head[key].equal(left[key]) for key in left)
        assert head["weight"].abs().sum() > 0
    if name == "ppo_critic":
        assert_same_files(out / "values/critic/model", run / "critic/model")


@pytest.mark.parametrize("name", [name for name in KINDS if "ppo" not in name])
def test_an_earlier_step_is_the_model_of_a_shorter_run(runs, tmp_path, name):
    step, out = export(runs / name, tmp_path / "out", step=2)
    assert step == 2
    assert_same_files(out, runs / f"{name}-short" / "model")
    with pytest.raises(AssertionError):
        assert_same_files(out, runs / name / "model")


@pytest.mark.parametrize(
    "change",
    [{}, {"optimizer": "schedule_free_adamw"}, {"dtype": "bfloat16", "weights_dtype": "bfloat16"}],
    ids=["plain", "schedule_free", "bfloat16"],
)
def test_the_command_writes_a_model_that_transformers_loads(settings, tmp_path, capsys, change):
    if "optimizer" in change:
        pytest.importorskip("schedulefree")
    open_sft(SFT(**settings, **change)).train()
    assert main(["export", settings["output"]]) == 0
    out = tmp_path / "run/exported/step-00000003"
    assert f"the model of step 3 is in {out}" in capsys.readouterr().out
    assert_same_files(out, tmp_path / "run/model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.generation_config.eos_token_id == [2, tokenizer.convert_tokens_to_ids("<|end|>")]
    assert model.dtype == (torch.bfloat16 if change.get("dtype") else torch.float32)


def test_the_best_is_chosen_by_the_metric_of_the_run(settings, tmp_path):
    open_sft(SFT(**settings)).train()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    worst = max(lines[1:], key=lambda line: line["eval/loss"])["step"]
    assert export(tmp_path / "run", tmp_path / "best", best=True)[0] == worst < 3


def test_what_cannot_be_exported_is_refused_with_the_steps_there_are(settings, tmp_path, capsys):
    def refusal(*words):
        assert main(["export", *map(str, words)]) == 1
        return capsys.readouterr().err

    run = tmp_path / "run"
    assert f"{run}: no run, as it has no readable config.yaml" in refusal(run)
    open_sft(SFT(**{**settings, "keep_best": None})).train()
    assert "there is no checkpoint of step 7; there are 1, 2, 3" in refusal(run, "--step", 7)
    assert "no checkpoint is the best, as the run had no keep_best; there are 1, 2, 3" in refusal(
        run, "--best"
    )
    assert f"{run / 'model'} holds something already" in refusal(run, run / "model")
    shard = run / "checkpoints/step-00000003/shard-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    said = refusal(run)
    assert "step-00000003 is damaged: shard-0.safetensors has another sha256" in said
    assert "give the --step of another, there are 1, 2, 3" in said
    for path in (run / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    assert "there is no checkpoint; a run writes them by save_every" in refusal(run)


def test_a_model_given_as_an_object_is_asked_for_by_name(settings, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(settings["model"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    open_sft(SFT(**{**settings, "model": model, "tokenizer": tokenizer})).train()
    with pytest.raises(
        ValueError, match=r"model: the run was given it as an object .*give --model"
    ):
        export(tmp_path / "run", tmp_path / "out")
    start = settings["model"]
    _, out = export(tmp_path / "run", tmp_path / "out", places={"model": start, "tokenizer": start})
    assert_same_files(out, tmp_path / "run/model")


def test_a_checkpoint_of_an_earlier_version_ends_as_the_model_of_its_run(
    settings, tmp_path, monkeypatch
):
    from burnish.loops.runs import checkpoint

    dump = checkpoint.dump

    def dump_as_before(state):
        return dump({name: value for name, value in state.items() if name != "end_tokens"})

    monkeypatch.setattr(checkpoint, "dump", dump_as_before)
    open_sft(SFT(**settings)).train()
    _, out = export(tmp_path / "run", tmp_path / "out")
    assert_same_files(out, tmp_path / "run/model")


def test_each_kind_of_model_is_known_by_a_setting_of_its_own():
    for recipe in RECIPES.keys() - {"demo"}:
        kinds = [kind for name, kind in _KINDS.items() if hasattr(settings_of(recipe), name)]
        expected = {"reward": "Reward", "prm": "PRM", "ppo": "PPO"}.get(recipe)
        assert [kind.__name__ for kind in kinds] == ([expected] if expected else []), recipe


def test_an_empty_directory_may_be_the_target(settings, tmp_path):
    open_sft(SFT(**{**settings, "steps": 1})).train()
    Path(tmp_path / "empty").mkdir()
    assert export(tmp_path / "run", tmp_path / "empty")[1] == tmp_path / "empty"
