"""The peer's loss and trainers on given tensors and completions."""

from pathlib import Path
from typing import Any

import torch
from burnish.benchmarks.peer.sampled import replay
from burnish.benchmarks.peer.trl_losses import dpo_loss, make_rows
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def dpo_trainer_loss(tensors: list[Tensor], **settings: Any) -> Tensor:
    """TRL's DPO loss of completions of one token, whose log-probability is that of the whole
    completion.

    At β = 0.3, of chosen, rejected, ref_chosen and ref_rejected.
    """
    rows = make_rows(torch.cat(tensors[:2]).unsqueeze(1))
    return dpo_loss(rows, torch.cat(tensors[2:]), beta=0.3, **settings)


def replayed(trainer: type, samples: Path) -> type:
    """A trainer of the peer that samples, given the completions that were drawn on our side."""
    draw = replay(samples)

    class Replayed(trainer):  # type: ignore[misc]
        def _generate(self, *asked: Any) -> tuple[Any, ...]:
            twice = len(asked) > 1  # of the online DPO trainer: model, prompts, images
            prompts = [prompt for prompt in asked[1] for _ in range(2)] if twice else asked[0]
            drawn = draw(prompts, self)
            ids, tokens = drawn["prompt_ids"], drawn["completion_ids"]
            if twice:
                return (
                    *_padded([*ids[::2], *ids[1::2]], "left"),
                    *_padded([*tokens[::2], *tokens[1::2]], "right"),
                    None,
                )
            if trainer.__name__ == "DistillationTrainer":
                return ids, tokens, None, None, None
            texts = self.processing_class.batch_decode(tokens, skip_special_tokens=True)
            return ids, tokens, [[{"role": "assistant", "content": text}] for text in texts]

    return Replayed


def _padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """Tokens, and the mask of those that are no padding."""
    kinds = (
        [torch.tensor(row) for row in rows],
        [torch.ones(len(row), dtype=torch.long) for row in rows],
    )
    ids, mask = (pad_sequence(kind, batch_first=True, padding_side=side) for kind in kinds)
    return ids, mask
