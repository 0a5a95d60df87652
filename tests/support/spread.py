"""Online runs on several ranks, one after the other in the same processes."""

import asyncio
import os
import time
import weakref
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate import Accelerator
from burnish.loops.config import Lora
from burnish.loops.environments import Limits, Step
from burnish.loops.models import io
from burnish.loops.recipes.grpo import run_grpo
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rl.context import open_run
from burnish.loops.rl.settings import VLLM
from burnish.loops.rollouts.scheduler import RolloutScheduler
from online import even
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GROUPS = {"limits": Limits, "lora": Lora, "vllm": VLLM}


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


class Sharding:
    """Within it, a run's policy is sharded over all ranks. It leaves the weights where the run would leave its model.

    Attributes:
        held: the most gathered tensors that were alive at once, as each was gathered.
    """

    def __init__(self, output):
        self.output, self.held, self.alive = Path(output), 0, []
        self.patches = ExitStack()

    def __enter__(self):
        checkpoint = "burnish.loops.runs.context.checkpoint.save"
        for name, function in (
            ("burnish.loops.rl.context.open_run", self.open_run),
            ("burnish.loops.models.io._whole", self.whole),
            (checkpoint, lambda *arguments, **options: None),
            ("burnish.loops.runs.context.save_model", lambda *arguments: None),
        ):
            self.patches.enter_context(patch(name, function))
        prepare = lambda accelerator, model, optimizer: (model, accelerator.prepare_optimizer(optimizer))  # noqa: E731
        self.patches.enter_context(patch.object(Accelerator, "prepare", prepare))
        return self

    def __exit__(self, *error):
        self.patches.close()
        if error[0] is None:
            weights = {name: tensor.clone() for name, tensor in io.named_weights(self.policy)}
            if os.environ["RANK"] == "0":
                (self.output / "model").mkdir()
                save_file(weights, self.output / "model/model.safetensors")
            (self.output / f"held-{os.environ['RANK']}.txt").write_text(str(self.held))

    def open_run(self, *arguments, **options):
        run = open_run(*arguments, **options)
        self.policy = run.model
        mesh = init_device_mesh("cpu", (run.accelerator.num_processes,))
        for layer in self.policy.plain.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.policy, mesh=mesh)
        return run

    def whole(self, tensor, dtype, gather=io._whole):
        gathered = gather(tensor, dtype)
        self.alive = [each for each in self.alive if each() is not None] + [weakref.ref(gathered)]
        self.held = max(self.held, len(self.alive))
        return gathered


def be_rank(runs):
    slowly = patch.object(RolloutScheduler, "publish", publish_in_between)
    with slowly, patch("burnish.loops.runs.context.draw_curves"):
        for fields in runs:
            sharded = fields.pop("sharded", False)
            config = GRPO(**{name: GROUPS[name](**x) if name in GROUPS else x for name, x in fields.items()})
            with Sharding(config.output) if sharded else nullcontext():
                run_grpo(config)
            assert torch.get_default_dtype() == torch.float32
