"""Our recipes and the peer's trainers on the same model, examples, order and hyper-parameters, each in its own process.

Both train in float32 with AdamW (0.9, 0.999, 1e-8, no decay), a constant rate and clipping at 1.0. A step is all that
happens between two calls of the optimizer, so that the first one is not timed. Who does not agree with the peer is
reported as failed and not compared: losses of every step must be within 1e-4 where both are given the same answers;
where each draws answers of its own, see `sampled`.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import sampled
from .real_model import preference_pairs, smollm2, write_jsonl
from .report import load

PEER = "trl"
AGREEMENT = 1e-4
Rows = Iterator[dict[str, Any]]
Metrics = list[dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """One of our recipes beside the trainer that does the same.

    Args:
        rows: examples from preference pairs; as many as there are.
        ours: fields of its configuration.
        trainer: the name of the peer's trainer.
        theirs: fields of its configuration.
        providers: besides the peer as it comes, without checkpointing, and ours; with the fields that they change.
        answers: how many and how long the answers are that each side draws; None where both are given them.
        model: ``model(given, directory)`` is where the model is, which may be written to that directory.
    """

    rows: Callable[[Rows], Rows]
    ours: dict[str, Any]
    trainer: str
    theirs: dict[str, Any]
    providers: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: sampled.Answers | None = None
    model: Callable[[Path | None, Path], Path] = lambda given, directory: given or smollm2()

    def names(self) -> tuple[str, ...]:
        return (PEER, "trl without checkpointing", "burnish", *self.providers)

    def fields(self, provider: str) -> dict[str, Any]:
        """Those that this provider changes."""
        return {"trl without checkpointing": {"gradient_checkpointing": False}, **self.providers}.get(provider, {})


def answers(pairs: Rows) -> Rows:
    """The chosen side, as prompt and completion: loss is on the completion, here and there."""
    for pair in pairs:
        yield {"prompt": pair["prompt"], "completion": pair["chosen"]}


def judged(pairs: Rows) -> Rows:
    """Alternately the right answer to a question, and the wrong one to the next."""
    for i, pair in enumerate(pairs):
        kind = ("chosen", "rejected")[i % 2]
        yield {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}


RECIPES = {
    "dpo": Recipe(
        lambda pairs: pairs,
        {"reference": "copy"},
        "DPO",
        {"beta": 0.1},
        {"burnish precompute": {"reference": "precompute"}},
    ),
    "sft": Recipe(answers, {}, "SFT", {}),
    # Not with the loss `kto`: each side pairs prompts with other answers of its own for z0.
    "kto": Recipe(
        judged,
        {"reference": "copy", "loss": "apo_zero_unpaired"},
        "KTO",
        {"beta": 0.1, "loss_type": "apo_zero_unpaired"},
        {"burnish precompute": {"reference": "precompute"}},
    ),
    "grpo": Recipe(
        sampled.questions,
        {
            "old": "recomputed",
            "group_size": 8,
            "max_tokens": 64,
            "max_length": None,
            "rewards": {f"{sampled.__name__}:vowels": 1.0},
        },
        "GRPO",
        {
            "per_device_train_batch_size": 8,  # its default; without a GPU it makes logits of every token of these rows
            "num_generations": 8,
            "max_completion_length": 64,
            "loss_type": "grpo",
            "shuffle_dataset": False,
        },
        {"burnish by groups": {"micro_tokens": 1024}},
        sampled.Answers(group=8, tokens=64),
        sampled.talkative,
    ),
}


def train_burnish(
    model: Path,
    data: Path,
    batch_size: int,
    steps: int,
    learning_rate: float = 1e-6,
    recipe: str = "dpo",
    **fields: Any,
) -> Metrics:
    """Metrics of each step."""
    from ..loops.recipes import dpo, grpo, kto, settings, sft

    run: Any
    make: Any
    run, make = {
        "dpo": (dpo.dpo, settings.DPO),
        "sft": (sft.sft, settings.SFT),
        "kto": (kto.run_kto, settings.KTO),
        "grpo": (grpo.run_grpo, settings.GRPO),
    }[recipe]
    with tempfile.TemporaryDirectory() as directory:
        common = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate}
        fixed = {"schedule": "constant", "shuffle": False, "output": directory}
        config = make(model=str(model), data=str(data), **(common | fixed | RECIPES[recipe].ours | fields))
        run(config)
        return [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]


def train_trl(
    model: Path,
    data: Path,
    batch_size: int,
    steps: int,
    learning_rate: float = 1e-6,
    recipe: str = "dpo",
    rollout: Callable[..., Any] | None = None,
    **fields: Any,
) -> Metrics:
    """Metrics of each step of the peer's trainer, with its defaults where nothing is said.

    Args:
        rollout: what gives it answers, which it draws itself otherwise.
    """
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    peer = RECIPES[recipe]
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = batch_size * (peer.answers.group if peer.answers else 1)
    given: dict[str, Any] = {"reward_funcs": sampled.vowels, "rollout_func": rollout} if peer.answers else {}
    with tempfile.TemporaryDirectory() as output:
        settings = {
            "output_dir": output,
            "per_device_train_batch_size": rows,
            "max_steps": steps,
            "learning_rate": learning_rate,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1.0,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.0,
            "train_sampling_strategy": "sequential",
            "bf16": False,
            "use_cpu": not torch.cuda.is_available(),
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **peer.theirs,
            **fields,
        }
        settings["gradient_accumulation_steps"] = rows // settings["per_device_train_batch_size"]
        trainer = getattr(trl, f"{peer.trainer}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            train_dataset=load_dataset("json", data_files=str(data), split="train"),
            args=getattr(trl, f"{peer.trainer}Config")(**settings),
            **given,
        )
        trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@contextmanager
def clock() -> Iterator[list[tuple[float, float]]]:
    """What the wall's clock and that of all processors show after each call of an optimizer."""
    marks: list[tuple[float, float]] = []
    hook = register_optimizer_step_post_hook(lambda *call: marks.append((time.perf_counter(), time.process_time())))
    try:
        yield marks
    finally:
        hook.remove()


