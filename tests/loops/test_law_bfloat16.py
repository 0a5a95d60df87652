"""The law in bfloat16: splits agree as far as the rounding of the whole step goes, which is no more
than it must be.
"""

import pytest
import torch
from law import (
    IN_BFLOAT16,
    assert_rounded_once,
    assert_same_in_bfloat16,
    numbers,
    one_step,
    splits_on_ranks,
)

SPLITS = [("packed", 60), ("shared", None), ("shared", 40), ("padded", 1)]


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_a_step_under_autocast_does_not_depend_on_layout_micro_batches_or_ranks(
    name, law_bfloat16_on_ranks
):
    with numbers(torch.float64):
        exact = one_step(name, "padded", None)
    with numbers(torch.bfloat16):
        whole = one_step(name, "padded", None)
        parts = {setting: one_step(name, *setting) for setting in SPLITS}
    assert all(parts[setting]["micro_batches"] > 1 for setting in (("shared", 40), ("padded", 1)))
    assert_rounded_once(whole, exact)
    on_two_ranks, _ = law_bfloat16_on_ranks
    for result in (
        *parts.values(),
        *(on_two_ranks[name, split] for split in splits_on_ranks("bfloat16", name)),
    ):
        assert_same_in_bfloat16(result, whole, exact)
