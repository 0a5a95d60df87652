"""Time, memory and error of the language-model head, provider by provider: ``burnish bench kernels``.

For each shape everyone is first held to float64, in values and gradients; who fails is shown with the error and not
timed. The others take turns, and so do the matrix products alone, which are the floor. See ``measure.py`` for the
rules, ``providers.py`` for who takes part and how to add your own as ``module:object``.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from . import measure
from .inputs import INPUTS, NAMED, Inputs, Shape, parse_shapes
from .measure import PASSES
from .providers import OUTPUTS, PROVIDERS, Outputs, Provider, find, first_line
from .real_model import Unavailable
from .report import Case, Report, machine, save, show

Row = dict[str, Any]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOPS = {"forward": 2, "frozen": 4, "train": 6}  # of N·D·V: what can't be avoided


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="burnish bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--providers", nargs="+", metavar="NAME", help=f"some of {', '.join(PROVIDERS)}, or your module:object")
    add("--shapes", nargs="+", metavar="SHAPE", help=f"NxDxV: tokens, width, vocabulary; or {', '.join(NAMED)}")
    add("--dtypes", nargs="+", choices=DTYPES, help="float32 on a CPU, bfloat16 on a GPU")
    add("--outputs", nargs="+", metavar="A+B", help=f"what is asked for, of {', '.join(OUTPUTS)}; joined by +")
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="frozen is train without the head's gradient")
    add("--inputs", choices=INPUTS, default="random", help="hidden states")
    add("--dead_rows", nargs="+", type=float, default=[0.0], help="share of the rows whose upstream gradients are 0")
    add("--rounds", type=int, default=5, help="in each, everyone runs once")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory")
    add("--output", type=Path, default=Path("runs/bench"), help="where kernels.json, kernels.md and kernels.png go")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if one of ours has failed, or nothing could be measured; 2 for a mistake in the arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    on_gpu = options.device.startswith("cuda")
    options.dtypes = options.dtypes or (["bfloat16"] if on_gpu else ["float32"])
    outputs = options.outputs or (["loss"] if on_gpu else []) + ["logprob", "logprob+entropy"]
    try:
        if on_gpu and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no GPU here")
        if options.rounds < 1 or not all(0 <= share < 1 for share in options.dead_rows):
            raise ValueError("--rounds must be >= 1, and --dead_rows in [0, 1)")
        providers = {name: find(name) for name in options.providers or PROVIDERS}
        shapes = parse_shapes(options.shapes or (["large"] if on_gpu else ["small"]))
        report = bench(providers, shapes, [parse_outputs(text) for text in outputs], options, given)
    except (ValueError, Unavailable) as error:
        print(f"burnish bench kernels: {error}", file=sys.stderr)
        return 2
    rows = [row for case in report["cases"] for row in case["rows"]]
    failed = [row for row in rows if row["status"] == "failed" and row["provider"].startswith("burnish-")]
    return 1 if failed or not any(row["status"] == "measured" for row in rows) else 0


def parse_outputs(text: str) -> Outputs:
    """``logprob+entropy`` as a tuple, in the order of ``OUTPUTS``.

    Raises:
        ValueError: if a name is unknown, or the loss has company.
    """
    names = text.split("+")
    unknown = [name for name in names if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"no output {unknown[0]!r}, wanted some of {', '.join(OUTPUTS)}, joined by +")
    if "loss" in names and len(names) > 1:
        raise ValueError(f"the loss is asked for alone, got {text!r}")
    return tuple(output for output in OUTPUTS if output in names)


def bench(
    providers: dict[str, Provider],
    shapes: Sequence[Shape],
    asked: Sequence[Outputs],
    options: argparse.Namespace,
    given: Sequence[str],
) -> Report:
    """Measures case by case; each is shown and saved when it is done."""
    device, console = torch.device(options.device), Console()
    console.width = max(console.width, 120)  # a table that wraps can still be read, one that is cut can't
    missing = {name: reason for name, provider in providers.items() if (reason := provider.missing(device))}
    for name, reason in missing.items():
        console.print(f"{name} is not measured: {reason}", markup=False, highlight=False, soft_wrap=True)
    here = {name: provider for name, provider in providers.items() if name not in missing}
    report: Report = {
        "command": shlex.join(["burnish", "bench", "kernels", *given]),
        "machine": machine(device),
        "rounds": options.rounds,
        "unavailable": missing,
        "cases": [],
    }
    for shape, dtype, dead_rows in product(shapes, options.dtypes, options.dead_rows):
        inputs = INPUTS[options.inputs](shape, DTYPES[dtype], device, dead_rows)
        named = {"shape": list(shape), "dtype": dtype, "inputs": options.inputs, "dead_rows": dead_rows}
        for outputs in asked:
            if dead_rows and outputs == ("loss",):  # it has one upstream gradient for all rows
                continue
            able = {name: provider for name, provider in here.items() if provider.can_give(outputs)}
            for case in measured(able, inputs, outputs, options):
                report["cases"].append(named | case)
                show(report["cases"][-1], console)
            save(report, options.output)
    return report


def measured(
    providers: dict[str, Provider], inputs: Inputs, outputs: Outputs, options: argparse.Namespace
) -> list[Case]:
    """A case for each pass, with a row for each provider: judged, and timed unless it has failed."""
    judged = judge(providers, inputs, outputs, options.passes)
    cases = [timing(providers, rows, inputs, outputs, kind, options.rounds) for kind, rows in judged.items()]
    for name in providers:
        passed = [kind for kind, rows in judged.items() if rows[name]["status"] == "measured" and options.memory]
        for kind, size in measure.extra_bytes(name, inputs, outputs, passed).items():
            judged[kind][name]["extra_bytes"] = size
    return cases


def judge(
    providers: dict[str, Provider], inputs: Inputs, outputs: Outputs, passes: Sequence[str]
) -> dict[str, dict[str, Row]]:
    """For each pass, each provider's errors, and the reason if it has failed."""
    truth = measure.exact(inputs, outputs)
    limits = measure.limits(inputs, outputs, truth)
    judged: dict[str, dict[str, Row]] = {kind: {} for kind in passes}
    for kind, (name, provider) in product(passes, providers.items()):
        row: Row = {"provider": name, "status": "measured", "errors": {}}
        try:
            row["errors"] = measure.errors(measure.run(provider, inputs, outputs, kind), truth)
            if reason := measure.gate(row["errors"], limits, kind):
                row |= {"status": "failed", "reason": reason}
        except torch.OutOfMemoryError as error:
            row |= {"status": "out of memory", "reason": first_line(error)}
        except Exception as error:  # a provider may raise whatever it likes, and the others go on
            row |= {"status": "failed", "reason": first_line(error)}
        judged[kind][name] = row
    return judged


