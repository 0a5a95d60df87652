"""Reports of a run: ``metrics.jsonl`` and trackers, a line for each step, and a plot of the metrics
at the end.
"""

import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..config import Common
from ..lines import damaged_of, lines_of, parse, sift
from .checkpoint import writing
from .storage import sync
from .trackers import for_trackers, open_trackers

log = logging.getLogger(__name__)

_UNSYNCED = 1.0  # seconds of a journal that a power cut may take
_HEADLINES = ("loss", "nll", "reward", "accuracy", "rewards/accuracies", "rewards/margins")
_SHOWN = (*_HEADLINES, "grad_norm", *(f"eval/{name}" for name in _HEADLINES))
_QUIET = 10.0  # seconds between lines where there is no terminal to draw a bar on

_NOT_DRAWN = {"step", "seconds", "tokens", "input_tokens", "skipped", "ranks/slowest"}
# The panels of the plot: loss and reward, then held-out metrics, then the rest of these.
_FIRST = (
    *("loss", "reward", "kl", "entropy", "grad_norm"),
    *("completions/mean_length", "learning_rate"),
)
_PANELS = 12
_PANEL = (4.0, 2.6)  # inches

MetricsLine = dict[str, float]  # a line of metrics.jsonl: numbers by name, "step" among them
Curves = dict[str, dict[str, list[tuple[int, float]]]]  # metric -> data set -> (step, value)


