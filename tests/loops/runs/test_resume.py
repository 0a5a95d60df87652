"""kill -9 at any moment and resume: the same weights, bit for bit, and one line per step."""

import pytest
from grids import exhaustive, slow
from killed import assert_undisturbed, kill_and_resume
from tiny import save_model, sums, write_rows


@pytest.fixture
def config(tmp_path):
    """A run whose every kind of state matters: shuffled epochs, a schedule, momentum, adapters with
    dropout.
    """
    return {
        "model": str(save_model(tmp_path / "start")),
        "data": str(write_rows(tmp_path / "pairs.jsonl", sums(50))),
        "output": str(tmp_path / "run"),
        "batch_size": 8,
        "micro_tokens": 150,
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup": 0.1,
        "save_every": 3,
    }


def kills(*counts):
    """So many kills at random moments; without them, or for a few, a part of the run is enough."""
    few, *most = counts
    return pytest.mark.parametrize("kills", [0, slow(few), *map(exhaustive, most)])


def steps(kills):
    return 12 if not kills else 36 if kills < 5 else 80


@kills(3, 10)
def test_dpo_with_adapters_and_dropout_survives_kills(kills, config):
    config |= {"lora": {"r": 4, "dropout": 0.1}, "steps": steps(kills)}
    happened, _ = kill_and_resume("dpo", config, "write:7", "write:4", f"random:{kills}")
    assert (happened["random"], happened["write"]) == (kills, 2)
    assert_undisturbed(config)


@kills(3)
def test_sft_on_a_mixture_survives_a_truncated_newest_checkpoint_and_says_so(
    kills, config, tmp_path
):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(50)]
    parts = {"most": rows[:30], "least": rows[30:]}
    parts = {
        str(write_rows(tmp_path / f"{name}.jsonl", part)): w
        for (name, part), w in zip(parts.items(), (1.5, 0.5), strict=True)
    }
    config["data"] = parts
    config["steps"] = steps(kills)
    happened, log = kill_and_resume("sft", config, "write:15", "truncate", f"random:{kills}")
    assert happened["truncate"] == 1
    assert "is damaged and passed over: state.pt has another sha256" in log
    assert_undisturbed(config)


@kills(2, 5)
def test_sft_on_a_streamed_mixture_survives_kills(kills, config, tmp_path):
    config["data"] = [
        {
            "path": str(write_rows(tmp_path / f"part{i}.jsonl", sums(3 + i % 7))),
            "weight": (0.02, 0.5, 1.0, 2.0)[i % 4],
            "columns": {"chosen": "completion"},
        }
        for i in range(25 if kills else 4)
    ]
    config |= {"streaming": True, "steps": steps(kills), "on_bad_row": "skip"}
    happened, log = kill_and_resume("sft", config, "write:4", "write:2", f"random:{kills}")
    assert (happened["random"], happened["write"]) == (kills, 2)
    assert " parts: " in log and "part3.jsonl: " in log
    assert_undisturbed(config)
