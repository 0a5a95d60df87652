"""A fault at each call of a save, and in each file of a checkpoint: runs go on to the weights of an
undisturbed one.

``python tests/faults.py`` runs the same, and prints a table.
"""

import pytest
from faulty import FAULTS, outcomes
from grids import exhaustive, slow
from killed import assert_undisturbed, kill_and_resume
from online import prepare
from tiny import save_model, sums, write_rows

# Faults of each kind, at least: a call more in a save is one fault more.
COUNTS = {"one process": 30, "rank 0 of 2": 20, "rank 1 of 2": 10, "two ranks": 60}
QUICK = ("ENOSPC, one process", "damaged files, one process")
NAMES = [
    name for name in FAULTS if name != "EIO, one process"
]  # two processes find what EIO is called, one finds ENOSPC
CASES = [(name, 1) if name in QUICK else slow(name, 3) for name in NAMES]
CASES += [exhaustive(name, 1) for name in NAMES if name not in QUICK]


@pytest.mark.parametrize(("name", "every"), CASES)
def test_a_run_goes_on_to_the_same_weights_after_every_fault(name, every, tmp_path):
    begins = [begin for _, begin in outcomes(name, tmp_path, every)]
    if "collectives" in name:
        assert (
            len(begins) >= 10 // every
            and 0 in begins
            and max(begins) >= 2
            and (1 in begins or every > 1)
        )
    else:
        assert (
            len(begins) >= COUNTS[name.split(", ")[1]] / every and begins.count(2) > len(begins) / 2
        )


SIGNALS = [
    slow("dpo", 4),
    slow("ppo", 4),
    *(exhaustive(recipe, 13) for recipe in ("sft", "dpo", "grpo", "ppo")),
]


@pytest.mark.parametrize(("recipe", "signals"), SIGNALS)
def test_any_signal_at_any_moment_leaves_a_run_that_ends_with_the_same_weights(
    recipe, signals, tmp_path
):
    """By default, nothing is saved but at the end and where a signal asks for it."""
    if recipe in ("grpo", "ppo"):
        config = {
            **prepare(tmp_path),
            "epochs_per_rollout": 2,
            "minibatches": 2,
            "old_logprobs": "recomputed",
        }
    else:
        rows = sums(50)
        if recipe == "sft":
            rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in rows]
        data = write_rows(tmp_path / "rows.jsonl", rows)
        config = {"model": str(save_model(tmp_path / "start")), "data": str(data), "batch_size": 8}
    config |= {"output": str(tmp_path / "run"), "steps": 4 * signals + 8}
    happened, _ = kill_and_resume(recipe, config, f"signals:{signals}", timeout=1800)
    assert happened["signals"] == signals
    assert_undisturbed(config)
