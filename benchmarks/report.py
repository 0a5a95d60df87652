"""Reports of measurements: tables in the terminal, and under one name JSON, Markdown and a plot."""

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .operation import Json

# to packages
PEERS = {
    "trl": "trl",
    "liger": "liger-kernel",
    "cce": "cut-cross-entropy",
    "quack": "quack-kernels",
}
PACKAGES = ("torch", "triton", "transformers", *PEERS.values(), "nvidia-cutlass-dsl")
RULE = (
    "Held to float64 in every value and every gradient, of all rows; allowed is twice the error of the definition in "
    "the dtype of the inputs, + 1e-6. Times are medians over interleaved rounds; MB is the peak above the inputs, "
    "gradients included."
)


def merged(records: Iterable[Json]) -> list[Json]:
    """One case of all records that measured it, with the rows of all.

    Its floor is that of all their rounds.
    """
    cases: dict[str, Json] = {}
    for part in (case for r in records if isinstance(r.get("found"), list) for case in r["found"]):
        case = cases.setdefault(title(part), {**part, "floor": {}, "rows": []})
        names = {row["provider"] for row in part["rows"]}
        case["rows"] = [row for row in case["rows"] if row["provider"] not in names] + part["rows"]
        for name, floor in part["floor"].items():
            before = case["floor"].get(name)
            rounds = summary(
                [*(before["seconds"]["rounds"] if before else []), *floor["seconds"]["rounds"]]
            )
            flops = (floor["tflops"] or 0) * floor["seconds"]["median"]
            case["floor"][name] = {"seconds": rounds, "tflops": flops / rounds["median"] or None}
    # a provider at a time: none has the baseline's rounds beside its own
    for case in cases.values():
        measured = [row for row in case["rows"] if row["status"] == "measured"]
        for base in [row for row in measured if row["provider"] == case["baseline"]]:
            for row in measured:
                row["ratio"][case["baseline"]] = (
                    row["seconds"]["median"] / base["seconds"]["median"]
                )
    return list(cases.values())


def summary(seconds: list[float]) -> Json:
    return {"median": median(seconds), "min": min(seconds), "max": max(seconds), "rounds": seconds}


