"""What a batch refuses to be made of."""

import pytest
import torch
from burnish.data import Example
from burnish.loops.batch import collate
from tiny import make_examples


def test_a_first_token_is_not_predicted_from_another_example():
    without = Example([], [[7, 8]], [[True, True]])
    with pytest.raises(
        ValueError, match="an example has no prompt, so nothing predicts its first token"
    ):
        collate([*make_examples(1, completions=1), without])


def test_a_column_has_an_entry_for_each_of_something_or_is_one_number():
    examples = make_examples(3)
    tokens = len(collate(examples).target)
    for size in (tokens, 6, 3):
        assert len(collate(examples, {"x": torch.zeros(size, 2)}).columns["x"]) == size
    assert collate(examples, {"x": torch.tensor(1.0)}).columns["x"] == 1
    with pytest.raises(ValueError, match=rf"column x: wanted an entry .*, {tokens}, 6 or 3, got 5"):
        collate(examples, {"x": torch.zeros(5)})
