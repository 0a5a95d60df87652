"""Everything that matters on a GPU, in parts that fit into minutes:
``burnish bench gpu --output DIR``.

    ceilings     bytes and products of this machine, in a burst and sustained
    head         N = 8192, D = 4096, V = 151936 in bfloat16, log-prob and entropy, forward alone and with gradients
    digits       of products and log-probs against float64, cuBLAS's own beside each provider's
    dead_rows    the head with 80 % of the rows without a gradient
    profile      the kernels of one of our steps, into profile.txt
    tiles        our step with tiles of other sizes
    logprob      the head, log-prob alone, with providers that give nothing else
    divergence   of heads of the same width
    objectives   512 completions of 200,000 tokens, against the peer's loss code
    grid         tokens x width x vocabulary of real models
    compiled     the naive formula through inductor, once

A call measures, in this order, what fits into --minutes, and says what is left and how long that
would take: call it again. Every measurement is a line of gpu.jsonl in --output, and is not done
again unless the code or package that it measures has changed, or its line is deleted. A provider
that hangs, crashes or is missing loses rows, with the reason. At the end, and in gpu.md, stand the
figures that our head is to meet, as far as they were measured.
"""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import product
from pathlib import Path

from .. import harness
from ..kernels import OPERATION
from ..operation import Json, named
from ..real_model import Unavailable
from ..report import merged, plot, save, say, show_table, shown
from ..worker import CallFailed, Worker
from . import ceilings
from .chain import Book, Unit, attempted, chain
from .targets import HEADER, cells, ours, targets

# seconds for a process, or for inputs and their truth: imports of a fresh machine take their time
START = 150.0


def benchmark(
    operation_name: str, flags: str, part: str, options: argparse.Namespace
) -> Iterator[Unit]:
    """``burnish bench operation_name`` with these flags, each provider in each case."""
    try:
        operation = named(operation_name)
    except ModuleNotFoundError as error:
        options.missing[part] = f"{error.name} is not installed"
        return
    shapes = ["--shapes", *options.shapes] if options.shapes else []
    arguments = [
        *ROUNDS.split(),
        *flags.split(),
        *shapes,
        *options.more,
        "--device",
        options.device,
    ]
    parsed = harness.parser(operation).parse_args(arguments)
    known = [name for name in options.providers or parsed.providers if operation.knows(name)]
    # its import may hang: not asked again
    parsed.providers = [name for name in known if name not in options.missing]
    parsed.patience = options.patience
    if not parsed.providers:
        return
    try:
        absent, plans = harness.plan(operation, parsed, options.worker)
    except Unavailable as error:
        options.missing[part] = str(error)
        return
    options.missing.update(absent)
    for plan, names in plans:
        title = f"{plan.title}, {' '.join(plan.passes)}"
        for name in names:
            yield Unit(
                part, title, name, *estimate(plan, name), harness.measured, (plan, [name]), plan
            )


def estimate(plan: harness.Plan, name: str) -> tuple[float, float]:
    """Seconds for a provider, and before it for inputs and truth: a guess, from operations and
    plausible rates.
    """
    tokens, *widths, vocab = plan.shape
    work = tokens * vocab * sum(widths)
    rate, exact = (3e14, 2e13) if plan.device.startswith("cuda") else (5e10, 5e9)
    step = 8 * work / rate
    each = plan.rounds * 4 * max(plan.seconds, step) + 8 * step + (40 if name == "compiled" else 2)
    return 1 + len(plan.passes) * each, 5 + 20 * work / exact


