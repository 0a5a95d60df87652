"""A run and its directory: opening, logging, the schedule of the learning rate, and what is left at the end.

config.yaml      the resolved configuration
metrics.jsonl    one JSON object per step
checkpoints/     see `checkpoint`
model/           the trained model, as transformers loads it; adapter/ beside it where adapters were trained
curves.png       the metrics over the steps
"""

import dataclasses
import errno
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from transformers import PreTrainedTokenizerBase, get_scheduler

from ..batch import Batch
from ..config import Common
from ..models.backbone import Backbone
from ..models.io import save_model
from . import checkpoint
from .curves import draw_curves

# What may differ when a run is resumed: none of it changes the steps that were already taken.
_FREE = {"resume", "steps", "epochs", "eval_every", "save_every", "report_to", "vllm"}


@runtime_checkable
class Steps(Protocol):
    """This rank's micro-batches of each of so many steps: a `Feed`, or `RolloutFeed`."""

    @property
    def steps(self) -> int: ...

    def __call__(self, step: int) -> Sequence[Batch]: ...


class RunError(ValueError):
    """The run directory can't be used as asked."""


def open_accelerator(config: Common) -> Accelerator:
    """The `Accelerator` of a run whose directory is free, or holds the same run to go on with.

    Raises:
        RunError: if the directory holds another run, or holds a run and ``config.resume`` is false.
    """
    AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
    accelerator = Accelerator(
        mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
        log_with=config.report_to,
        project_dir=config.output,
    )
    accelerator.gradient_state._set_sync_gradients(True)  # one that died between two micro-batches
    set_seed(config.seed)
    _check_directory(config)
    return accelerator


def _check_directory(config: Common) -> None:
    path = Path(config.output) / "config.yaml"
    if not path.exists():
        return
    if not config.resume:
        raise RunError(
            f"output: {config.output} already holds a run; go on with it (--resume true) or name another directory"
        )
    before, now = yaml.safe_load(path.read_text()), yaml.safe_load(to_yaml(config))
    for key in now:
        if key not in _FREE and before.get(key) != now[key]:
            raise RunError(
                f"resume: {config.output} was run with {key}={before.get(key)!r}, now it is {now[key]!r}; "
                "set it back, or name another output directory"
            )


def finish(policy: Backbone, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the trained model and the curves.

    Raises:
        CheckpointError: if the disk is full.
    """
    try:
        save_model(policy, tokenizer, directory)
    except Exception as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            free = shutil.disk_usage(directory).free / 2**20
            raise checkpoint.CheckpointError(
                f"the disk is full ({free:.0f} MiB free): the model could not be written to {directory}, its "
                "last checkpoint is whole; make room and start again with --resume true"
            ) from error
        raise
    draw_curves(directory / "metrics.jsonl", directory / "curves.png")


class Journal:
    """``metrics.jsonl`` and the trackers. What was logged after the step that a run resumes from is taken back."""

    def __init__(self, directory: Path, start: int, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.trackers = bool(accelerator.log_with)
        if self.trackers:
            accelerator.init_trackers("logs")
        if accelerator.is_main_process:
            path = directory / "metrics.jsonl"
            kept = [line for line in _lines(path) if line["step"] <= start] if start else []
            partial = path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            partial.replace(path)
            self.file = path.open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.file.write(json.dumps({"step": step, **metrics}) + "\n")
            self.file.flush()
        if self.trackers:
            self.accelerator.log(dict(metrics), step=step)

    def close(self) -> None:
        if self.accelerator.is_main_process:
            self.file.close()
        if self.trackers:
            self.accelerator.end_training()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; a process that was killed may have left half a line at the end."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def to_yaml(config: Common) -> str:
    return str(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True))


def learning_rate_schedule(
    config: Common, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    warmup = round(config.warmup * steps) if config.warmup < 1 else int(config.warmup)
    name = "constant_with_warmup" if config.schedule == "constant" and warmup else config.schedule
    schedule: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=steps
    )
    return schedule


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
