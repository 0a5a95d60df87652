"""The steps of an open run, one by one: the caller's loop around them is the callback system."""

import logging
import math
import statistics
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NoReturn

from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from ..batch import Batch
from ..config import Interval
from ..models.end_tokens import ends_of
from ..models.io import save_model
from ..registry import nearest
from ..train import optimizers
from ..train.losses import TensorReader, Term, compose, weightings
from ..train.step import StepResult, evaluate, optimize, prepare, sum_over_ranks
from . import checkpoint, hub, liveness, ranks, stop
from .card import write_cards
from .directory import lock_directory
from .feed import StepFeed, digest
from .liveness import at
from .ranks import barrier, from_main, watching
from .record import Entry, recorded
from .report import draw_curves, journal, written
from .storage import remove, sync

log = logging.getLogger(__name__)

# What a run leaves in its directory, to be flushed to the disk: directories, and the files in them.
_RESULTS = (
    *("model/**/*", "adapter/**/*", "critic/**/*", "*.safetensors"),
    *("model", "adapter", "critic"),
)


@dataclass(eq=False)
class _Running:
    """What is open while steps are taken.

    Attributes:
        received: how many signals of each kind this rank has received, see `stop.signals`.
        entry: what the record has of this start, on the main process; see `record.recorded`.
        uploads: to the Hub, on the main process of a run that has a repository.
        log: writes the metrics of a step.
        saved: when the last checkpoint was, by the clock.
        signal: the signal for which the run stops.
    """

    received: Mapping[str, float]
    entry: Entry
    uploads: hub.Uploads | None
    log: Callable[[int, Mapping[str, float]], None]
    saver: checkpoint.Saver
    saved: float
    signal: str | None = None


