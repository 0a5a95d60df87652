"""The law for rollouts: from the same answers on, a step is the same for every split and every layout of its rows."""

import json

import pytest
import torch
from law import ONLINE, assert_same, one_step, run_ranks

SPLITS = [("packed", None), ("shared", 30), ("padded", 1)]
ON_RANKS = ["shared:", "padded:1"]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    output = tmp_path_factory.mktemp("law") / "results.json"
    run_ranks(2, output, "online", *ON_RANKS)
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", ONLINE)
def test_a_step_on_a_rollout_does_not_depend_on_layout_micro_batches_or_ranks(name, on_two_ranks):
    """From the same answers on: measured, judged, compared, chosen, and split, by the recipe itself."""
    torch.set_default_dtype(torch.float64)
    try:
        expected = one_step(name, "padded", None)
        parts = {setting: one_step(name, *setting) for setting in SPLITS}
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected["metrics"]["skipped"] == 0
    assert parts["shared", 30]["micro_batches"] > 1
    assert parts["padded", 1]["micro_batches"] > parts["shared", 30]["micro_batches"]
    for result in (*parts.values(), *(on_two_ranks[f"{name}:{setting}"] for setting in ON_RANKS)):
        assert_same(result, expected)
