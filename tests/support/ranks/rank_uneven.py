"""Ranks that are given other rows than each other, as a loop of one's own that shares them out
would need.
"""

import os

import burnish
import pytest
from datasets import Dataset
from looped import ROWS


def be_rank(saved):
    rank = int(os.environ["RANK"])
    half = ROWS[rank::2]
    of_this_rank = {
        "rows": {"data": half},
        "held out": {"data": ROWS, "eval_data": half},
        "order": {"data": ROWS[::-1] if rank else ROWS},
        "stream": {"data": Dataset.from_list(half).to_iterable_dataset(), "streaming": True},
    }
    for settings in of_this_rank.values():
        with pytest.raises(
            ValueError,
            match="data: the rows differ between ranks, so that some would be trained on",
        ):
            burnish.sft(saved, **settings, steps=1, batch_size=4)
    print("refused", *of_this_rank)
