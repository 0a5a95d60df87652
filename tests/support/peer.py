"""Losses of TRL 1.16's own code, run on our tensors."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def dpo_trainer_loss(tensors: list[Tensor], **settings: Any) -> Tensor:
    """DPOTrainer's loss of answers of one token, whose log-probability is that of the whole answer."""
    from trl import DPOTrainer

    policy = torch.cat(tensors[:2]).unsqueeze(1)
    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device="cpu")
    settings = {"loss_types": ["sigmoid"], "label_smoothing": 0.0, "f_divergence_type": "reverse_kl", **settings}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=same,
        args=SimpleNamespace(discopop_tau=0.05),
        aux_loss_enabled=False,
        beta=0.3,
        ld_alpha=None,
        loss_weights=[1.0],
        precompute_ref_logps=True,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
    nothing = torch.zeros_like(policy)
    output = SimpleNamespace(log_probs=policy, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    inputs = {
        "input_ids": torch.zeros(len(policy), 2, dtype=torch.int64),
        "attention_mask": torch.ones(len(policy), 2, dtype=torch.int64),
        "completion_mask": torch.tensor([[0, 1]]).expand(len(policy), 2),
        "ref_chosen_logps": tensors[2],
        "ref_rejected_logps": tensors[3],
    }
    loss: Tensor = DPOTrainer._compute_loss(trainer, lambda **_: output, inputs, return_outputs=False)
    return loss
