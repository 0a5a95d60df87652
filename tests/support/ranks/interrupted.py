"""A run that was killed after a checkpoint, and goes on from there; and optimizers of weights that
ranks share.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from burnish.loops.config import Common, Lora
from burnish.loops.train import optimizers
from killed import RECIPES
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

STEPS, KILLED_AFTER = 6, 3


def train(recipe, **fields):
    with patch("burnish.loops.runs.training.draw_curves"):  # the picture takes longer than the run
        if isinstance(lora := fields.pop("lora", None), dict):
            fields["lora"] = Lora(**lora)
        kind, open_recipe = RECIPES[recipe]
        open_recipe(kind(**fields)).train()


def resumed(fields, directory, recipe="sft"):
    """Train, and train again from the checkpoint in the middle; the files of both models, and the
    metrics of both.
    """
    fields = {
        "batch_size": 4,
        "steps": STEPS,
        "save_every": KILLED_AFTER,
        "learning_rate": 1e-2,
        **fields,
    }
    whole, again = Path(directory, "whole"), Path(directory, "again")
    train(recipe, **fields, output=str(whole))
    if int(os.environ.get("RANK", 0)) == 0:
        shutil.copytree(whole, again)
        shutil.rmtree(again / "checkpoints" / f"step-{STEPS:08d}")
        shutil.rmtree(again / "model")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    train(recipe, **fields, output=str(again), resume=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return [(run / "model" / "model.safetensors").read_bytes() for run in (whole, again)], [
        [
            {
                name: value
                for name, value in json.loads(line).items()
                if name != "seconds" and "ranks/" not in name
            }
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in (whole, again)
    ]


ON_RANKS = (
    {"optimizer": "adamw_8bit"},
    {"optimizer": "schedule_free_adamw", "schedule": "constant"},
    {"dtype": "bfloat16", "weights_dtype": "bfloat16", "optimizer": "muon"},
    {"dtype": "float16"},
)


def be_rank(directory, fields):
    for number, options in enumerate(ON_RANKS):
        models, metrics = resumed({**fields, **options}, Path(directory, str(number)))
        assert models[0] == models[1] and metrics[0] == metrics[1], options
        assert metrics[0][-1]["eval/loss"] < metrics[0][0]["eval/loss"]
    for rounding in ("stochastic", "compensated"):
        for optimizer in ("adamw", "muon", "sgd"):
            check_sharded(rounding, optimizer)
    check_narrow()
    for weights_dtype in (torch.float32, torch.bfloat16):
        check_offloaded(weights_dtype)
    check_refused("adafactor", "transformers")
    check_refused("paged_adamw_8bit", "bitsandbytes")
    check_refused("rprop", "torch")


def check_refused(name, package):
    """Before the first step, in a line, an optimizer that would fail in it."""
    module = torch.nn.Linear(4, 4)
    torch.distributed.fsdp.fully_shard(
        module, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    )
    with pytest.raises(
        ValueError, match=f"optimizer {name}: {package} can't update sharded weights; adamw_torch"
    ):
        optimizers.make_optimizer(Common("", "", "", optimizer=name), module)


def check_sharded(rounding, name):
    """Sharded weights take the steps of whole ones: bit for bit where they are compensated, to a
    neighbor by chance.
    """
    settings = Common("", "", "", optimizer=name, rounding=rounding, learning_rate=1e-3, dtype="bfloat16",
                      weights_dtype="bfloat16", weight_decay=0.1)  # fmt: skip
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    ends = []
    for sharded in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(17, 33), torch.nn.Linear(33, 5)).bfloat16()
        if sharded:
            torch.distributed.fsdp.fully_shard(module, mesh=mesh)
        optimizer = optimizers.make_optimizer(settings, module)
        for step in range(3):
            for parameter in module.parameters():
                gradient = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(step)
                ).bfloat16()
                if sharded:
                    gradient = torch.distributed.tensor.distribute_tensor(
                        gradient, mesh, parameter.placements
                    )
                parameter.grad = gradient
            optimizer.step()
        ends.append(
            [p.full_tensor() if sharded else p.detach().clone() for p in module.parameters()]
        )
        if sharded:
            check_state_by_name(module, optimizer, settings)
    for whole, shards in zip(*ends, strict=True):
        if (
            rounding == "compensated" and name != "muon"
        ):  # whose products of sharded matrices are summed in another order
            assert torch.equal(whole, shards), name
        assert torch.allclose(whole.float(), shards.float(), rtol=3 * 2**-7, atol=1e-5), name


def check_narrow():
    """Muon's steps of matrices with fewer rows than ranks, and its state, are those of whole ones,
    bit for bit.
    """
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    ends = []
    for sharded in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Linear(8, 1, bias=False)
        if sharded:
            torch.distributed.fsdp.fully_shard(module, mesh=mesh)
        optimizer = optimizers.make_optimizer(
            Common("", "", "", optimizer="muon", learning_rate=1e-2), module
        )
        weight = module.weight
        for step in range(3):
            gradient = torch.randn(1, 8, generator=torch.Generator().manual_seed(step))
            if sharded:
                gradient = torch.distributed.tensor.distribute_tensor(
                    gradient, mesh, weight.placements
                )
            weight.grad = gradient
            optimizer.step()
        state = optimizer.state[weight]["momentum_buffer"]
        assert not sharded or state.placements == weight.placements
        ends.append([each.full_tensor() if sharded else each.detach() for each in (weight, state)])
    for whole, shards in zip(*ends, strict=True):
        assert torch.equal(whole, shards)


def check_offloaded(weights_dtype):
    """Steps on the host of copies of shards, and the state they leave, are those of whole weights,
    bit for bit.
    """
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    ends = []
    for sharded in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Linear(8, 6, dtype=weights_dtype)
        if sharded:
            torch.distributed.fsdp.fully_shard(module, mesh=mesh)
        settings = Common(
            "", "", "", learning_rate=1e-2, rounding="compensated", offload_optimizer=sharded
        )
        optimizer = optimizers.make_optimizer(settings, module)
        # as if they were on a GPU
        with patch.object(optimizers.Float32Steps, "_is_copied", lambda *_: True):
            for step in range(3):
                for parameter in module.parameters():
                    gradient = torch.randn(
                        parameter.shape, generator=torch.Generator().manual_seed(step)
                    )
                    gradient = gradient.to(weights_dtype)
                    if sharded:
                        gradient = torch.distributed.tensor.distribute_tensor(
                            gradient, mesh, parameter.placements
                        )
                    parameter.grad = gradient
                optimizer.step()
        state = optimizer.state[module.weight]["exp_avg"]
        assert not sharded or state.placements == module.weight.placements
        ends.append(
            [
                each.full_tensor() if sharded else each.detach()
                for each in (*module.parameters(), state)
            ]
        )
        if sharded:
            with pytest.raises(
                ValueError, match="optimizer muon: can't be offloaded; leave offload_optimizer out"
            ):
                optimizers.make_optimizer(replace(settings, optimizer="muon"), module)
    for whole, shards in zip(*ends, strict=True):
        assert torch.equal(whole, shards)


def check_state_by_name(module, optimizer, settings):
    """What torch's checkpoints take of a sharded state comes back bit for bit."""
    state = get_optimizer_state_dict(module, optimizer)
    again = optimizers.make_optimizer(settings, module)
    set_optimizer_state_dict(module, again, state)
    for parameter, before in optimizer.state.items():
        for name, value in before.items():
            restored = again.state[parameter][name]
            if isinstance(value, torch.Tensor):
                assert restored.dtype == value.dtype
                assert torch.equal(optimizers.local(restored), optimizers.local(value)), name
