"""Online runs on several ranks, one after the other in the same processes."""

import asyncio
import os
import time
import weakref
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from burnish.loops.config import Lora, Parallel, Teacher
from burnish.loops.environments import Limits, Step
from burnish.loops.models import io
from burnish.loops.recipes.distill import open_distill
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.online_dpo import open_online_dpo
from burnish.loops.recipes.ppo import open_ppo
from burnish.loops.recipes.settings import GRPO, PPO, Distill, OnlineDPO
from burnish.loops.rl.settings import VLLM
from burnish.loops.rollouts.scheduler import RolloutScheduler
from burnish.loops.runs import training
from online import even

GROUPS = {"limits": Limits, "lora": Lora, "vllm": VLLM, "teacher": Teacher}
RECIPES = {
    "grpo": (open_grpo, GRPO),
    "ppo": (open_ppo, PPO),
    "online_dpo": (open_online_dpo, OnlineDPO),
    "distill": (open_distill, Distill),
}


def first_even(row, sample):
    """All of a group alike in half of the groups, or about so."""
    return float(sample.tokens[0] % 2 == 0)


class Turns:
    """An environment of as many turns as its row's prompt is long, modulo 3, whose waits differ
    from turn to turn.
    """

    def reset(self, row):
        self.left = len(str(row["prompt"])) % 3
        return row["prompt"]

    def step(self, completion):
        time.sleep(completion.index / 1000)
        self.left -= 1
        return Step("and?", done=self.left < 0, reward=even({}, completion))


publish = RolloutScheduler.publish


def publish_in_between(scheduler, *arguments):
    """Nothing is under way when weights change, so that the versions of samples don't depend on the
    clock.
    """

    async def wait():
        await asyncio.gather(*scheduler._groups.values())

    scheduler.loop.run(wait())
    publish(scheduler, *arguments)


class Held:
    """Within it, the gathered weights that are alive at once are counted, until the model is saved.

    Attributes:
        most: as each was gathered.
    """

    def __init__(self, output):
        self.output, self.most, self.alive = Path(output), 0, []
        self.patches = ExitStack()

    def __enter__(self):
        gather, save = io.whole, training.save_model

        def whole(tensor):
            gathered = gather(tensor)
            self.alive = [each for each in self.alive if each() is not None] + [
                weakref.ref(gathered)
            ]
            self.most = max(self.most, len(self.alive))
            return gathered

        def save_model(*arguments, **options):
            with patch.object(io, "whole", gather):
                save(*arguments, **options)

        self.patches.enter_context(patch.object(io, "whole", whole))
        self.patches.enter_context(patch.object(training, "save_model", save_model))
        return self

    def __exit__(self, *error):
        self.patches.close()
        if error[0] is None:
            (self.output / f"held-{os.environ['RANK']}.txt").write_text(str(self.most))


def be_rank(runs):
    slowly = patch.object(RolloutScheduler, "publish", publish_in_between)
    with slowly, patch("burnish.loops.runs.training.draw_curves"):
        for fields in runs:
            sharded = fields.pop("sharded", False)
            fields["parallel"] = Parallel(int(os.environ["WORLD_SIZE"]) if sharded else 1)
            open_recipe, settings = RECIPES[fields.pop("recipe", "grpo")]
            config = settings(
                **{name: GROUPS[name](**x) if name in GROUPS else x for name, x in fields.items()}
            )
            with Held(config.output) if sharded else nullcontext():
                open_recipe(config).train()
            assert torch.get_default_dtype() == torch.float32
