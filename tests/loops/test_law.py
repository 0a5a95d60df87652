"""The law: loss, gradient and every metric are the same for every split of a step and every layout of its rows."""

import json

import pytest
import torch
from law import RECIPES, assert_same, one_step, run_ranks

ON_RANKS = ["shared:", "packed:60", "padded:1"]


@pytest.fixture(scope="module", params=RECIPES)
def whole(request):
    """The recipe's step in one piece, padded."""
    torch.set_default_dtype(torch.float64)
    try:
        yield request.param, one_step(request.param, "padded", None)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    output = tmp_path_factory.mktemp("law") / "results.json"
    run_ranks(2, output, "offline", *ON_RANKS)
    return json.loads(output.read_text())


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("micro_tokens", [None, 60, 1])
def test_a_step_does_not_depend_on_layout_or_micro_batches(whole, layout, micro_tokens):
    name, expected = whole
    result = one_step(name, layout, micro_tokens)
    assert result["micro_batches"] == {None: 1, 1: 9}.get(micro_tokens, result["micro_batches"])
    assert_same(result, expected)


def test_a_step_does_not_depend_on_the_number_of_ranks(whole, on_two_ranks):
    name, expected = whole
    for setting in ON_RANKS:
        assert_same(on_two_ranks[f"{name}:{setting}"], expected)
