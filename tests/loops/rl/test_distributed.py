"""Rollouts that all ranks sample are those that one process samples."""

import asyncio
import functools
import math
import queue
import threading
from types import SimpleNamespace

import pytest
import torch
from burnish.loops.rl import distributed
from burnish.loops.rollouts.sample import Request, SamplingParams
from forked import run_forked
from grids import exhaustive, slow
from online import lines, prepare, stored
from safetensors.torch import load_file
from tiny import save_model, sums, write_rows

EXACT = {"rtol": 1e-11, "atol": 1e-12}
RUNS = {
    "plain": {"group_size": 3},
    "few prompts": {"prompts_per_rollout": 1, "group_size": 6},
    "dynamic sampling": {
        "dynamic_sampling": True,
        "rewards": {"rank_spread:first_even": 1.0},
        "group_size": 2,
    },
    "conversations": {
        "rewards": {},
        "environment": "rank_spread:Turns",
        "limits": {"turns": 3},
        "max_tokens": 8,
    },
    "minibatches": {"group_size": 3, "epochs_per_rollout": 2, "minibatches": 2},
    "stale": {"max_staleness": 1, "old_logprobs": "recomputed"},
    "adapters": {"lora": {"r": 2}},
    "held out": {"eval_temperature": 1.0, "eval_every": 1, "eval_samples": 3},
    "bfloat16": {"dtype": "bfloat16", "beta": 0.1},
}
RECIPES = {
    "ppo": {"recipe": "ppo", "beta": 0.1, "lam": 0.9, "epochs_per_rollout": 2, "minibatches": 2},
    "ppo with a critic": {"recipe": "ppo", "value_model": "start", "group_size": 2},
    "online_dpo": {"recipe": "online_dpo", "group_size": 3, "loss": {"dpo": 1.0, "nll": 0.1}},
    "distill": {
        "recipe": "distill",
        "on_policy": 0.5,
        "loss": {"distillation": 1.0, "iw_opd": 0.5},
        "teacher": {"model": "teacher", "divergence": "jsd"},
        "batch_size": 5,
        "schedule": "cosine_with_min_lr",
        "schedule_kwargs": {"min_lr_rate": 0.1},
    },
}
# Whole on each rank, and in shards. Four ranks have other shares of the prompts, of turns and of
# rows than two; where they share one prompt, turns, values or two kinds of steps, they differ most.
WHOLE = ["few prompts", "dynamic sampling", "minibatches"]
SHARDED = [
    "stale",
    "adapters",
    "held out",
    "conversations",
    "ppo",
    "online_dpo",
    "distill",
    "bfloat16",
]
SETS = {
    "2": (WHOLE, SHARDED),
    "4": (["few prompts", "conversations"], ["ppo with a critic", "distill"]),
    "2, others": (["plain", "conversations"], ["plain", "ppo with a critic"]),
    "4, others": (["plain", "dynamic sampling"], ["plain", "bfloat16"]),
}
KINDS = {
    name: [*whole, *(f"{kind}, sharded" for kind in sharded if kind != "bfloat16")]
    for name, (whole, sharded) in SETS.items()
}
CASES = [(kind, "2") for kind in KINDS["2"]]
CASES += [slow(kind, "4") for kind in KINDS["4"]]
CASES += [exhaustive(kind, name) for name in ("2, others", "4, others") for kind in KINDS[name]]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """``train(name, one)`` is a directory that holds the runs of this set, or those of one process
    beside them.
    """
    directory = tmp_path_factory.mktemp("ranks")
    common = {**prepare(directory), "dtype": "float64", "steps": 3}
    held_out = [{"prompt": pair["prompt"], "answer": "1"} for pair in sums(5, seed=1)]
    held_out = {"eval_data": str(write_rows(directory / "held_out.jsonl", held_out))}
    teacher = str(save_model(directory / "teacher", seed=1))
    write_rows(
        directory / "pairs.jsonl",
        [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(17)],
    )

    @functools.cache
    def train(name, one=False):
        (whole, sharded), ranks, place = SETS[name], int(name[0]), directory / name
        if one:
            whole, sharded, ranks, place = (
                dict.fromkeys([*whole, *sharded]),
                [],
                1,
                directory / f"{name} in one",
            )
        runs = [{**common, **(RUNS | RECIPES)[kind], "output": str(place / kind)} for kind in whole]
        for kind in sharded:
            fields = {**common, **(RUNS | RECIPES)[kind], "output": str(place / f"{kind}, sharded")}
            runs.append(fields | {"sharded": True})
        runs = [fields | held_out if "eval_every" in fields else fields for fields in runs]
        for fields in runs:
            if "value_model" in fields:
                fields["value_model"] = common["model"]
            if "teacher" in fields:
                fields["teacher"] = {**fields["teacher"], "model": teacher}
                fields["data"] = str(directory / "pairs.jsonl")
                del fields["rewards"], fields["prompts_per_rollout"]
        for status, printed in run_forked(ranks, "rank_spread", runs):
            assert status == 0, printed[-3000:]
            assert printed.count(
                "value_model: probed before sharding, so each rank loads"
            ) == sharded.count("ppo with a critic")
        return place

    return train


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_samples_metrics_and_weights_are_those_of_one_process(train, kind, name):
    one, many = train(name, one=True) / kind.removesuffix(", sharded"), train(name) / kind
    for alone, spread in zip(stored(one), stored(many), strict=True):
        torch.testing.assert_close(spread.pop("logprobs"), alone.pop("logprobs"), **EXACT)
        assert spread == alone
    for alone, spread in zip(lines(one), lines(many), strict=True):
        assert alone.keys() == {name for name in spread if not name.startswith("ranks/")}
        for name in alone:
            assert "seconds" in name or spread[name] == pytest.approx(
                alone[name], rel=1e-9, abs=1e-12
            ), name
    written = [
        *one.glob("*/model.safetensors"),
        *one.glob("critic/model/*.safetensors"),
        *one.glob("*.safetensors"),
    ]
    for path in written:
        weights = load_file(many / path.relative_to(one))
        for name, tensor in load_file(path).items():
            torch.testing.assert_close(weights[name], tensor, **EXACT)
    assert len(written) == (2 if kind.startswith("ppo") else 1)  # the values, too
    weights, start = (
        load_file(path / "model.safetensors") for path in (many / "model", one.parents[1] / "start")
    )
    assert any(not torch.equal(weights[name].float(), start[name]) for name in start)


