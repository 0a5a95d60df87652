"""A recipe that is killed on some ranks goes on, on others, to the weights, metrics and log-probs
of one process.

An online one goes on to the same samples as well.
"""

import itertools
import json
import random
import shutil
import signal

import pytest
import torch
from burnish.loops.batch import collate
from burnish.loops.models.policy import Policy
from forked import run_forked
from grids import covering
from killed import untimed
from safetensors.torch import load_file
from sharded import prepare
from shared import made_once
from tiny import make_examples
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

EXACT = 1e-10
STEPS, SAVE_EVERY = 6, 2
ORDERS = {"steps": STEPS, "save_every": SAVE_EVERY}
RECIPES = [
    "sft",
    "dpo",
    "dpo_adapters",
    "dpo_averaged",
    "dpo_precomputed",
    "kto",
    "orpo",
    "cpo",
    "reward",
    "prm",
    "distill",
    "sdpo",
    "grpo",
]
ONLINE = ["ppo", "ppo_critic", "online_dpo"]
# In how many ranks of which kind; the number of shards that a copy of the model is in.
SHARDS = {"1 one": 1, "2 ddp": 1, "2 fsdp": 2, "4 ddp": 1, "4 fsdp": 4, "4 hsdp": 2}
KILLED = ["1 one", "2 ddp", "2 fsdp", "4 hsdp"]
# Each recipe is killed in each of these worlds, goes on in each of the others, and from each of
# these to those.
FACTORS = [RECIPES, KILLED, list(SHARDS)]
ALL = [
    tuple(values[i] for values, i in zip(FACTORS, each, strict=True))
    for each in covering(FACTORS, 2)
]
# Each online recipe goes on in each of the worlds that it was killed in, from another one of them.
CROSSED = [
    (name, KILLED[i - k], target)
    for k, name in enumerate(ONLINE, 1)
    for i, target in enumerate(KILLED)
]
# A checkpoint knows neither its world nor its recipe, and test_resharding has it go from any world
# to any, so that a part will do: each recipe once, in shards before or after; each of the former
# worlds, and each of the latter.
PART = [
    ("sft", "2 fsdp", "4 hsdp"), ("dpo", "2 fsdp", "4 fsdp"), ("dpo_adapters", "2 fsdp", "4 ddp"),
    ("dpo_precomputed", "2 fsdp", "2 fsdp"), ("kto", "4 hsdp", "4 hsdp"), ("orpo", "4 hsdp", "4 fsdp"),
    ("cpo", "2 ddp", "4 hsdp"), ("reward", "4 hsdp", "2 fsdp"), ("prm", "4 hsdp", "2 ddp"),
    ("distill", "4 hsdp", "1 one"), ("grpo", "2 fsdp", "4 hsdp"), ("ppo", "2 fsdp", "4 fsdp"),
    ("ppo_critic", "1 one", "4 hsdp"), ("online_dpo", "1 one", "4 fsdp"),
    ("dpo_averaged", "2 fsdp", "4 hsdp"), ("sdpo", "2 ddp", "2 fsdp"),
]  # fmt: skip
PAIRS = list(itertools.product(KILLED, SHARDS))
FURTHER = [(recipe, *PAIRS[17 - i]) for i, recipe in enumerate(2 * (RECIPES + ONLINE))]
REST = [case for case in dict.fromkeys(ALL + CROSSED + FURTHER) if case not in PART]
# The completions that a run samples.
SAMPLED = {**dict.fromkeys(("grpo", *ONLINE), 2 * 3 * 3), "sdpo": STEPS * 5 * 2}
QUICK = {"1 one": [("dpo", "2 fsdp")]}  # the other way round is in the part


def run_world(start, world, runs):
    """Exit status and output of each rank."""
    return run_forked(int(world.split()[0]), "sharded", str(start), SHARDS[world], runs)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    return made_once(tmp_path_factory, "sharded-start", prepare)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory, start):
    """The directory of a run of this recipe in one process."""

    def get(recipe):
        def make(folder):
            ((status, printed),) = run_world(
                start, "1 one", [(recipe, str(folder / "run"), ORDERS)]
            )
            assert status == 0, printed[-3000:]

        return made_once(tmp_path_factory, f"unbroken-{recipe}", make) / "run"

    return get


