"""Rollouts that all ranks sample are those that one process samples."""

import functools

import pytest
import torch
from forked import run_forked
from online import lines, prepare, stored
from safetensors.torch import load_file
from tiny import sums, write_rows

EXACT = {"rtol": 1e-11, "atol": 1e-12}
RUNS = {
    "plain": {"group_size": 3},
    "few prompts": {"prompts_per_rollout": 1, "group_size": 6},
    "dynamic sampling": {"dynamic_sampling": True, "rewards": {"spread:first_even": 1.0}, "group_size": 2},
    "conversations": {"rewards": {}, "environment": "spread:Turns", "limits": {"turns": 3}, "max_tokens": 8},
    "minibatches": {"epochs_per_rollout": 2, "minibatches": 2},
    "stale": {"max_staleness": 1, "old_logprobs": "recomputed"},
    "adapters": {"lora": {"r": 2}},
    "held out": {"eval_temperature": 1.0, "eval_every": 1},
}


SHARDED = ["plain", "stale", "adapters", "held out", "conversations"]
RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """``train(ranks)`` is a directory that holds a run of each kind on so many ranks."""
    directory = tmp_path_factory.mktemp("ranks")
    common = {**prepare(directory), "dtype": "float64", "steps": 3}
    held_out = [{"prompt": pair["prompt"], "answer": "1"} for pair in sums(5, seed=1)]
    held_out = {"eval_data": str(write_rows(directory / "held_out.jsonl", held_out))}

    @functools.cache
    def train(ranks):
        place = directory / str(ranks)
        runs = [{**common, **fields, "output": str(place / kind)} for kind, fields in RUNS.items()]
        runs += [
            {**common, **RUNS[kind], "output": str(place / f"{kind}, sharded"), "sharded": True} for kind in SHARDED
        ]
        runs = [fields | held_out if "eval_every" in fields else fields for fields in runs]
        runs = [fields for fields in runs if ranks > 1 or "sharded" not in fields]
        for status, printed in run_forked(ranks, "spread", runs):
            assert status == 0, printed[-3000:]
        return place

    return train


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", [*RUNS, *(f"{kind}, sharded" for kind in SHARDED)])
def test_samples_metrics_and_weights_are_those_of_one_process(train, kind, ranks):
    one, many = train(1) / kind.removesuffix(", sharded"), train(ranks) / kind
    for alone, spread in zip(stored(one), stored(many), strict=True):
        torch.testing.assert_close(spread.pop("logprobs"), alone.pop("logprobs"), **EXACT)
        assert spread == alone
    for alone, spread in zip(lines(one), lines(many), strict=True):
        assert alone.keys() == spread.keys()
        for name in alone:
            assert "seconds" in name or spread[name] == pytest.approx(alone[name], rel=1e-9, abs=1e-12), name
    weights, expected = (load_file(place / "model/model.safetensors") for place in (many, one))
    start = load_file(one.parents[1] / "start/model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, **EXACT)
    assert any(not torch.equal(weights[name].float(), start[name]) for name in start)
