"""The peer's trainer and ours on the same pairs in the same order: the same losses, step by step."""

import pytest
from burnish.benchmarks.peer.trainers import AGREEMENT, train_burnish, train_trl
from tiny import save_model, sums, write_rows


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the peer's own
def test_dpo_losses_equal_those_of_trl(tmp_path):
    model = save_model(tmp_path / "model")
    data = write_rows(tmp_path / "pairs.jsonl", sums(24))
    # A learning rate at which losses move far more than they may differ.
    setting = {"model": model, "data": data, "batch_size": 4, "steps": 6, "learning_rate": 3e-3}
    ours = train_burnish(**setting)
    theirs = train_trl(**setting)
    assert [step["loss"] for step in ours] == pytest.approx([step["loss"] for step in theirs], abs=AGREEMENT)
    losses = [step["loss"] for step in ours]
    assert max(losses) - min(losses) > 100 * AGREEMENT
