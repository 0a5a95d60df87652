"""Kill after step k, resume, and end with the same weights, whatever the optimizer is."""

import pytest
from forked import run_forked
from grids import slow
from interrupted import resumed, train
from tiny import save_model, sums, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # what packages say of themselves, and of a CPU

BFLOAT16 = {"dtype": "bfloat16", "weights_dtype": "bfloat16"}
SCHEDULE_FREE = {"optimizer": "schedule_free_adamw", "schedule": "constant", "warmup": 2}
RUNS = {
    "adamw": {},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
    "lion in 8 bits": {"optimizer": "lion_8bit"},
    "ademamix in 8 bits": {"optimizer": "ademamix_8bit", "schedule": "warmup_stable_decay",
                           "schedule_kwargs": {"num_decay_steps": 2}},
    "adamw in 8 bits": {"optimizer": "adamw_8bit"},
    "schedule-free adamw": SCHEDULE_FREE,
    "bfloat16 weights by chance": BFLOAT16,
    "bfloat16 weights, compensated, in 8 bits": {**BFLOAT16, "rounding": "compensated", "optimizer": "adamw_8bit"},
    "float16": {"dtype": "float16"},
    "float16, schedule-free adamw": {**SCHEDULE_FREE, "dtype": "float16"},
    "noise on embeddings": {"neftune_noise_alpha": 5.0, "gradient_checkpointing": "selective"},
    "a schedule by evaluations": {"schedule": "reduce_lr_on_plateau", "schedule_kwargs": {"patience": 0, "factor": 0.5,
                                  "threshold": 1.0}},
}  # fmt: skip
LATER = {
    "sgd with momentum": {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9}},
    "lion": {"optimizer": "lion"},
    "paged adamw in 8 bits": {"optimizer": "paged_adamw_8bit"},
    "nadam": {"optimizer": "nadam"},
    "float16, adamw in 8 bits": {"dtype": "float16", "optimizer": "adamw_8bit"},
    "float16, muon": {"dtype": "float16", "optimizer": "muon"},
    "float16, offloaded": {"dtype": "float16", "offload_optimizer": True},
    "float16, adapters": {"dtype": "float16", "lora": {"r": 4}},
    "adamw of torchao in 4 bits": {"optimizer": "adamw_torch_4bit"},
}


@pytest.fixture
def fields(tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(24)]
    data = str(write_rows(tmp_path / "rows.jsonl", rows))
    return {"model": str(save_model(tmp_path / "start")), "data": data, "eval_data": data, "eval_every": 2,
            "weight_decay": 0.1}  # fmt: skip


@pytest.mark.parametrize("run", [*RUNS, *map(slow, LATER)])
def test_a_run_that_was_killed_ends_with_the_weights_of_the_whole_one(run, fields, tmp_path):
    (whole, again), (metrics, metrics_again) = resumed(
        {**fields, **{**RUNS, **LATER}[run]}, tmp_path
    )
    assert whole == again
    assert metrics == metrics_again
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"]
    if run == "a schedule by evaluations":
        assert [line["learning_rate"] for line in metrics[1:]] == [
            0.01,
            0.01,
            0.005,
            0.005,
            0.0025,
            0.0025,
        ]


def test_a_bfloat16_run_saves_half_of_the_bytes(fields, tmp_path):
    fields |= {"batch_size": 4, "steps": 1}
    train("sft", **fields, **BFLOAT16, output=str(tmp_path / "half"))
    train("sft", **fields, dtype="bfloat16", output=str(tmp_path / "full"))
    half, full = (
        (tmp_path / name / "model/model.safetensors").stat().st_size for name in ("half", "full")
    )
    assert half < 0.52 * full


def test_two_ranks_that_were_killed_end_with_the_same_weights(fields, tmp_path):
    outcomes = run_forked(2, "interrupted", str(tmp_path), fields)
    for status, printed in outcomes:
        assert status == 0, printed[-3000:]