def run_provider(
    recipe: str, provider: str, model: Path, data: Path, batch_size: int, steps: int, evidence: Path | None = None
) -> dict[str, Any]:
    """Train.

    Args:
        evidence: where the gradient of the first step is kept, and the answers that it is of.
    """
    chosen = RECIPES[recipe]
    fields, train = dict(chosen.fields(provider)), train_trl if provider.startswith(PEER) else train_burnish
    if train is train_trl:
        getattr(importlib.import_module("trl"), f"{chosen.trainer}Trainer")
    else:
        importlib.import_module("burnish.loops.cli")
    imported = _peak_mib()
    if evidence is not None:
        if train is train_trl:
            fields |= {"rollout": sampled.replay(next(evidence.glob(f"*/{sampled.SAMPLES}"))), "max_grad_norm": 0.0}
        else:
            fields |= {"output": str(evidence / provider), "max_grad_norm": float("inf")}
    with clock() as marks, sampled.gradient_kept(evidence / f"{provider}.pt") if evidence else nullcontext():
        metrics = train(model, data, batch_size, steps, recipe=recipe, **fields)
    wall, processors = ([b - a for a, b in pairwise(times)] for times in zip(*marks, strict=True))
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else _peak_mib()
    return {
        "losses": [line["loss"] for line in metrics],
        "whole": chosen.answers is None or sampled.whole(metrics, chosen.answers),
        "seconds": wall,
        "processor_seconds": processors,
        "imported_mib": imported,
        "peak_mib": peak,
    }


