"""Runs whose rows are read when their step comes: the same on every number of ranks, and what can't
be streamed.
"""

import json

import pytest
from burnish.data import DataError
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.kto import open_kto
from burnish.loops.recipes.preference import open_dpo
from burnish.loops.recipes.settings import DPO, GRPO, KTO, SFT
from burnish.loops.recipes.sft import open_sft
from forked import run_forked
from killed import assert_undisturbed, untimed
from tiny import save_model, sums, write_rows


@pytest.fixture
def config(tmp_path):
    parts = [
        {"path": str(write_rows(tmp_path / f"{n}.jsonl", sums(n))), "weight": w}
        for n, w in ((9, 1.0), (4, 0.5))
    ]
    return {
        "model": str(save_model(tmp_path / "start")),
        "data": parts,
        "streaming": True,
        "output": str(tmp_path / "run"),
        "batch_size": 6,
        "micro_tokens": 100,
        "steps": 4,
        "learning_rate": 1e-2,
        "dtype": "float64",
    }


def test_two_ranks_train_on_the_same_stream_as_one_and_go_on_where_they_were_stopped(
    config, tmp_path, capsys
):
    outcomes = run_forked(2, "signalled", "dpo", config, "SIGTERM", 3, 1)
    assert all(status == 0 for status, _ in outcomes), outcomes
    assert_undisturbed(config)
    alone = open_dpo(DPO(**{**config, "output": str(tmp_path / "alone")})).train()
    on_two = untimed(tmp_path / "run")[-1]
    assert alone["loss"] == pytest.approx(on_two["loss"], abs=1e-12)
    assert alone["grad_norm"] == pytest.approx(on_two["grad_norm"], rel=1e-9)
    account = capsys.readouterr().out
    assert "2 parts: 24 rows read, 24 kept" in account and "9.jsonl: " in account
    # undisturbed, and once of both ranks
    assert outcomes[0][1].count("2 parts: 24 rows read, 24 kept") == 1


def test_a_stream_in_bfloat16_trains(config):
    assert open_dpo(DPO(**{**config, "dtype": "bfloat16"})).train()["loss"] < 1


def test_held_out_data_beside_a_stream_are_read_as_ever(config, tmp_path):
    held_out = str(write_rows(tmp_path / "held_out.jsonl", sums(5, seed=1)))
    open_dpo(DPO(**{**config, "eval_data": held_out})).train()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 4]


def test_completions_of_other_prompts_are_those_of_the_step(config):
    assert open_kto(KTO(**config, loss="kto")).train()["loss"] > 0


@pytest.mark.parametrize(
    ("kind", "open_recipe", "more", "message"),
    [
        (
            SFT,
            open_sft,
            {"steps": None},
            "streaming: wanted steps, as an epoch has no known length",
        ),
        (
            DPO,
            open_dpo,
            {"reference": "precompute"},
            "streaming: ref_logprob can't be computed of all data before",
        ),
        (
            DPO,
            open_dpo,
            {"eval_data": 0.5},
            "eval_data: rows can't be held out of data that are streamed",
        ),
        (
            GRPO,
            open_grpo,
            {"batch_size": ..., "rewards": {"exact_match": 1.0}},
            "streaming: this recipe samples",
        ),
    ],
)
def test_what_can_not_be_streamed_is_refused(kind, open_recipe, more, message, config):
    fields = {name: value for name, value in {**config, **more}.items() if value is not ...}
    fields["dtype"] = "float32"
    with pytest.raises((ValueError, DataError), match=message):
        open_recipe(kind(**fields))
