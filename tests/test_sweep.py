"""examples/sweep.py: trials are pruned, and a sweep that is killed goes on where it was."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from worlds import demonstrations, save_start, successors, write_rows

SWEEP = Path(__file__).parents[1] / "examples/sweep.py"
TRIALS = 20
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("optuna") is None, reason='needs pip install "burnish[sweep]"'),
]


@pytest.fixture
def command(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", demonstrations(successors(600, seed=1)))
    held_out = write_rows(tmp_path / "held_out.jsonl", demonstrations(successors(60, seed=2)))
    base = {
        "model": str(save_start(tmp_path / "start")),
        "data": str(rows),
        "eval_data": str(held_out),
        "eval_every": 4,
        "steps": 16,
        "batch_size": 16,
    }
    space = {
        "learning_rate": {"low": 1e-6, "high": 1e-2, "log": True},
        "warmup": {"choices": [0.0, 0.2]},
    }
    for name, values in (("base", base), ("space", space)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
    words = ["sft", "base.yaml", "space.yaml", "sweep", "--trials", str(TRIALS)]
    return [sys.executable, str(SWEEP), *words]


def start(command, directory):
    with (directory / "log.txt").open("a") as log:
        return subprocess.Popen(
            command, cwd=directory, stdout=log, stderr=log, start_new_session=True
        )


def begun(directory):
    """The trials that have taken a step."""
    return sum(path.stat().st_size > 0 for path in directory.glob("sweep/*/metrics.jsonl"))


def test_a_sweep_survives_two_kills_and_prunes(command, tmp_path):
    for trials in (5, 11):
        sweep = start(command, tmp_path)
        until = time.monotonic() + 300
        while begun(tmp_path) < trials:
            assert sweep.poll() is None and time.monotonic() < until, (
                tmp_path / "log.txt"
            ).read_text()
            time.sleep(0.02)
        os.killpg(sweep.pid, signal.SIGKILL)
        sweep.wait()
    assert start(command, tmp_path).wait(timeout=300) == 0, (tmp_path / "log.txt").read_text()

    import optuna

    study = optuna.load_study(study_name="sft", storage=f"sqlite:///{tmp_path}/sweep/study.db")
    states = [trial.state.name for trial in study.trials]
    assert states.count("COMPLETE") + states.count("PRUNED") == TRIALS
    assert states.count("PRUNED") >= 3 and states.count("RUNNING") == 0
    assert 1 <= states.count("FAIL") <= 2  # no more than there were kills
    ended = [trial.params for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]
    assert all(trial.params in ended for trial in study.trials if trial.state.name == "FAIL")
    assert study.best_value < 2.0  # untrained, it is log 15 = 2.7

    table = (tmp_path / "sweep/trials.md").read_text().splitlines()
    assert len(table) == 2 + TRIALS
    losses = [float(line.split("|")[3]) for line in table[2:] if "complete" in line]
    assert losses == sorted(losses) and losses[0] == pytest.approx(study.best_value, abs=1e-4)
    assert (tmp_path / "sweep/trials.png").read_bytes().startswith(b"\x89PNG")
    assert start(command, tmp_path).wait(timeout=100) == 0  # nothing is left to do
    assert len(study.trials) == len(states)
