"""One benchmark from its arguments to its report, for any ``Operation``."""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import measure
from .operation import Inputs, Json, Operation, first_line, named
from .real_model import Unavailable
from .report import machine, merged, plot, save, say, show, summary
from .worker import CallFailed, Lost, Worker

DTYPES = ("float32", "bfloat16")


class Plan(NamedTuple):
    """A case before it is measured; all of it travels to another process."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    dead_rows: float
    settings: tuple[tuple[str, float], ...]
    inputs: str
    outputs: tuple[str, ...]
    passes: tuple[str, ...]
    rounds: int
    seconds: float
    memory: bool
    threads: int

    @property
    def title(self) -> str:
        """One line; each pass is a case of the report."""
        parts = [self.operation, "x".join(map(str, self.shape)), self.dtype, "+".join(self.outputs)]
        parts += [
            f"{name}={value:g}"
            for name, value in (*self.settings, ("dead_rows", self.dead_rows))
            if value
        ]
        return " ".join(parts)


def parser(operation: Operation, description: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"burnish bench {operation.name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    providers = f"some of {', '.join(operation.providers)}, or your module:object"
    add, on_gpu = parser.add_argument, torch.cuda.is_available()
    add("--providers", nargs="+", metavar="NAME", help=providers)
    add(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help=f"{operation.sizes}; or {', '.join(operation.shapes)}",
    )
    add("--dtypes", nargs="+", choices=DTYPES, help="float32 on a CPU, bfloat16 on a GPU")
    add(
        "--outputs",
        nargs="+",
        metavar="A+B",
        help=f"some of {', '.join(operation.outputs)}; joined by +",
    )
    add(
        "--passes",
        nargs="+",
        choices=operation.passes,
        default=list(operation.passes),
        help="timed",
    )
    add(
        "--inputs",
        choices=operation.inputs,
        default=next(iter(operation.inputs)),
        help="source of the tensors",
    )
    add(
        "--dead_rows",
        nargs="+",
        type=float,
        default=[0.0],
        help="share of the rows whose upstream gradients are 0",
    )
    for name, values in operation.settings.items():
        add(f"--{name}", nargs="+", type=float, default=list(values), help=f"default: {values}")
    add("--rounds", type=int, default=5, help="in each, every provider runs once")
    seconds = "time of a provider in a round, step after step; 0: one step. 0.3 on a GPU"
    add("--seconds", type=float, default=0.3 if on_gpu else 0.0, help=seconds)
    add("--device", default="cuda" if on_gpu else "cpu")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory")
    add(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="measure in a process of its own; default on a GPU",
    )
    add(
        "--patience",
        type=float,
        default=600,
        help="seconds for one provider in a case, if isolated",
    )
    add(
        "--output",
        type=Path,
        default=Path("runs/bench"),
        help="directory of the JSON, the Markdown and the plot",
    )
    return parser


def main(operation: Operation, arguments: Sequence[str] | None, description: str | None) -> int:
    """Returns 0; 1 if one of ours has failed, or nothing could be measured; 2 for a mistake in the
    arguments.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser(operation, description).parse_args(arguments)
    try:
        report = new_report(
            shlex.join(["burnish", "bench", operation.name, *arguments]), options.device
        )
        bench(operation, options, report)
        plot(report, options.output / f"{operation.name}.png")
    except (ValueError, Unavailable, Lost, CallFailed) as error:
        print(f"burnish bench {operation.name}: {error}", file=sys.stderr)
        return 2
    rows = [row for case in report["cases"] for row in case["rows"]]
    bad = [
        row
        for row in rows
        if row["status"] in ("failed", "lost") and row["provider"].startswith("burnish")
    ]
    return 1 if bad or not any(row["status"] == "measured" for row in rows) else 0


def new_report(command: str, device: str) -> Json:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    return {
        "command": command,
        "machine": machine(torch.device(device)),
        "unavailable": {},
        "cases": [],
    }


