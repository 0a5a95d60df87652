"""A recipe on the workers of Ray Train, which restarts it after a worker was lost:

    python examples/ray_train.py --workers 8 dpo --config dpo.yaml --output /shared/runs/dpo

Ray gives every worker a GPU and torch's variables, which is all that burnish needs from a launcher;
checkpoints are burnish's own, in --output, which all machines must see.
"""

import argparse
import os
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def work(config: dict[str, Any]) -> None:
    """One rank. An exit status other than 0 is a failure, and Ray tries again."""
    os.environ.update(config["environment"])
    from burnish.loops.cli import main

    os.chdir(config["directory"])
    status = main([*config["words"], "--resume", "true"])
    if status:
        raise RuntimeError(f"burnish ended with status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1, help="ranks, each with a GPU")
    parser.add_argument("--cpu", action="store_true", help="ranks without a GPU")
    parser.add_argument("--failures", type=int, default=3, help="how often to begin again")
    parser.add_argument(
        "--storage", help="Ray's own directory, where all machines see it; not that of the run"
    )
    options, words = parser.parse_known_args()
    environment = {"ACCELERATE_USE_CPU": "true"} if options.cpu else {}
    TorchTrainer(
        work,
        train_loop_config={"words": words, "environment": environment, "directory": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=RunConfig(
            storage_path=options.storage, failure_config=FailureConfig(options.failures)
        ),
    ).fit()


if __name__ == "__main__":
    main()