@pytest.fixture(scope="session")
def killed(tmp_path_factory, start):
    """The directory of a run of this recipe in a world of which one rank died by SIGKILL, in a step
    drawn by chance.
    """

    def get(recipe, world):
        def make(folder):
            ranks, chance = int(world.split()[0]), random.Random(f"{recipe} {world}")
            mortal, step = chance.randrange(ranks), chance.randint(SAVE_EVERY + 1, STEPS)
            orders = {**ORDERS, "mortal": [mortal, step]}
            outcomes = run_world(start, world, [(recipe, str(folder / "run"), orders)])
            for rank, (status, printed) in enumerate(outcomes):
                assert status == (-signal.SIGKILL if rank == mortal else 1), printed[-3000:]
            # by all, unless it takes three seconds to tell them
            named = f"the process of rank {mortal} has ended"
            assert ranks == 1 or any(named in printed for _, printed in outcomes)
            last = (step - 1) // SAVE_EVERY * SAVE_EVERY
            newest = max((folder / "run/checkpoints").glob("step-*"))
            assert newest.name == f"step-{last:08d}" and not (folder / "run/model").exists()

        return (
            made_once(tmp_path_factory, f"killed-{recipe}-{world.replace(' ', '-')}", make) / "run"
        )

    return get


def samples(run):
    """What an online recipe has sampled, each once, and the log-probs apart."""
    path = run / "samples.jsonl"
    stored = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [sample.pop("logprobs") for sample in stored], stored


def outputs(recipe, run):
    """Log-probs, or scores, under the model that a run has left, as transformers loads it."""
    if recipe == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(run / "model", dtype="auto")
        return model(torch.arange(20).reshape(2, 10)).logits
    if recipe == "prm":
        model = AutoModelForTokenClassification.from_pretrained(run / "model", dtype="auto")
        return model(torch.arange(20).reshape(2, 10)).logits
    return Policy(AutoModelForCausalLM.from_pretrained(run / "model", dtype="auto"))(
        collate(make_examples(3))
    ).logprob


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        *(pytest.param(world, cases, id=world) for world, cases in QUICK.items()),
        *(
            pytest.param(
                world, [(recipe, source) for recipe, source, target in cases if target == world],
                id=f"{name} to {world}", marks=mark,
            )
            for name, cases, mark in (("part", PART, pytest.mark.slow), ("rest", REST, pytest.mark.exhaustive))
            for world in SHARDS
        ),
    ],
)  # fmt: skip
def test_a_recipe_that_was_killed_goes_on_in_another_world_to_the_end_of_one_process(
    world, cases, start, unbroken, killed, tmp_path
):
    runs = [shutil.copytree(killed(*case), tmp_path / " from ".join(case)) for case in cases]
    orders = {**ORDERS, "resume": True}
    resumed = [(recipe, str(run), orders) for (recipe, _), run in zip(cases, runs, strict=True)]
    for status, printed in run_world(start, world, resumed):
        assert status == 0, printed[-3000:]
    for (recipe, source), run in zip(cases, runs, strict=True):
        one = unbroken(recipe)
        written = [
            one / "model/model.safetensors",
            *one.glob("critic/model/*"),
            *one.glob("value_head.safetensors"),
        ]
        # those of values, too
        for file in (path for path in written if path.suffix == ".safetensors"):
            expected, weights = load_file(file), load_file(run / file.relative_to(one))
            assert weights.keys() == expected.keys()
            for name, weight in expected.items():
                torch.testing.assert_close(
                    weights[name], weight, rtol=0, atol=EXACT, msg=f"{run.name}: {name}"
                )
                assert source != world or world != "1 one" or torch.equal(weights[name], weight)
        assert [line["step"] for line in untimed(run)] == list(range(1, STEPS + 1))
        for line, same in zip(untimed(run), untimed(one), strict=True):
            assert line == pytest.approx(same, rel=EXACT, abs=EXACT), run.name
        (logprobs, sampled), (same, same_samples) = samples(run), samples(one)
        assert sampled == same_samples and len(sampled) == SAMPLED.get(recipe, 0)
        for each, other in zip(logprobs, same, strict=True):
            assert each == pytest.approx(other, rel=EXACT, abs=EXACT), run.name
        torch.testing.assert_close(outputs(recipe, run), outputs(recipe, one), rtol=0, atol=EXACT)
