"""Measurements in order, as many as fit into a time, none of them twice: what ``burnish bench gpu`` is made of."""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from .isolation import Failure, Lost, Room

Record = dict[str, Any]
SOURCES = Path(__file__).parent
PEERS = {"trl": "trl", "liger": "liger-kernel", "cce": "cut-cross-entropy", "quack": "quack-kernels"}


class Unit(NamedTuple):
    """One measurement: of one provider in one case of a part.

    Args:
        seconds: estimated, and ``setup`` before it unless the same case was measured last.
        function: ``function(*arguments, notice)`` measures it, and returns what json can hold.
    """

    part: str
    case: str
    provider: str
    seconds: float
    setup: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def guess(self, before: str) -> float:
        """Seconds after the case ``before``."""
        return self.seconds + (self.setup if self.case != before else 0.0)


class Book:
    """The measurements so far, a line of ``path`` each; only those of today's code, packages and device are seen."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        self.records: dict[tuple[str, str, str], Record] = {}
        text = path.read_text() if path.exists() else ""
        if text and not text.endswith("\n"):  # a call was ended while it wrote
            path.write_text(text := text[: text.rfind("\n") + 1])
        for line in text.splitlines():
            self._enter(json.loads(line))

    def _enter(self, record: Record) -> None:
        if record["version"] == version(record["provider"], self.device):
            self.records[record["part"], record["case"], record["provider"]] = record

    def add(self, unit: Unit, guess: float, found: Record) -> Record:
        """``found`` as a record of this unit, written to the file."""
        names = {"part": unit.part, "case": unit.case, "provider": unit.provider, "estimated": guess}
        record = {**names, "version": version(unit.provider, self.device), **found}
        with self.path.open("a") as file:
            file.write(json.dumps(json.loads(json.dumps(record), parse_constant=str)) + "\n")
        self._enter(record)
        return record

    def of(self, unit: Unit) -> Record | None:
        return self.records.get((unit.part, unit.case, unit.provider))

    def done(self, unit: Unit) -> bool:
        """Not so is what failed by an error, which may have been mended where no version tells."""
        match self.of(unit):
            case {"status": "done", "found": list(cases)}:
                return all(row["status"] != "failed" for case in cases for row in case["rows"])
            case {"status": "done" | "lost"}:
                return True
        return False

    def given_up(self) -> dict[str, str]:
        """Who has once not answered, or twice ended the process, and so costs no more time; and where."""
        lost: dict[str, list[Record]] = {}
        for record in self.records.values():
            if record["status"] == "lost":
                lost.setdefault(record["provider"], []).append(record)
        return {
            name: "; ".join(f"{r['part']}, {r['case']}: {r['reason']}" for r in records)
            for name, records in lost.items()
            if len(records) > 1 or records[0]["silent"]
        }

    def estimate(self, unit: Unit, guess: float) -> float:
        """Seconds: the guess, corrected by the others so far; half as much again as what once was not enough."""
        taken = [r["took"] / r["estimated"] for r in self.records.values() if r["status"] == "done"]
        pace = min(4.0, max(0.25, median(taken))) if len(taken) > 3 else 1.0
        record = self.of(unit)
        cut = 1.5 * float(record["took"]) if record and record["status"] == "cut" else 0.0
        return max(pace * guess, cut)


@cache
def version(provider: str, device: str) -> str:
    """Of all that a figure depends on: device, rules, and the code of the provider, or the version of its package."""
    files = [SOURCES / f"{name}.py" for name in ("measure", "inputs", "ceilings")]
    if provider.startswith("burnish"):
        files += sorted(path for room in ("kernels", "objectives") for path in (SOURCES.parent / room).glob("*.py"))
    packages = ["torch", "triton", *[package for name, package in PEERS.items() if provider.startswith(name)]]
    found = {package: [d.version for d in importlib.metadata.distributions(name=package)][:1] for package in packages}
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    parts = [json.dumps([gpu, found]).encode(), *(path.read_bytes() for path in files)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def chain(
    units: Iterable[Unit],
    book: Book,
    left: Callable[[], float],
    attempt: Callable[[Unit, float], Record],
    tell: Callable[[Record], None],
) -> list[Unit]:
    """Measures what was not measured and fits into what is ``left()``, in order; returns what does not fit."""
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
        tell(record)
        if record["status"] == "cut":
            rest.append(unit)
    return rest


def attempted(room: Room | None, unit: Unit, limit: float, *, clock: Callable[[], float]) -> Record:
    """What it gave: "done" with what was found, "lost" or "failed" with the reason, "cut" after ``limit`` seconds."""
    began = clock()
    found: Record
    try:
        if room is None:
            content = unit.function(*unit.arguments, lambda name: None)
        else:
            content = room.once(unit.function, unit.arguments, limit)
        found = {"status": "done", "found": content}
    except TimeoutError:
        found = {"status": "cut", "reason": f"not done after {limit:.0f} s"}
    except Lost as error:
        found = {"status": "lost", "reason": str(error), "silent": error.silent}
    except Exception as error:  # a mistake in one part is no reason to lose the others
        found = {"status": "failed", "reason": str(error) if isinstance(error, Failure) else repr(error)}
    return found | {"took": clock() - began}