def timing(
    providers: dict[str, Provider], rows: dict[str, Row], inputs: Inputs, outputs: Outputs, kind: str, rounds: int
) -> Case:
    """One pass: the matrix products alone, and the figures of those who have not failed, added to their rows."""
    passed = [name for name, row in rows.items() if row["status"] == "measured"]
    products = measure.products(inputs, kind, dtype := measure.fastest_dtype(inputs))
    steps = {name: partial(measure.step, providers[name], inputs, outputs, kind) for name in passed}
    spans = measure.interleave(products | steps, rounds, inputs.hidden.device)
    seconds = {name: [sum(span) for span in spans[name]] for name in spans}
    floors = measure.floors({name: seconds[name] for name in products})
    against = floors | ({"naive": seconds["naive"]} if "naive" in passed else {})
    unit = inputs.shape.flops / 1e12
    for name in passed:
        rows[name] |= {
            "seconds": summary(seconds[name]),
            "backward": summary([span[1] for span in spans[name]]) if kind != "forward" else None,
            "tflops": FLOPS[kind] * unit / median(seconds[name]),
            "ratio": {other: measure.ratio(seconds[name], theirs) for other, theirs in against.items()},
            "extra_bytes": None,
        }
    floor = {
        name: {"seconds": summary(taken), "tflops": int(name.removesuffix("NDV")) * unit / median(taken)}
        for name, taken in floors.items()
    }
    shown = {"outputs": list(outputs), "pass": kind, "products_in": str(dtype).removeprefix("torch.")}
    return {**shown, "floor": floor, "rows": list(rows.values())}


def summary(seconds: list[float]) -> dict[str, Any]:
    return {"median": median(seconds), "min": min(seconds), "max": max(seconds), "rounds": seconds}
