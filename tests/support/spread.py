"""Online runs on several ranks, one after the other in the same processes."""

import asyncio
import time
from unittest.mock import patch

from burnish.loops.config import Lora
from burnish.loops.environments import Limits, Step
from burnish.loops.recipes.grpo import run_grpo
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rollouts.scheduler import RolloutScheduler
from online import even

GROUPS = {"limits": Limits, "lora": Lora}


def first_even(row, sample):
    """All of a group alike in half of the groups, or about so."""
    return float(sample.tokens[0] % 2 == 0)


class Turns:
    """An environment of as many turns as its row's prompt is long, modulo 3, whose waits differ from turn to turn."""

    def reset(self, row):
        self.left = len(str(row["prompt"])) % 3
        return row["prompt"]

    def step(self, completion):
        time.sleep(completion.index / 1000)
        self.left -= 1
        return Step("and?", done=self.left < 0, reward=even({}, completion))


publish = RolloutScheduler.publish


def publish_in_between(scheduler, *arguments):
    """Nothing is under way when weights change, so that the versions of samples don't depend on the clock."""

    async def wait():
        await asyncio.gather(*scheduler._begun.values())

    scheduler.run(wait())
    publish(scheduler, *arguments)


def be_rank(runs):
    slowly = patch.object(RolloutScheduler, "publish", publish_in_between)
    with slowly, patch("burnish.loops.runs.context.draw_curves"):
        for fields in runs:
            run_grpo(GRPO(**{name: GROUPS[name](**x) if name in GROUPS else x for name, x in fields.items()}))
