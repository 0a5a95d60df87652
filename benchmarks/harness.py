"""One benchmark from its arguments to its report, for any ``Operation``."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console

from . import measure
from .clocks import Clocks
from .isolation import Failure, LostDevice, Notice, Room, check_device
from .operation import Inputs, Operation, Outputs, Settings, first_line, named
from .real_model import Unavailable
from .report import Case, Report, machine, plot, save, show, summary

Row = dict[str, Any]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Asked(NamedTuple):
    """One case before it is measured; all of it travels to another process."""

    operation: str
    inputs: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    dead_rows: float
    settings: tuple[tuple[str, float], ...]
    outputs: Outputs
    passes: tuple[str, ...]
    rounds: int
    seconds: float
    memory: bool
    threads: int

    @property
    def title(self) -> str:
        """What is measured, in one line; each pass of it is a case."""
        parts = [self.operation, "x".join(map(str, self.shape)), self.dtype, "+".join(self.outputs)]
        parts += [f"{name}={value:g}" for name, value in (*self.settings, ("dead_rows", self.dead_rows)) if value]
        return " ".join(parts)


def parser(operation: Operation, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"burnish bench {operation.name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = f"some of {', '.join(operation.providers)}, or your module:object"
    outputs = f"what is asked for, of {', '.join(operation.outputs)}; joined by +"
    add = parser.add_argument
    on_gpu = torch.cuda.is_available()
    add("--providers", nargs="+", metavar="NAME", help=known)
    add("--shapes", nargs="+", metavar="SHAPE", help=f"{operation.sizes}; or {', '.join(operation.shapes)}")
    add("--dtypes", nargs="+", choices=DTYPES, help="float32 on a CPU, bfloat16 on a GPU")
    add("--outputs", nargs="+", metavar="A+B", help=outputs)
    add("--passes", nargs="+", choices=operation.passes, default=list(operation.passes), help="what is timed")
    add("--inputs", choices=operation.inputs, default=next(iter(operation.inputs)), help="where tensors come from")
    add("--dead_rows", nargs="+", type=float, default=[0.0], help="share of the rows whose upstream gradients are 0")
    for name, values in operation.settings.items():
        add(f"--{name}", nargs="+", type=float, default=list(values), help=f"{values} unless something else is said")
    add("--rounds", type=int, default=5, help="in each, everyone runs once")
    seconds = "how long one runs in a round, step after step; 0: one step. 0.3 on a GPU"
    add("--seconds", type=float, default=0.3 if on_gpu else 0.0, help=seconds)
    add("--device", default="cuda" if on_gpu else "cpu")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory")
    add("--isolate", action=argparse.BooleanOptionalAction, help="measure in a process of its own; so on a GPU")
    add("--patience", type=float, default=600, help="seconds for one provider at a time, if isolated")
    add("--output", type=Path, default=Path("runs/bench"), help="where the JSON, the Markdown and the plot go")
    return parser


def main(operation: Operation, arguments: Sequence[str] | None, description: str | None) -> int:
    """Returns 0; 1 if one of ours has failed, or nothing could be measured; 2 for a mistake in the arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser(operation, description).parse_args(given)
    command = shlex.join(["burnish", "bench", operation.name, *given])
    try:
        report = new_report(command, options.device)
        bench(operation, options, report, operation.name)
        plot(report, options.output / f"{operation.name}.png")
    except (ValueError, Unavailable, LostDevice, Failure) as error:
        print(f"burnish bench {operation.name}: {error}", file=sys.stderr)
        return 2
    return status(report)


def status(report: Report) -> int:
    rows = [row for case in report["cases"] for row in case["rows"]]
    bad = [row for row in rows if row["status"] in ("failed", "lost") and row["provider"].startswith("burnish")]
    return 1 if bad or not any(row["status"] == "measured" for row in rows) else 0


def new_report(command: str, device: str) -> Report:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    return {"command": command, "machine": machine(torch.device(device)), "unavailable": {}, "cases": []}


def bench(operation: Operation, options: argparse.Namespace, report: Report, name: str) -> None:
    """Measures case by case, each added to the report, shown and saved as ``name.json`` when it is done.

    Raises:
        ValueError: for what is wrong with the options, before anything is measured.
    """
    console = wide_console()
    isolate = options.device.startswith("cuda") if options.isolate is None else options.isolate
    with closing(Room(options.patience)) as room:
        gone, cases = plan(operation, options, room if isolate else None)
        report["unavailable"] |= gone
        for who, reason in gone.items():
            console.print(f"{who} is not measured: {reason}", markup=False, highlight=False, soft_wrap=True)
        for asked, able in cases:
            lost: dict[str, str] = {}
            if isolate:
                try:
                    found, lost = room(measured, (asked,), able)
                except Failure as error:
                    console.print(f"{asked.title} is not measured: {error}", markup=False, soft_wrap=True)
                    report["unavailable"][asked.title] = str(error)
                    continue
            else:
                found = measured(asked, able, lambda name: None)
            for case in found:
                case["rows"] += [lost_row(who, why) for who, why in lost.items()]
                report["cases"].append(case)
                show(case, console)
            save(report, options.output, name)