def bench(operation: Operation, options: argparse.Namespace, report: Json) -> None:
    """Measures case by case; each is added to the report, shown and saved when it is done.

    Raises:
        ValueError: if an option is wrong, before anything is measured.
    """
    isolate = options.device.startswith("cuda") if options.isolate is None else options.isolate
    warn_if_busy(report["machine"]["load"], os.cpu_count() or 1)
    with closing(Worker(isolate)) as worker:
        absent, plans = plan(operation, options, worker)
        report["unavailable"] |= absent
        for name, reason in absent.items():
            say(f"{name} is not measured: {reason}")
        for each, names in plans:
            try:
                cases = (
                    _isolated(each, names, worker, options.patience)
                    if isolate
                    else measured(each, names)
                )
            except CallFailed as error:
                say(f"{each.title} is not measured: {error}")
                report["unavailable"][each.title] = str(error)
                continue
            for case in cases:
                case["rows"] += _lacking(operation, options, absent, each)
                compare_with_fastest(case)
            report["cases"] += cases
            for case in cases:
                show(case)
            if options.output is not None:
                save(report, options.output, operation.name)


def _lacking(
    operation: Operation, options: argparse.Namespace, absent: Mapping[str, str], plan: Plan
) -> list[Json]:
    """Rows of the providers that were asked for and lack an output of the case."""
    rows: list[Json] = []
    for name in options.providers or []:
        provider = operation.find(name)
        if name not in absent and not operation.can_give(provider, plan.outputs):
            reason = operation.lacks(provider, plan.outputs)
            rows.append({"provider": name, "status": "lacks", "reason": reason, "errors": {}})
    return rows


def compare_with_fastest(case: Json) -> None:
    """Divide times by those of the fastest provider, if the baseline was not measured."""
    passed = [row for row in case["rows"] if row["status"] == "measured"]
    if not passed or any(row["provider"] == case["baseline"] for row in passed):
        return
    fastest = min(passed, key=lambda row: float(row["seconds"]["median"]))
    case["baseline"] = fastest["provider"]
    for row in passed:
        rounds, others = row["seconds"]["rounds"], fastest["seconds"]["rounds"]
        if len(rounds) == len(others):
            row["ratio"][case["baseline"]] = measure.ratio(rounds, others)


def warn_if_busy(load: float | None, cores: int) -> None:
    """Say so where other work takes more than a quarter of the cores: medians hide little of it."""
    if load is not None and load > cores / 4:
        tell(
            f"this machine is busy: {load:g} processes wanted its {cores} cores in the last minute. Times are of a "
            "shared machine; ratios within a round are less affected"
        )


def tell(text: str) -> None:
    """A line about the progress, apart from the tables."""
    print(text, file=sys.stderr, flush=True)


def _isolated(plan: Plan, names: list[str], worker: Worker, patience: float) -> list[Json]:
    """In another process each provider takes turns with the floor alone, so that the one that ends
    it is known.
    """
    parts, lost = [], []
    for name in names:
        tell(f"  {plan.title}: {name}")
        worker.prepare(prepared, plan)
        try:
            parts.append({"found": worker.call(measured, plan, [name], seconds=patience)})
        except Lost as error:
            lost.append({"provider": name, "status": "lost", "reason": str(error), "errors": {}})
    cases: list[Json] = merged(parts or [{"found": worker.prepare(measured, plan, [])}])
    for case in cases:
        case["rows"] += lost
    return cases


def plan(
    operation: Operation, options: argparse.Namespace, worker: Worker
) -> tuple[dict[str, str], list[tuple[Plan, list[str]]]]:
    """Providers that can't run here and why, and the cases, each with the providers that take part.

    Raises:
        CallFailed: if no process can be started.
        Unavailable: if the baseline needs a package that is not there.
        ValueError: if an option is wrong.
    """
    if (
        options.rounds < 1
        or options.seconds < 0
        or not all(0 <= share < 1 for share in options.dead_rows)
    ):
        raise ValueError("--rounds must be >= 1, --seconds >= 0, and --dead_rows in [0, 1)")
    providers = {name: operation.find(name) for name in options.providers or operation.providers}
    cases = _cases(operation, options)
    names = list(dict.fromkeys([*providers, operation.baseline]))
    reasons = missing(operation, names, options.device, worker, options.patience)
    if operation.baseline in reasons:
        raise Unavailable(f"{reasons[operation.baseline]}, and every provider is held to it")
    plans = []
    for case in cases:
        able = [
            name
            for name, provider in providers.items()
            if name not in reasons and operation.can_give(provider, case.outputs)
        ]
        plans.append((case, able))
    return reasons, plans


