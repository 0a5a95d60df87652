"""Processor time of every test, its child processes included, as a table:
``pytest --cpu-times FILE``.

The time of a fixture counts for the first test that uses it.
"""

import os
import resource
import sys
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

SHOWN = 40
PAGE = """# The {shown} tests that take most processor time

Made by `{command}`: {tests:,} tests in {total:,.0f} processor seconds, children included; {share:.0%} is in this table.
By the clock these tests took {clock:,.0f} s: what is more than the first number was spent waiting.
Each process of pytest takes {collection:.0f} s more before its first test, to import and collect.

| seconds | test |
|--:|---|
{rows}
"""


def of_children() -> float:
    """Processor seconds of children that run, and of those of their own that have ended."""
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        found: list[str] = []
        with suppress(OSError):  # a thread that has ended
            found = children.read_text().split()
        for child in found:
            with suppress(OSError):  # it has ended
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def used() -> float:
    """Processor seconds of this process and of its children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + of_children()


class Recorder:
    """A plugin of pytest; workers of pytest-xdist send what they measure with their reports."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.collection = self.clock = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self.start = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self.start = self.start, used()
        report.processor_seconds, report.collection = self.start - before, self.collection
        return report

    def pytest_collection_finish(self) -> None:
        self.collection = used()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # a worker that died sent none
        self.seconds[report.nodeid] += getattr(report, "processor_seconds", 0.0)
        self.collection = getattr(report, "collection", self.collection)
        self.clock += report.duration

    def pytest_terminal_summary(self) -> None:
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:SHOWN]
        total = sum(self.seconds.values())
        page = PAGE.format(
            shown=len(slowest),
            command=" ".join(["pytest", *sys.argv[1:]]),
            tests=len(self.seconds),
            total=total,
            clock=self.clock,
            share=sum(seconds for _, seconds in slowest) / max(total, 1e-9),
            collection=self.collection,
            rows="\n".join(f"| {seconds:.1f} | {test} |" for test, seconds in slowest),
        )
        self.path.write_text(page)
