"""Everything at the sizes that matter on a GPU, into one report: ``burnish bench gpu --output DIR``.

    head         N = 8192, D = 4096, V = 151936 in bfloat16: every provider, with and without gradients
    dead_rows    the same with 80 % of the rows without a gradient
    grid         tokens x width x vocabulary of real models
    divergence   of heads of the same and of different width
    objectives   512 answers of 200,000 tokens, against the peer's loss code

Each case is saved when it is done, as gpu.json and gpu.md, or gpu-head.json if ``--parts head`` is asked for; who takes
the GPU along, or gives no answer, loses a row. At the end stand the figures that our head is to meet.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import harness
from .operation import named
from .report import TARGET_HEADER, Case, Report, plot, save, target_cells

Row = dict[str, Any]

PARTS: dict[str, tuple[str, list[str]]] = {
    "head": ("kernels", ["--shapes", "large", "--outputs", "loss", "logprob", "logprob+entropy"]),
    "dead_rows": (
        "kernels",
        ["--shapes", "large", "--outputs", "logprob+entropy", "--passes", "train", "--dead_rows", "0.8"],
    ),
    "grid": (
        "kernels",
        ["--shapes", "grid", "--outputs", "logprob+entropy", "--passes", "forward", "train", "--rounds", "3"],
    ),
    "divergence": (
        "divergence",
        ["--shapes", "large", "8192x2048x4096x151936", "--passes", "forward", "train", "--beta", "0", "0.5", "1"],
    ),
    "objectives": ("objectives", ["--shapes", "large", "--dtypes", "float32"]),
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="burnish bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, help="some of them; all unless something else is said")
    add("--shapes", nargs="+", metavar="NAME", help="in place of each part's own, such as tiny")
    add("--output", type=Path, default=Path("runs/bench"), help="where the report goes")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if one of ours has failed, or nothing could be measured; 2 for a mistake in the arguments."""
    given = list(sys.argv[1:] if given is None else given)
    options, more = arguments().parse_known_args(given)
    name = "-".join(["gpu", *(options.parts or [])])
    try:
        plan = [(named(PARTS[part][0]), parsed(part, more, options)) for part in options.parts or PARTS]
        report = harness.new_report(shlex.join(["burnish", "bench", "gpu", *given]), plan[0][1].device)
        for who in plan[0][1].providers or []:
            if not any(operation.knows(who) for operation, _ in plan):
                plan[0][0].find(who)
        for operation, asked in plan:
            if asked.providers is not None:  # the names of all parts
                asked.providers = [who for who in asked.providers if operation.knows(who)]
                if not asked.providers:
                    continue
            harness.bench(operation, asked, report, name)
            report["targets"] = list(targets(report["cases"]))
            save(report, options.output, name)
        plot(report, options.output / f"{name}.png")
    except ValueError as error:
        print(f"burnish bench gpu: {error}", file=sys.stderr)
        return 2
    show(report)
    return harness.status(report)


def parsed(part: str, more: list[str], options: argparse.Namespace) -> argparse.Namespace:
    """The options of a part: its own, then what was given for all of them."""
    operation, own = PARTS[part]
    shapes = ["--shapes", *options.shapes] if options.shapes else []
    return harness.parser(named(operation), None).parse_args([*own, *shapes, *more, "--output", str(options.output)])


def targets(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """What the head is to meet, as far as it was measured: at the shape of the first case of the head."""
    heads = [case for case in cases if case["operation"] == "kernels"]
    same = [case for case in heads if case["shape"] == heads[0]["shape"]]
    for case in same:
        if case["dead_rows"] == 0:
            yield from _speed(case)
    for case in same:
        whole = [c for c in same if not c["dead_rows"] and all(c[k] == case[k] for k in ("outputs", "pass", "dtype"))]
        if case["dead_rows"] and case["pass"] == "train" and whole:
            yield from _dead_rows(whole[0], case)


def _speed(case: Case) -> Iterator[dict[str, Any]]:
    about = f"{' + '.join(case['outputs'])}, {case['pass']}"
    ours, others = _measured(case, ours=True), _measured(case, ours=False)
    if not ours:
        yield _target(f"{about}: ours", "nothing measured", "", None)
        return
    kept, *twice = case["floor"]
    best = ours[0]
    wanted = {"forward": 1.15, "train": 1.25}.get(case["pass"])
    yield _ratio(f"{about}: {best['provider']} ÷ {kept}", best["ratio"][kept], wanted)
    again = [row for row in ours if row["provider"].endswith("-recompute")]
    if twice and again:
        wanted = 1.2 if case["pass"] == "train" else None
        yield _ratio(f"{about}: {again[0]['provider']} ÷ {twice[0]}", again[0]["ratio"][twice[0]], wanted)
    if again and again[0]["extra_bytes"] is not None and case["pass"] == "train":
        tokens, width, vocab = case["shape"]
        itemsize = getattr(torch, case["dtype"]).itemsize
        extra = again[0]["extra_bytes"] - itemsize * width * (tokens + vocab)
        bound = 0.35e9 + 4 * vocab * width
        what = f"{about}: {again[0]['provider']}, memory above inputs and gradients"
        yield _target(what, f"{extra / 1e9:.3f} GB", f"≤ {bound / 1e9:.3f} GB (0.35 + float32 dW)", extra <= bound)
    if others:
        share = best["seconds"]["median"] / others[0]["seconds"]["median"]
        yield _ratio(f"{about}: {best['provider']} ÷ {others[0]['provider']}, the fastest of the others", share, 1.0)
    if "logprob" in best["errors"]:
        error = best["errors"]["logprob"]
        yield _target(f"{about}: {best['provider']}, error of a log-prob", f"{error:.1e}", "≤ 1e-5", error <= 1e-5)


def _dead_rows(whole: Case, sparse: Case) -> Iterator[dict[str, Any]]:
    before = {row["provider"]: row for row in _measured(whole, ours=True)}
    for row in _measured(sparse, ours=True)[:1]:
        if row["provider"] in before:
            share = row["backward"]["median"] / before[row["provider"]]["backward"]["median"]
            what = f"{row['provider']}: backward with {sparse['dead_rows']:.0%} dead rows ÷ with none"
            yield _ratio(what, share, 0.3 if sparse["dead_rows"] == 0.8 else None)


def _measured(case: Case, *, ours: bool) -> list[Row]:
    """The fastest first."""
    rows = [
        row for row in case["rows"] if row["status"] == "measured" and row["provider"].startswith("burnish") == ours
    ]
    return sorted(rows, key=lambda row: row["seconds"]["median"])


def _ratio(what: str, found: float, wanted: float | None) -> dict[str, Any]:
    return _target(what, f"{found:.2f}", "" if wanted is None else f"≤ {wanted}", wanted and found <= wanted)


def _target(what: str, found: str, wanted: str, met: Any) -> dict[str, Any]:
    return {"what": what, "found": found, "wanted": wanted, "met": met}


def show(report: Report) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in TARGET_HEADER:
        table.add_column(head, no_wrap=True)
    for row in target_cells(report["targets"]):
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 132)
    console.print(table)
