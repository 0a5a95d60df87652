"""kill -9 at any moment and resume: the same weights, bit for bit, and one line per step."""

import pytest
from killed import assert_undisturbed, kill_and_resume
from tiny import save_model, sums, write_rows


@pytest.fixture
def config(tmp_path):
    """A run whose every kind of state matters: shuffled epochs, a schedule, momentum, adapters with dropout."""
    return {
        "model": str(save_model(tmp_path / "start")),
        "data": str(write_rows(tmp_path / "pairs.jsonl", sums(50))),
        "output": str(tmp_path / "run"),
        "steps": 80,
        "batch_size": 8,
        "micro_tokens": 150,
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup": 0.1,
        "save_every": 5,
    }


def test_dpo_with_adapters_and_dropout_survives_kills_at_random_moments(config):
    happened, _ = kill_and_resume(
        "dpo", {**config, "lora": {"r": 4, "dropout": 0.1}}, "write:4", "write:2", "random:10"
    )
    assert happened["random"] == 10
    assert happened["write"] == 2
    assert_undisturbed(config)


def test_sft_survives_a_truncated_newest_checkpoint_and_says_so(config, tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(50)]
    config["data"] = str(write_rows(tmp_path / "messages.jsonl", rows))
    happened, log = kill_and_resume("sft", config, "write:7", "truncate", "random:3")
    assert happened["truncate"] == 1
    assert "is damaged and passed over: state.pt has another size" in log
    assert_undisturbed(config)
