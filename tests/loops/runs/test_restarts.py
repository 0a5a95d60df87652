"""Ranks die: the others end in order, and a launcher that restarts them loses nothing."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from forked import run_forked
from grids import exhaustive, slow
from online import prepare
from safetensors.torch import load_file
from tiny import save_model, sums, write_rows

STEPS = 300
LONGEST = 15.0  # seconds for which a rank may wait for one that is dead


def moments(count):
    """Recipe, rank and seconds of so many deaths over the first three seconds, half of them of each
    recipe.
    """
    each = count // 2
    return [
        (recipe, i % 2, round(3.0 * (i + 0.5) / each, 3))
        for recipe in ("ppo", "grpo")
        for i in range(each)
    ]


DEATHS = [("ppo", 1, 0.6), slow("grpo", 0, 1.2), *(exhaustive(*moment) for moment in moments(40))]


@pytest.mark.parametrize(("recipe", "mortal", "seconds"), DEATHS)
def test_a_rank_that_dies_while_a_run_is_opened_is_survived_for_seconds(
    recipe, mortal, seconds, tmp_path
):
    fields = {name: value for name, value in prepare(tmp_path).items() if name != "rewards"}
    fields |= {
        "rewards": json.dumps({"online:even": 1.0}),
        "output": str(tmp_path / "run"),
        "steps": 50,
    }
    fields |= {"parallel.dp_shard_size": 2, "hang_seconds": 10}
    outcomes = run_forked(2, "rank_dying", recipe, fields, mortal, seconds)
    assert outcomes[mortal][0] == -signal.SIGKILL, outcomes[mortal][1][-3000:]
    status, printed = outcomes[1 - mortal]
    assert "Traceback" not in printed, printed[-5000:]
    if status == 0:  # the command has returned
        (waited,) = re.findall(r"waited for it ([\d.]+) s, status 1", printed)
        assert float(waited) < LONGEST
        (line,) = [line for line in printed.splitlines() if line.startswith(f"burnish {recipe}: ")]
        known = (
            f"the process of rank {mortal} has ended",
            "another rank has ended",
            "ranks can't meet at",
        )
        assert any(each in line for each in known), line
    else:
        assert status == 1 and f"the process of rank {mortal} has ended" in printed, printed[-3000:]


@pytest.fixture
def command(tmp_path):
    """``command(output, restarts)`` starts a run of two ranks under torchrun."""
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(40)]
    fields = {
        "model": save_model(tmp_path / "start"),
        "data": write_rows(tmp_path / "rows.jsonl", rows),
    }
    fields |= {
        "steps": STEPS,
        "batch_size": 4,
        "save_every": 5,
        "learning_rate": 1e-3,
        "resume": "true",
    }
    fields |= {"parallel.dp_shard_size": 2, "hang_seconds": 30}

    def start(output, restarts):
        flags = [f"--{name}={value}" for name, value in {**fields, "output": output}.items()]
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            f"--max-restarts={restarts}",
        ]
        words = [
            sys.executable,
            *launcher,
            "--no-python",
            sys.executable,
            "-m",
            "burnish",
            "sft",
            *flags,
        ]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        with Path(f"{output}.log").open("w") as log:
            return subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)

    return start


def ranks_of(launcher):
    """The processes of the ranks, in their order."""
    found = {}
    for process in psutil.Process(launcher.pid).children():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            rank = process.environ().get("RANK")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if alive and rank is not None:
            found[int(rank)] = process
    return [found[rank] for rank in sorted(found)]


def step_of(run):
    journal = run / "metrics.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0


@pytest.mark.parametrize(("kills", "stops"), [slow(2, 1), exhaustive(20, 0)])
def test_torchrun_restarts_ranks_that_are_killed_or_stopped_to_the_same_weights(
    command, tmp_path, kills, stops
):
    """Unattended: each restart goes on from the newest checkpoint."""
    launcher, whole = command(tmp_path / "whole", 0), tmp_path / "whole"
    assert launcher.wait(600) == 0, Path(f"{whole}.log").read_text()[-3000:]
    run, draw = tmp_path / "run", random.Random(0)
    launcher, faults = (
        command(run, kills + stops),
        [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops,
    )
    last = STEPS - 20
    for i, fault in enumerate(faults):
        target, known = last * (i + 1) // (len(faults) + 1), set()
        while launcher.poll() is None and (step_of(run) < target or len(ranks_of(launcher)) < 2):
            time.sleep(0.05)
        assert launcher.poll() is None, Path(f"{run}.log").read_text()[-5000:]
        known = {process.pid for process in ranks_of(launcher)}
        draw.choice(ranks_of(launcher)).send_signal(fault)
        while launcher.poll() is None and known & {process.pid for process in ranks_of(launcher)}:
            time.sleep(0.05)
    assert launcher.wait(600) == 0, Path(f"{run}.log").read_text()[-5000:]
    ended, expected = (load_file(each / "model/model.safetensors") for each in (run, whole))
    assert all(tensor.equal(expected[name]) for name, tensor in ended.items())
    assert [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ] == [*range(1, STEPS + 1)]
