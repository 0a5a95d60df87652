"""Steps in float16 of which one overflows on the last rank alone: in copies of the weights, in
shards, or in layers that are split.
"""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from burnish.loops.batch import collate, token_mean
from burnish.loops.models.policy import Policy
from burnish.loops.models.sharding import local
from burnish.loops.runs.context import scale_loss
from burnish.loops.train.step import optimize, prepare
from tiny import make_examples, make_model
from torch.distributed.device_mesh import init_device_mesh

STEPS, OVERFLOWS = 4, 2  # the second of four steps


class Overflowing(Accelerator):
    """Puts an infinity into this rank's part of a gradient after the backward pass of a step."""

    passes = 0

    def backward(self, loss, **options):
        super().backward(loss, **options)
        self.passes += 1
        last = self.process_index == self.num_processes - 1
        if last and self.passes == OVERFLOWS:
            local(self.weight.grad).view(-1)[0] = torch.inf


MESHES = {
    "copies": None,
    "shards": {"mesh_shape": (2,)},
    "split": {"mesh_shape": (1, 2), "mesh_dim_names": ("shards", "tp")},
}


def be_rank(directory, kind):
    """Take the steps, and save the metrics, the scaler and the weights of this rank."""
    AcceleratorState._reset_state()
    accelerator = Overflowing(cpu=True, mixed_precision="fp16")
    scale_loss(accelerator)
    mesh = None if kind == "copies" else init_device_mesh("cpu", **MESHES[kind])
    policy = Policy(make_model(dtype=torch.float32), mesh=mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    prepared, optimizer = prepare(accelerator, policy, optimizer)
    named = dict(policy.named_parameters())
    accelerator.weight = next(named[name] for name in named if "q_proj" in name)
    example = make_examples(2, completions=1)[0 if kind == "split" else accelerator.process_index]

    def objective(policy, batch):
        # In copies the gradients of all ranks are summed in the backward pass: it must overflow
        # there.
        last = accelerator.process_index == accelerator.num_processes - 1
        here = last and accelerator.passes == OVERFLOWS - 1 and kind == "copies"
        return {"nll": (-policy(batch).logprob * (1e30 if here else 1.0), {})}

    weights, metrics = [], []
    for step in optimize(
        prepared,
        lambda step: [collate([example])],
        objective,
        {"nll": (1.0, token_mean)},
        accelerator=accelerator,
        optimizer=optimizer,
        schedule=schedule,
        steps=STEPS,
    ):
        metrics.append({name: step.metrics[name] for name in ("loss", "skipped", "loss_scale")})
        weights.append(local(accelerator.weight).detach().clone())
    result = {"metrics": metrics, "weights": weights, "scaler": accelerator.scaler.state_dict()}
    torch.save(result, Path(directory, f"{os.environ['RANK']}.pt"))