def test_steps_of_the_data_and_of_the_students_own_completions_take_turns(train):
    """So that the comparison of the runs is one of both."""
    assert {line["on_policy"] for line in lines(train("2", one=True) / "distill")} == {0.0, 1.0}


@pytest.mark.parametrize("name", ["2", exhaustive("4, others")])
def test_a_run_in_bfloat16_and_in_shards_samples_and_learns_as_one_process_does(train, name):
    one, many = train(name, one=True) / "bfloat16", train(name) / "bfloat16, sharded"
    assert len(stored(many)) == len(stored(one)) == 3 * 4 * 4
    start = load_file(one.parents[1] / "start/model.safetensors")
    moved = [
        torch.cat([(weights[name].float() - start[name]).flatten() for name in start])
        for weights in (load_file(place / "model/model.safetensors") for place in (one, many))
    ]
    assert torch.nn.functional.cosine_similarity(*moved, dim=0) > 0.9
    for line, alone in zip(lines(many), lines(one), strict=True):
        assert alone.keys() == {name for name in line if not name.startswith("ranks/")}
        assert all(math.isfinite(value) for value in line.values())
        # the sampler has the weights that are trained
        assert line["sampling/logp_difference/max"] < 0.1


def test_a_request_that_can_not_be_sent_fails_and_is_not_waited_for(monkeypatch):
    answered = threading.Event()

    def send(message, rank, group):
        raise TypeError("cannot pickle it")

    monkeypatch.setattr(distributed, "send", send)
    monkeypatch.setattr(distributed, "receive", lambda rank, group: answered.wait(60))
    source = distributed.DistributedSource(SimpleNamespace(overlaps=False, stored=False), None, 2)
    request = Request(1, [1], range(1), SamplingParams(1), 0)
    try:
        with pytest.raises(TypeError, match="cannot pickle it"):
            asyncio.run(asyncio.wait_for(source.sample(request), 20))
    finally:
        answered.set()


def test_a_request_that_is_given_up_has_ended_on_its_rank(monkeypatch):
    """A step on the weights that it is sampled from may follow at once."""
    queues = {"to 0": queue.SimpleQueue(), "to 1": queue.SimpleQueue()}
    begun, ended = threading.Event(), []

    class Slow:
        overlaps = stored = False

        async def sample(self, request):
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                ended.append(request.task)

        async def close(self):
            pass

    monkeypatch.setattr(distributed, "send", lambda x, rank, group: queues[f"to {rank}"].put(x))
    receive = {"main": "to 0", "other": "to 1"}
    monkeypatch.setattr(
        distributed, "receive", lambda rank, group: queues[receive[group]].get(timeout=60)
    )
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    follower = distributed.Follower(accelerator, Slow(), tuple, "other")

    async def give_up():
        source = distributed.DistributedSource(Slow(), "main", 2)
        request = Request(1, [1], range(1), SamplingParams(1), 0)
        under_way = asyncio.create_task(source.sample(request))
        await asyncio.to_thread(begun.wait, 60)
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
        assert ended == [1] and under_way.cancelled()
        await source.close()

    asyncio.run(give_up())
    follower.close()
