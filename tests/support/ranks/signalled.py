"""Runs that a signal reaches in the middle of a step, in this process or on one rank of several."""

import itertools
import os
import signal
from pathlib import Path
from unittest.mock import patch

from burnish.loops.runs import checkpoint, training
from burnish.loops.runs.stop import Stopped
from killed import RECIPES, build, in_step


def send(name):
    os.kill(os.getpid(), signal.Signals[name])


def be_rank(recipe, config, name, step, rank):
    """Train undisturbed; then with a signal that reaches this rank alone, and go on. By the clock
    of the main process each step is to be saved, while that of the other one stands."""
    # ignored in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, open_recipe = RECIPES[recipe]
    here = int(os.environ["RANK"])
    clock = itertools.count(0, 0 if here else 1000)
    with (
        patch.object(training, "draw_curves"),
        patch.object(training, "monotonic", lambda: float(next(clock))),
    ):
        open_recipe(build(kind, {**config, "output": config["output"] + "-undisturbed"})).train()
        try:
            with in_step(step, lambda: send(name) if here == rank else None):
                open_recipe(build(kind, config)).train()
        except Stopped as stopped:
            newest = [path.name for path in checkpoint._all(Path(config["output"]) / "checkpoints")]
            print(f"status {stopped.code}: {stopped}, {newest}")
        open_recipe(build(kind, {**config, "resume": True})).train()
