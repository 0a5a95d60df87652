"""Everything that matters on a GPU, in parts that fit into minutes: ``burnish bench gpu --output DIR``.

    ceilings     bytes and products of this machine, in a burst and sustained
    head         N = 8192, D = 4096, V = 151936 in bfloat16, log-prob and entropy, forward alone and with gradients
    digits       of products and log-probs against float64, cuBLAS's own beside each provider's
    dead_rows    the head with 80 % of the rows without a gradient
    profile      the kernels of one of our steps, into profile.txt
    tiles        our step with tiles of other sizes
    logprob      the head, log-prob alone, with those who give nothing else
    divergence   of heads of the same width
    objectives   512 answers of 200,000 tokens, against the peer's loss code
    grid         tokens x width x vocabulary of real models
    compiled     the naive formula through inductor, once

A call measures, in this order, what fits into --minutes, and says what is left and how long that would take: call it
again. Every measurement is a line of gpu.jsonl in --output, and is not done again unless the code or package that it
measures has changed, or its line is deleted. Who hangs, crashes or is missing loses rows, with the reason. At the end,
and in gpu.md, stand the figures that our head is to meet, as far as they were measured.
"""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from . import ceilings, harness
from .chain import Book, Record, Unit, attempted, chain
from .clocks import shown
from .isolation import Failure, Room
from .kernels import OPERATION
from .operation import named
from .report import TARGET_HEADER, Report, grid, merged, plot, save, target_cells
from .targets import ours, targets

Row = dict[str, Any]
START = 150.0  # seconds for a process, its inputs and the truth about them: imports of a fresh machine take their time


class Options(NamedTuple):
    """What was given: ``more`` are further flags of the benchmarks."""

    device: str
    shapes: list[str] | None
    providers: list[str] | None
    more: list[str]
    room: Room | None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the head."""
        return OPERATION.parse_shapes(self.shapes or ["large"])[0]


Missing = dict[str, str]
Part = Callable[[str, Options, Missing], Iterator[Unit]]


def benchmark(operation_name: str, own: str, part: str, options: Options, missing: Missing) -> Iterator[Unit]:
    """Of ``burnish bench operation_name`` with these flags, each provider in each case."""
    operation = named(operation_name)
    shapes = ["--shapes", *options.shapes] if options.shapes else []
    flags = [*ROUNDS.split(), *own.split(), *shapes, *options.more, "--device", options.device]
    asked = harness.parser(operation, None).parse_args(flags)
    known = [who for who in options.providers or asked.providers if operation.knows(who)]
    asked.providers = [who for who in known if who not in missing]  # one whose import hangs is not asked again
    if not asked.providers:
        return
    try:
        absent, cases = harness.plan(operation, asked, options.room)
    except harness.Unmeasurable as error:
        missing[part] = str(error)
        return
    missing |= absent
    for case, names in cases:
        for name in names:
            estimate = harness.estimate(case, name)
            yield Unit(
                part, f"{case.title}, {' '.join(case.passes)}", name, *estimate, harness.measured, (case, [name])
            )


def measure_ceilings(part: str, options: Options, missing: Missing) -> Iterator[Unit]:
    n, d, v = options.shape
    device = options.device
    yield Unit(part, "copy", "torch", 5, 10, ceilings.copy, (device, min(2**32, 16 * n * v), 0.5))
    side = min(n, 8192)
    yield Unit(part, f"{side}^3", "cublas", 5, 10, ceilings.square, (device, side, 2.0))
    for rows, columns in product((n // 2, n), sorted({min(v, columns) for columns in (4096, 8192, 16384)})):
        arguments = device, rows, columns, d, 0.5
        yield Unit(part, f"{rows}x{columns}x{d}", "cublas", 5, 10, ceilings.products, arguments)


def measure_digits(part: str, options: Options, missing: Missing) -> Iterator[Unit]:
    n, d, v = options.shape
    for width in (d // 8, d // 4, d // 2, d, 2 * d):
        sizes = width, min(n, 256), min(v, 8192)
        yield Unit(part, f"product, K = {width}", "cublas", 1, 10, ceilings.truncation, (options.device, *sizes))
    known = [name for name in options.providers or DIGITS.split() if OPERATION.knows(name)]
    names = [name for name in known if name not in missing]
    missing |= harness.missing(OPERATION, names, options.device, options.room)
    for name in ("cublas", *(name for name in names if name not in missing)):
        yield Unit(part, "log-probs", name, 4, 10, ceilings.logprobs, (options.device, options.shape, name))


def measure_profile(part: str, options: Options, missing: Missing) -> Iterator[Unit]:
    yield Unit(part, "step", "burnish", 8, 10, ceilings.profile, (options.device, options.shape))


def measure_tiles(part: str, options: Options, missing: Missing) -> Iterator[Unit]:
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

PARTS: dict[str, Part] = {
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


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="burnish bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="some of them")
    add("--minutes", type=float, default=9.0, help="of this call; 0 only says what is left")
    add("--shapes", nargs="+", metavar="NAME", help="in place of each part's own, such as tiny")
    add("--providers", nargs="+", metavar="NAME", help="in place of each part's own; each where it is known")
    add("--device", default="cuda")
    add("--isolate", action=argparse.BooleanOptionalAction, help="measure in a process of its own; so on a GPU")
    add("--patience", type=float, default=60.0, help="seconds for one provider at a time, if isolated")
    add("--output", type=Path, default=Path("runs/bench"), help="where the measurements and the report are")
    return parser


def main(given: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Returns 0; 1 if one of ours has failed, or nothing was measured yet; 2 for a mistake in the arguments."""
    began = clock()
    given = list(sys.argv[1:] if given is None else given)
    options, more = arguments().parse_known_args(given)
    console = harness.wide_console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    isolate = options.device.startswith("cuda") if options.isolate is None else options.isolate

    def left() -> float:
        return 60 * float(options.minutes) - (clock() - began)

    with closing(Room(options.patience, start=START)) as opened:
        room = opened if isolate else None
        what = Options(options.device, options.shapes, options.providers, more, room)
        try:
            report = harness.new_report(shlex.join(["burnish", "bench", "gpu", *given]), options.device)
            units = planned(options.parts, what, report["unavailable"])
        except (ValueError, Failure) as error:
            print(f"burnish bench gpu: {error}", file=sys.stderr)
            return 2
        for who, reason in report["unavailable"].items():
            say(f"{who} is not measured: {reason}")
        options.output.mkdir(parents=True, exist_ok=True)
        book = Book(options.output / "gpu.jsonl", options.device)
        attempt = partial(attempted, room, clock=clock)
        rest = chain(units, book, left, attempt, lambda record: write(record, book, report, options.output, say))
    finish(report, book, options.output)
    show(report, console)
    tell_what_is_left(rest, book, say)
    return status(book, report)


