"""A rank of a short run of distillation from a teacher on a server, under bfloat16 autocast."""

from burnish.loops.cli import main


def be_rank(student, url, data, output, shards, *further):
    teacher = ["--teacher.server", url, "--teacher.top_k", "8"]
    flags = ["--steps", "2", "--batch_size", "4", "--micro_tokens", "60", "--dtype", "bfloat16"]
    place = ["--model", student, "--data", data, "--output", output]
    sharded = ["--parallel.dp_shard_size", str(shards)]
    assert main(["distill", *place, *teacher, *flags, *sharded, *further]) == 0
