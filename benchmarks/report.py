"""What is made of measurements: a table in the terminal, and under one name JSON, Markdown and a plot."""

import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "quack-kernels")

Case = dict[str, Any]
Report = dict[str, Any]


def machine(device: torch.device) -> dict[str, Any]:
    """The kind of machine and the versions, nothing that tells one machine from another of its kind."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpu = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda} if device.type == "cuda" else {}
    return {
        **gpu,
        "cpu": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "date": date.today().isoformat(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())


def title(case: Case) -> str:
    parts = [f"{'x'.join(map(str, case['shape']))} {case['dtype']}", " + ".join(case["outputs"]), case["pass"]]
    if case["inputs"] != "random":
        parts.append(f"{case['inputs']} hidden states")
    if case["dead_rows"]:
        parts.append(f"{case['dead_rows']:.0%} of the rows without a gradient")
    return ", ".join(parts)


def header(case: Case) -> list[str]:
    floors = [f"÷{name}" for name in case["floor"]]
    return ["provider", "ms", "min–max", "TFLOP/s", *floors, "÷naive", "MB", "error", "of gradients"]


def cells(case: Case) -> Iterator[list[str]]:
    """The rows of a table as text: the products alone, then whoever was measured, then whoever was not."""
    for name, floor in case["floor"].items():
        yield [f"{name} in {case['products_in']}", *_time(floor), *[""] * (len(case["floor"]) + 4)]
    for row in sorted(case["rows"], key=lambda row: row["status"] != "measured"):
        errors = [_worst(row["errors"], gradients=False), _worst(row["errors"], gradients=True)]
        if row["status"] != "measured":
            yield [row["provider"], row["status"], *[""] * (len(case["floor"]) + 4), *errors]
            continue
        ratios = [f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "" for name in (*case["floor"], "naive")]
        memory = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:.0f}"
        yield [row["provider"], *_time(row), *ratios, memory, *errors]


def _time(row: dict[str, Any]) -> list[str]:
    milliseconds = (1000 * row["seconds"][k] for k in ("median", "min", "max"))
    middle, least, most = (f"{t:.0f}" if t >= 100 else f"{t:.3g}" for t in milliseconds)
    return [middle, f"{least}–{most}", f"{row['tflops']:.3g}"]


def _worst(errors: dict[str, float], *, gradients: bool) -> str:
    chosen = [float(error) for name, error in errors.items() if name.startswith("d_") == gradients]
    return f"{math.nan if any(map(math.isnan, chosen)) else max(chosen):.0e}" if chosen else ""


def reasons(case: Case) -> list[str]:
    return [f"{row['provider']} {row['status']}: {row['reason']}" for row in case["rows"] if "reason" in row]


def show(case: Case, console: Console) -> None:
    table = Table(title=title(case), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header(case)):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in cells(case):
        table.add_row(*row)
    console.print(table)
    for reason in reasons(case):
        console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)


def markdown(report: Report) -> str:
    machine = report["machine"]
    where = f"{machine.get('gpu', machine['cpu'])}, {machine['threads']} threads"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [f"# `{report['command']}`", "", f"{where}; {versions}; {machine['date']}; {report['rounds']} rounds.", ""]
    lines += [f"- {name} is not measured: {reason}" for name, reason in report["unavailable"].items()]
    for case in report["cases"]:
        head = header(case)
        lines += ["", f"## {title(case)}", "", markdown_line(head), markdown_line(["---", *["--:"] * (len(head) - 1)])]
        lines += [*map(markdown_line, cells(case)), "", *(f"- {reason}" for reason in reasons(case))]
    return "\n".join(lines) + "\n"


def markdown_line(parts: Iterable[str]) -> str:
    return f"| {' | '.join(part.replace('|', '&#124;') for part in parts)} |"


def save(report: Report, directory: Path) -> None:
    """``kernels.json``, ``kernels.md`` and ``kernels.png``."""
    directory.mkdir(parents=True, exist_ok=True)
    strict = json.loads(json.dumps(report), parse_constant=str)  # NaN, the error of a failure, is no JSON
    (directory / "kernels.json").write_text(json.dumps(strict, indent=1, allow_nan=False) + "\n")
    (directory / "kernels.md").write_text(markdown(report))
    plot(report, directory / "kernels.png")


def plot(report: Report, path: Path) -> None:
    """Time over the floor with the logits kept, a panel for each pass and its outputs, a group for each shape."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels: dict[str, list[Case]] = {}
    for case in report["cases"]:
        panels.setdefault(title(case).partition(" ")[2], []).append(case)
    names = list(dict.fromkeys(row["provider"] for case in report["cases"] for row in case["rows"]))
    colors = {name: colormaps["tab20"](k % 20) for k, name in enumerate(names)}
    shapes = max(len(cases) for cases in panels.values())
    figure = Figure(figsize=(min(24, 6 + 2 * shapes), 0.8 + 2.4 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, cases) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        _bars(axes, cases, colors)
        axes.set_title(label, loc="left", fontsize="medium")
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, cases: list[Case], colors: dict[str, Any]) -> None:
    kept, *twice = cases[0]["floor"]
    ticks, labels, left = [], [], 0.0
    for case in cases:
        measured = [row for row in case["rows"] if row["status"] == "measured"]
        edges = [left + k for k in range(len(measured))]
        heights = [row["ratio"][kept] for row in measured]
        axes.bar(edges, heights, 0.9, align="edge", color=[colors[row["provider"]] for row in measured])
        right = left + len(measured)
        axes.hlines(1, left, right, "black", linewidth=0.8)
        for name in twice:
            floor = case["floor"][name]["seconds"]["median"] / case["floor"][kept]["seconds"]["median"]
            axes.hlines(floor, left, right, "black", "dotted", linewidth=0.8)
        ticks.append((left + right) / 2)
        labels.append("×".join(map(str, case["shape"])))
        left = right + 1
    axes.set_xticks(ticks, labels, fontsize="small")
    axes.set_ylabel(f"time ÷ {kept}")
    axes.spines[["top", "right"]].set_visible(False)
