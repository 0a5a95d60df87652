"""The law for rollouts: from the same answers on, a step is the same for every split and every
layout of its rows.
"""

import pytest
import torch
from law import ONLINE, assert_same, one_step, splits_on_ranks

SPLITS = [("packed", None), ("shared", 30), ("padded", 1)]


@pytest.mark.parametrize("name", ONLINE)
def test_a_step_on_a_rollout_does_not_depend_on_layout_micro_batches_or_ranks(
    name, law_online_on_ranks
):
    """From the same answers on: measured, judged, compared, chosen, and split, by the recipe
    itself.
    """
    torch.set_default_dtype(torch.float64)
    try:
        expected = one_step(name, "padded", None)
        parts = {setting: one_step(name, *setting) for setting in SPLITS}
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected["metrics"]["skipped"] == 0
    assert 0 < expected["metrics"].get("kept", 0.5) < 1
    assert parts["shared", 30]["micro_batches"] > 1
    assert parts["padded", 1]["micro_batches"] > parts["shared", 30]["micro_batches"]
    on_two_ranks, _ = law_online_on_ranks
    for result in (
        *parts.values(),
        *(on_two_ranks[name, split] for split in splits_on_ranks("online", name)),
    ):
        assert_same(result, expected)
