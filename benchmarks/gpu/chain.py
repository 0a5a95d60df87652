"""Measurements in order, as many as fit into a time, none of them twice: what ``burnish bench gpu``
is made of.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from .. import harness
from ..operation import Json
from ..report import PEERS, versions
from ..worker import CallFailed, Lost, Worker

ROOT = Path(__file__).parents[2]  # of the checkout


class Unit(NamedTuple):
    """One measurement: of one provider in one case of a part."""

    part: str
    case: str
    provider: str
    seconds: float  # estimated
    setup: float  # seconds before it, estimated, unless the same case was measured last
    function: Callable[..., Any]  # returns what JSON can hold
    arguments: tuple[Any, ...]
    plan: harness.Plan | None = None  # whose inputs and truth are made first

    def guess(self, before: str) -> float:
        """Seconds after the case ``before``."""
        return self.seconds + (self.setup if self.case != before else 0.0)


class Book:
    """The measurements so far, a line of ``path`` each; only those of today's code, packages and
    device are seen.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        self.records: dict[tuple[str, str, str], Json] = {}
        text = path.read_text() if path.exists() else ""
        if text and not text.endswith("\n"):  # a call was ended while it wrote
            path.write_text(text := text[: text.rfind("\n") + 1])
        for line in text.splitlines():
            self._enter(json.loads(line))

    def _enter(self, record: Json) -> None:
        if record["version"] == version(record["provider"], self.device):
            self.records[record["part"], record["case"], record["provider"]] = record

    def add(self, unit: Unit, guess: float, outcome: Json) -> Json:
        """``outcome`` as a record of this unit, written to the file."""
        names = {
            "part": unit.part,
            "case": unit.case,
            "provider": unit.provider,
            "estimated": guess,
        }
        record = {**names, "version": version(unit.provider, self.device), **outcome}
        with self.path.open("a") as file:
            file.write(json.dumps(json.loads(json.dumps(record), parse_constant=str)) + "\n")
        self._enter(record)
        return record

    def record_of(self, unit: Unit) -> Json | None:
        return self.records.get((unit.part, unit.case, unit.provider))

    def done(self, unit: Unit) -> bool:
        """False after an error, which may have been mended where no version tells."""
        match self.record_of(unit):
            case {"status": "done", "found": list(cases)}:
                return all(row["status"] != "failed" for case in cases for row in case["rows"])
            case {"status": "done" | "lost"}:
                return True
        return False

    def given_up(self) -> dict[str, str]:
        """Providers that ran out of time once or ended the process twice, and so cost no more time;
        and where.
        """
        lost: dict[str, list[Json]] = {}
        for record in self.records.values():
            if record["status"] == "lost":
                lost.setdefault(record["provider"], []).append(record)
        return {
            name: "; ".join(f"{r['part']}, {r['case']}: {r['reason']}" for r in records)
            for name, records in lost.items()
            if len(records) > 1 or records[0]["silent"]
        }

    def estimate(self, unit: Unit, guess: float) -> float:
        """Seconds: the guess, corrected by the others so far; half as much again as what once was
        not enough.
        """
        shares = [
            r["took"] / r["estimated"] for r in self.records.values() if r["status"] == "done"
        ]
        pace = min(4.0, max(0.25, median(shares))) if len(shares) > 3 else 1.0
        record = self.record_of(unit)
        cut = 1.5 * float(record["took"]) if record and record["status"] == "cut" else 0.0
        return max(pace * guess, cut)


@cache
def version(provider: str, device: str) -> str:
    """A hash of all that a figure depends on: device, rules, and the provider's code, or the
    version of its package.
    """
    files = [
        ROOT / "benchmarks" / f"{name}.py"
        for name in ("measure", "operation", "kernels", "gpu/ceilings")
    ]
    if provider.startswith("burnish"):
        files += sorted(
            path for room in ("kernels", "objectives") for path in (ROOT / room).glob("*.py")
        )
    packages = [
        "torch",
        "triton",
        *[package for name, package in PEERS.items() if provider.startswith(name)],
    ]
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    parts = [json.dumps([gpu, versions(packages)]).encode(), *(path.read_bytes() for path in files)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def chain(
    units: Iterable[Unit],
    book: Book,
    left: Callable[[], float],
    attempt: Callable[[Unit, float], Json],
    on_record: Callable[[Json], None],
) -> list[Unit]:
    """Measures what was not measured and fits into what is ``left()``, in order.

    Returns what does not fit.
    """
    rest, before = [], ""
    for unit in units:
        if book.done(unit) or unit.provider in book.given_up():
            continue
        guess = unit.guess(before)
        if book.estimate(unit, guess) > left():
            rest.append(unit)
            continue
        before = unit.case
        record = book.add(unit, guess, attempt(unit, left()))
        on_record(record)
        if record["status"] == "cut":
            rest.append(unit)
    return rest


def attempted(
    worker: Worker, unit: Unit, limit: float, *, patience: float, clock: Callable[[], float]
) -> Json:
    """Measures a unit: "done" with the result, "lost" or "failed" with the reason, "cut" after
    ``limit`` seconds.
    """
    began = clock()
    outcome: Json
    try:
        if unit.plan is not None:
            worker.prepare(harness.prepared, unit.plan, seconds=min(worker.start, limit))
        seconds = min(max(patience, 2 * unit.seconds), limit - (clock() - began))
        outcome = {
            "status": "done",
            "found": worker.call(unit.function, *unit.arguments, seconds=seconds),
        }
    except (Lost, CallFailed) as error:
        outcome = {"status": "lost" if isinstance(error, Lost) else "failed", "reason": str(error)}
        outcome |= {"silent": error.silent} if isinstance(error, Lost) else {}
        if clock() - began >= limit:
            outcome = {"status": "cut", "reason": f"not done after {limit:.0f} s"}
    except Exception as error:  # a mistake in one part is no reason to lose the others
        outcome = {"status": "failed", "reason": repr(error)}
    return outcome | {"took": clock() - began}
