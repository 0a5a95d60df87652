"""A step of a policy that its caller sharded by torch alone, which averages gradients over the
ranks.
"""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from burnish.loops import Policy, collate, token_mean, train_step
from burnish.objectives import nll
from tiny import make_examples, make_model
from torch.distributed.fsdp import fully_shard


def objective(policy, batch):
    return {"nll": nll(policy(batch).logprob)}


def be_rank(directory):
    accelerator, policy = Accelerator(), Policy(make_model())
    if accelerator.num_processes > 1:
        fully_shard(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    mine = make_examples(6, completions=1)[accelerator.process_index :: accelerator.num_processes]
    batches, weightings = [collate(mine[:1]), collate(mine[1:])], {"nll": (1.0, token_mean)}
    metrics = train_step(
        accelerator, policy, optimizer, batches, objective, weightings, max_grad_norm=1.0
    )
    if accelerator.is_main_process:
        torch.save(metrics, Path(directory, f"{os.environ.get('WORLD_SIZE', '1')}.pt"))
