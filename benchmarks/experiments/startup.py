"""Seconds until the command line answers, of a one-step run, and of the demo:
``burnish bench startup``.

    command    wall and processor seconds of ``burnish --version``, ``--help``, a wrong flag, and ``burnish dpo --help``
    one step   of ``burnish dpo`` and ``burnish grpo`` on --model, over loading it, one step and saving it by themselves
    demo       wall and processor seconds of ``burnish demo``, and of its first training line

Every measurement is a process of its own; commands are medians over --rounds.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..operation import Json
from ..real_model import preference_pairs, write_jsonl
from ..report import machine, say

# the code that runs here; an installed script may be of another
BURNISH = [sys.executable, "-m", "burnish"]
ALONE = [sys.executable, "-m", f"{__package__}.startup"]
COMMANDS = {
    "burnish --version": ["--version"],
    "burnish --help": ["--help"],
    "burnish dpo --bta 0.1": [
        "dpo",
        "--model",
        "m",
        "--data",
        "d",
        "--output",
        "o",
        "--bta",
        "0.1",
    ],
    "burnish dpo --help": ["dpo", "--help"],
}


def timed(command: Sequence[str], first: str = "", wanted: int = 0) -> dict[str, float]:
    """Wall and processor seconds of a process, and the seconds until it prints a line that matches
    ``first``.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    seconds: dict[str, float] = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if first and "first line" not in seconds and re.search(first, line):
                seconds["first line"] = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode != wanted:
        output = "".join(lines)[-2000:]
        raise RuntimeError(
            f"{' '.join(command)[:200]} ended with status {process.returncode}:\n{output}"
        )
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - began, "cpu_seconds": cpu, **seconds}


def answers(rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    for name, flags in COMMANDS.items():
        runs = [
            timed([*BURNISH, *flags], wanted=2 if "--bta" in flags else 0) for _ in range(rounds)
        ]
        yield name, {key: median(run[key] for run in runs) for key in runs[0]}


def alone(recipe: str, model: str, data: str, output: str) -> None:
    """What no run of one step avoids, from our own parts: imports, load, one optimizer step and
    save.
    """
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ...data import Tokenization, encode_preference, example
    from ...loops import (
        LocalSource,
        Policy,
        RolloutBuffer,
        RolloutScheduler,
        SamplingParams,
        collate,
        frozen_copy,
        length_normalized,
        pair_mean,
        train_step,
    )
    from ...objectives import clipped_surrogate, dpo, group_advantage, sequence_sum

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = Policy(network)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    if recipe == "dpo":
        reference = frozen_copy(policy)
        pairs, _ = encode_preference(data, tokenizer, Tokenization(max_length=1024))
        batches = [collate([example(pairs, i) for i in range(len(pairs))])]

        def objective(policy: Any, batch: Any) -> Any:
            sums = (
                sequence_sum(x, batch.sequence, batch.sequences)
                for x in (policy(batch).logprob, reference(batch))
            )
            kinds = [side[batch.completion == i] for side in sums for i in (0, 1)]
            return {"dpo": dpo(*kinds, beta=0.1)}
    else:
        prompts = [json.loads(line) for line in Path(data).read_text().splitlines()]
        scheduler = RolloutScheduler(
            LocalSource(policy, tokenizer),
            prompts,
            group_size=4,
            sampling=SamplingParams(max_tokens=8),
        )
        scheduler.publish(policy)
        rollout = RolloutBuffer(scheduler.take(2))
        scores = rollout.score([lambda completion, answer: float(completion.strip() == answer)])
        rollout["advantage"] = group_advantage(scores.total, scores.group)[rollout.sequence]
        batches = rollout.micro_batches(8192)

        def objective(policy: Any, batch: Any) -> Any:
            columns = batch.columns["sampled_logp"], batch.columns["advantage"]
            return {
                "grpo": clipped_surrogate(
                    policy(batch).logprob, *columns, clip_low=0.2, clip_high=0.2
                )
            }

    weightings: Any = {
        "dpo": {"dpo": (1.0, pair_mean)},
        "grpo": {"grpo": (1.0, length_normalized)},
    }[recipe]
    train_step(Accelerator(), policy, optimizer, batches, objective, weightings, max_grad_norm=1.0)
    network.save_pretrained(output)
    tokenizer.save_pretrained(output)


def one_step(model: Path, directory: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """DPO on 8 pairs, GRPO on 4 completions of 8 tokens to each of 2 prompts; and the same work
    alone.
    """
    pairs = list(preference_pairs(8, seed=0))
    prompts = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in pairs]
    grpo = [
        "--prompts_per_rollout",
        "2",
        "--group_size",
        "4",
        "--max_tokens",
        "8",
        "--rewards",
        "{exact_match: 1.0}",
    ]
    flags = {"dpo": ["--batch_size", "8"], "grpo": [*grpo, "--show_every", "0"]}
    for recipe, rows in {"dpo": pairs, "grpo": prompts}.items():
        data, output = (
            str(write_jsonl(directory / f"{recipe}.jsonl", rows)),
            str(directory / recipe),
        )
        unavoidable = timed([*ALONE, recipe, str(model), data, f"{output}-alone"])
        yield f"{recipe}: load, step, save", unavoidable
        places = ["--model", str(model), "--data", data, "--output", output]
        run = timed([*BURNISH, recipe, *places, "--steps", "1", *flags[recipe]])
        ratios = {"ratio": "seconds", "cpu_ratio": "cpu_seconds"}
        yield (
            f"burnish {recipe}, one step",
            run | {name: run[key] / unavoidable[key] for name, key in ratios.items()},
        )


def demo(output: str) -> Iterator[tuple[str, dict[str, float]]]:
    yield "burnish demo", timed([*BURNISH, "demo", "--output", output], first=r"step +\d+/")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="burnish bench startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model", type=Path, help="directory of a model; without it no run of one step is measured"
    )
    parser.add_argument(
        "--demo", action=argparse.BooleanOptionalAction, default=False, help="run the demo, too"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench"), help="directory of startup.json"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    report: Json = {"machine": machine(torch.device("cpu")), "figures": {}}
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as name:
        measured = [answers(options.rounds)]
        if options.model:
            measured.append(one_step(options.model, Path(name)))
        if options.demo:
            measured.append(demo(f"{name}/demo"))
        for what, figures in chain(*measured):
            say(f"{what:24}" + "".join(f"  {key} {value:.2f}" for key, value in figures.items()))
            report["figures"][what] = figures
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "startup.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    alone(*sys.argv[1:])
