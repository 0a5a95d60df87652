"""A rank of a short run on conversations, from the command line, in so many shards."""

from burnish.loops.cli import main


def be_rank(start, data, output, shards):
    flags = ["--steps", "2", "--batch_size", "4", "--dtype", "bfloat16"]
    sharded = ["--parallel.dp_shard_size", str(shards)]
    assert (
        main(["sft", "--model", start, "--data", data, "--output", output, *flags, *sharded]) == 0
    )