def measure_ceilings(part: str, options: argparse.Namespace) -> Iterator[Unit]:
    (n, d, v), device = options.shape, options.device
    yield Unit(part, "copy", "torch", 5, 10, ceilings.copy, (device, min(2**32, 16 * n * v), 0.5))
    side = min(n, 8192)
    yield Unit(part, f"{side}^3", "cublas", 5, 10, ceilings.square, (device, side, 2.0))
    for rows, columns in product(
        (n // 2, n), sorted({min(v, columns) for columns in (4096, 8192, 16384)})
    ):
        arguments = device, rows, columns, d, 0.5
        yield Unit(part, f"{rows}x{columns}x{d}", "cublas", 5, 10, ceilings.products, arguments)


def measure_digits(part: str, options: argparse.Namespace) -> Iterator[Unit]:
    (n, d, v), missing = options.shape, options.missing
    for width in (d // 8, d // 4, d // 2, d, 2 * d):
        sizes = width, min(n, 256), min(v, 8192)
        yield Unit(
            part,
            f"product, K = {width}",
            "cublas",
            1,
            10,
            ceilings.truncation,
            (options.device, *sizes),
        )
    known = [name for name in options.providers or DIGITS.split() if OPERATION.knows(name)]
    names = [name for name in known if name not in missing]
    missing.update(
        harness.missing(OPERATION, names, options.device, options.worker, options.patience)
    )
    for name in ("cublas", *(name for name in names if name not in missing)):
        yield Unit(
            part, "log-probs", name, 4, 10, ceilings.logprobs, (options.device, options.shape, name)
        )


def measure_profile(part: str, options: argparse.Namespace) -> Iterator[Unit]:
    yield Unit(part, "step", "burnish", 8, 10, ceilings.profile, (options.device, options.shape))


def measure_tiles(part: str, options: argparse.Namespace) -> Iterator[Unit]:
    n = options.shape[0]
    for rows, columns in ((n // 2, 8192), (n, 8192), (n, 16384), (n // 2, 16384), (n, 4096)):
        arguments = options.device, options.shape, rows, columns, 0.5
        yield Unit(part, f"{rows}x{columns}", "burnish", 8, 10, ceilings.tiles, arguments)


DIGITS = "naive burnish-triton burnish-fused trl liger liger-scaled cce-exact"
ROUNDS = "--rounds 3 --seconds 0.3"
OURS = "burnish-triton-4GiB burnish-triton-recompute burnish-triton"
HEAD = f"--outputs logprob+entropy --passes train forward --providers {OURS} burnish-fused trl naive liger-scaled"
DEAD = f"--outputs logprob+entropy --passes train --dead_rows 0.8 --providers {OURS} trl"
ALONE = "--outputs logprob --passes train --providers burnish-triton-4GiB liger cce cce-exact trl"
KL = "--outputs divergence --passes train forward --beta 0 0.5 --providers burnish-triton burnish-triton-recompute trl"
GRID = "--shapes grid --outputs logprob+entropy --passes train forward --providers burnish-triton burnish-fused trl"
LOSSES = "--shapes large --dtypes float32 --seconds 0.05 --providers burnish trl"
COMPILED = "--outputs logprob+entropy --passes train --providers compiled"

PARTS: dict[str, Callable[[str, argparse.Namespace], Iterator[Unit]]] = {
    "ceilings": measure_ceilings,
    "head": partial(benchmark, "kernels", HEAD),
    "digits": measure_digits,
    "dead_rows": partial(benchmark, "kernels", DEAD),
    "profile": measure_profile,
    "tiles": measure_tiles,
    "logprob": partial(benchmark, "kernels", ALONE),
    "divergence": partial(benchmark, "divergence", KL),
    "objectives": partial(benchmark, "objectives", LOSSES),
    "grid": partial(benchmark, "kernels", GRID),
    "compiled": partial(benchmark, "kernels", COMPILED),
}


def main(
    arguments: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic
) -> int:
    """Returns 0; 1 if one of ours has failed, or nothing was measured yet; 2 for a mistake in the
    arguments.
    """
    began = clock()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="burnish bench gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="some of them")
    add("--minutes", type=float, default=9.0, help="of this call; 0 only says what is left")
    add("--shapes", nargs="+", metavar="NAME", help="in place of each part's own, such as tiny")
    add(
        "--providers",
        nargs="+",
        metavar="NAME",
        help="in place of each part's own; each where it is known",
    )
    add("--device", default="cuda")
    add(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="measure in a process of its own; so on a GPU",
    )
    add(
        "--patience",
        type=float,
        default=60.0,
        help="seconds for one measurement, or twice its estimate, if isolated",
    )
    add(
        "--output",
        type=Path,
        default=Path("runs/bench"),
        help="where the measurements and the report are",
    )
    flags, more = parser.parse_known_args(arguments)
    isolate = flags.device.startswith("cuda") if flags.isolate is None else flags.isolate
    with closing(Worker(isolate, START)) as worker:
        try:
            report = harness.new_report(
                shlex.join(["burnish", "bench", "gpu", *arguments]), flags.device
            )
            # Of `missing` every part adds its own: providers that can't be measured, with the
            # reason.
            flags.more, flags.missing, flags.worker = more, report["unavailable"], worker
            flags.shape = OPERATION.parse_shapes(flags.shapes or ["large"])[0]  # of the head
            units = planned(flags)
        except (ValueError, CallFailed) as error:
            print(f"burnish bench gpu: {error}", file=sys.stderr)
            return 2
        for name, reason in report["unavailable"].items():
            say(f"{name} is not measured: {reason}")
        flags.output.mkdir(parents=True, exist_ok=True)
        book = Book(flags.output / "gpu.jsonl", flags.device)
        attempt = partial(attempted, worker, patience=flags.patience, clock=clock)

        def left() -> float:
            return 60 * float(flags.minutes) - (clock() - began)

        rest = chain(
            units, book, left, attempt, lambda record: write(record, book, report, flags.output)
        )
    finish(report, book, flags.output)
    for name, rows in report["tables"].items():
        show_table(*grid(rows), name)
    show_table(HEADER, cells(report["targets"]), "targets", wrap=True)
    say_what_is_left(rest, book)
    return status(book, report)


def planned(options: argparse.Namespace) -> list[Unit]:
    """The units of all parts.

    Raises:
        ValueError: for a mistake in the arguments.
        CallFailed: if no process can be started.
    """
    operations = []
    for name in ("kernels", "divergence", "objectives"):
        with suppress(ModuleNotFoundError):
            operations.append(named(name))
    for name in options.providers or []:
        if not any(operation.knows(name) for operation in operations):
            OPERATION.find(name)
    return [unit for part in options.parts for unit in PARTS[part](part, options)]


def write(record: Json, book: Book, report: Json, output: Path) -> None:
    """Prints a line for each figure, and saves the report so far."""
    for text in lines(record):
        say(
            f"{record['part']}  {record['case']}  {record['provider']}: {text}  [{record['took']:.0f} s]"
        )
    finish(report, book, output, plots=False)


def lines(record: Json) -> Iterator[str]:
    if record["status"] != "done":
        yield f"{record['status']}, {record['reason']}"
    elif isinstance(record["found"], list):
        for case in record["found"]:
            yield from (f"{case['pass']} {in_a_line(row)}" for row in case["rows"])
    else:
        names, ((_, *cells),) = grid({"": record["found"]})
        yield (
            "see profile.txt"
            if "text" in names
            else ", ".join(map(" ".join, zip(names[1:], cells, strict=True)))
        )


def in_a_line(row: Json) -> str:
    if row["status"] != "measured":
        return f"{row['status']}, {row['reason']}"
    ratios = " ".join(f"÷{name} {value:.2f}" for name, value in row["ratio"].items())
    errors = " ".join(f"{name} {float(value):.0e}" for name, value in row["errors"].items())
    return (
        f"{1000 * row['seconds']['median']:.3g} ms, {ratios}; {errors}; {shown(row.get('clocks'))}"
    )


def finish(report: Json, book: Book, output: Path, *, plots: bool = True) -> None:
    """Writes the report of all records as gpu.json, gpu.md, gpu.png and profile.txt."""
    order = {part: i for i, part in enumerate(PARTS)}
    records = sorted(
        book.records.values(), key=lambda record: order.get(record["part"], len(order))
    )
    report["cases"], report["tables"] = merged(records), {}
    for record in records:
        if record["status"] != "done":
            name = f"{record['part']}, {record['case']}: {record['provider']}"
            report["unavailable"][name] = f"{record['status']}, {record['reason']}"
        elif isinstance(record["found"], dict) and "text" in record["found"]:
            (output / "profile.txt").write_text(record["found"]["text"])
        elif isinstance(record["found"], dict):
            row = f"{record['case']}, {record['provider']}"
            report["tables"].setdefault(record["part"], {})[row] = record["found"]
    for row in (row for case in report["cases"] for row in case["rows"]):
        if "absent" in (row.get("clocks") or {}):
            report["unavailable"]["clock, power and temperature"] = row["clocks"]["absent"]
    report["targets"] = list(targets(report["cases"], report["machine"]))
    sections = [(name, *grid(rows)) for name, rows in report["tables"].items()]
    save(report, output, "gpu", [("", HEADER, cells(report["targets"])), *sections])
    if plots:
        plot(report, output / "gpu.png")


def grid(rows: dict[str, Json]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of rows that may have different columns."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    return ["", *names], [
        [label, *(_cell(row.get(name)) for name in names)] for label, row in rows.items()
    ]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def status(book: Book, report: Json) -> int:
    """1 if one of ours failed, was lost or is wrong, or nothing was measured yet."""
    records = book.records.values()
    bad = [
        r
        for r in records
        if r["provider"].startswith("burnish") and r["status"] in ("failed", "lost")
    ]
    rows = [row for case in report["cases"] for row in ours(case["rows"])]
    wrong = [row for row in rows if row["status"] == "failed"]
    return 1 if bad or wrong or not any(record["status"] == "done" for record in records) else 0


def say_what_is_left(rest: list[Unit], book: Book) -> None:
    for name, where in book.given_up().items():
        say(f"{name} is not asked again: {where}")
    seconds: dict[str, list[float]] = {}
    for unit, before in zip(rest, ["", *(unit.case for unit in rest)], strict=False):
        seconds.setdefault(unit.part, []).append(book.estimate(unit, unit.guess(before)))
    for part, each in seconds.items():
        say(f"left: {part}, {len(each)} measurements, about {sum(each):.0f} s")
    minutes = math.ceil(sum(map(sum, seconds.values())) / 60)
    say(
        f"left in all: about {minutes} minutes; the same command goes on"
        if rest
        else "nothing is left"
    )
