"""Processor time of every test, its child processes included, as a table: ``pytest --cpu-times FILE``.

The time of a fixture counts for the first test that uses it, that of a process for the test that waits for its end.
"""

import resource
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

SHOWN = 40
PAGE = """# The {shown} tests that take most processor time

Made by `{command}`: {tests:,} tests in {total:,.0f} processor seconds, children included; {share:.0%} is in this table.
Each process of pytest takes {collection:.0f} s more before its first test, to import and collect.

| seconds | test |
|--:|---|
{rows}
"""


def used() -> float:
    """Processor seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Recorder:
    """A plugin of pytest; workers of pytest-xdist send what they measure with their reports."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.collection = 0.0

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
        self.seconds[report.nodeid] += report.processor_seconds
        self.collection = report.collection

    def pytest_terminal_summary(self) -> None:
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:SHOWN]
        total = sum(self.seconds.values())
        page = PAGE.format(
            shown=len(slowest),
            command=" ".join(["pytest", *sys.argv[1:]]),
            tests=len(self.seconds),
            total=total,
            share=sum(seconds for _, seconds in slowest) / max(total, 1e-9),
            collection=self.collection,
            rows="\n".join(f"| {seconds:.1f} | {test} |" for test, seconds in slowest),
        )
        self.path.write_text(page)