@contextmanager
def journal(
    directory: Path | None,
    start: int,
    steps: int,
    accelerator: Accelerator,
    config: Common,
    *,
    steps_per_epoch: float,
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yield ``log(step, metrics)``: a line of ``metrics.jsonl``, the trackers, and a bar on a
    terminal, or elsewhere a line every few seconds. Lines logged after the step that a run resumes
    from are removed.

    Args:
        directory: None for trackers alone.
        steps_per_epoch: for the share of the data that was seen.
    """
    main = accelerator.is_main_process
    open_trackers(accelerator, config, start)
    num_tokens = 0.0
    lines: _Lines | None = None
    if directory is not None and main:
        lines = _Lines(directory / "metrics.jsonl", steps)
        num_tokens = _take_back(lines.path, start)
    display = _Display(start, steps, visible=main)

    def report(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal num_tokens
        numbers = _as_numbers(metrics)
        if lines is not None:
            lines.append(step, numbers)
        num_tokens += numbers.get("input_tokens", 0.0)
        totals: dict[str, float] = {}
        if "loss" in numbers:  # not of an evaluation before the first step
            totals = {"epoch": step / steps_per_epoch, "num_tokens": num_tokens}
        accelerator.log(for_trackers(step, {**numbers, **totals}), step=step)
        if step:
            display.show(step, numbers)

    try:
        with display:
            yield report
    finally:
        if lines is not None:
            lines.close()
        for tracker in accelerator.trackers:  # `end_training` would end the process group as well
            tracker.finish()


def _as_numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as JSON holds them: what a caller added may be numbers of numpy or torch."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        numbers[name] = value if isinstance(value, int | float) else float(value)
    return numbers


class _Lines:
    """Appends to ``metrics.jsonl``; a power cut takes the lines of a second at most."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path = path
        self.steps = steps
        self._unsynced = False
        self._synced = -math.inf  # when the file was last flushed to the disk

    def append(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write ``{"step": 7, "loss": 0.69, ...}``; raises as `writing` does."""
        with (
            writing(f"step {step} of metrics.jsonl", self.path.parent / "checkpoints"),
            self.path.open("a") as file,
        ):
            file.write(json.dumps({"step": step, **numbers}) + "\n")
            self._unsynced = True
            # Waiting for the disk after every line would take longer than a small model's step.
            if step == self.steps or time.monotonic() - self._synced > _UNSYNCED:
                file.flush()
                os.fsync(file.fileno())
                self._synced = time.monotonic()
                self._unsynced = False

    def close(self) -> None:
        if self._unsynced and self.path.is_file():
            sync(self.path)


class _Display:
    """Shows the main metrics: as a bar on a terminal, else as a line every few seconds.

    Args:
        visible: false on all ranks but the first, which show nothing.
    """

    def __init__(self, start: int, steps: int, *, visible: bool) -> None:
        self.steps = steps
        self.console = Console()
        self.has_bar = visible and self.console.is_terminal
        self.has_lines = visible and not self.console.is_terminal
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.bar = Progress(
            "step", *columns, "{task.description}", console=self.console, disable=not self.has_bar
        )
        self.task = self.bar.add_task("", total=steps, completed=start)
        self._shown = -math.inf  # when the last line was

    def __enter__(self) -> None:
        if self.has_bar:  # a disabled bar would print an empty line at its end
            self.bar.start()

    def __exit__(self, *error: object) -> None:
        if self.has_bar:
            self.bar.stop()

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        text = "  ".join(f"{name} {numbers[name]:.4g}" for name in _SHOWN if name in numbers)
        self.bar.update(self.task, completed=step, description=text)
        due = step == self.steps or time.monotonic() - self._shown > _QUIET
        if self.has_lines and due:
            self._shown = time.monotonic()
            self.console.print(f"step {step}/{self.steps}  {text}", soft_wrap=True)


def _take_back(path: Path, start: int) -> float:
    """Remove the lines after the step that a run resumes from, and set unreadable ones aside.

    A warning counts them.

    Returns:
        The number of tokens that the run has read.
    """
    num_tokens = 0.0
    last = 0

    def keep(line: bytes) -> bool:
        nonlocal num_tokens, last
        entry = parse_entry(line)
        step = int(entry["step"])
        if start == 0 or step > start:
            return False
        num_tokens += entry.get("input_tokens", 0.0)
        last = max(last, step)
        return True

    with writing(path.name, path.parent / "checkpoints"):
        damaged = sift(path, keep)
        path.touch()
        sync(path.parent)
    if damaged and start:
        log.warning(
            "metrics.jsonl: %d of its lines can't be read and are in %s now; the run goes on without them",
            *(damaged, damaged_of(path).name),
        )
    elif last < start:
        log.warning(
            "metrics.jsonl: it ends at step %d, and the run goes on from step %d", last, start
        )
    return num_tokens


def parse_entry(line: bytes) -> MetricsLine:
    """A line of the journal: numbers by their names, ``step`` among them.

    Raises:
        ValueError: if it is something else.
    """
    entry = parse(line)
    if not all(isinstance(value, int | float) for value in entry.values()):
        raise ValueError("wanted numbers")
    step = entry.get("step")
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"wanted a step, got {step!r}")
    return entry


def entries(path: Path) -> Iterator[MetricsLine]:
    """The readable lines of a journal, one at a time; none if it can't be read."""
    with suppress(OSError):
        for line in lines_of(path):
            with suppress(ValueError):
                yield parse_entry(line)


def written(directory: Path | None, start: int) -> Iterator[MetricsLine]:
    """The readable entries up to the step that a run resumes from; none of a run that begins."""
    if directory and start:
        for entry in entries(directory / "metrics.jsonl"):
            if entry["step"] <= start:
                yield entry


def draw_curves(metrics: Path, picture: Path) -> None:
    """Plot the main metrics, one panel each, unless none was measured more than once."""
    curves = most_important(read_curves(metrics))
    longest = 0
    for lines in curves.values():
        longest = max(longest, *map(len, lines.values()))
    if longest < 2:
        return
    from matplotlib.figure import Figure  # slow to import

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    width, height = _PANEL[0] * columns, _PANEL[1] * rows
    figure = Figure(figsize=(width, height))
    # Margins in inches: matplotlib's own layouts draw everything once more to find them.
    figure.subplots_adjust(
        0.65 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.35 / height, wspace=0.27, hspace=0.5
    )
    for i, (name, lines) in enumerate(curves.items()):
        axis = figure.add_subplot(rows, columns, i + 1)
        for label, points in lines.items():
            steps, values = zip(*points, strict=True)
            marker = "o" if label == "held out" else ""  # measured at some steps only
            axis.plot(steps, values, label=label, marker=marker, markersize=3)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.locator_params(nbins=5)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def read_curves(metrics: Path) -> Curves:
    """Steps and values by metric and data set: ``eval/loss`` shares a panel with ``loss``."""
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for line in entries(metrics):
        for name, value in line.items():
            if name not in _NOT_DRAWN and math.isfinite(value):
                measured_on = "held out" if name.startswith("eval/") else "training"
                point = (int(line["step"]), value)
                curves[name.removeprefix("eval/")][measured_on].append(point)
    return curves


def most_important(curves: Curves) -> Curves:
    """At most twelve: loss and reward, held-out metrics, the usual metrics of a policy, then the
    rest.

    A recipe that samples has forty metrics, which take longer to draw than some runs take to train.
    """

    def place(name: str) -> tuple[bool, bool, int]:
        known = _FIRST.index(name) if name in _FIRST else len(_FIRST)
        return known > _FIRST.index("reward"), "held out" not in curves[name], known

    return {name: curves[name] for name in sorted(curves, key=place)[:_PANELS]}