def _cases(operation: Operation, options: argparse.Namespace) -> list[Plan]:
    """Every combination of shape, dtype, dead rows, settings and outputs that the options ask for.

    Raises:
        ValueError: for a shape or an output that the operation does not know.
    """
    on_gpu = options.device.startswith("cuda")
    outputs = [
        operation.parse_outputs(text)
        for text in options.outputs or _default_outputs(operation, on_gpu)
    ]
    dtypes = options.dtypes or ["bfloat16" if on_gpu else "float32"]
    shapes = operation.parse_shapes(options.shapes or ["large" if on_gpu else "small"])
    values = product(*(getattr(options, setting) for setting in operation.settings))
    settings = [tuple(zip(operation.settings, each, strict=True)) for each in values]
    cases = []
    for shape, dtype, dead_rows, each, wanted in product(
        shapes, dtypes, options.dead_rows, settings, outputs
    ):
        if dead_rows and wanted[0] in operation.alone:  # it has one upstream gradient for all rows
            continue
        case = Plan(
            operation=operation.name,
            shape=shape,
            dtype=dtype,
            device=options.device,
            dead_rows=dead_rows,
            settings=each,
            inputs=options.inputs,
            outputs=wanted,
            passes=tuple(options.passes),
            rounds=options.rounds,
            seconds=options.seconds,
            memory=options.memory,
            threads=torch.get_num_threads(),
        )
        cases.append(case)
    return cases


def _default_outputs(operation: Operation, on_gpu: bool) -> list[str]:
    """The outputs to measure unless some are named; on a GPU the mean, as training takes it, before
    them.
    """
    if on_gpu and operation.mean[1]:
        return ["loss", *operation.default_outputs]
    return list(operation.default_outputs)


def missing(
    operation: Operation, names: Sequence[str], device: str, worker: Worker, patience: float
) -> dict[str, str]:
    """Providers that can't run here, and why; an import, too, may hang or crash.

    Raises:
        CallFailed: if no process can be started.
    """
    reasons = {}
    for name in names:
        worker.prepare(_missing, operation.name, device)
        try:
            reason = worker.call(_missing, operation.name, device, name, seconds=patience)
        except Lost as error:
            reason = str(error)
        if reason:
            reasons[name] = reason
    return reasons


def _missing(operation_name: str, device: str, name: str | None = None) -> str | None:
    operation = named(operation_name)
    return operation.find(name).missing(torch.device(device)) if name else None


@lru_cache(1)
def _inputs(
    operation: str, shape: tuple[int, ...], dtype: str, device: str, *setting: Any
) -> Inputs:
    return named(operation).make_inputs(shape, getattr(torch, dtype), device, *setting)


