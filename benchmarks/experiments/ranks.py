"""What planning and data cost one of many ranks, with no other rank there: ``burnish bench ranks``.

    plan       seconds, and the peak of Python's and numpy's memory, of one rank's plan of a step (`data.Batches`): it
               is that of all ranks, worked out by each from the lengths alone, and so no message
    order      the same of the first step, which draws the permutation of an epoch
    examples   examples that this rank reads and collates in a step, and its share of the tokens over an even one
    numbers    float64 numbers that a step sums over ranks, counted while one is taken: denominators, metrics, votes

Examples have lognormal lengths, as conversations do.
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..operation import Json
from ..report import machine, say


def cost(work: Callable[[], object]) -> tuple[Any, float, float]:
    """The result, seconds, and MB at the peak of memory that was allocated meanwhile."""
    began = time.process_time()
    result = work()
    seconds = time.process_time() - began
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return result, seconds, peak


def planned(rows: int, ranks: int, batch_size: int) -> dict[str, float]:
    from ...data import Batches

    lengths = np.clip(np.random.default_rng(0).lognormal(6.0, 0.8, rows), 16, 8192).astype(np.int64)

    def batches() -> Batches:
        return Batches(
            lengths, batch_size=batch_size, micro_tokens=8192, seed=0, epochs=1, ranks=ranks
        )

    _, order_seconds, order_mb = cost(lambda: batches().indices(0))
    plan = batches()
    plan.indices(0)
    of_ranks, seconds, mb = cost(lambda: plan.plan(0))
    tokens = [sum(int(lengths[i]) for micro in rank for i in micro) for rank in of_ranks]
    return {
        "plan seconds": seconds,
        "plan MB": mb,
        "order seconds": order_seconds,
        "order MB": order_mb,
        "examples": float(sum(map(len, of_ranks[0]))),
        "micro-batches": float(len(of_ranks[0])),
        "most tokens over the mean": max(tokens) * ranks / sum(tokens),
    }


def summed_numbers(micro_batches: int, examples: int) -> dict[str, float]:
    """Collectives of one `train_step`, and the numbers in them."""
    from accelerate import Accelerator

    from ...data import Example
    from ...loops import collate, token_mean, train_step
    from ...objectives import nll

    accelerator, sizes = Accelerator(cpu=True), []
    reduce = accelerator.reduce

    def counted(tensor: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, **options)

    accelerator.reduce = counted
    model = torch.nn.Embedding(100, 1)
    batch = collate([Example([1], [[2, 3]], [[True, True]])] * examples)
    train_step(
        accelerator,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [batch] * micro_batches,
        lambda policy, batch: {"nll": nll(policy(batch.target)[:, 0])},
        {"nll": (1.0, token_mean)},
        max_grad_norm=1.0,
    )
    return {"collectives": float(len(sizes)), "numbers": float(sum(sizes))}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="burnish bench ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--per_rank", type=int, default=16, help="examples of a step on each rank")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench"), help="directory of ranks.json"
    )
    options = parser.parse_args(arguments)
    report: Json = {"machine": machine(torch.device("cpu")), "figures": {}}
    for rows in options.rows:
        for ranks in options.ranks:
            name = f"{rows:,} rows, {ranks} ranks, {ranks * options.per_rank} examples a step"
            report["figures"][name] = planned(rows, ranks, ranks * options.per_rank)
    for micro_batches, examples in ((1, 1), (8, 1), (8, 64)):
        name = f"a step of {micro_batches} micro-batches of {examples} examples"
        report["figures"][name] = summed_numbers(micro_batches, examples)
    for name, figures in report["figures"].items():
        say(f"{name:50}" + "".join(f"  {key} {value:.3g}" for key, value in figures.items()))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "ranks.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0
