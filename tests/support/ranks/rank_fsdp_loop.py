"""Steps of `examples/embedding/fsdp_loop.py` on several ranks, and the weights that they end with."""

import runpy
from pathlib import Path

import torch
from tiny import make_model
from torch import distributed

LENGTH, STEPS, RATE = 9, 3, 0.5


def batch(ends):
    """Tokens, a mask of completions from the third token up to these ends, and advantages of rows."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 30, (len(ends), LENGTH), generator=generator)
    place = torch.arange(LENGTH)
    mask = (place >= 3) & (place < torch.tensor(ends)[:, None])
    return tokens, mask, torch.randn(len(ends), generator=generator, dtype=torch.float64)


def be_rank(example, ends, directory):
    """Two ranks: the first has three of the rows, the second has the others."""
    loop = runpy.run_path(example)
    distributed.init_process_group("gloo")
    first = distributed.get_rank() == 0
    policy = loop["shard"](make_model())
    optimizer = torch.optim.SGD(policy.parameters(), lr=RATE)
    tokens, mask, advantage = (x[:3] if first else x[3:] for x in batch(ends))
    with torch.no_grad():
        old_logp = policy(tokens, mask)
    for _ in range(STEPS):
        loop["grpo_step"](policy, optimizer, tokens, mask, old_logp, advantage)
    weights = {name: x.full_tensor() for name, x in policy.model.named_parameters()}
    if first:
        torch.save(weights, Path(directory, "weights.pt"))
    distributed.destroy_process_group()
