"""kill -9 at any moment and resume: the same weights, bit for bit, and one line per step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_model, sums, write_rows

KILLED = Path(__file__).parents[1] / "support" / "killed.py"


@pytest.fixture
def config(tmp_path):
    """A run whose every kind of state matters: shuffled epochs, a schedule, momentum, adapters with dropout."""
    return {
        "model": str(save_model(tmp_path / "start")),
        "data": str(write_rows(tmp_path / "pairs.jsonl", sums(50))),
        "output": str(tmp_path / "run"),
        "steps": 80,
        "batch_size": 8,
        "micro_tokens": 150,
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup": 0.1,
        "save_every": 5,
    }


def kill_and_resume(recipe, config, *orders):
    path = Path(config["output"]).with_suffix(".json")
    path.write_text(json.dumps(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(KILLED), recipe, str(path), *orders],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    log = Path(config["output"]).with_suffix(".log")
    assert done.returncode == 0, done.stderr[-2000:] + (log.read_text()[-2000:] if log.exists() else "")
    return json.loads(done.stdout.splitlines()[-1]), log.read_text()


def assert_undisturbed(config):
    run, whole = Path(config["output"]), Path(config["output"] + "-undisturbed")
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    lines = [
        [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()] for place in (run, whole)
    ]
    for disturbed, undisturbed in zip(*lines, strict=True):
        assert {**disturbed, "seconds": 0} == {**undisturbed, "seconds": 0}


def test_dpo_with_adapters_and_dropout_survives_kills_at_random_moments(config):
    happened, _ = kill_and_resume(
        "dpo", {**config, "lora": {"r": 4, "dropout": 0.1}}, "write:4", "write:2", "random:10"
    )
    assert happened["random"] == 10
    assert happened["write"] == 2
    assert_undisturbed(config)


def test_sft_survives_a_truncated_newest_checkpoint_and_says_so(config, tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(50)]
    config["data"] = str(write_rows(tmp_path / "messages.jsonl", rows))
    happened, log = kill_and_resume("sft", config, "write:7", "truncate", "random:3")
    assert happened["truncate"] == 1
    assert "is damaged and passed over: state.pt has another size" in log
    assert_undisturbed(config)
