"""Whole runs on a stand-in for GPUs, which refuses what they refuse, end where runs on the CPU
do.
"""

import pytest
import torch
from safetensors.torch import load_file
from sharded import assert_same_end, last_metrics, runs_on

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="this torch can't register devices from Python"
)
slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
# Offline, online, with values, adapters and a teacher. The judge of online_dpo computes in float32,
# which rounds.
RECIPES = ("dpo", "grpo", "sft", "dpo_adapters", "kto", "reward", "distill_top_k", "ppo")
REST = (
    "dpo_precomputed",
    "dpo_tied",
    "orpo",
    "cpo",
    "reward_adapters",
    "prm",
    "distill",
    "ppo_critic",
)
# Ranks, shards, tp_size, cp_size.
WORLDS = [
    pytest.param((2, 2), ("dpo",), id="shards"),
    pytest.param((2, 2), ("grpo",), marks=slow, id="sampled in shards"),
    pytest.param((1, 1), RECIPES, marks=slow, id="one"),
    pytest.param((2, 1), ("dpo",), marks=slow, id="copies"),
    pytest.param((4, 2), ("dpo",), marks=slow, id="copies of shards"),
    pytest.param((2, 1, 2), ("sft",), marks=slow, id="layers split"),
    pytest.param((2, 1, 1, 2), ("sft",), marks=slow, id="rows split"),
    pytest.param((2, 1), ("grpo", "dpo_adapters", "kto"), marks=exhaustive, id="further copies"),
    pytest.param((2, 2), (*RECIPES[2:], *REST), marks=exhaustive, id="all in shards"),
]
SETTINGS = [
    pytest.param({"optimizer": "muon", "neftune_noise_alpha": 5.0}, marks=slow),
    pytest.param({"offload_optimizer": True, "ref_model_sync_steps": 1}, marks=slow),
    pytest.param(
        {"gradient_checkpointing": "selective", "optimizer": "adafactor"}, marks=exhaustive
    ),
    pytest.param({"layout": "padded", "attention": "eager"}, marks=exhaustive),
]


@pytest.mark.parametrize(("world", "names"), WORLDS)
def test_runs_on_the_device_end_where_those_on_the_cpu_do(world, names, tmp_path_factory):
    runs = runs_on(tmp_path_factory, names, *world, module="rank_on_standin")
    expected = runs_on(tmp_path_factory, names, *world)
    for name in names:
        assert_same_end(expected / name, runs / name)


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param((2, 2), "sft_float16", id="shards"),
        pytest.param((1, 1), "dpo_float16", marks=slow, id="one"),
        pytest.param((2, 1), "dpo_float16", marks=slow, id="copies"),
        pytest.param((2, 1, 2), "sft_float16", marks=slow, id="layers split"),
    ],
)
def test_runs_in_float16_on_the_device_end_as_near_to_float32_as_on_the_cpu(
    world, name, tmp_path_factory
):
    recipe = name.removesuffix("_float16")
    exact = runs_on(tmp_path_factory, (recipe,), dtype="float32") / recipe
    on_device = runs_on(tmp_path_factory, (name,), *world, module="rank_on_standin") / name
    on_cpu = runs_on(tmp_path_factory, (name,), *world) / name

    def error(run):
        pair = [load_file(each / "model/model.safetensors") for each in (run, exact)]
        return torch.stack([(pair[0][key] - pair[1][key]).norm() for key in pair[1]]).norm()

    # the two round other products of a layer
    assert 0 < error(on_device) <= 2 * error(on_cpu)
    for run in (on_device, on_cpu):
        assert last_metrics(run)["skipped"] == 0 and last_metrics(run)["loss_scale"] == 2.0**16


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings))
def test_settings_of_a_run_do_on_the_device_what_they_do_on_the_cpu(settings, tmp_path_factory):
    runs = runs_on(tmp_path_factory, ("dpo",), module="rank_on_standin", **settings)
    assert_same_end(runs_on(tmp_path_factory, ("dpo",), **settings) / "dpo", runs / "dpo")