def lost_row(name: str, reason: str) -> Row:
    return {"provider": name, "status": "lost", "reason": reason, "errors": {}}


def wide_console() -> Console:
    console = Console()
    console.width = max(console.width, 132)  # a table that wraps can still be read, one that is cut can't
    return console


class Unmeasurable(ValueError):
    """There is nothing here that providers could be held to."""


def missing(operation: Operation, names: Sequence[str], device: str, room: Room | None) -> dict[str, str]:
    """Who can't run here, and why; asked in the room if there is one, for an import, too, may hang or crash.

    Raises:
        Failure: if the room can't be opened.
    """
    if room is None:
        return absent(operation.name, device, names, lambda name: None)
    found, lost = room(absent, (operation.name, device), list(names))
    return {**found, **lost}


def absent(operation_name: str, device: str, names: Sequence[str], notice: Notice) -> dict[str, str]:
    found = {}
    for name in names:
        notice(name)
        if reason := named(operation_name).find(name).missing(torch.device(device)):
            found[name] = reason
    return found


def plan(
    operation: Operation, options: argparse.Namespace, room: Room | None
) -> tuple[dict[str, str], list[tuple[Asked, list[str]]]]:
    """Who can't run here and why, and the cases, each with those who can take part.

    Raises:
        Failure: if the room can't be opened.
        Unmeasurable: if the definition needs a package that is not there.
        ValueError: for what is wrong with the options.
    """
    if options.rounds < 1 or options.seconds < 0 or not all(0 <= share < 1 for share in options.dead_rows):
        raise ValueError("--rounds must be >= 1, --seconds >= 0, and --dead_rows in [0, 1)")
    on_gpu = options.device.startswith("cuda")
    providers = {name: operation.find(name) for name in options.providers or operation.providers}
    outputs = [operation.parse_outputs(text) for text in options.outputs or operation.asked(on_gpu)]
    dtypes = options.dtypes or (["bfloat16"] if on_gpu else ["float32"])
    shapes = operation.parse_shapes(options.shapes or [("large" if on_gpu else "small")])
    needed = [operation.needed] if operation.needed else []
    gone = missing(operation, list(dict.fromkeys([*providers, *needed])), options.device, room)
    if reason := gone.get(operation.needed or ""):
        raise Unmeasurable(f"{reason}, and everyone is held to it")
    values = product(*(getattr(options, setting) for setting in operation.settings))
    settings = [tuple(zip(operation.settings, each, strict=True)) for each in values]
    cases = []
    for shape, dtype, dead_rows, each, wanted in product(shapes, dtypes, options.dead_rows, settings, outputs):
        if dead_rows and wanted[0] in operation.alone:  # it has one upstream gradient for all rows
            continue
        able = [n for n, p in providers.items() if n not in gone and operation.can_give(p, wanted)]
        asked = Asked(
            operation.name, options.inputs, tuple(shape), dtype, options.device, dead_rows, each, wanted,
            tuple(options.passes), options.rounds, options.seconds, options.memory, torch.get_num_threads(),
        )  # fmt: skip
        cases.append((asked, able))
    return gone, cases


def estimate(asked: Asked, name: str) -> tuple[float, float]:
    """Seconds for a provider, and before it for inputs and truth: a guess, from operations and plausible rates."""
    tokens, *widths, vocab = asked.shape
    work = tokens * vocab * sum(widths)
    rate, exact = (3e14, 2e13) if asked.device.startswith("cuda") else (5e10, 5e9)
    step = 8 * work / rate
    each = asked.rounds * 4 * max(asked.seconds, step) + 8 * step + (40 if name == "compiled" else 2)
    return 1 + len(asked.passes) * each, 5 + 20 * work / exact


@lru_cache(1)
def _inputs(asked: Asked) -> Inputs:
    make = named(asked.operation).inputs[asked.inputs]
    return make(asked.shape, DTYPES[asked.dtype], torch.device(asked.device), asked.dead_rows, dict(asked.settings))


@lru_cache(1)
def _truth(asked: Asked) -> tuple[measure.Outcome, dict[str, float]]:
    """What everyone is held to, and how far one may be from it."""
    operation, inputs = named(asked.operation), _inputs(asked._replace(outputs=()))
    truth = measure.exact(operation, inputs, asked.outputs)
    return truth, measure.limits(operation, inputs, asked.outputs, truth)


