"""Weights: what each unit counts, from masks alone."""

from functools import partial

import pytest
import torch
from burnish.data import Example
from burnish.loops.batch import collate, fixed_length, length_normalized, pair_mean, token_mean


@pytest.fixture
def batch():
    """Answers of 3 and 1 trained tokens, then of 2 and 2."""
    return collate(
        [
            Example([1], [[5, 6, 7, 8], [9]], [[True, True, False, True], [True]]),
            Example([1], [[5, 6], [7, 8]], [[True, True], [True, True]]),
        ]
    )


@pytest.mark.parametrize(
    ("weighting", "weights", "share"),
    [
        (token_mean, [1] * 8, 8),
        (partial(token_mean, of=0), [1] * 5, 5),
        (length_normalized, [1 / 3] * 3 + [1] + [1 / 2] * 4, 4),
        (partial(length_normalized, of=1), [1, 1 / 2, 1 / 2], 2),
        (partial(fixed_length, length=10), [1 / 10] * 8, 4),
        (pair_mean, [1, 1], 2),
    ],
)
def test_weights_and_denominators_are_those_of_the_definition(batch, weighting, weights, share):
    result = weighting(batch)
    assert result.weight.tolist() == pytest.approx(weights)
    assert result.weight.dtype == torch.float64
    assert result.share == share


def test_shares_of_micro_batches_add_up_to_that_of_the_whole(batch):
    parts = [collate([example]) for example in batch.examples]
    for weighting in (token_mean, length_normalized, partial(fixed_length, length=10), pair_mean):
        assert sum(weighting(part).share for part in parts) == weighting(batch).share
        assert torch.equal(
            torch.cat([weighting(part).weight for part in parts]), weighting(batch).weight
        )


def test_an_empty_batch_weighs_nothing():
    for weighting in (token_mean, length_normalized, partial(fixed_length, length=10), pair_mean):
        assert weighting(collate([])).share == 0
        assert weighting(collate([])).weight.shape == (0,)
