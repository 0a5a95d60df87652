"""A small model in float64, trained on this rank's part of each batch, alone, replicated or
sharded, with checkpoints.

A kind is one, ddp, fsdp, or hsdp, which shards over pairs of ranks.
"""

import math
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from burnish.loops.runs import checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout
from torch.testing._internal.two_tensor import TwoTensor

STEPS = 6


class Net(nn.Module):
    """Sizes that no number of ranks divides, a bias shorter than there are ranks, tied weights, a
    buffer, dropout.
    """

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 7, dtype=torch.float64)
        self.outer = nn.Linear(7, 3, dtype=torch.float64)
        self.tied = nn.Linear(5, 7, bias=False, dtype=torch.float64)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, rows):
        self.seen += 1
        hidden = torch.tanh(self.inner(rows)) + torch.tanh(self.tied(rows))
        return self.outer(hidden) * self.frozen


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, which is kept in tensors of another class, as by 8-bit optimizers."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if not (state := self.state[parameter]):
                zero = torch.zeros_like(parameter.to_local())
                shape = {"shape": parameter.shape, "stride": parameter.stride()}
                both = TwoTensor(zero, zero.clone())
                state["momentum"] = DTensor.from_local(
                    both, parameter.device_mesh, parameter.placements, **shape
                )
            both = state["momentum"]._local_tensor
            both.a.mul_(0.9).add_(parameter.grad.to_local())
            both.b.sub_(1.0)
            parameter.to_local().sub_(0.05 * both.a)


class Memory:
    """What a recipe may remember: numbers, texts, tensors, and keys that are no strings."""

    def __init__(self):
        self.state = {
            "steps": 0,
            "texts": ["ä"],
            "ready": {3: [1, 2.5, None]},
            "column": torch.zeros(2),
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def start(kind, *, random=False, composed=False):
    """Everything at step 0; with ``random`` each rank draws dropout from its own generator."""
    torch.manual_seed(0)
    accelerator, model = Accelerator(), Net()
    ranks, rank = accelerator.num_processes, accelerator.process_index
    policy = model
    if kind == "ddp":
        policy = nn.parallel.DistributedDataParallel(model)
    if kind in ("fsdp", "hsdp"):
        shape = {"fsdp": (ranks,), "hsdp": (ranks // 2, 2)}[kind]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        fully_shard(model.outer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = Momentum(trained) if composed else torch.optim.AdamW(trained, lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(100 + rank)
    memory = Memory()
    parts = {"optimizer": optimizer, "schedule": schedule, "memory": memory}
    checkpoints = {"accelerator": accelerator, "policy": policy, "parts": parts, "data": "digest"}
    return SimpleNamespace(
        **checkpoints, model=model, checkpoints=checkpoints, memory=memory, random=random
    )


def step(run, number):
    """The gradient of the mean over one batch of 12 rows."""
    ranks, rank = run.accelerator.num_processes, run.accelerator.process_index
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(12, 5, generator=generator, dtype=torch.float64)[rank::ranks]
    output = run.policy(rows)
    if run.random:
        output = dropout(output, 0.3)
    (output.square().sum() / 12 * ranks).backward()
    run.parts["optimizer"].step()
    run.parts["optimizer"].zero_grad()
    run.parts["schedule"].step()
    run.memory.state["steps"] = number
    run.memory.state["column"] = torch.full((2,), float(number))


def finish(run, begin):
    """The weights and buffers after all steps, whole on every rank."""
    for number in range(begin + 1, STEPS + 1):
        step(run, number)
    assert run.memory.state["steps"] == STEPS and run.memory.state["ready"] == {3: [1, 2.5, None]}
    state = run.model.state_dict()
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in state.items()
    }


def be_rank(order, kind, directories, output, random=False, composed=False):
    """Train to the end, with a checkpoint of step 3 in each directory, which may be written in the
    background; or go on to the end from each."""
    results = {}
    for directory in directories:
        run = start(kind, random=random, composed=composed)
        begin = 0
        saver = checkpoint.Saver(background=order == "save in the background")
        if order != "load":
            for begin in (1, 2, 3):
                step(run, begin)
            if order == "keep a tensor for each rank":
                run.parts["optimizer"].state[run.model.inner.weight]["codes"] = torch.zeros(5)
            saver.save(Path(directory), begin, **run.checkpoints)
        else:
            begin = checkpoint.load_newest(Path(directory), **run.checkpoints)
            assert (
                begin == 3
                and run.memory.state["steps"] == 3
                and run.memory.state["column"].tolist() == [3.0, 3.0]
            )
            assert math.isclose(run.parts["optimizer"].param_groups[0]["lr"], 0.05 / 4)
        results[directory] = finish(run, begin)
        saver.wait()
        saver.close()
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, output)