def measured(asked: Asked, names: Sequence[str], notice: Notice) -> list[Case]:
    """A case for each pass, with a row for each provider: judged, and timed unless it has failed."""
    torch.set_num_threads(asked.threads)
    operation, outputs = named(asked.operation), asked.outputs
    same = asked._replace(passes=(), rounds=0, seconds=0.0, memory=False)
    inputs, truth = _inputs(same._replace(outputs=())), _truth(same)
    judged = judge(operation, names, inputs, outputs, asked.passes, *truth, notice)
    if inputs.device.type == "cuda":
        torch.cuda.empty_cache()  # what made the truth is not for providers to find
    cases = []
    for kind, rows in judged.items():
        case = timing(operation, rows, inputs, outputs, kind, asked.rounds, asked.seconds, notice)
        settings: Settings = dict(asked.settings)
        cases.append(
            {
                "operation": asked.operation,
                "shape": list(asked.shape),
                "dtype": asked.dtype,
                "inputs": asked.inputs,
                "dead_rows": asked.dead_rows,
                "settings": settings,
                "rounds": asked.rounds,
                **case,
            }
        )
    for name in names if asked.memory else []:
        notice(name)
        passed = [kind for kind, rows in judged.items() if rows[name]["status"] == "measured"]
        for kind, size in measure.extra_bytes(operation, name, inputs, outputs, passed, asked.dead_rows).items():
            judged[kind][name]["extra_bytes"] = size
    return cases


def judge(
    operation: Operation,
    names: Sequence[str],
    inputs: Inputs,
    outputs: Outputs,
    passes: Sequence[str],
    truth: measure.Outcome,
    limits: dict[str, float],
    notice: Notice,
) -> dict[str, dict[str, Row]]:
    """For each pass, each provider's errors, and the reason if it has failed."""
    judged: dict[str, dict[str, Row]] = {kind: {} for kind in passes}
    for kind, name in product(passes, names):
        notice(name)
        row: Row = {"provider": name, "status": "measured", "errors": {}}
        gradients = {f"d_{x}" for x in operation.passes[kind]}
        try:
            found = measure.run(operation, operation.find(name), inputs, outputs, kind)
            found = found._replace(gradients=operation.collect(inputs, found.gradients))
            row["errors"] = measure.errors(found, truth)
            if reason := measure.gate(row["errors"], limits, gradients):
                row |= {"status": "failed", "reason": reason}
        except Exception as error:  # a provider may raise whatever it likes, and the others go on
            row |= failure(error, inputs.device)
        judged[kind][name] = row
    return judged


def failure(error: Exception, device: torch.device) -> Row:
    """What is said of a provider who has raised; `LostDevice` if nobody can run any more."""
    reason = first_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "out of memory", "reason": reason}
    try:
        check_device(device)
    except LostDevice as lost:
        raise LostDevice(reason) from lost
    return {"status": "failed", "reason": reason}


def timing(
    operation: Operation,
    rows: dict[str, Row],
    inputs: Inputs,
    outputs: Outputs,
    kind: str,
    rounds: int,
    each: float,
    notice: Notice,
) -> Case:
    """One pass: what can't be avoided alone, and the figures of those who have not failed, added to their rows."""
    passed = [name for name, row in rows.items() if row["status"] == "measured"]
    dtype = measure.fastest_dtype(inputs.dtype, inputs.device)
    alone = operation.products(inputs, kind, dtype)

    steps = {name: partial(measure.step, operation, operation.find(name), inputs, outputs, kind) for name in passed}

    def stumbled(name: str, error: Exception) -> None:
        rows[name] |= failure(error, inputs.device)

    with Clocks(inputs.device) as clocks:
        spans = measure.interleave(alone.steps | steps, rounds, inputs.device, notice, stumbled, each)
    seconds = {name: [sum(span) for span in found] for name, found in spans.items()}
    floors = measure.floors(alone, seconds)
    against = {name: floor["rounds"] for name, floor in floors.items()}
    if operation.baseline in seconds:
        against[operation.baseline] = seconds[operation.baseline]
    flops = next(iter(floors.values()))["flops"]
    for name in seconds.keys() & set(passed):
        rows[name] |= {
            "seconds": summary(seconds[name]),
            "backward": summary([span[1] for span in spans[name]]) if operation.passes[kind] else None,
            "tflops": flops / median(seconds[name]) / 1e12 if flops else None,
            "ratio": {other: measure.ratio(seconds[name], theirs) for other, theirs in against.items()},
            "extra_bytes": None,
            "clocks": clocks.found,
        }
    floor = {
        name: {
            "seconds": summary(found["rounds"]),
            "tflops": found["flops"] / median(found["rounds"]) / 1e12 if found["flops"] else None,
        }
        for name, found in floors.items()
    }
    shown = {"outputs": list(outputs), "pass": kind, "products_in": str(dtype).removeprefix("torch.")}
    return {**shown, "baseline": operation.baseline, "floor": floor, "rows": list(rows.values())}
