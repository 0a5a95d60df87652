"""The law in bfloat16 and float16: splits agree as far as the rounding of the whole step goes, which
is no more than it must be.
"""

import pytest
import torch
from law import (
    IN_FLOAT16,
    IN_SIXTEEN_BITS,
    KINKED,
    UNITS,
    assert_loss_is_rounded_once,
    assert_rounded_once,
    assert_same_but_rounded,
    numbers,
    one_step,
    splits_on_ranks,
)

SPLITS = [("packed", 60), ("shared", None), ("shared", 40), ("padded", 1)]


def check_splits(name, dtype, on_two_ranks):
    """A step in 16 bits is the same for all splits of it, on one rank and on two.

    Of a loss with kinks the gradient of the whole step is further from float64 than its roundings
    are: by √(4 · the share of signs that flip), 14 % of uld's here, where 0.5 % do. Its loss is not.
    """
    unit = UNITS[dtype]
    with numbers(torch.float64):
        exact = one_step(name, "padded", None)
    with numbers(dtype):
        whole = one_step(name, "padded", None)
        parts = {setting: one_step(name, *setting) for setting in SPLITS}
    assert all(parts[setting]["micro_batches"] > 1 for setting in (("shared", 40), ("padded", 1)))
    assert whole["metrics"]["skipped"] == 0
    if name in KINKED:
        assert_loss_is_rounded_once(whole, exact, unit)
    else:
        assert_rounded_once(whole, exact, unit)
    kind = str(dtype).removeprefix("torch.")
    for result in (
        *parts.values(),
        *(on_two_ranks[name, split] for split in splits_on_ranks(kind, name)),
    ):
        assert_same_but_rounded(result, whole, exact, unit)


@pytest.mark.parametrize("name", IN_SIXTEEN_BITS)
def test_a_step_under_autocast_does_not_depend_on_layout_micro_batches_or_ranks(
    name, law_bfloat16_on_ranks
):
    check_splits(name, torch.bfloat16, law_bfloat16_on_ranks[0])


@pytest.mark.parametrize("name", IN_FLOAT16)
def test_nor_does_one_in_float16_whose_loss_is_scaled(name, law_float16_on_ranks):
    check_splits(name, torch.float16, law_float16_on_ranks[0])
