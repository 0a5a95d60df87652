# /// script
# requires-python = ">=3.11"
# dependencies = ["burnish[train]"]
# ///
"""A recipe as a job on a machine of Hugging Face, on all GPUs that it has:

    hf jobs uv run --flavor a100x4 --timeout 8h --attempts 3 --secrets HF_TOKEN \
        --volume hf://buckets/me/runs:/runs examples/hf_jobs.py dpo \
        --model Qwen/Qwen3-0.6B --data trl-lib/ultrafeedback_binarized \
        --output /runs/dpo --hub.id me/qwen-dpo --hub.private true

The machine's own disk is gone when the job ends, so the model goes to the Hub (--hub.id). What a run
leaves in a bucket (--output /runs/...) lets the next attempt go on from its newest checkpoint; without
one, --hub.every checkpoint keeps the newest weights.
"""

import subprocess
import sys

import torch

# burnish's own, and TRL's
REPOSITORY = ("--hub.id", "--hub_model_id", "--push_to_hub")


def main(words: list[str]) -> int:
    """Run burnish with these words; its exit status."""
    given = {word.partition("=")[0] for word in words}
    if given.isdisjoint(REPOSITORY):
        print("the disk of a job is gone at its end: pass --hub.id me/my-model", file=sys.stderr)
        return 2
    if not {"--output", "--output_dir"} & given:
        words = [*words, "--output", "run"]
    command = [sys.executable, "-m"]
    gpus = torch.cuda.device_count()
    if gpus > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", "-m"]
    return subprocess.run([*command, "burnish", *words, "--resume", "true"]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
