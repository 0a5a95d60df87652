"""A checkpoint is of no number of ranks: saved alone, replicated or sharded, it goes on as any of
these.
"""

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


def attempt(order, world, directories, output, *options):
    """Exit status and output of each rank."""
    ranks, kind = world.split()
    return run_forked(
        int(ranks), "resharded", order, kind, list(map(str, directories)), str(output), *options
    )


def launch(order, world, directories, output, *options):
    """What it saved at the end, and printed."""
    outcomes = attempt(order, world, directories, output, *options)
    for status, printed in outcomes:
        assert status == 0, printed[-3000:]
    return torch.load(output, weights_only=True), "".join(printed for _, printed in outcomes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a run's checkpoint of step 3, and its weights in the end, by its world; made
    when asked for.
    """
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
    ends, _ = launch(
        "load", world, [saved(source)[0] for source in sources], tmp_path / "weights.pt"
    )
    unbroken = saved("1 one")[1]
    for source in sources:
        end = ends[str(saved(source)[0])]
        assert end.keys() == unbroken.keys() and end["seen"] == 6
        for name, weight in end.items():
            torch.testing.assert_close(weight, unbroken[name], rtol=0, atol=1e-10)
            if source == world:
                assert torch.equal(weight, saved(source)[1][name])


@pytest.mark.parametrize("world", ["2 fsdp", slow("2 ddp"), slow("4 hsdp")])
def test_a_checkpoint_that_was_written_while_training_went_on_is_the_same(world, saved, tmp_path):
    directory = tmp_path / "checkpoints"
    launch("save in the background", world, [directory], tmp_path / "weights.pt")
    for file in (saved(world)[0] / "step-00000003").glob("shard-*"):
        assert file.read_bytes() == (directory / "step-00000003" / file.name).read_bytes()


def test_each_rank_writes_an_equal_part_and_nothing_is_pickled_but_numbers(saved):
    for world in ("2 ddp", "2 fsdp"):
        path = saved(world)[0] / "step-00000003"
        names = {
            "shard-0.safetensors",
            "shard-1.safetensors",
            "random-0.pt",
            "random-1.pt",
            "state.pt",
        }
        assert json.loads((path / "manifest.json").read_text()).keys() == names
        sizes = []
        for rank in (0, 1):
            with safe_open(path / f"shard-{rank}.safetensors", "pt") as file:
                sizes.append(sum(file.get_tensor(name).numel() for name in file.keys()))  # noqa: SIM118
        assert min(sizes) > max(sizes) / 2
        # AdamW's two, the buffer, and the counts of steps
        assert sum(sizes) == 3 * (5 * 7 + 7 + 3 * 7 + 3) + 1 + 4
        assert torch.load(path / "state.pt", weights_only=True).keys() == {
            "end_tokens",
            "format",
            "step",
            "data",
            "optimizer",
            "schedule",
            "memory",
        }


def test_generators_go_on_where_they_were_and_new_ranks_are_said_to_have_fresh_ones(
    saved, tmp_path
):
    directory = tmp_path / "checkpoints"
    unbroken, _ = launch("save", "2 fsdp", [directory], tmp_path / "weights.pt", True)
    resumed, printed = launch("load", "2 fsdp", [directory], tmp_path / "again.pt", True)
    for name, weight in unbroken[str(directory)].items():
        assert torch.equal(weight, resumed[str(directory)][name])
    assert "fewer ranks" not in printed
    alone = saved("1 one")[0]
    _, printed = launch("load", "2 ddp", [alone], tmp_path / "weights.pt")
    assert re.findall(
        "step-00000003 was written by fewer ranks: rank (.) keeps its fresh generators", printed
    ) == ["1"]


def test_state_that_is_not_sharded_as_the_weights_are_is_refused(tmp_path):
    outcomes = attempt(
        "keep a tensor for each rank", "2 fsdp", [tmp_path / "checkpoints"], tmp_path / "weights.pt"
    )
    for status, printed in outcomes:
        assert status == 1
        assert (
            "optimizer: inner.weight is sharded, and 'codes' in its state is not, so no other"
            in printed
        )


def test_composed_tensors_go_on_in_as_many_shards_and_are_refused_in_others(tmp_path):
    directory = tmp_path / "checkpoints"
    unbroken, _ = launch("save", "2 fsdp", [directory], tmp_path / "weights.pt", False, True)
    resumed, _ = launch("load", "2 fsdp", [directory], tmp_path / "again.pt", False, True)
    for name, weight in unbroken[str(directory)].items():
        assert torch.equal(weight, resumed[str(directory)][name])
    for status, printed in attempt(
        "load", "3 fsdp", [directory], tmp_path / "none.pt", False, True
    ):
        assert status == 1
        assert "can't be resharded, and 'optimizer/inner.bias/momentum@" in printed
        assert "resume on as many shards as wrote it" in printed
