"""GRPO on SmolLM2-135M-Instruct: sums of reasoning-gym, and how many it gets right of those it
never trained on.

    python -m burnish.benchmarks.experiments.reasoning [directory]    writes results/smollm2_grpo.json and .png

The prompt is the question alone, and the task's verifier scores the whole completion. The run is
kept in the directory, if one is named.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from ...loops.recipes.grpo import open_grpo
from ...loops.recipes.settings import GRPO
from ...loops.rewards.reasoning_gym import reasoning_gym_rows
from ...loops.rollouts.replay import read_samples
from ...loops.runs.report import draw_curves
from ..operation import Json
from ..real_model import smollm2, write_jsonl
from ..report import load, machine
from .common import RESULTS, read_metrics

TASK = {"task": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
TRAINED, HELD_OUT = 2048, 192
# The verifier alone is learned from; it gives a part of 1 where the right number stands in a longer
# text.
MEASURED = {"right": r"\A\s*(-?\d+)\.?\s*\Z", "first_number_right": r"(?s)\A.*?(-?\d+).*"}
REWARDS: dict[str, Any] = {"reasoning_gym": {"tag": ""}} | {
    name: {"function": "exact_match", "weight": 0.0, "extract": extract, "ignore": []}
    for name, extract in MEASURED.items()
}
SETTINGS: dict[str, Any] = {
    "rewards": REWARDS,
    "max_tokens": 6,
    "prompts_per_rollout": 10,
    "group_size": 8,
    "steps": 27,
    "dynamic_sampling": True,
    "learning_rate": 3e-5,
    "schedule": "linear",
    "warmup": 2,
    "eval_every": 9,
}
DRAWN = {"step", "entropy"} | {
    f"{kind}rewards/{name}/mean" for kind in ("", "eval/") for name in MEASURED
}
KEPT = DRAWN | {
    "rewards/reasoning_gym/mean",
    "eval/rewards/reasoning_gym/mean",
    "completions/clipped_ratio",
}
KEPT |= {"completions/mean_length", "groups_passed_over", "grad_norm", "learning_rate", "tokens"}
KEPT |= {"seconds", "sampling/seconds"}


def questions(trained: int, held_out: int) -> tuple[list[Json], list[Json]]:
    """Rows to train on, and others to measure on, all different, of which none is among the
    former.
    """
    options = {name: value for name, value in TASK.items() if name != "task"}

    def drawn(count: int, seed: int) -> list[Json]:
        rows: list[Json] = []
        for row in reasoning_gym_rows(
            str(TASK["task"]), count, seed=seed, instruction="", **options
        ):
            message: Any = row["prompt"][0]
            rows.append({**row, "prompt": message["content"]})
        return rows

    measured = list({row["prompt"]: row for row in drawn(2 * held_out, seed=1_000_000)}.values())[
        :held_out
    ]
    asked = {row["prompt"] for row in measured}
    return [row for row in drawn(trained, seed=0) if row["prompt"] not in asked], measured


def best_constant(rows: Sequence[Json]) -> Json:
    """The one answer that is right most often."""
    ((answer, count),) = Counter(row["answer"] for row in rows).most_common(1)
    return {"answer": answer, "right": count / len(rows)}


def train(directory: Path) -> Json:
    """Trains in ``directory``; returns the report."""
    trained, held_out = questions(TRAINED, HELD_OUT)
    config = GRPO(
        model=str(smollm2()),
        data=str(write_jsonl(directory / "data.jsonl", trained)),
        eval_data=str(write_jsonl(directory / "held_out.jsonl", held_out)),
        output=str(directory / "run"),
        **SETTINGS,
    )
    before, began = load(), (time.perf_counter(), time.process_time())
    open_grpo(config).train()
    minutes = {
        "wall": (time.perf_counter() - began[0]) / 60,
        "processor": (time.process_time() - began[1]) / 60,
    }
    steps = read_steps(directory / "run")
    settings = dataclasses.asdict(config)
    for name in ("model", "data", "eval_data", "output"):  # paths of this machine
        del settings[name]
    return {
        **machine(torch.device("cpu")),
        "cores": os.cpu_count(),
        "load": {"before": before, "after": load()},
        "minutes": minutes,
        "task": TASK,
        "questions": {"trained": len(trained), "held out": len(held_out)},
        "best constant answer": best_constant(held_out),
        "held out": summary(steps, len(held_out)),
        "settings": settings,
        "steps": steps,
    }


def read_steps(run: Path) -> list[Json]:
    """Metrics of every step.

    Rewards are those of all completions, of groups that were passed over too.
    """
    steps = [
        {name: value for name, value in line.items() if name in KEPT} for line in read_metrics(run)
    ]
    rewards: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for sample in read_samples(run / "samples.jsonl"):
        for name, score in sample.rewards.items():
            rewards[sample.oldest + 1, name].append(score if isinstance(score, float) else 0.0)
    for (step, name), scores in rewards.items():
        steps[step][f"rewards/{name}/mean"] = mean(scores)
    return steps


def summary(steps: Sequence[Json], count: int) -> Json:
    """Shares of the held-out questions before and after, and the binomial standard error of
    each.
    """
    found = {}
    for name in (f"rewards/{measured}/mean" for measured in REWARDS):
        shares = [steps[i][f"eval/{name}"] for i in (0, -1)]
        errors = [(share * (1 - share) / count) ** 0.5 for share in shares]
        found[name] = {"before": shares[0], "after": shares[1], "standard errors": errors}
    return found


def draw(steps: Sequence[Json], picture: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as name:
        kept = ({key: value for key, value in step.items() if key in DRAWN} for step in steps)
        draw_curves(write_jsonl(Path(name) / "metrics.jsonl", kept), picture)


def main(arguments: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as name:
        report = train(Path(arguments[0] if arguments else name))
    (RESULTS / "smollm2_grpo.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(report["steps"], RESULTS / "smollm2_grpo.png")
    print(json.dumps({name: report[name] for name in ("held out", "minutes")}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
