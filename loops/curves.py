"""A picture of the metrics of a run."""

import json
import math
from collections import defaultdict
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_LEFT_OUT = {"step", "seconds", "tokens", "skipped"}
_PANEL = (4.0, 2.6)  # inches


def draw_curves(metrics: Path, picture: Path) -> None:
    """One panel per metric of ``metrics.jsonl``; what was measured on held-out data goes into the panel of its twin."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, metrics.read_text().splitlines()):
        for name, value in line.items():
            held_out = name.startswith("eval/")
            if name not in _LEFT_OUT and math.isfinite(value):
                panel = curves[name.removeprefix("eval/")]
                panel["held out" if held_out else "training"].append((line["step"], value))
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
