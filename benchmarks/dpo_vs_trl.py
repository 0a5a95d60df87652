"""DPO against the peer: same model, pairs, order and hyper-parameters; losses first, then seconds and memory.

    python -m burnish.benchmarks.dpo_vs_trl [--steps 6] [--batch_size 8] [--rounds 2] [--output results.json]

Both train SmolLM2-135M-Instruct in float32 on conversational pairs with AdamW (0.9, 0.999, 1e-8, no decay), a constant
rate of 1e-6, beta 0.1 and clipping at 1.0. Each provider runs in processes of its own, in turn; the first step of each
process is not timed. A provider whose losses differ from the peer's by more than 1e-4 is reported as failed and not
compared.
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .real_model import preference_pairs, smollm2, write_jsonl

PROVIDERS = ("trl", "trl without checkpointing", "burnish", "burnish precompute")
PEER = "trl"
AGREEMENT = 1e-4


def train_burnish(
    model: Path, data: Path, batch_size: int, steps: int, learning_rate: float = 1e-6, reference: str = "copy"
) -> list[dict[str, float]]:
    """Loss and seconds of each step."""
    from ..loops.dpo import DPO, dpo

    with tempfile.TemporaryDirectory() as directory:
        dpo(
            DPO(
                model=str(model),
                data=str(data),
                output=directory,
                steps=steps,
                batch_size=batch_size,
                learning_rate=learning_rate,
                schedule="constant",
                shuffle=False,
                reference=reference,  # type: ignore[arg-type]
            )
        )
        lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
        return [{"loss": line["loss"], "seconds": line["seconds"]} for line in lines]


def train_trl(
    model: Path, data: Path, batch_size: int, steps: int, learning_rate: float = 1e-6, checkpointing: bool = True
) -> list[dict[str, float]]:
    """Loss and seconds of each step of the peer's trainer, with its defaults where nothing is said."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

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
    with tempfile.TemporaryDirectory() as output:
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            processing_class=tokenizer,
            train_dataset=load_dataset("json", data_files=str(data), split="train"),
            args=DPOConfig(
                output_dir=output,
                per_device_train_batch_size=batch_size,
                max_steps=steps,
                learning_rate=learning_rate,
                lr_scheduler_type="constant",
                beta=0.1,
                max_grad_norm=1.0,
                adam_beta1=0.9,
                adam_beta2=0.999,
                adam_epsilon=1e-8,
                weight_decay=0.0,
                train_sampling_strategy="sequential",
                gradient_checkpointing=checkpointing,
                bf16=False,
                use_cpu=True,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            callbacks=[clock],
        )
        trainer.train()
    return clock.steps


def run_provider(provider: str, data: Path, batch_size: int, steps: int) -> dict[str, Any]:
    if provider.startswith("trl"):
        measured = train_trl(smollm2(), data, batch_size, steps, checkpointing=provider == "trl")
    else:
        reference = "precompute" if "precompute" in provider else "copy"
        measured = train_burnish(smollm2(), data, batch_size, steps, reference=reference)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"steps": measured, "peak_mib": peak}


def in_own_process(provider: str, data: Path, batch_size: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "burnish.benchmarks.dpo_vs_trl", "--provider", provider, "--data", str(data)]
    command += ["--batch_size", str(batch_size), "--steps", str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{provider} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(steps: int, batch_size: int, rounds: int, providers: tuple[str, ...] = PROVIDERS) -> dict[str, Any]:
    """Figures of every provider, over ``rounds`` interleaved processes each."""
    results: dict[str, list[dict[str, Any]]] = {provider: [] for provider in providers}
    with tempfile.TemporaryDirectory() as directory:
        data = write_jsonl(Path(directory) / "pairs.jsonl", preference_pairs(steps * batch_size, seed=0))
        for _ in range(rounds):
            for provider in providers:
                results[provider].append(in_own_process(provider, data, batch_size, steps))
    peer = results[PEER]
    figures = {}
    for provider, runs in results.items():
        losses = [step["loss"] for step in runs[0]["steps"]]
        difference = max(abs(a - b["loss"]) for a, b in zip(losses, peer[0]["steps"], strict=True))
        seconds = [step["seconds"] for run in runs for step in run["steps"][1:]]
        figures[provider] = {
            "losses": losses,
            "loss_difference": difference,
            "agrees": difference <= AGREEMENT,
            "seconds_median": statistics.median(seconds),
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "peak_mib": max(run["peak_mib"] for run in runs),
        }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl", "accelerate")}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": versions,
        "steps": steps,
        "batch_size": batch_size,
        "rounds": rounds,
        "figures": figures,
    }


def show(report: dict[str, Any]) -> None:
    table = Table("provider", "loss difference", "s/step", "of the peer's", "peak MiB", "of the peer's")
    peer = report["figures"][PEER]
    for provider, figure in report["figures"].items():
        if figure["agrees"]:
            time_ratio = f"{figure['seconds_median'] / peer['seconds_median']:.2f}"
            memory_ratio = f"{figure['peak_mib'] / peer['peak_mib']:.2f}"
        else:
            time_ratio = memory_ratio = "failed"
        table.add_row(
            provider,
            f"{figure['loss_difference']:.1e}",
            f"{figure['seconds_median']:.2f}",
            time_ratio,
            f"{figure['peak_mib']:.0f}",
            memory_ratio,
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--provider", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.provider:
        print(json.dumps(run_provider(options.provider, options.data, options.batch_size, options.steps)))
        return
    report = compare(options.steps, options.batch_size, options.rounds)
    show(report)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
