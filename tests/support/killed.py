"""Train in child processes that are killed with SIGKILL as told, until one finishes; prints what happened as JSON.

    python killed.py <recipe> <config.json> <how> ...

    random:<count>     kill <count> children, each a random number of steps and a random moment after its start
    write:<n>          kill a child in the middle of writing its n-th file of a checkpoint
    truncate           cut the newest checkpoint in half

Children are forked from this process, which has imported everything and computed nothing.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

from burnish.loops import checkpoint
from burnish.loops.config import Lora
from burnish.loops.dpo import DPO, dpo
from burnish.loops.sft import SFT, sft

RECIPES = {"dpo": (DPO, dpo), "sft": (SFT, sft)}


def train(recipe, config, before=lambda: None):
    """Process id of a child that trains; it exits with status 0 if it finishes."""
    child = os.fork()
    if child:
        return child
    log = os.open(Path(config["output"]).with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        before()
        build, run = RECIPES[recipe]
        run(build(**config))
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def wait(child):
    """True if the child was killed; raises if it failed by itself."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit(f"a child failed with status {os.WEXITSTATUS(status)}")
    return False


def wait_for_step(run, further):
    """Until the run has gone that many steps beyond its newest checkpoint, or for half a minute."""
    saved = [int(path.name.removeprefix("step-")) for path in checkpoint._all(run / "checkpoints")]
    target = max(saved, default=0) + further
    for _ in range(3000):
        journal = run / "metrics.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        if lines and lines[-1].endswith("}") and json.loads(lines[-1])["step"] >= target:
            return
        time.sleep(0.01)


def kill_while_writing(nth):
    """In this process, die half-way through the n-th file that a checkpoint writes."""
    original = checkpoint._write
    written = 0

    def write(path, state):
        nonlocal written
        written += 1
        original(path, state)
        if written == nth:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._write = write


def main():
    recipe, path, *orders = sys.argv[1:]
    config = json.loads(Path(path).read_text())
    config["lora"] = Lora(**config.get("lora", {}))
    rng = random.Random(0)
    happened = {"random": 0, "write": 0, "truncate": 0}
    assert not wait(train(recipe, {**config, "output": config["output"] + "-undisturbed"}))
    resumed = {**config, "resume": True}
    finished = False
    for order in orders:
        kind, _, value = order.partition(":")
        if kind == "truncate":
            newest = checkpoint._all(Path(config["output"]) / "checkpoints")[0] / "state.pt"
            os.truncate(newest, newest.stat().st_size // 2)
            happened["truncate"] += 1
            continue
        for _ in range(int(value) if kind == "random" else 1):
            if finished:
                break
            before = partial(kill_while_writing, int(value)) if kind == "write" else lambda: None
            child = train(recipe, resumed, before)
            if kind == "random":
                wait_for_step(Path(config["output"]), rng.randint(0, 8))
                time.sleep(rng.uniform(0.0, 0.1))
                os.kill(child, signal.SIGKILL)
            killed = wait(child)
            happened[kind] += killed
            finished = not killed
    while not finished:
        finished = not wait(train(recipe, resumed))
    print(json.dumps(happened))


if __name__ == "__main__":
    main()
