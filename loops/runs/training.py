"""The steps of an open run, one by one: the caller's loop around them is the callback system."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, ParamSpec

from transformers import PreTrainedTokenizerBase

from ..models.io import save_model
from ..train import optimizers
from ..train.step import Objective, StepResult, evaluate, optimize, sum_over_ranks
from ..train.weighting import Weightings
from . import checkpoint, stop
from .directory import claimed
from .feed import Feed
from .ranks import gloo_group, meet, watching
from .report import Journal, draw_curves, progress, written

if TYPE_CHECKING:
    from .context import RunContext

P = ParamSpec("P")


@dataclass
class Training:
    """A run that is ready. Its steps are taken while it is iterated over, or all of them by `train`.

        for step in training:       # a `StepResult`: number and metrics
            ...                     # your own code; `break` ends the run

    What the body adds to ``step.metrics`` is logged with them; then the step is saved, if it is due. A loop that is
    left early, by ``break``, ``return`` or an error, ends the run in order: with a checkpoint of that step and with the
    model as it is. Where there are several ranks, one that leaves its loop ends all of them after the same step. With
    ``resume`` a run goes on after the last step that was saved, whose body has run.

    Attributes:
        context: what is trained, on which ranks, and its settings.
        state: what a checkpoint holds, as `checkpoint.save` takes it.
        start: steps that were taken before.
        save: writes what is left beside the model; every rank calls it.
        resources: closed at the end, however the run ends.
        metrics: of the last step.
    """

    context: "RunContext[Any]"
    feed: Any
    objective: Objective
    weightings: Weightings
    state: dict[str, Any]
    start: int
    evaluation: Feed | Callable[[int], Mapping[str, float]] | None
    memory: checkpoint.StepMemory | None
    report: Callable[[], Mapping[str, float]]
    save: Callable[[], None]
    resources: AbstractContextManager[Any]

    def __post_init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.directory = None if self.context.config.output is None else self.context.directory
        self.checkpoints = self.context.file("checkpoints") or Path()
        self.best, self.taken = checkpoint.Best(self.context.config.keep_best), False
        for line in map(json.loads, written(self.directory, self.start)):
            if line["step"] == 0 or checkpoint.path_of(self.checkpoints, line["step"]).exists():
                self.best.observe(line["step"], line)

    @property
    def model(self) -> Any:
        """The model of transformers that is trained, or that of peft around it."""
        return self.context.model.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.context.tokenizer

    def train(self) -> dict[str, float]:
        """Take all steps; returns the metrics of the last one."""
        for _ in self:
            pass
        return self.metrics

    def __iter__(self) -> Iterator[StepResult]:
        """Take the steps.

        Raises:
            CheckpointError: if a checkpoint, or the model, could not be written.
            Stopped: after the step in which SIGINT, SIGTERM or SIGUSR1 reached any rank, which is saved.
        """
        accelerator, config, steps = self.context.accelerator, self.context.config, self.feed.steps
        if self.taken:
            raise RuntimeError("training: its steps were taken; open a run with resume=True to go on with it")
        self.taken, signalled, parts = True, [], self.state["parts"]
        gloo_group("checkpoint")
        with self.resources:
            batch = getattr(config, "batch_size", None) or config.prompts_per_rollout / config.steps_per_rollout
            epoch = len(self.context.data) / batch
            with (
                watching(accelerator),
                stop.signals(visible=accelerator.is_main_process) as self.received,
                claimed(config, self.context.description) if accelerator.is_main_process else nullcontext(),
                closing(Journal(self.directory, self.start, accelerator, config, steps_per_epoch=epoch)) as journal,
                closing(checkpoint.Saver(background=accelerator.device.type != "cpu")) as self.saver,
                progress(steps, self.start, visible=accelerator.is_main_process) as show,
            ):
                self.saved = monotonic()
                if self.evaluation is not None and self.start == 0:
                    held_out = self._evaluate(0)
                    self.best.observe(0, held_out)
                    journal.write(0, held_out)
                for step in self._optimize():
                    signalled = [name for name in self.received if step.metrics.pop(name)]
                    if step.metrics.pop("unsaved"):
                        self.saver.wait()
                    to_save = step.metrics.pop("save") > 0 or self._due(step.number, config.save_every)
                    self.metrics = {**step.metrics, **self.report()}
                    if self.memory is not None:
                        self.memory.observe(self.metrics)
                    if self.context.synced is not None:
                        self.context.synced.observe()
                    if self._due(step.number, config.eval_every):
                        held_out = self._evaluate(step.number)
                        self.metrics |= held_out
                        if isinstance(parts["schedule"], optimizers.AtEvaluation):
                            parts["schedule"].observe(held_out)
                        to_save |= self.best.observe(step.number, held_out)
                    left = False
                    try:
                        yield StepResult(step.number, self.metrics)
                    except GeneratorExit:
                        left = True
                    left = sum_over_ranks(accelerator, {"left": float(left)})["left"] > 0
                    journal.write(step.number, self.metrics)
                    show(step.number, self.metrics)
                    if to_save or signalled or left:
                        self._save(step.number)
                    signalled = signalled if step.number < steps else []
                    if left or signalled:
                        break
                self.saver.wait()
                if not signalled:
                    parts["optimizer"].eval()  # a schedule-free one leaves the weights that are evaluated
                    self._save_model()
                meet(accelerator)
                if self.context.stream is not None:
                    accelerator.print(self.context.stream.accounting)
            if signalled:
                advice = "" if self.directory is None else "; go on with --resume true"
                stopped = stop.Stopped(f"stopped at step {step.number} of {steps}{advice}", stop.STATUS[signalled[0]])
                if accelerator.is_main_process:
                    print(stopped, file=sys.stderr)
                raise stopped

    def _optimize(self) -> Iterator[StepResult]:
        config, parts = self.context.config, self.state["parts"]

        def votes() -> dict[str, float]:
            by_clock = self.context.accelerator.is_main_process and bool(config.save_minutes)
            save = by_clock and monotonic() - self.saved >= 60 * config.save_minutes
            return {**self.received, "save": float(save), "unsaved": float(self.saver.failed)}

        return optimize(
            self.state["policy"],
            self.feed,
            self.objective,
            self.weightings,
            accelerator=self.context.accelerator,
            optimizer=parts["optimizer"],
            schedule=parts["schedule"],
            steps=self.feed.steps,
            start=self.start,
            max_grad_norm=config.max_grad_norm or math.inf,
            votes=votes,
        )

    def _due(self, step: int, every: int | None) -> bool:
        return step == self.feed.steps or (every is not None and step % every == 0)

    def _evaluate(self, step: int) -> dict[str, float]:
        with optimizers.evaluated_weights(self.state["parts"]["optimizer"], self.context.model):
            if isinstance(self.evaluation, Feed):
                batches, policy = self.evaluation(0), self.state["policy"]
                metrics: Mapping[str, float] = evaluate(
                    self.context.accelerator, policy, batches, self.objective, self.weightings
                )
            else:
                metrics = {} if self.evaluation is None else self.evaluation(step)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def _save(self, step: int) -> None:
        if self.directory is not None:
            self.saver.save(self.checkpoints, step, **self.state, keep=self.context.config.keep, best=self.best.step)
        self.saved = monotonic()

    def _save_model(self) -> None:
        if self.directory is None:
            return
        main = self.context.accelerator.is_main_process
        with checkpoint.writing("the model", self.checkpoints):
            save_model(self.context.model, self.context.tokenizer, self.directory, write=main)
            self.save()
        if main:
            draw_curves(self.directory / "metrics.jsonl", self.directory / "curves.png")


def to_the_end(open_recipe: Callable[P, Training]) -> Callable[P, dict[str, float]]:
    """The function that opens a run, takes all of its steps, and returns the metrics of the last one."""

    @wraps(open_recipe)
    def run(*args: P.args, **kwargs: P.kwargs) -> dict[str, float]:
        return open_recipe(*args, **kwargs).train()

    return run
