"""A picture of the metrics of a run."""

import json
import math
from collections import defaultdict
from pathlib import Path

_LEFT_OUT = {"step", "seconds", "tokens", "skipped"}
_FIRST = ("loss", "reward", "kl", "entropy", "grad_norm", "completions/mean_length", "learning_rate")
_PANELS = 12
_PANEL = (4.0, 2.6)  # inches

Curves = dict[str, dict[str, list[tuple[int, float]]]]  # by metric, and by what it was measured on: (step, value)


def draw_curves(metrics: Path, picture: Path) -> None:
    """One panel for each of the foremost metrics of ``metrics.jsonl``, unless none was measured more than once."""
    curves = foremost(read_curves(metrics))
    if all(len(points) < 2 for lines in curves.values() for points in lines.values()):
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    width, height = _PANEL[0] * columns, _PANEL[1] * rows
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    # Margins in inches: matplotlib's own layouts draw everything once more to find them.
    figure.subplots_adjust(0.65 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.35 / height, wspace=0.27, hspace=0.5)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, lines) in zip(axes, curves.items(), strict=False):
        for label, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=label, marker="o" if label == "held out" else "", markersize=3)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.locator_params(nbins=5)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(fontsize=8)
    for axis in axes[len(curves) :]:
        axis.remove()
    figure.savefig(picture, dpi=110)


def read_curves(metrics: Path) -> Curves:
    """Held-out metrics share the panel of their training twin."""
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