def machine(device: torch.device) -> Json:
    """The kind of machine and the versions, nothing that tells one machine from another of its
    kind.
    """
    gpu = (
        {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        if device.type == "cuda"
        else {}
    )
    return {
        **gpu,
        "cpu": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
        "date": date.today().isoformat(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    installed = {
        name: [d.version for d in importlib.metadata.distributions(name=name)] for name in packages
    }
    return {name: found[0] for name, found in installed.items() if found}


def load() -> float | None:
    """Processes that wanted a core in the last minute, other users' included.

    None where the system does not tell.
    """
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor()
    )


def title(case: Json) -> str:
    operation = "" if case["operation"] == "kernels" else f"{case['operation']} "
    settings = [f"{name} {value:g}" for name, value in case["settings"].items()]
    shape = "x".join(map(str, case["shape"]))
    parts = [
        f"{operation}{shape} {case['dtype']}",
        " + ".join(case["outputs"]),
        *settings,
        case["pass"],
    ]
    if case["inputs"] != "random":
        parts.append(f"{case['inputs']} inputs")
    if case["dead_rows"]:
        parts.append(f"{case['dead_rows']:.0%} of the rows without a gradient")
    return ", ".join(parts)


def header(case: Json) -> list[str]:
    floors = [f"÷{name}" for name in case["floor"]]
    names = [
        "provider",
        "ms",
        "min–max",
        "TFLOP/s",
        *floors,
        f"÷{case['baseline']}",
        "MB",
        "error",
        "of gradients",
    ]
    return [*names, *["MHz / W / °C"] * _clocked(case)]


def shown(clocks: Json | None) -> str:
    """MHz / W / °C."""
    if not clocks:
        return ""
    return (
        "unknown"
        if "absent" in clocks
        else f"{clocks['mhz']:.0f} / {clocks['watts']:.0f} / {clocks['celsius']:.0f}"
    )


def _clocked(case: Json) -> bool:
    return any(row.get("clocks") for row in case["rows"])


def cells(case: Json) -> Iterator[list[str]]:
    """The rows of a table as text: the floors, then providers that were measured, then those that
    were not.
    """
    others, clocked = len(case["floor"]) + 2, _clocked(case)
    for name, floor in case["floor"].items():
        yield [f"{name} in {case['products_in']}", *_time(floor), *[""] * (others + 2 + clocked)]
    for row in sorted(case["rows"], key=lambda row: row["status"] != "measured"):
        errors = [_worst(row["errors"], gradients=False), _worst(row["errors"], gradients=True)]
        if row["status"] != "measured":
            yield [row["provider"], row["status"], "", "", *[""] * others, *errors, *[""] * clocked]
            continue
        against = (*case["floor"], case["baseline"])
        ratios = [f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "" for name in against]
        memory = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:.0f}"
        yield [
            row["provider"],
            *_time(row),
            *ratios,
            memory,
            *errors,
            *[shown(row.get("clocks"))] * clocked,
        ]


def _time(row: Json) -> list[str]:
    milliseconds = (1000 * row["seconds"][k] for k in ("median", "min", "max"))
    middle, least, most = (f"{t:.0f}" if t >= 100 else f"{t:.3g}" for t in milliseconds)
    return [middle, f"{least}–{most}", "" if row["tflops"] is None else f"{row['tflops']:.3g}"]


def _worst(errors: dict[str, float], *, gradients: bool) -> str:
    chosen = [float(error) for name, error in errors.items() if name.startswith("d_") == gradients]
    return f"{math.nan if any(map(math.isnan, chosen)) else max(chosen):.0e}" if chosen else ""


def reasons(case: Json) -> list[str]:
    return [
        f"{row['provider']} {row['status']}: {row['reason']}"
        for row in case["rows"]
        if "reason" in row
    ]


def console() -> Console:
    console = Console()
    # a table that wraps can still be read, one that is cut can't
    console.width = max(console.width, 132)
    return console


def say(text: str) -> None:
    console().print(text, markup=False, highlight=False, soft_wrap=True)


def show_table(
    head: Sequence[str], rows: Iterable[list[str]], title: str | None = None, *, wrap: bool = False
) -> None:
    """In the terminal; numbers stand to the right."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", no_wrap=not wrap)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def show(case: Json) -> None:
    show_table(header(case), cells(case), title(case))
    for reason in reasons(case):
        say(f"  {reason}")


def table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """In Markdown."""
    for line in (head, ["---", *["--:"] * (len(head) - 1)], *rows):
        yield f"| {' | '.join(part.replace('|', '&#124;') for part in line)} |"


def markdown(report: Json, sections: Iterable[tuple[str, list[str], list[list[str]]]] = ()) -> str:
    machine = report["machine"]
    where = f"{machine.get('gpu', machine['cpu'])}, {machine['threads']} threads"
    where += "" if machine["load"] is None else f", load {machine['load']} before"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"# `{report['command']}`",
        "",
        f"{where}; {versions}; {machine['date']}.",
        "",
        RULE,
        "",
    ]
    lines += [
        f"- {name} is not measured: {reason}" for name, reason in report["unavailable"].items()
    ]
    for name, head, rows in sections:
        lines += ["", *([f"## {name}", ""] if name else []), *table(head, rows)]
    for case in report["cases"]:
        lines += ["", f"## {title(case)}", "", *table(header(case), cells(case)), ""]
        lines += [f"- {reason}" for reason in reasons(case)]
    return "\n".join(lines) + "\n"


def save(
    report: Json,
    directory: Path,
    name: str,
    sections: Iterable[tuple[str, list[str], list[list[str]]]] = (),
) -> None:
    """``name.json`` and ``name.md``, with further tables before those of the cases."""
    directory.mkdir(parents=True, exist_ok=True)
    # NaN, the error of a failure, is no JSON
    strict = json.loads(json.dumps(report), parse_constant=str)
    (directory / f"{name}.json").write_text(json.dumps(strict, indent=1, allow_nan=False) + "\n")
    (directory / f"{name}.md").write_text(markdown(report, sections))


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot(report: Json, path: Path) -> None:
    """Time over the floor with the logits kept, a panel for each pass and its outputs, a group for
    each shape.

    There is none where nothing was measured, or matplotlib is not installed.
    """
    if not report["cases"] or importlib.util.find_spec("matplotlib") is None:
        return
    panels: dict[str, list[Json]] = {}
    for case in report["cases"]:
        panels.setdefault(
            title(case).replace("x".join(map(str, case["shape"])) + " ", ""), []
        ).append(case)
    names = list(dict.fromkeys(row["provider"] for case in report["cases"] for row in case["rows"]))
    colors = {name: f"C{k}" for k, name in enumerate(names)}
    picture = figure(min(24, 6 + 2 * max(map(len, panels.values()))), 0.8 + 2.4 * len(panels))
    for axes, (label, cases) in zip(
        picture.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True
    ):
        _bars(axes, cases, colors)
        axes.set_title(label, loc="left", fontsize="medium")
    handles = [axes.bar(0, 0, color=color, label=name) for name, color in colors.items()]
    picture.legend(
        handles=handles, loc="outside lower center", ncols=5, fontsize="small", frameon=False
    )
    picture.savefig(path, dpi=120)


def _bars(axes: Any, cases: list[Json], colors: dict[str, str]) -> None:
    kept, *recomputed = cases[0]["floor"]
    ticks, labels, left = [], [], 0.0
    for case in cases:
        measured = [row for row in case["rows"] if row["status"] == "measured"]
        heights = [row["ratio"][kept] for row in measured]
        edges, right = [left + k for k in range(len(measured))], left + len(measured)
        axes.bar(
            edges, heights, 0.9, align="edge", color=[colors[row["provider"]] for row in measured]
        )
        axes.hlines(1, left, right, "black", linewidth=0.8)
        for name in recomputed:
            floor = (
                case["floor"][name]["seconds"]["median"] / case["floor"][kept]["seconds"]["median"]
            )
            axes.hlines(floor, left, right, "black", "dotted", linewidth=0.8)
        ticks.append((left + right) / 2)
        labels.append("×".join(map(str, case["shape"])))
        left = right + 1
    axes.set_xticks(ticks, labels, fontsize="small")
    axes.set_ylabel(f"time ÷ {kept}")
    axes.spines[["top", "right"]].set_visible(False)
