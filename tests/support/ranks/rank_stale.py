"""The last rank sees the run's directory as it was, or as it never was, as by a client of a disk
that is shared.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from burnish.loops.recipes import opener
from burnish.loops.recipes.settings import DPO
from burnish.loops.runs import training


def entries_of(losses):
    return [{"step": step, "loss": 1.0, "eval/loss": loss} for step, loss in enumerate(losses)]


# What `written` returns there instead of the journal; None leaves it as it is.
SEEN = {
    "nothing": [],
    "better": entries_of([9.0, -9.0, -8.0]),
    "worse": entries_of([9.0, 99.0, 98.0]),
    "no files": None,
}


def be_rank(fields, resumed, seen):
    """Train, then go on with other settings, in which the last rank sees something else."""
    with patch.object(training, "draw_curves"):
        opener("dpo")(DPO(**fields)).train()
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    with ExitStack() as patches:
        patches.enter_context(patch.object(training, "draw_curves"))
        if last and seen == "no files":
            patches.enter_context(patch.object(Path, "exists", exists_elsewhere(fields["output"])))
        elif last and seen is not None:
            patches.enter_context(patch.object(training, "written", lambda *of_run: SEEN[seen]))
        opener("dpo")(DPO(**{**fields, **resumed}, resume=True)).train()


def exists_elsewhere(output):
    """`Path.exists`, by which nothing is in this directory."""
    exists = Path.exists

    def nothing_there(path, **options):
        return exists(path, **options) and not Path(os.path.abspath(path)).is_relative_to(output)

    return nothing_there
