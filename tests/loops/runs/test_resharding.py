"""A checkpoint is of no number of ranks: saved alone, replicated or sharded, it goes on as any of these."""

import json
import re

import pytest
import torch
from forked import run_forked
from grids import slow
from safetensors import safe_open

# In how many ranks of which kind.
WORLDS = ["1 one", "2 ddp", "2 fsdp", slow("4 ddp"), slow("4 fsdp"), slow("4 hsdp")]
SAVED = ["1 one", "2 ddp", "2 fsdp", "4 fsdp", "4 hsdp"]


def launch(order, world, directories, output, **options):
    ranks, kind = world.split()
    outcomes = run_forked(int(ranks), "resharded", order, kind, list(map(str, directories)), str(output), *options)
    for status, printed in outcomes:
        assert status == 0, printed[-3000:]
    return torch.load(output, weights_only=True), "".join(printed for _, printed in outcomes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a run's checkpoint of step 3, and its weights in the end, by its world; made when asked for."""
    made = {}

    def of(world):
        if world not in made:
            folder = tmp_path_factory.mktemp(world.replace(" ", "-"))
            weights, _ = launch("save", world, [folder / "checkpoints"], folder / "weights.pt")
            made[world] = folder / "checkpoints", weights[str(folder / "checkpoints")]
        return made[world]

    return of


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_goes_on_in_another_world_to_the_same_weights(world, saved, tmp_path):
    fewer = world in ("1 one", "2 ddp", "2 fsdp")
    sources = SAVED[:3] if fewer else SAVED
    ends, _ = launch("load", world, [saved(source)[0] for source in sources], tmp_path / "weights.pt")
    unbroken = saved("1 one")[1]
    for source in sources:
        end = ends[str(saved(source)[0])]
        assert end.keys() == unbroken.keys() and end["seen"] == 6
        for name, weight in end.items():
            torch.testing.assert_close(weight, unbroken[name], rtol=0, atol=1e-10)
            if source == world:
                assert torch.equal(weight, saved(source)[1][name])
