"""One run and its directory: configuration, metrics, checkpoints, curves, and the loop body that writes them.

config.yaml      the resolved configuration
metrics.jsonl    one JSON object per step
checkpoints/     see `checkpoint`
model/           the trained model, as transformers loads it; adapter/ beside it where adapters were trained
curves.png       the metrics over the steps
"""

import dataclasses
import errno
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
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
from ..train.step import Objective, evaluate, optimize
from ..train.weighting import Weightings
from . import checkpoint
from .curves import draw_curves
from .progress import progress

log = logging.getLogger(__name__)

# What may differ when a run is resumed: none of it changes the steps that were already taken.
_FREE = {"resume", "steps", "epochs", "eval_every", "save_every", "report_to", "vllm"}


Evaluation = Callable[[int], Mapping[str, float]]


@runtime_checkable
class Steps(Protocol):
    """This rank's micro-batches of each of so many steps: a `Feed`, or `RolloutFeed`."""

    @property
    def steps(self) -> int: ...

    def __call__(self, step: int) -> Sequence[Batch]: ...


class StepMemory(checkpoint.Memory, Protocol):
    """A memory that is told the metrics of every step."""

    def observe(self, metrics: Mapping[str, float]) -> None: ...


class RunError(ValueError):
    """The run directory can't be used as asked."""


class Run:
    """An open run directory and its `Accelerator`.

    Raises:
        RunError: if the directory holds another run, or holds a run and ``config.resume`` is false.
    """

    def __init__(self, config: Common) -> None:
        self.config = config
        self.directory = Path(config.output)
        AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
        self.accelerator = Accelerator(
            mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
            log_with=config.report_to,
            project_dir=config.output,
        )
        self.accelerator.gradient_state._set_sync_gradients(True)  # one that died between two micro-batches
        set_seed(config.seed)
        self._check_directory()

    def _check_directory(self) -> None:
        path = self.directory / "config.yaml"
        if not path.exists():
            return
        if not self.config.resume:
            raise RunError(
                f"output: {self.directory} already holds a run; go on with it (--resume true) or name another directory"
            )
        before, now = yaml.safe_load(path.read_text()), yaml.safe_load(to_yaml(self.config))
        for key in now:
            if key not in _FREE and before.get(key) != now[key]:
                raise RunError(
                    f"resume: {self.directory} was run with {key}={before.get(key)!r}, now it is {now[key]!r}; "
                    "set it back, or name another output directory"
                )

    def train(
        self,
        policy: Backbone,
        tokenizer: PreTrainedTokenizerBase,
        feed: Steps,
        objective: Objective,
        weightings: Weightings,
        *,
        evaluation: Steps | Evaluation | None = None,
        memory: StepMemory | None = None,
        report: Callable[[], Mapping[str, float]] = dict,
    ) -> dict[str, float]:
        """Optimize, evaluate, save and report; returns the metrics of the last step.

        Args:
            evaluation: what the losses are measured on, or ``evaluation(steps taken)``, which gives other metrics.
            memory: what is remembered from step to step, and in checkpoints.
            report: further metrics of the step that was just taken.
        """
        config, accelerator = self.config, self.accelerator
        accelerator.wait_for_everyone()  # every rank has looked at the directory before the main process writes to it
        if accelerator.is_main_process:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "config.yaml").write_text(to_yaml(config))
        trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        adamw = torch.optim.AdamW(trainable, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        schedule = _schedule(config, adamw, feed.steps)
        prepared, optimizer = accelerator.prepare(policy, adamw)
        parts: dict[str, Any] = {
            "accelerator": accelerator,
            "policy": prepared,
            "optimizer": optimizer,
            "schedule": schedule,
        }
        checkpoints = self.directory / "checkpoints"
        start = checkpoint.load_newest(checkpoints, **parts, memory=memory) if config.resume else 0
        journal = Journal(self.directory, start, accelerator)

        def held_out(taken: int) -> dict[str, float]:
            assert evaluation is not None
            metrics: Mapping[str, float]
            if isinstance(evaluation, Steps):
                metrics = evaluate(accelerator, prepared, evaluation(0), objective, weightings)
            else:
                metrics = evaluation(taken)
            return {f"eval/{name}": value for name, value in metrics.items()}

        metrics: dict[str, float] = {}
        with closing(journal), progress(feed.steps, start, visible=accelerator.is_main_process) as show:
            if evaluation is not None and start == 0:
                journal.write(0, held_out(0))
            for step in optimize(
                batches=feed,
                objective=objective,
                weightings=weightings,
                steps=feed.steps,
                start=start,
                max_grad_norm=config.max_grad_norm,
                **parts,
            ):
                metrics = {**step.metrics, **report()}
                if memory is not None:
                    memory.observe(metrics)
                last = step.number == feed.steps
                if evaluation is not None and (last or _due(step.number, config.eval_every)):
                    metrics = {**metrics, **held_out(step.number)}
                journal.write(step.number, metrics)
                show(step.number, metrics)
                if last or _due(step.number, config.save_every):
                    checkpoint.save(checkpoints, step.number, **parts, memory=memory)
        if accelerator.is_main_process:
            self._finish(accelerator.unwrap_model(prepared), tokenizer)
        accelerator.wait_for_everyone()
        return metrics

    def _finish(self, policy: Backbone, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            save_model(policy, tokenizer, self.directory)
        except Exception as error:
            if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
                free = shutil.disk_usage(self.directory).free / 2**20
                raise checkpoint.CheckpointError(
                    f"the disk is full ({free:.0f} MiB free): the model could not be written to {self.directory}, its "
                    "last checkpoint is whole; make room and start again with --resume true"
                ) from error
            raise
        draw_curves(self.directory / "metrics.jsonl", self.directory / "curves.png")


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


def _schedule(config: Common, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    warmup = round(config.warmup * steps) if config.warmup < 1 else int(config.warmup)
    name = "constant_with_warmup" if config.schedule == "constant" and warmup else config.schedule
    schedule: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=steps
    )
    return schedule


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