def planned(parts: Sequence[str], options: Options, missing: Missing) -> list[Unit]:
    """Of all parts; in ``missing`` who can't take part, and why.

    Raises:
        ValueError: for a mistake in the arguments.
        Failure: if no process can be started.
    """
    for who in options.providers or []:
        if not any(named(name).knows(who) for name in ("kernels", "divergence", "objectives")):
            OPERATION.find(who)
    return [unit for part in parts for unit in PARTS[part](part, options, missing)]


def write(record: Record, book: Book, report: Report, output: Path, say: Callable[[str], None]) -> None:
    """Says what was found in a line, and saves the report so far."""
    head = f"{record['part']}  {record['case']}  {record['provider']}"
    for text in lines(record):
        say(f"{head}: {text}  [{record['took']:.0f} s]")
    finish(report, book, output, plots=False)


def lines(record: Record) -> Iterator[str]:
    if record["status"] != "done":
        yield f"{record['status']}, {record['reason']}"
    elif isinstance(record["found"], list):
        for case in record["found"]:
            yield from (f"{case['pass']} {in_a_line(row)}" for row in case["rows"])
    else:
        names, ((_, *cells),) = grid({"": record["found"]})
        yield "see profile.txt" if "text" in names else ", ".join(map(" ".join, zip(names[1:], cells, strict=True)))


def in_a_line(row: Row) -> str:
    if row["status"] != "measured":
        return f"{row['status']}, {row['reason']}"
    ratios = " ".join(f"÷{name} {value:.2f}" for name, value in row["ratio"].items())
    errors = " ".join(f"{name} {float(value):.0e}" for name, value in row["errors"].items())
    return f"{1000 * row['seconds']['median']:.3g} ms, {ratios}; {errors}; {shown(row.get('clocks'))}"


def finish(report: Report, book: Book, output: Path, *, plots: bool = True) -> None:
    """The report of all that the book holds, as gpu.json, gpu.md, gpu.png and profile.txt."""
    order = {part: i for i, part in enumerate(PARTS)}
    records = sorted(book.records.values(), key=lambda record: order.get(record["part"], len(order)))
    report["cases"], report["tables"] = merged(records), {}
    for record in records:
        if record["status"] != "done":
            who = f"{record['part']}, {record['case']}: {record['provider']}"
            report["unavailable"][who] = f"{record['status']}, {record['reason']}"
        elif isinstance(record["found"], dict) and "text" in record["found"]:
            (output / "profile.txt").write_text(record["found"]["text"])
        elif isinstance(record["found"], dict):
            row = f"{record['case']}, {record['provider']}"
            report["tables"].setdefault(record["part"], {})[row] = record["found"]
    for row in (row for case in report["cases"] for row in case["rows"]):
        if "absent" in (row.get("clocks") or {}):
            report["unavailable"]["clock, power and temperature"] = row["clocks"]["absent"]
    report["targets"] = list(targets(report["cases"], report["machine"]))
    save(report, output, "gpu")
    if plots:
        plot(report, output / "gpu.png")


def status(book: Book, report: Report) -> int:
    """1 if one of ours failed, was lost or is wrong, or nothing was measured yet."""
    records = book.records.values()
    bad = [r for r in records if r["provider"].startswith("burnish") and r["status"] in ("failed", "lost")]
    rows = [row for case in report["cases"] for row in ours(case["rows"])]
    wrong = [row for row in rows if row["status"] == "failed"]
    return 1 if bad or wrong or not any(record["status"] == "done" for record in records) else 0


def show(report: Report, console: Any) -> None:
    tables = [(name, *grid(rows)) for name, rows in report["tables"].items()]
    for name, head, cells in [*tables, ("targets", TARGET_HEADER, target_cells(report["targets"]))]:
        table = Table(title=name, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in head:
            table.add_column(column, no_wrap=name != "targets")
        for row in cells:
            table.add_row(*row)
        console.print(table)


def tell_what_is_left(rest: list[Unit], book: Book, say: Callable[[str], None]) -> None:
    for who, where in book.given_up().items():
        say(f"{who} is not asked again: {where}")
    seconds: dict[str, list[float]] = {}
    for unit, before in zip(rest, ["", *(unit.case for unit in rest)], strict=False):
        seconds.setdefault(unit.part, []).append(book.estimate(unit, unit.guess(before)))
    for part, each in seconds.items():
        say(f"left: {part}, {len(each)} measurements, about {sum(each):.0f} s")
    minutes = math.ceil(sum(map(sum, seconds.values())) / 60)
    say(f"left in all: about {minutes} minutes; the same command goes on" if rest else "nothing is left")
