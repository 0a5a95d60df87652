"""The law: loss, gradient and every metric are the same for every split of a step and every layout of its rows."""

import pytest
import torch
from law import KINDS, RECIPES, assert_same, one_step


@pytest.fixture(scope="module", params=RECIPES)
def whole(request):
    """The recipe's step in one piece, padded."""
    torch.set_default_dtype(torch.float64)
    try:
        yield request.param, one_step(request.param, "padded", None)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("micro_tokens", [None, 60, 1])
def test_a_step_does_not_depend_on_layout_or_micro_batches(whole, layout, micro_tokens):
    name, expected = whole
    result = one_step(name, layout, micro_tokens)
    assert result["micro_batches"] == {None: 1, 1: 9}.get(micro_tokens, result["micro_batches"])
    assert_same(result, expected)


def test_a_step_does_not_depend_on_the_number_of_ranks(whole, law_on_ranks):
    (name, expected), (on_two_ranks, _) = whole, law_on_ranks
    for split in KINDS["offline"][2]:
        assert_same(on_two_ranks[name, split], expected)