def _peak_mib() -> float:
    """Of this process until now; what `resource` tells of a child begins at its parent's."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1024


def in_own_process(
    recipe: str, provider: str, model: Path, data: Path, batch_size: int, steps: int, *evidence: Path
) -> dict[str, Any]:
    arguments = (recipe, provider, model, data, batch_size, steps, *evidence)
    command = [sys.executable, "-m", "burnish.benchmarks.trainers", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{provider} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(
    recipe: str, steps: int, batch_size: int, rounds: int, names: tuple[str, ...], model: Path | None = None
) -> dict[str, Any]:
    """Figures of every provider, over ``rounds`` interleaved processes each."""
    before, chosen = load(), RECIPES[recipe]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model = chosen.model(model, directory)
        data = write_jsonl(directory / "rows.jsonl", chosen.rows(preference_pairs(steps * batch_size, seed=0)))
        differences = gradient_differences(recipe, names, model, data) if chosen.answers else None
        for _ in range(rounds):
            for name in names:
                results[name].append(in_own_process(recipe, name, model, data, batch_size, steps))
    if differences is None:
        differences = {name: loss_difference(runs[0], results[PEER][0]) for name, runs in results.items()}
    return {
        "recipe": recipe,
        "model": model.name,
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": {"before": before, "after": load()},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl", "accelerate")},
        "steps": steps,
        "batch_size": batch_size,
        "answers": chosen.answers and chosen.answers._asdict(),
        "rounds": rounds,
        "figures": {name: figures(runs, differences.get(name), chosen.answers) for name, runs in results.items()},
    }


def loss_difference(ours: dict[str, Any], peer: dict[str, Any]) -> float:
    """The largest over all steps."""
    return float(max(abs(a - b) for a, b in zip(ours["losses"], peer["losses"], strict=True)))


def gradient_differences(recipe: str, names: Iterable[str], model: Path, data: Path) -> dict[str, float]:
    """Of ours to the peer, in a step on the same answers: in its loss or its gradient, whichever is more."""
    ours = [name for name in names if not name.startswith(PEER)] or ["burnish"]
    with tempfile.TemporaryDirectory() as directory:
        evidence = Path(directory)
        setting = (model, data, sampled.COMPARED, 1, evidence)
        losses = {name: float(in_own_process(recipe, name, *setting)["losses"][0]) for name in (*ours, PEER)}
        if len({sampled.drawn(evidence / name / sampled.SAMPLES) for name in ours}) > 1:
            raise RuntimeError(f"{' and '.join(ours)} did not draw the same answers")
        return {
            name: max(abs(loss - losses[PEER]), sampled.distance(evidence / f"{name}.pt", evidence / f"{PEER}.pt"))
            for name, loss in losses.items()
        }


def figures(runs: list[dict[str, Any]], difference: float | None, answers: sampled.Answers | None) -> dict[str, Any]:
    """Of the runs of one provider.

    Args:
        difference: from the peer; None for the peer in another setting.
    """
    agrees = difference is None or difference <= (sampled.AGREEMENT if answers else AGREEMENT)

    def over_runs(name: str) -> list[float]:
        return [seconds for run in runs for seconds in run[name]]

    return {
        "losses": runs[0]["losses"],
        "difference": difference,
        "agrees": agrees and all(run["whole"] for run in runs),
        "seconds_median": statistics.median(over_runs("seconds")),
        "seconds_min": min(over_runs("seconds")),
        "seconds_max": max(over_runs("seconds")),
        "processor_seconds_median": statistics.median(over_runs("processor_seconds")),
        "imported_mib": max(run["imported_mib"] for run in runs),
        "peak_mib": max(run["peak_mib"] for run in runs),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One provider in this process; what `burnish bench loops` starts.")
    kinds = {"recipe": str, "provider": str, "model": Path, "data": Path, "batch_size": int, "steps": int}
    for argument, kind in kinds.items():
        parser.add_argument(argument, type=kind)
    parser.add_argument("evidence", type=Path, nargs="?")
    print(json.dumps(run_provider(*vars(parser.parse_args()).values())))
