"""Ranks of which one takes longer to read each step."""

import os
import time
from unittest.mock import patch

from burnish.loops.recipes.settings import SFT
from burnish.loops.recipes.sft import open_sft
from burnish.loops.runs import training
from burnish.loops.runs.feed import Feed


def be_rank(fields, slow, seconds):
    """Train as one rank; the one with this number waits for so long before each step."""
    read = Feed.__call__

    def slowly(feed, step):
        if int(os.environ["RANK"]) == slow:
            time.sleep(seconds)
        return read(feed, step)

    with patch.object(Feed, "__call__", slowly), patch.object(training, "draw_curves"):
        open_sft(SFT(**fields)).train()
