"""Ranks of `sharded` on the stand-in for a GPU, which is registered in their own processes only."""

import os

import pytest
import sharded
import torch
import torch.distributed as dist
from accelerate import Accelerator


def be_rank(*arguments):
    os.environ.pop("ACCELERATE_USE_CPU", None)
    import standin

    host, device = torch.ones(2), torch.ones(2, device=standin.DEVICE)
    for mix in (
        torch.add,
        torch.dot,
        torch.minimum,
        lambda a, b: a.index_copy_(0, torch.arange(2), b),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mix(device, host)
    assert Accelerator().device == standin.DEVICE
    if dist.is_initialized():
        dist.all_reduce(device)
        assert device.tolist() == [dist.get_world_size()] * 2
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(host)
    sharded.be_rank(*arguments)
