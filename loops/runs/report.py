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
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

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
_FIRST = (
    "loss",
    "reward",
    "kl",
    "entropy",
    "grad_norm",
    "completions/mean_length",
    "learning_rate",
)
_PANELS = 12
_PANEL = (4.0, 2.6)  # inches


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
    main, path = (
        accelerator.is_main_process,
        None if directory is None else directory / "metrics.jsonl",
    )
    open_trackers(accelerator, config, start)
    num_tokens = 0.0
    if path is not None and main:
        num_tokens = _take_back(path, start)
    console = Console()
    columns = (
        "step",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    disable = not (main and console.is_terminal)
    bar = Progress(*columns, "{task.description}", console=console, disable=disable)
    task = bar.add_task("", total=steps, completed=start)
    shown = -math.inf  # when the last line was
    unsynced = False
    synced = -math.inf  # when the journal was last flushed to the disk

    def report(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal num_tokens, shown, synced, unsynced
        numbers = {
            name: value if isinstance(value, int | float) else float(value)
            for name, value in metrics.items()
        }
        if path is not None and main:
            with (
                writing(f"step {step} of metrics.jsonl", path.parent / "checkpoints"),
                path.open("a") as file,
            ):
                file.write(json.dumps({"step": step, **numbers}) + "\n")
                unsynced = True
                if step == steps or time.monotonic() - synced > _UNSYNCED:
                    file.flush()
                    os.fsync(file.fileno())
                    synced, unsynced = time.monotonic(), False
        num_tokens += numbers.get("input_tokens", 0.0)
        totals = (
            {"epoch": step / steps_per_epoch, "num_tokens": num_tokens} if "loss" in numbers else {}
        )
        accelerator.log(for_trackers(step, {**numbers, **totals}), step=step)
        if step:
            text = "  ".join(f"{name} {numbers[name]:.4g}" for name in _SHOWN if name in numbers)
            bar.update(task, completed=step, description=text)
            if disable and main and (step == steps or time.monotonic() - shown > _QUIET):
                shown = time.monotonic()
                console.print(f"step {step}/{steps}  {text}", soft_wrap=True)

    try:
        with nullcontext() if disable else bar:
            yield report
    finally:
        if unsynced and path is not None and path.is_file():
            sync(path)
        for tracker in accelerator.trackers:  # `end_training` would end the process group as well
            tracker.finish()


def _take_back(path: Path, start: int) -> float:
    """Remove the lines after the step that a run resumes from, and set unreadable ones aside; a
    warning counts them.

    Returns:
        The number of tokens that the run has read.
    """
    num_tokens = 0.0
    last = 0

    def keep(line: bytes) -> bool:
        nonlocal num_tokens, last
        entry = parse_entry(line)
        if start == 0 or entry["step"] > start:
            return False
        num_tokens += entry.get("input_tokens", 0.0)
        last = max(last, entry["step"])
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


def parse_entry(line: bytes) -> dict[str, Any]:
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


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The readable lines of a journal, one at a time; none if it can't be read."""
    with suppress(OSError):
        for line in lines_of(path):
            with suppress(ValueError):
                yield parse_entry(line)


def written(directory: Path | None, start: int) -> Iterator[dict[str, Any]]:
    """The readable entries of a journal up to the step that a run resumes from; none of a run that
    begins.
    """
    if directory and start:
        yield from (
            entry for entry in entries(directory / "metrics.jsonl") if entry["step"] <= start
        )


def draw_curves(metrics: Path, picture: Path) -> None:
    """Plot the main metrics of ``metrics.jsonl``, one panel each, unless none was measured more
    than once.
    """
    curves = most_important(read_curves(metrics))
    if all(len(points) < 2 for lines in curves.values() for points in lines.values()):
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
            axis.plot(
                *zip(*points, strict=True),
                label=label,
                marker="o" if label == "held out" else "",
                markersize=3,
            )
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.locator_params(nbins=5)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def read_curves(metrics: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Steps and values by metric and data set; held-out metrics share a panel with their training
    counterpart.
    """
    curves: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in entries(metrics):
        for name, value in line.items():
            if name not in _NOT_DRAWN and math.isfinite(value):
                measured_on = "held out" if name.startswith("eval/") else "training"
                curves[name.removeprefix("eval/")][measured_on].append((line["step"], value))
    return curves


def most_important(curves: dict[str, Any]) -> dict[str, Any]:
    """At most twelve: loss and reward, held-out metrics, the usual metrics of a policy, then the
    rest.

    A recipe that samples has forty metrics, which take longer to draw than some runs take to train.
    """

    def place(name: str) -> tuple[bool, bool, int]:
        known = _FIRST.index(name) if name in _FIRST else len(_FIRST)
        return known > _FIRST.index("reward"), "held out" not in curves[name], known

    return {name: curves[name] for name in sorted(curves, key=place)[:_PANELS]}