@lru_cache(1)
def _truth(*key: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The outcome in float64, and how far a provider may be from it."""
    *setting, outputs = key
    inputs = _inputs(*setting)
    truth = measure.exact(inputs, outputs)
    return truth, measure.limits(inputs, outputs, truth)


def forget() -> None:
    """Drop the tensors that are kept for further calls: they hold their operation."""
    _inputs.cache_clear()
    _truth.cache_clear()


def prepared(plan: Plan) -> None:
    """Makes inputs and truth of a case, which are kept for the calls that follow."""
    torch.set_num_threads(plan.threads)
    _truth(*plan[: Plan._fields.index("passes")])


def measured(plan: Plan, names: Sequence[str]) -> list[Json]:
    """A case for each pass, with a row for each provider: gated, and timed unless it has failed."""
    prepared(plan)
    inputs = _inputs(*plan[: Plan._fields.index("outputs")])
    rows: dict[str, dict[str, Json]] = {kind: {} for kind in plan.passes}
    for kind, name in product(plan.passes, names):
        row = rows[kind][name] = gated(plan, name, inputs, kind)
        worst = max(map(float, row["errors"].values()), default=math.nan)
        tell(f"  {name}, {kind}: {row.get('reason', f'right, to {worst:.0e}')}")
    if inputs.device.type == "cuda":
        torch.cuda.empty_cache()  # memory of the truth is not for providers to reuse
    cases = [
        {
            "operation": plan.operation,
            "shape": list(plan.shape),
            "dtype": plan.dtype,
            "inputs": plan.inputs,
            "dead_rows": plan.dead_rows,
            "settings": dict(plan.settings),
            "rounds": plan.rounds,
            "outputs": list(plan.outputs),
            "pass": kind,
            **timing(plan, rows[kind], inputs, kind),
        }
        for kind in plan.passes
    ]
    for name in names if plan.memory else []:
        passed = [kind for kind in plan.passes if rows[kind][name]["status"] == "measured"]
        for kind, size in measure.extra_bytes(
            inputs, name, plan.outputs, passed, plan.dead_rows
        ).items():
            rows[kind][name]["extra_bytes"] = size
    return cases


def gated(plan: Plan, name: str, inputs: Inputs, kind: str) -> Json:
    """A provider's errors in a pass, and the reason if it has failed."""
    truth, limits = _truth(*plan[: Plan._fields.index("passes")])
    row: Json = {"provider": name, "status": "measured", "errors": {}}
    operation = inputs.operation
    try:
        outcome = measure.run(inputs, operation.find(name), plan.outputs, kind)
        row["errors"] = measure.errors(operation.collect(inputs, outcome), truth)
        if reason := measure.gate(
            row["errors"], limits, {f"d_{x}" for x in operation.passes[kind]}
        ):
            row |= {"status": "failed", "reason": reason}
    except Exception as error:  # a provider may raise anything, and the others go on
        row |= failure(error, inputs.device)
    return row


def failure(error: Exception, device: torch.device) -> Json:
    """The status of a provider that has raised; `Lost` if no other can run on the GPU any more."""
    reason = first_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "out of memory", "reason": reason}
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.zeros(1, device=device).item()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        except Exception as lost:
            raise Lost(reason) from lost
    return {"status": "failed", "reason": reason}


def timing(plan: Plan, rows: dict[str, Json], inputs: Inputs, kind: str) -> Json:
    """The floors of a pass; seconds and ratios of the providers that passed the gate are added to
    their rows.
    """
    operation = inputs.operation
    passed = [name for name, row in rows.items() if row["status"] == "measured"]
    tell(f"  {kind}: {len(passed)} take turns, {plan.rounds} rounds")
    dtype = measure.fastest_dtype(inputs.dtype, inputs.device)
    products = operation.products(inputs, kind, dtype)
    steps = {
        name: partial(measure.run, inputs, operation.find(name), plan.outputs, kind)
        for name in passed
    }

    def on_error(name: str, error: Exception) -> None:
        rows[name] |= failure(error, inputs.device)

    with measure.clocks(inputs.device) as clocks:
        spans = measure.interleave(
            products.steps | steps, plan.rounds, inputs.device, on_error, plan.seconds
        )
    seconds = {name: [sum(span) for span in each] for name, each in spans.items()}
    floors = measure.floors(products, seconds)
    against = {name: floor["rounds"] for name, floor in floors.items()}
    if operation.baseline in seconds:
        against[operation.baseline] = seconds[operation.baseline]
    flops = next(iter(floors.values()))["flops"]

    def rates(rounds: list[float], flops: int) -> Json:
        return {
            "seconds": summary(rounds),
            "tflops": flops / median(rounds) / 1e12 if flops else None,
        }

    for name in seconds.keys() & set(passed):
        rows[name] |= {
            **rates(seconds[name], flops),
            "backward": summary([span[1] for span in spans[name]])
            if operation.passes[kind]
            else None,
            "ratio": {
                other: measure.ratio(seconds[name], rounds) for other, rounds in against.items()
            },
            "extra_bytes": None,
            "clocks": clocks or None,
        }
    return {
        "products_in": str(dtype).removeprefix("torch."),
        "baseline": operation.baseline,
        "floor": {name: rates(floor["rounds"], floor["flops"]) for name, floor in floors.items()},
        "rows": list(rows.values()),
    }
