"""One rank of an online run dies by SIGKILL at a chosen moment; the others leave a note of what
they ended with.
"""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from burnish.loops.recipes import opener
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rollouts.local import source
from burnish.loops.runs import checkpoint, context, liveness, training

step = sys.modules["burnish.loops.train.step"]  # the package has a function of that name
MOMENTS = {  # the function that is called then, and how often until the death
    "opening": (context, "check_ranks", 1),
    "loading": (context, "load_model", 1),
    "resuming": (training, "digest", 1),
    "sampling": (source, "draw", 8),  # in the second rollout
    "training": (step, "train_step", 2),
    "saving": (checkpoint, "save", 1),
}


def interrupted_at(moment, happen):
    place, name, count = MOMENTS[moment]
    function, calls = getattr(place, name), 0

    def interrupted(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == count:
            happen()
        return function(*arguments, **options)

    return patch.object(place, name, interrupted)


def be_rank(fields, moment, mortal, stuck):
    """Run as one rank.

    Args:
        mortal: the rank that dies.
        stuck: at the same moment the others begin to wait where no error reaches them, as in NCCL.
    """
    rank = int(os.environ["RANK"])
    note = Path(f"{fields['output']}-rank{rank}.txt")

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def wait():
        time.sleep(600)  # longer than the others of a rank that failed may take

    with ExitStack() as patches:
        patches.enter_context(patch("burnish.loops.runs.training.draw_curves"))
        if not stuck:
            patches.enter_context(patch.object(liveness, "NEWS", 60.0))
        if rank == mortal or stuck:
            patches.enter_context(interrupted_at(moment, die if rank == mortal else wait))
            patches.enter_context(patch.object(liveness, "GRACE", 1.0))
        try:
            opener("grpo")(GRPO(**fields)).train()
        except BaseException as error:
            note.write_text(f"{type(error).__name__}: {error}")
            raise
