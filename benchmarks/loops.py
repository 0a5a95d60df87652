"""Our recipe against the peer's trainer, on the same model, examples and steps: ``burnish bench loops``.

SmolLM2-135M-Instruct, or the model of a directory, learns from conversations in float32, see ``trainers.py``; for grpo
a new model of 17M parameters answers prompts of some 256 tokens with 64, 8 times each. Agreement first: who is not
within 1e-4 of the peer's losses, or for grpo within 1e-5 of its gradient on the same answers, is shown as failed, and
its time and memory are not compared. Time is that of the wall and of all processors; memory is the peak of the process,
beside which stands what it takes before it has loaded a model.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .report import table as markdown_table
from .trainers import PEER, RECIPES, compare

HEADER = [
    "provider",
    "difference",
    "s per step",
    "min–max",
    "÷peer",
    "CPU s",
    "÷peer",
    "peak MB",
    "÷peer",
    "imports MB",
]
_MEGABYTES = 2**20 / 1e6  # of a MiB


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="burnish bench loops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--recipe", choices=RECIPES, default="dpo")
    names = "; ".join(f"{name}: {', '.join(recipe.names())}" for name, recipe in RECIPES.items())
    add("--providers", nargs="+", metavar="NAME", help=f"the peer, and some of the recipe's: {names}")
    add("--model", type=Path, help="directory of another model")
    add("--steps", type=int, default=6, help="the first is not timed")
    add("--batch_size", type=int, default=8, help="examples a step, or prompts")
    add("--rounds", type=int, default=2, help="in each, everyone runs once, in a process of its own")
    add("--output", type=Path, default=Path("runs/bench"), help="where loops.json, loops.md and loops.png go")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if ours does not agree with the peer, or one could not run; 2 for a mistake in the arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    known_names = RECIPES[options.recipe].names()
    asked = options.providers or known_names
    unknown = [name for name in asked if name not in known_names]
    if unknown:
        nearest = get_close_matches(unknown[0], known_names, n=1, cutoff=0.0)[0]
        known = ", ".join(map(repr, known_names))
        print(
            f"burnish bench loops: no provider {unknown[0]!r}, did you mean {nearest!r}? Known are {known}",
            file=sys.stderr,
        )
        return 2
    if options.steps < 2 or options.rounds < 1 or options.batch_size < 1:
        print("burnish bench loops: --steps must be >= 2, --rounds and --batch_size >= 1", file=sys.stderr)
        return 2
    names = (PEER, *(name for name in known_names if name in asked and name != PEER))
    try:
        report = compare(options.recipe, options.steps, options.batch_size, options.rounds, names, options.model)
    except (RuntimeError, ImportError) as error:
        print(f"burnish bench loops: {error}", file=sys.stderr)
        return 1
    report = {"command": shlex.join(["burnish", "bench", "loops", *given])} | report
    show(report)
    save(report, options.output)
    return 0 if all(figure["agrees"] for figure in report["figures"].values()) else 1


def cells(report: dict[str, Any]) -> Iterator[list[str]]:
    """The rows of the table as text."""
    peer = report["figures"][PEER]
    for name, figure in report["figures"].items():
        difference = "" if figure["difference"] is None else f"{figure['difference']:.0e}"
        if not figure["agrees"]:
            yield [name, difference, "failed", *[""] * (len(HEADER) - 3)]
            continue
        seconds, processors, peak = (
            (figure[key], f"{figure[key] / peer[key]:.2f}")
            for key in ("seconds_median", "processor_seconds_median", "peak_mib")
        )
        yield [
            name,
            difference,
            f"{seconds[0]:.3g}",
            f"{figure['seconds_min']:.3g}–{figure['seconds_max']:.3g}",
            seconds[1],
            f"{processors[0]:.3g}",
            processors[1],
            f"{peak[0] * _MEGABYTES:.0f}",
            peak[1],
            f"{figure['imported_mib'] * _MEGABYTES:.0f}",
        ]


def show(report: dict[str, Any]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(HEADER):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in cells(report):
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)


def save(report: dict[str, Any], directory: Path) -> None:
    """``loops.json``, ``loops.md`` and ``loops.png``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "loops.json").write_text(json.dumps(report, indent=1) + "\n")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    load = "load {before} before, {after} after".format_map(report["load"])
    setting = f"{report['model']}, {report['steps']} steps of {report['batch_size']}, {report['rounds']} rounds, {load}"
    if report["answers"]:
        setting += ", {group} answers of {tokens} tokens to a prompt".format_map(report["answers"])
    machine = report["gpu"] or report["machine"]
    lines = [f"# `{report['command']}`", "", f"{machine}; {versions}; {report['date']}; {setting}.", ""]
    (directory / "loops.md").write_text("\n".join([*lines, *markdown_table(HEADER, cells(report))]) + "\n")
    plot(report, directory / "loops.png")


def plot(report: dict[str, Any], path: Path) -> None:
    """Time and memory over the peer's, of those that agree."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures = {name: figure for name, figure in report["figures"].items() if figure["agrees"]}
    figure = Figure(figsize=(9, 1 + 0.4 * len(figures)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, label) in zip(
        figure.subplots(1, 2, sharey=True), [("seconds_median", "time"), ("peak_mib", "peak memory")], strict=True
    ):
        axes.barh(list(figures), [f[key] / report["figures"][PEER][key] for f in figures.values()])
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel(f"{label} ÷ {PEER}'s")
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)
