"""Our recipes and the peer's trainers on the same model, examples, order and hyper-parameters, each in its own process.

Both train in float32 with AdamW (0.9, 0.999, 1e-8, no decay), a constant rate and clipping at 1.0. The first step of a
process is not timed. Whose losses differ from the peer's by more than 1e-4 is reported as failed and not compared.
"""

import argparse
import datetime
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .real_model import preference_pairs, smollm2, write_jsonl
from .report import load

PEER = "trl"
AGREEMENT = 1e-4
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """One of our recipes beside the trainer that does the same.

    Args:
        rows: examples from preference pairs; as many as there are.
        ours: fields of its configuration.
        trainer: the name of the peer's trainer.
        theirs: fields of its configuration.
        providers: besides the peer as it comes, without checkpointing, and ours; with the fields that they change.
    """

    rows: Callable[[Rows], Rows]
    ours: dict[str, Any]
    trainer: str
    theirs: dict[str, Any]
    providers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        return (PEER, "trl without checkpointing", "burnish", *self.providers)


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
}


def train_burnish(
    model: Path,
    data: Path,
    batch_size: int,
    steps: int,
    learning_rate: float = 1e-6,
    recipe: str = "dpo",
    **fields: Any,
) -> list[dict[str, float]]:
    """Loss and seconds of each step."""
    from ..loops import dpo, kto, sft

    run: Any
    make: Any
    run, make = {"dpo": (dpo.dpo, dpo.DPO), "sft": (sft.sft, sft.SFT), "kto": (kto.run_kto, kto.KTO)}[recipe]
    with tempfile.TemporaryDirectory() as directory:
        common = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate}
        fixed = {"schedule": "constant", "shuffle": False, "output": directory}
        run(make(model=str(model), data=str(data), **common, **fixed, **(RECIPES[recipe].ours | fields)))
        lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
        return [{"loss": line["loss"], "seconds": line["seconds"]} for line in lines]


def train_trl(
    model: Path,
    data: Path,
    batch_size: int,
    steps: int,
    learning_rate: float = 1e-6,
    checkpointing: bool = True,
    recipe: str = "dpo",
) -> list[dict[str, float]]:
    """Loss and seconds of each step of the peer's trainer, with its defaults where nothing is said."""
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.began = 0.0
            self.steps: list[dict[str, float]] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps.append({"seconds": time.perf_counter() - self.began})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                self.steps[-1]["loss"] = logs["loss"]

    clock = Clock()
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    name = RECIPES[recipe].trainer
    with tempfile.TemporaryDirectory() as output:
        config = getattr(trl, f"{name}Config")(
            output_dir=output,
            per_device_train_batch_size=batch_size,
            max_steps=steps,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_epsilon=1e-8,
            weight_decay=0.0,
            train_sampling_strategy="sequential",
            gradient_checkpointing=checkpointing,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **RECIPES[recipe].theirs,
        )
        trainer = getattr(trl, f"{name}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            train_dataset=load_dataset("json", data_files=str(data), split="train"),
            args=config,
            callbacks=[clock],
        )
        trainer.train()
    return clock.steps


def run_provider(recipe: str, provider: str, model: Path, data: Path, batch_size: int, steps: int) -> dict[str, Any]:
    if provider.startswith(PEER):
        measured = train_trl(model, data, batch_size, steps, checkpointing=provider == PEER, recipe=recipe)
    else:
        fields = RECIPES[recipe].providers.get(provider, {})
        measured = train_burnish(model, data, batch_size, steps, recipe=recipe, **fields)
    peak: float = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    return {"steps": measured, "peak_mib": peak}


def in_own_process(recipe: str, provider: str, model: Path, data: Path, batch_size: int, steps: int) -> dict[str, Any]:
    arguments = (recipe, provider, model, data, batch_size, steps)
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
    model = model or smollm2()
    before = load()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as directory:
        rows = RECIPES[recipe].rows(preference_pairs(steps * batch_size, seed=0))
        data = write_jsonl(Path(directory) / "rows.jsonl", rows)
        for _ in range(rounds):
            for name in names:
                results[name].append(in_own_process(recipe, name, model, data, batch_size, steps))
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
        "rounds": rounds,
        "figures": {name: figures(runs, results[PEER]) for name, runs in results.items()},
    }


def figures(runs: list[dict[str, Any]], peer: list[dict[str, Any]]) -> dict[str, Any]:
    losses = [step["loss"] for step in runs[0]["steps"]]
    difference = max(abs(a - b["loss"]) for a, b in zip(losses, peer[0]["steps"], strict=True))
    seconds = [step["seconds"] for run in runs for step in run["steps"][1:]]
    return {
        "losses": losses,
        "loss_difference": difference,
        "agrees": difference <= AGREEMENT,
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "peak_mib": max(run["peak_mib"] for run in runs),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One provider in this process; what `burnish bench loops` starts.")
    kinds = {"recipe": str, "provider": str, "model": Path, "data": Path, "batch_size": int, "steps": int}
    for argument, kind in kinds.items():
        parser.add_argument(argument, type=kind)
    print(json.dumps(run_provider(*vars(parser.parse_args()).values())))
