"""A rank of a short run of distillation from a teacher of another tokenizer, under bfloat16
autocast.
"""

from burnish.loops.cli import main


def be_rank(student, teacher, data, output, shards):
    told = ["--teacher.model", teacher, "--teacher.divergence", "gold"]
    flags = ["--steps", "2", "--batch_size", "6", "--micro_tokens", "60", "--dtype", "bfloat16"]
    place = ["--model", student, "--data", data, "--output", output]
    sharded = ["--parallel.dp_shard_size", str(shards)]
    assert main(["distill", *place, *told, *flags, *sharded]) == 0
