"""The law: loss, gradient and every metric are the same for every split of a step and every layout
of its rows.
"""

import functools
import itertools

import pytest
import torch
from grids import grid
from law import RECIPES, assert_same, one_step, splits_on_ranks

# the first one is the whole
SPLITS = list(itertools.product(["padded", "packed", "shared"], [None, 60, 1]))[1:]


@pytest.fixture(scope="module", autouse=True)
def in_double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@functools.cache
def whole(recipe):
    """The recipe's step in one piece, padded."""
    return one_step(recipe, "padded", None)


@grid(strength=1, recipe=RECIPES, split=SPLITS)  # others are taken on ranks
def test_a_step_does_not_depend_on_layout_or_micro_batches(recipe, split):
    result, (_, micro_tokens) = one_step(recipe, *split), split
    assert result["micro_batches"] == {None: 1, 1: 9}.get(micro_tokens, result["micro_batches"])
    assert_same(result, whole(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_does_not_depend_on_the_number_of_ranks(recipe, law_on_ranks):
    on_two_ranks, _ = law_on_ranks
    for split in splits_on_ranks("offline", recipe):
        assert_same(on_two_ranks[recipe, split], whole(recipe))
