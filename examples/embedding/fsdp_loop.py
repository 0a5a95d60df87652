"""GRPO in a plain loop under torch's FSDP2: `shard` a model of transformers, then take `grpo_step`
on each rank's own rows. Tokens and mask are [rows, length], log-probs flat, advantages one per row.

FSDP has the head's weight whole only inside forward of what it shards: log-probs come from there.
"""

import torch
from burnish.kernels import linear_logprob
from burnish.objectives import clipped_surrogate
from torch import distributed
from torch.distributed.fsdp import fully_shard


class Logprobs(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, mask):
        hidden = self.model.base_model(tokens, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings().weight
        here = mask[:, 1:]
        return linear_logprob(hidden[:, :-1][here], head, tokens[:, 1:][here]).logprob


def shard(model):
    for layer in model.base_model.layers:
        fully_shard(layer)
    return fully_shard(Logprobs(model))


def grpo_step(policy, optimizer, tokens, mask, old_logp, advantage):
    row = mask[:, 1:].nonzero()[:, 0]
    loss, stats = clipped_surrogate(policy(tokens, mask), old_logp, advantage[row], clip_high=0.28)
    count = torch.tensor(len(loss), device=loss.device)
    distributed.all_reduce(count)  # trained tokens of all ranks; FSDP takes the ranks' mean
    (loss.sum() / count * distributed.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return stats
