"""One rank of an online run stops, or dies, at a chosen moment; prints how each ended. For runs
that are watched.
"""

import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from unittest.mock import patch

from burnish.loops.recipes import opener
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rl import context as rl_context
from burnish.loops.rollouts.local import source
from burnish.loops.runs import checkpoint, context, liveness
from killed import build

step = sys.modules["burnish.loops.train.step"]  # the package has a function of that name
# The function that is called then, and how often until it happens.
MOMENTS = {
    "set-up": (context, "load_model", 1),
    "sampling": (source, "draw", 8),  # in the second rollout
    "reward": (rl_context, "score_samples", 2),
    "forward": (step, "train_step", 2),
    "save": (checkpoint, "save", 1),
    "evaluation": (rl_context.RLContext, "evaluate", 2),
}


def at_moment(moment, happen):
    """A patch that has something happen once, when the moment comes."""
    place, name, count = MOMENTS[moment]
    function, calls = getattr(place, name), 0

    def then(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == count:
            happen()
        return function(*arguments, **options)

    return patch.object(place, name, then)


def stop(rank):
    """Stop the process of this rank, as whoever calls it is another one where only that takes
    part.
    """
    own = rank == int(os.environ["RANK"])
    os.kill(os.getpid() if own else liveness._watch.peers[rank].process[1], signal.SIGSTOP)


def stand(rank):
    time.sleep(600)


def hold(rank):
    """Keep Python's interpreter lock, as a regular expression that goes back and forth does."""
    re.match(r"(a+)+$", "a" * 40 + "b")


HAPPEN = {"stop": stop, "stand": stand, "hold": hold}


def be_rank(fields, moment, rank, kind, notes):
    """Run as one rank; ``kind`` happens to the rank of this number at this moment. A note says
    when.

    Completions are scored on rank 0 alone, and meanwhile the other one waits.
    """
    here = int(os.environ["RANK"])

    def happen():
        with open(notes, "w") as file:
            file.write(f"{time.time()} {os.getpid()}")
        HAPPEN[kind](rank)

    with ExitStack() as patches:
        patches.enter_context(patch("burnish.loops.runs.training.draw_curves"))
        if here == (0 if moment == "reward" else rank) and moment is not None:
            patches.enter_context(at_moment(moment, happen))
        opener("grpo")(build(GRPO, fields)).train()
