"""The peak of the memory of a run, on one of several ranks."""

import time
from unittest.mock import patch

import torch.distributed as dist
from burnish.benchmarks.experiments.memory import configured, measured_peak
from burnish.loops.recipes import grpo, preference, sft  # noqa: F401, here and not in every rank

PAUSE = 0.05  # seconds

_wait = dist.Work.wait


def be_rank(recipe, fields):
    with (
        patch.object(dist.Work, "wait", wait_until_freed),
        patch("burnish.loops.runs.training.draw_curves", lambda metrics, picture: None),
    ):
        print("measured", measured_peak(*configured(recipe, fields)))


def wait_until_freed(work, *arguments):
    """Wait, and give gloo's thread the time to let go of the tensors: what it frees last, the
    profiler doesn't see.
    """
    done = _wait(work, *arguments)
    time.sleep(PAUSE)
    return done
