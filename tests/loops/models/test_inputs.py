"""Rows: where each trained token is predicted from, and who sees whom."""

import random

import pytest
import torch
from burnish.data import Example
from burnish.loops.batch import collate
from burnish.loops.models.backbone import arrange
from tiny import make_examples

LAYOUTS = ("padded", "packed", "shared")


def context(rows, predictor):
    """The tokens that a position of the flattened rows may see, in the order of their positions."""
    width = rows.input_ids.shape[1]
    row, place = divmod(int(predictor), width)
    ids, positions = rows.input_ids[row], rows.position_ids[row]
    if rows.attention_mask is None:  # packed: back to the last position 0
        start = max(i for i in range(place + 1) if positions[i] == 0)
        seen = range(start, place + 1)
    elif rows.attention_mask.ndim == 2:
        seen = [i for i in range(place + 1) if rows.attention_mask[row, i]]
    else:
        seen = [i for i in range(width) if rows.attention_mask[row, 0, place, i]]
    assert [int(positions[i]) for i in seen] == list(range(len(seen)))
    return [int(ids[i]) for i in seen]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("one_row", [False, True])
def test_each_trained_token_is_predicted_from_exactly_what_precedes_it(layout, one_row):
    examples = make_examples(5, completions=3)
    if layout == "padded" and one_row:
        pytest.skip("padded rows hold one sequence each")
    rows = arrange(examples, layout, one_row=one_row)
    expected = [
        example.prompt + completion[:t]
        for example in examples
        for completion, trained in zip(example.completions, example.trained, strict=True)
        for t, train in enumerate(trained)
        if train
    ]
    assert [context(rows, p) for p in rows.position] == expected


def test_targets_stand_in_the_order_of_examples_completions_and_positions():
    examples = [Example([1], [[5, 6, 7], [8]], [[True, False, True], [True]]), Example([2], [[9, 4]], [[True, True]])]
    batch = collate(examples)
    assert batch.target.tolist() == [5, 7, 8, 9, 4]
    assert batch.sequence.tolist() == [0, 0, 1, 2, 2]
    assert batch.completion.tolist() == [0, 1, 0]
    assert batch.tokens_of(1).tolist() == [False, False, True, False, False]


def test_a_shared_prompt_stands_in_its_row_once():
    example = Example([3, 4, 5], [[6, 7], [8, 9]], [[True, True]] * 2)
    assert arrange([example], "shared").input_ids.tolist() == [[3, 4, 5, 6, 8]]


def test_nothing_after_the_last_predictor_is_computed():
    example = Example([3, 4], [[6, 7, 8, 9]], [[True, True, False, False]])
    assert arrange([example], "padded").input_ids.tolist() == [[3, 4, 6]]


def test_packing_fills_rows_before_it_opens_new_ones():
    examples = [Example([3] * n, [[5]], [[True]]) for n in (2, 6, 4, 3, 1)]
    assert arrange(examples, "packed").input_ids.shape == (3, 6)


def test_packing_puts_each_segment_in_the_first_row_with_room_longest_first():
    draw = random.Random(0)
    for highest in (2, 5, 60) * 10:
        lengths = [draw.randint(1, highest) for _ in range(draw.randint(1, 80))]
        examples = [Example([i + 1] * length, [[0]], [[True]]) for i, length in enumerate(lengths)]
        expected: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            row = next((row for row in expected if len(row) + lengths[i] <= max(lengths)), None)
            if row is None:
                expected.append(row := [])
            row += examples[i].prompt
        rows = arrange(examples, "packed").input_ids.tolist()
        assert [[token for token in row if token] for row in rows] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_still_has_a_row_to_compute(layout):
    rows = arrange([], layout)
    assert rows.input_ids.shape == (1, 1)
    assert rows.position.shape == (0,)
    assert rows.position.dtype == torch.int64
