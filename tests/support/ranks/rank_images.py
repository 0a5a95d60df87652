"""One or two ranks that train a small vision-language model, of whose rows few have images."""

import json
import sys

from burnish.loops.config import Parallel
from burnish.loops.recipes import opener, settings


def be_rank(model, data, output, shards, dtype="float64"):
    config = settings.SFT(
        model=model,
        data=data,
        output=output,
        steps=3,
        batch_size=2,
        shuffle=False,
        learning_rate=1e-3,
        optimizer="sgd",
        dtype=dtype,
        report_to="none",
        parallel=Parallel(dp_shard_size=int(shards)),
        hang_seconds=60.0,
    )
    losses = [step.metrics["loss"] for step in opener("sft")(config)]
    print(json.dumps(losses))


if __name__ == "__main__":
    be_rank(*sys.argv[1:])
