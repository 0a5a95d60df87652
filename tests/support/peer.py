"""TRL's DPO loss of completions of one token, whose log-probability is that of the whole completion."""

from typing import Any

import torch
from burnish.benchmarks.peer.trl_losses import dpo_loss, make_rows
from torch import Tensor


def dpo_trainer_loss(tensors: list[Tensor], **settings: Any) -> Tensor:
    """At β = 0.3, of chosen, rejected, ref_chosen and ref_rejected."""
    rows = make_rows(torch.cat(tensors[:2]).unsqueeze(1))
    return dpo_loss(rows, torch.cat(tensors[2:]), beta=0.3, **settings)
