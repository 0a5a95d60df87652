"""Reports of a run: ``metrics.jsonl`` and trackers, a line for each step, and a plot of the metrics at the end."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from ..config import Common
from .checkpoint import replace, writing
from .trackers import for_trackers, open_trackers

_TOLD = ("loss", "nll", "reward", "accuracy", "rewards/accuracies", "rewards/margins")
_SHOWN = (*_TOLD, "grad_norm", *(f"eval/{name}" for name in _TOLD))
_QUIET = 10.0  # seconds between lines where there is no terminal to draw a bar on

_NOT_DRAWN = {"step", "seconds", "tokens", "input_tokens", "skipped"}
_FIRST = ("loss", "reward", "kl", "entropy", "grad_norm", "completions/mean_length", "learning_rate")
_PANELS = 12
_PANEL = (4.0, 2.6)  # inches


@contextmanager
def journal(
    directory: Path | None, start: int, steps: int, accelerator: Accelerator, config: Common, *, steps_per_epoch: float
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Yield ``log(step, metrics)``: a line of ``metrics.jsonl``, the trackers, and a bar on a terminal, or elsewhere a
    line every few seconds. Lines logged after the step that a run resumes from are removed.

    Args:
        directory: None for trackers alone.
        steps_per_epoch: for the share of the data that was seen.
    """
    main, path = accelerator.is_main_process, None if directory is None else directory / "metrics.jsonl"
    open_trackers(accelerator, config, start)
    before = written(directory, start)
    num_tokens = sum(json.loads(line).get("input_tokens", 0.0) for line in before)
    if path is not None and main:
        replace(path, "".join(before))
    console = Console()
    columns = ("step", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    disable = not (main and console.is_terminal)
    bar = Progress(*columns, "{task.description}", console=console, disable=disable)
    task = bar.add_task("", total=steps, completed=start)
    shown = -math.inf  # when the last line was

    def log(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal num_tokens, shown
        numbers = {name: value if isinstance(value, int | float) else float(value) for name, value in metrics.items()}
        if path is not None and main:
            with writing(f"step {step} of metrics.jsonl", path.parent / "checkpoints"), path.open("a") as file:
                file.write(json.dumps({"step": step, **numbers}) + "\n")
        num_tokens += numbers.get("input_tokens", 0.0)
        totals = {"epoch": step / steps_per_epoch, "num_tokens": num_tokens} if "loss" in numbers else {}
        accelerator.log(for_trackers(step, {**numbers, **totals}), step=step)
        if step:
            text = "  ".join(f"{name} {numbers[name]:.4g}" for name in _SHOWN if name in numbers)
            bar.update(task, completed=step, description=text)
            if disable and main and (step == steps or time.monotonic() - shown > _QUIET):
                shown = time.monotonic()
                console.print(f"step {step}/{steps}  {text}", soft_wrap=True)

    try:
        with nullcontext() if disable else bar:
            yield log
    finally:
        for tracker in accelerator.trackers:  # `end_training` would end the process group as well
            tracker.finish()


def written(directory: Path | None, start: int) -> list[str]:
    """The lines of a journal up to the step that a run resumes from; none of a run that begins."""
    path = (directory or Path()) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if directory and start and path.exists() else []
    # A process that was killed may have left half a line at the end.
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= start]


def draw_curves(metrics: Path, picture: Path) -> None:
    """Plot the main metrics of ``metrics.jsonl``, one panel each, unless none was measured more than once."""
    curves = foremost(read_curves(metrics))
    if all(len(points) < 2 for lines in curves.values() for points in lines.values()):
        return
    from matplotlib.figure import Figure  # slow to import

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    width, height = _PANEL[0] * columns, _PANEL[1] * rows
    figure = Figure(figsize=(width, height))
    # Margins in inches: matplotlib's own layouts draw everything once more to find them.
    figure.subplots_adjust(0.65 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.35 / height, wspace=0.27, hspace=0.5)
    for i, (name, lines) in enumerate(curves.items()):
        axis = figure.add_subplot(rows, columns, i + 1)
        for label, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=label, marker="o" if label == "held out" else "", markersize=3)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.locator_params(nbins=5)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def read_curves(metrics: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Steps and values by metric and data set; held-out metrics share a panel with their training counterpart."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, metrics.read_text().splitlines()):
        for name, value in line.items():
            if name not in _NOT_DRAWN and math.isfinite(value):
                measured_on = "held out" if name.startswith("eval/") else "training"
                curves[name.removeprefix("eval/")][measured_on].append((line["step"], value))
    return curves


def foremost(curves: dict[str, Any]) -> dict[str, Any]:
    """At most twelve: loss and reward, held-out metrics, the usual metrics of a policy, then the rest.

    A recipe that samples has forty metrics, which take longer to draw than some runs take to train.
    """

    def place(name: str) -> tuple[bool, bool, int]:
        known = _FIRST.index(name) if name in _FIRST else len(_FIRST)
        return known > _FIRST.index("reward"), "held out" not in curves[name], known

    return {name: curves[name] for name in sorted(curves, key=place)[:_PANELS]}
