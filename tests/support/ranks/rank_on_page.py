"""Python of a page, on the stand-in for a GPU, which is registered in this process only."""

import os
from pathlib import Path

import torch
from tiny import save_model, sums, write_rows


def be_rank(directory, *blocks):
    os.environ.pop("ACCELERATE_USE_CPU", None)
    import standin

    os.chdir(directory)
    write_rows(Path("pairs.jsonl"), sums(8))
    model = str(save_model(Path("model")))
    for block in blocks:
        names = {"name": model}
        exec(block, names)
        parameters = list(names["policy"].parameters())
        assert {parameter.device for parameter in parameters} == {standin.DEVICE}
        assert torch.stack([parameter.isfinite().all() for parameter in parameters]).all()
        print(names["metrics"])
