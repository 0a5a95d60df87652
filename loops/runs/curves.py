"""A picture of the metrics of a run."""

import json
import math
from collections import defaultdict
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_LEFT_OUT = {"step", "seconds", "tokens", "skipped"}
_FIRST = ("loss", "reward", "kl", "entropy", "grad_norm", "completions/mean_length", "learning_rate")
_PANELS = 12
_PANEL = (4.0, 2.6)  # inches

Curves = dict[str, dict[str, list[tuple[int, float]]]]  # by metric, and by what it was measured on: (step, value)


def draw_curves(metrics: Path, picture: Path) -> None:
    """One panel for each of the foremost metrics of ``metrics.jsonl``."""
    curves = foremost(read_curves(metrics))
    if not curves:
        return
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, lines) in zip(axes, curves.items(), strict=False):
        for label, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=label, marker="o" if label == "held out" else "", markersize=3)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(fontsize=8)
    for axis in axes[len(curves) :]:
        axis.remove()
    figure.savefig(picture, dpi=110)


def read_curves(metrics: Path) -> Curves:
    """What was measured on held-out data goes with its twin."""
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, metrics.read_text().splitlines()):
        for name, value in line.items():
            held_out = name.startswith("eval/")
            if name not in _LEFT_OUT and math.isfinite(value):
                panel = curves[name.removeprefix("eval/")]
                panel["held out" if held_out else "training"].append((line["step"], value))
    return curves


def foremost(curves: Curves) -> Curves:
    """At most twelve: loss and reward, what was measured on held-out data, what every policy is watched by, the rest.

    A recipe that samples has forty metrics, which take longer to draw than some runs take to train.
    """

    def place(name: str) -> tuple[bool, bool, int]:
        known = _FIRST.index(name) if name in _FIRST else len(_FIRST)
        return known > _FIRST.index("reward"), "held out" not in curves[name], known

    return {name: curves[name] for name in sorted(curves, key=place)[:_PANELS]}