@dataclass(repr=False)
class Training:
    """A run that is ready.

    Its steps are taken while it is iterated over, or all of them by `train`.

        for step in training:       # a `StepResult`: number and metrics
            ...                     # your own code; `break` ends the run

    Metrics that the body adds to ``step.metrics`` are logged, too; then the step is saved, if it is
    due. A loop that is left early, by ``break``, ``return`` or an error, ends the run in order:
    with a checkpoint of that step and with the model as it is. With several ranks, one that leaves
    its loop ends all of them after the same step. With ``resume`` a run continues after the last
    saved step, whose body has run.

    Attributes:
        context: the `RunContext`: what is trained, on which ranks, and its settings.
        losses: all losses, including those that are only measured.
        read: computes the tensors of a batch that the losses take.
        feed: ``feed(step)`` gives the micro-batches of a step; see `StepFeed`. It is closed at the
            end of the run, however the run ends, or when the run is garbage-collected.
        save: writes further results beside the model; every rank calls it.
        state: what a checkpoint holds, as `checkpoint.save` takes it.
        start, step: number of steps taken by the run that is resumed, and in all.
        metrics: of the last step.
        best: the saved step whose ``keep_best`` is the best; None before there is one.
        uploaded: false if the run has ended, and its model is not on the Hub, as it should be.
    """

    context: Any  # whose module imports this one
    losses: Mapping[str, Term]
    read: TensorReader
    feed: StepFeed
    save: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        context, config = self.context, self.context.config
        optimizer: Any = optimizers.make_optimizer(config, context.model)
        schedule = optimizers.make_schedule(config, optimizer, self.feed.steps)
        policy, optimizer = prepare(context.accelerator, context.model, optimizer)
        parts: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule}
        if context.accelerator.scaler is not None:
            parts["scaler"] = context.accelerator.scaler
        if self.feed.stateful:
            parts["memory"] = self.feed
        if context.synced is not None:
            parts["reference"] = context.synced
        self.state = {"accelerator": context.accelerator, "policy": policy, "parts": parts}
        self._compare_data()
        self.objective = compose(self.losses, self.read)
        self.weightings = weightings(self.losses)
        self.directory = None if config.output is None else context.directory
        self.checkpoints = context.file("checkpoints") or Path()
        self.start = self.step = self._resumed() if config.resume else 0
        self.metrics: dict[str, float] = {}
        self.uploaded = True
        self._feed_seconds = 0.0
        self.best: int | None = None
        self.lowest = math.inf  # or the negative of the highest
        # Read on one rank: what the others see of a shared disk may be older, and they save
        # together or not at all.
        self.best, self.lowest = from_main(context.accelerator, self._find_best)
        self._unused = weakref.finalize(self, _drop, self.feed)  # unless it is iterated over

    def _compare_data(self) -> None:
        """Raise ValueError if ranks have different rows, or revisions of a model on the Hub."""
        context = self.context
        trained_on = digest(context.data)
        held_out = "" if context.eval_data is None else digest(context.eval_data)
        self.state["data"] = trained_on
        # What transformers notes of a model of the Hub; a directory has none.
        revision = getattr(context.model.plain.config, "_commit_hash", None)
        barrier()  # a rank that has ended is named there
        of_ranks = gather_object([((trained_on, held_out), revision)])
        rows, revisions = zip(*of_ranks, strict=True)
        if len(set(rows)) > 1:
            raise ValueError(
                "data: the rows differ between ranks, so that some would be trained on twice and others never; give "
                "all of them to every rank in the same order, shuffled with a seed if at all: each takes its share"
            )
        if len(set(revisions)) > 1:
            other = next(rank for rank, each in enumerate(revisions) if each != revisions[0])
            raise ValueError(
                f"model: rank {other} has loaded revision {revisions[other]} of it, rank 0 revision {revisions[0]}; "
                "download the same one on every machine"
            )

    def _find_best(self) -> tuple[int | None, float]:
        """On the main process, the best of the run that is resumed, and its value: of the steps
        that are saved.
        """
        for line in written(self.directory, self.start):
            step = int(line["step"])
            if step == 0 or checkpoint.path_of(self.checkpoints, step).exists():
                self._is_best(step, line)
        return self.best, self.lowest

    def _resumed(self) -> int:
        """Load the newest checkpoint and return its step; 0 if there is none, which is said.

        Raises:
            ValueError: if the run is to have fewer steps than it has taken.
        """
        step = checkpoint.load_newest(self.checkpoints, **self.state)
        if step > self.feed.steps:
            raise ValueError(
                f"resume: the run in {self.directory} has taken {step} steps, and is to have {self.feed.steps}; give "
                "as many steps or epochs at least, or name another output directory"
            )
        if step:
            optimizers.follow(self.state["parts"]["schedule"])
        elif self.context.accelerator.is_main_process:
            log.warning(
                "resume: there is nothing to resume in %s, so the run begins anew", self.directory
            )
        return step

    def __repr__(self) -> str:
        return f"<Training at step {self.start} of {self.feed.steps}: iterate over it, or call its train()>"

    @property
    def model(self) -> Any:
        """The trained transformers model, or peft's wrapper around it."""
        return self.context.model.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: PreTrainedTokenizerBase = self.context.tokenizer
        return tokenizer

    def train(self) -> dict[str, float]:
        """Take all steps; returns the metrics of the last one."""
        for _ in self:
            pass
        return self.metrics

    def __iter__(self) -> Iterator[StepResult]:
        """Take the steps.

        Raises:
            CheckpointError: if a checkpoint, or the model, could not be written.
            Stopped: after the step in which SIGINT, SIGTERM or SIGUSR1 reached any rank, which is
                saved.
        """
        config = self.context.config
        self._use_once()
        with closing(self.feed):
            with self._running() as run:
                if self.feed.evaluates and self.start == 0:
                    self._evaluate()
                    run.log(0, self.metrics)
                for step in self._optimize():
                    self._observe(step)
                    to_save = self._due(step.number, config.save_every)
                    if self._due(step.number, config.eval_every):
                        to_save |= self._evaluate()
                    left = True  # unless the caller asks for the next step
                    # Where a loop is left, Python closes this generator by an error at its yield.
                    with suppress(GeneratorExit), at("the body of the loop"):
                        yield StepResult(step.number, self.metrics, step.busy)
                        left = False
                    self._restore_accelerate()
                    if self._end_step(run, step, to_save=to_save, left=left):
                        break
                self._finish(run)
            if run.signal is not None and self.step < self.feed.steps:
                self._stop_for(run.signal)

    def _end_step(self, run: _Running, step: StepResult, *, to_save: bool, left: bool) -> bool:
        """Log and save a step, as all ranks decide together; true if the run ends with it."""
        busy = self._feed_seconds + step.busy
        votes = self._vote(run, to_save=to_save, left=left, busy=busy)
        run.log(step.number, self.metrics)
        if votes["failed"]:
            run.saver.wait()  # raises its error
        stops = run.signal is not None or votes["left"] > 0
        if votes["save"] or stops:
            self._save_checkpoint(run)
        return stops and step.number < self.feed.steps

    def _use_once(self) -> None:
        if not self._unused.detach():
            raise RuntimeError(
                f"training: it ended at step {self.step} of {self.feed.steps}; continue it in another run, by "
                "resume=True"
            )
        self._restore_accelerate()

    def _restore_accelerate(self) -> None:
        """Give Accelerate's shared state the values of this run, see `open_accelerator`."""
        AcceleratorState._shared_state.update(vars(self.context.accelerator.state))

    @contextmanager
    def _running(self) -> Iterator[_Running]:
        """Watch the other ranks, catch signals, lock the directory, open the journal, and wait for
        checkpoints.
        """
        context = self.context
        accelerator = context.accelerator
        config = context.config
        lines = journal(
            self.directory,
            self.start,
            self.feed.steps,
            accelerator,
            config,
            steps_per_epoch=float(self.steps_per_epoch),
        )
        # On a GPU the steps leave the processor free for a thread that writes.
        saver = checkpoint.Saver(background=accelerator.device.type != "cpu")
        # Left in the other order: checkpoints are on the disk before the record says that the run
        # has ended, and the lock is held until then.
        with (
            watching(),
            stop.signals(visible=accelerator.is_main_process) as received,
            lock_directory(config, context.description, accelerator),
            hub.uploading(self, received) as uploads,
            recorded(self) as entry,
            lines as log,
            closing(saver),
        ):
            yield _Running(received, entry, uploads, log, saver, saved=monotonic())

    def _optimize(self) -> Iterator[StepResult]:
        parts = self.state["parts"]
        return optimize(
            self.state["policy"],
            self._batches,
            self.objective,
            self.weightings,
            accelerator=self.context.accelerator,
            optimizer=parts["optimizer"],
            schedule=parts["schedule"],
            steps=self.feed.steps,
            start=self.start,
            max_grad_norm=self.context.config.max_grad_norm or math.inf,
            describe=self._describe,
        )

    def _batches(self, step: int) -> Sequence[Batch]:
        """The micro-batches of a step; the time for them, less that for others, is kept."""
        liveness.begin_step(step + 1)
        began = perf_counter()
        waited = ranks.seconds_waited()
        with at("reading"):
            micro_batches = self.feed(step)
        waited = ranks.seconds_waited() - waited
        self._feed_seconds = perf_counter() - began - waited
        return micro_batches

    def _observe(self, step: StepResult) -> None:
        """Take the metrics of a step, and show them to what has a state of its own."""
        self.step = step.number
        self.metrics = {**step.metrics, **self.feed.step_metrics()}
        self.feed.observe(self.metrics)
        if self.context.synced is not None:
            self.context.synced.observe(self.metrics)

    def _vote(self, run: _Running, *, to_save: bool, left: bool, busy: float) -> dict[str, float]:
        """Decide with all ranks what follows the step: what happens on one of them ends the run on
        all.

        Whether to save is for the main process to say: clocks differ. The time of each rank is
        added to the metrics.
        """
        accelerator = self.context.accelerator
        minutes = self.context.config.save_minutes
        clock = bool(minutes) and monotonic() - run.saved >= 60 * minutes
        of_this_rank: dict[str, float] = {
            **run.received,
            "left": left,
            "failed": run.saver.failed,
            "save": accelerator.is_main_process and (to_save or clock),
        }
        seconds = {f"seconds of {rank}": 0.0 for rank in range(accelerator.num_processes)}
        seconds[f"seconds of {accelerator.process_index}"] = busy
        # One sum for all of it: each collective takes as long as the slowest connection.
        votes = sum_over_ranks(accelerator, {**of_this_rank, **seconds})
        run.signal = next((name for name in run.received if votes[name]), None)
        if accelerator.num_processes > 1:
            self.metrics |= stragglers([votes[name] for name in seconds])
        return votes

    def _save_checkpoint(self, run: _Running) -> None:
        if self.directory is not None:
            self._end_with_tokens_of_stream()
            generation = getattr(self.context.model.plain, "generation_config", None)
            with at("saving"):
                run.saver.save(
                    self.checkpoints,
                    self.step,
                    **self.state,
                    keep=self.context.config.keep,
                    best=self.best,
                    end_tokens=ends_of(generation),
                )
                self._stage_upload(run)
        run.saved = monotonic()

    def _stage_upload(self, run: _Running) -> None:
        """Write the model of a checkpoint aside, and begin to upload it, if it is to be on the Hub.

        Every rank calls it.
        """
        context, accelerator = self.context, self.context.accelerator
        if context.config.hub.id is None or not from_main(accelerator, self._is_for_hub):
            return
        main = accelerator.is_main_process
        partial = context.directory / "hub" / ".partial"
        if main:
            remove(partial)
        weights = optimizers.evaluated_weights(self.state["parts"]["optimizer"], context.model)
        with checkpoint.writing("the model for the Hub", self.checkpoints), weights:
            save_model(context.model, context.tokenizer, partial, write=main)
        if run.uploads is not None:
            write_cards(self, run.entry, partial, self.step)
            run.uploads.stage(self.step, partial)

    def _is_for_hub(self) -> bool:
        """Whether the model of this checkpoint is to be on the Hub before the run ends."""
        if self.context.config.hub.every == "best":
            return self.best == self.step
        return self.context.config.hub.every == "checkpoint" and self.step < self.feed.steps

    def _finish(self, run: _Running) -> None:
        """Write the model, unless a signal has stopped the run before its last step."""
        run.saver.wait()
        if run.signal is None or self.step >= self.feed.steps:
            self._load_best()
            # a schedule-free optimizer then leaves the weights to evaluate
            self.state["parts"]["optimizer"].eval()
            with at("writing the model"):
                self._save_model(run)
        barrier()
        if self.context.stream is not None:
            self.context.accelerator.print(self.context.stream.accounting)

    def _load_best(self) -> None:
        """Take back the weights of the best step, if the run is to end with them.

        Every rank calls it.

        Raises:
            CheckpointError: if the checkpoint of that step is damaged.
        """
        if not self.context.config.load_best_model_at_end or self.best in (None, self.step):
            return
        accelerator = self.context.accelerator
        path = checkpoint.path_of(self.checkpoints, self.best)
        if problem := checkpoint.damage_on_ranks(path, accelerator):
            raise checkpoint.CheckpointError(
                f"load_best_model_at_end: the checkpoint of step {self.best} is damaged: {problem}; --resume true "
                "--load_best_model_at_end false writes the model of the last step"
            )
        optimizer = self.state["parts"]["optimizer"]
        restored = optimizer if optimizers.averages(optimizer) else None
        checkpoint.load_weights(path, accelerator.unwrap_model(self.state["policy"]), restored)

    def _stop_for(self, signal: str) -> NoReturn:
        advice = "" if self.directory is None else "; continue with --resume true"
        stopped = stop.Stopped(f"stopped at step {self.step} of {self.feed.steps}{advice}")
        stopped.code = stop.STATUS[signal]
        if self.context.accelerator.is_main_process:
            print(stopped, file=sys.stderr)
        raise stopped

    def _describe(self, step: int, micro_batches: list[int]) -> str:
        """Name rows of these micro-batches of all ranks.

        If there are none, rows of the whole step.
        """
        plan = self.feed.plan(step)
        if not any(gather_object(plan)):  # a feed of the caller's own that plans nothing
            return "look at what its feed gave"
        what = "the loss is not finite in a micro-batch of"
        examples = gather_object(list(chain.from_iterable(plan[i] for i in micro_batches)))
        if not examples:
            what = "its losses are finite, and its rows are"
            examples = gather_object(list(chain.from_iterable(plan)))
        rows = from_main(self.context.accelerator, lambda: self.context.name_rows(step, examples))
        return f"{what} {rows}"

    @property
    def steps_per_epoch(self) -> Fraction:
        """Steps that one pass over the data takes; the end of an epoch may lie within a step."""
        config = self.context.config
        if hasattr(config, "batch_size"):
            rows_per_step = Fraction(config.batch_size)
        else:
            rows_per_step = Fraction(config.prompts_per_rollout, config.steps_per_rollout)
        return len(self.context.data) / rows_per_step

    def _due(self, step: int, every: Interval | None) -> bool:
        """True after the last step, and after each that an interval of the settings ends with."""
        if step == self.feed.steps:
            return True
        if every is None:
            return False
        if every == "epoch":
            return step // self.steps_per_epoch > (step - 1) // self.steps_per_epoch
        period = math.ceil(every * self.feed.steps) if every < 1 else every
        return step % period == 0

    def evaluate(self, rows: object = None) -> dict[str, float]:
        """The metrics ``eval/...`` of the model as it is, on ``eval_data`` or on these rows.

        Every rank calls it.

        Args:
            rows: what ``eval_data`` may be: a list of rows, a file, a Dataset. Not in online
                recipes.

        Raises:
            ValueError: if there are neither rows nor ``eval_data``, or the recipe can't evaluate
                rows.
        """
        if rows is None and not self.feed.evaluates:
            raise ValueError(
                "evaluate: this run has no held-out data; give it some, eval_data=rows or eval_data=0.1"
            )
        self._restore_accelerate()
        with optimizers.evaluated_weights(self.state["parts"]["optimizer"], self.context.model):
            metrics = self.feed.evaluate(self._measure, rows)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def _measure(self, batches: list[Batch]) -> Mapping[str, float]:
        return evaluate(
            self.context.accelerator, self.state["policy"], batches, self.objective, self.weightings
        )

    def _evaluate(self) -> bool:
        """Add the metrics of held-out data, which a schedule may follow.

        True if they are the best so far.
        """
        with at("evaluating"):
            held_out = self.evaluate() if self.feed.evaluates else {}
        schedule = self.state["parts"]["schedule"]
        self.metrics |= held_out
        if self.step > 0 and isinstance(schedule, optimizers.AT_EVALUATION):
            schedule.step(held_out["eval/loss"])
        return self._is_best(self.step, held_out)

    def _is_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True if an evaluation after ``step`` has the lowest ``keep_best`` so far, or with
        ``max:`` the highest.

        Raises:
            ValueError: before the first step, if there is no such metric.
        """
        setting = self.context.config.keep_best or ""
        name = setting.removeprefix("max:")
        if setting and step == 0 and name not in metrics:
            raise ValueError(nearest("keep_best: no metric", name, metrics))
        value = to_lower(setting, metrics)
        better = step > 0 and value < self.lowest
        if better:
            self.best, self.lowest = step, value
        return better

    def _save_model(self, run: _Running) -> None:
        """Write the model, its card and the curves, and begin to upload them if they are to be on
        the Hub.
        """
        if self.directory is None:
            return
        main = self.context.accelerator.is_main_process
        self._end_with_tokens_of_stream()
        with checkpoint.writing("the model", self.checkpoints):
            # Every rank: the weights of a sharded model are gathered.
            save_model(self.context.model, self.context.tokenizer, self.directory, write=main)
            self.save()
            if main:
                _sync_results(self.directory)
        if main:
            draw_curves(self.directory / "metrics.jsonl", self.directory / "curves.png")
            write_cards(self, run.entry, self.directory, self._step_of_model)
            finished = "no steps were left; " if self.start >= self.feed.steps else ""
            print(f"{finished}the model{self._of_best_step()} is in {self.directory / 'model'}")
        if run.uploads is not None and self._ends_on_hub():
            run.uploads.begin(hub.Upload(self.directory, self._step_of_model, staged=False))

    @property
    def _step_of_model(self) -> int:
        """The step whose weights the run ends with: the last one, or the best one."""
        if self.context.config.load_best_model_at_end and self.best is not None:
            return self.best
        return self.step

    def _ends_on_hub(self) -> bool:
        """Whether the model at the end is to be on the Hub, where the best one may be already."""
        config = self.context.config
        return config.hub.every != "best" or config.load_best_model_at_end or self.best is None

    def _end_with_tokens_of_stream(self) -> None:
        """Rows of later steps of a stream may end with other tokens than the rows of the first."""
        if self.context.stream is not None:
            self.context.end_with(self.context.stream.accounting.end_tokens)

    def _of_best_step(self) -> str:
        """Which step the model is of, where it may not be the last."""
        config = self.context.config
        if not config.load_best_model_at_end:
            return ""
        if self.best is None:
            return f" of step {self.step} (no evaluation had a finite {config.keep_best})"
        return f" of step {self.best}, the best by {config.keep_best},"


def _sync_results(directory: Path) -> None:
    """Flush what a run leaves to the disk: files first, then the directories that name them."""
    for name in _RESULTS:
        for path in directory.glob(name):
            sync(path)
    sync(directory)


def to_lower(keep_best: str, metrics: Mapping[str, float]) -> float:
    """The value that the best step has the lowest of; nan where its metric was not measured."""
    name = keep_best.removeprefix("max:")
    value = metrics.get(name, math.nan)
    return value if name == keep_best else -value


def stragglers(seconds: Sequence[float]) -> dict[str, float]:
    """Metrics of the time of each rank in a step until it waits for the others' gradients.

    ranks/slowest           the rank that took longest
    ranks/excess_seconds    by how much longer than the median rank
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {
        "ranks/slowest": float(slowest),
        "ranks/excess_seconds": seconds[slowest] - statistics.median_low(seconds),
    }


def _drop(feed: StepFeed) -> None:
    """End a run whose steps were never taken."""
    liveness.end_run()
    feed.close()
