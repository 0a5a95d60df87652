"""Steps of a model with weights that no output depends on, by as many processes as there are
ranks.
"""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from burnish.loops.batch import collate, token_mean
from burnish.loops.models.policy import Policy
from burnish.loops.train.step import prepare, train_step
from safetensors.torch import save_file
from tiny import make_examples, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def nll(policy, batch):
    return {"nll": (-policy(batch).logprob, {})}


def be_rank(directory, unused):
    """Take three steps in float32 and in bfloat16 autocast, and save the weights after them."""
    results = {}
    for precision in ("no", "bf16"):
        views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[views])
        model = make_model(dtype=torch.float32)
        if unused:
            model.base_model.layers[1].indexer = nn.Linear(3, 5)
        model.base_model.embed_tokens.requires_grad_(False)  # waits for no gradient
        policy = Policy(model)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1, weight_decay=0.1)
        policy, optimizer = prepare(accelerator, policy, optimizer)
        if isinstance(policy, DistributedDataParallel):
            assert policy.find_unused_parameters == unused and policy.gradient_as_bucket_view
        examples = make_examples(24, completions=1)
        for step in range(3):
            parts = [collate(examples[n : n + 2]) for n in range(8 * step, 8 * step + 8, 2)]
            mine = parts[accelerator.process_index :: accelerator.num_processes]
            train_step(
                accelerator,
                policy,
                optimizer,
                mine,
                nll,
                {"nll": (1.0, token_mean)},
                max_grad_norm=0.5,
            )
        named = accelerator.unwrap_model(policy).named_parameters()
        results |= {f"{precision}.{name}": weight.detach().clone() for name, weight in named}
        accelerator.state._reset_state()
    if os.environ.get("RANK", "0") == "0":
        save_file(results, Path(directory, f"{os.environ.get('WORLD_SIZE', '1')}.safetensors"))
