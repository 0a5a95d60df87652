"""A script with a loop of its own, as one process or as one rank of several; any rank may leave its
loop early.
"""

import os
import sys
from unittest.mock import patch

import burnish
from tiny import sums
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(12)]


def be_rank(saved, output, left_by, dtype="float32"):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(saved),
        AutoTokenizer.from_pretrained(saved),
    )
    steps = []
    settings = {
        "tokenizer": tokenizer,
        "steps": 3,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "dtype": dtype,
    }
    with patch("burnish.loops.runs.training.draw_curves"):  # it takes longer than the run
        for step in burnish.sft(model, ROWS, output, **settings):
            steps.append(step.number)
            if step.number == 2 and os.environ.get("RANK", "0") == left_by:
                break
    print("steps", *steps)
    return model


if __name__ == "__main__":
    be_rank(*sys.argv[1:])
