"""One or two ranks that train a small vision-language model, of whose rows few have images."""

import json
import sys

from burnish.loops.config import Parallel
from burnish.loops.recipes import opener, settings


def letters(completion, images):
    """A reward that sees pictures."""
    size = images[0].width if images else 10
    return sum(map(ord, completion)) % size / size


def be_rank(model, data, output, shards, kind="sft"):
    plain = dict(
        model=model,
        data=data,
        output=output,
        steps=3,
        shuffle=False,
        learning_rate=1e-3,
        optimizer="sgd",
        dtype="float64",
        report_to="none",
        parallel=Parallel(dp_shard_size=int(shards)),
        hang_seconds=60.0,
    )
    if kind == "sft":
        config = settings.SFT(**plain, batch_size=2)
    else:
        config = settings.GRPO(
            **plain,
            rewards={letters: 1.0},
            prompts_per_rollout=2,
            group_size=3,
            max_tokens=6,
            show_every=0,
        )
    losses = [step.metrics["grad_norm"] for step in opener(kind)(config)]
    print(json.dumps(losses))


if __name__ == "__main__":
    be_rank(*sys.argv[1:])
