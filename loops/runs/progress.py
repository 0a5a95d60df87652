"""The line that a run shows for each step."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_TOLD = ("loss", "nll", "reward", "rewards/accuracies", "rewards/margins")
_SHOWN = (*_TOLD, "grad_norm", *(f"eval/{name}" for name in _TOLD))
_QUIET = 10.0  # seconds between lines where there is no terminal to draw a bar on


@contextmanager
def progress(
    steps: int, start: int = 0, *, visible: bool = True, title: str = "step"
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A bar on a terminal, a line every few seconds elsewhere; yields ``show(step, metrics)``."""
    console = Console()
    if not visible:
        yield lambda step, metrics: None
    elif console.is_terminal:
        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}"),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=steps, completed=start, said="")
            yield lambda step, metrics: bar.update(task, completed=step, said=say(metrics))
    else:
        said = 0.0

        def show(step: int, metrics: Mapping[str, float]) -> None:
            nonlocal said
            if step == steps or time.monotonic() - said > _QUIET:
                said = time.monotonic()
                console.print(f"{title} {step}/{steps}  {say(metrics)}", soft_wrap=True)

        yield show


def say(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in _SHOWN if name in metrics)
