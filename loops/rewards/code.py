"""Does the code that a model wrote pass its tests? Each test is a process with limits, see `code_runner`.

The limits protect a run from code that hangs, forks, prints for ever or ends its process. They are
no proof: a program that is made to deceive its tests, in whose process it runs, can; and where the
kernel has no namespaces it has the network. ``isolate: {jail: true}`` adds walls.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..rollouts.sample import Row, Sample
from . import code_runner

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_LARGEST_OUTPUT = code_runner.LARGEST_FILE


@dataclass(frozen=True)
class CodeTests:
    """The share of a row's tests that the Python code of the completion passes.

    The code is the last fenced block of the completion, or all of it if there is none. A test is a
    text of Python that runs after the code, such as ``assert add(1, 2) == 3``, or a mapping
    {input: text, output: text}, for a program that reads its standard input and prints. The column
    holds one test, or a list of them. Code that fails, in whatever way, fails its test: it scores 0
    and is not masked.

    Args:
        tests: name of the column.
        seconds: that all tests of a completion may take; those that are not reached have failed.
        memory: GiB of each test's process.
        all_or_nothing: 1 if all tests pass, and 0 otherwise.
    """

    tests: str = "tests"
    seconds: float = 10.0
    memory: float = 1.0
    all_or_nothing: bool = False

    def __post_init__(self) -> None:
        for name in ("seconds", "memory"):
            if not getattr(self, name) > 0:
                raise ValueError(f"code: {name} must be > 0, got {getattr(self, name)}")

    @property
    def columns(self) -> Sequence[str]:
        return (self.tests,)

    def __call__(self, row: Row, sample: Sample) -> float | None:
        given: Any = row[self.tests]
        tests = given if isinstance(given, list | tuple) else [given]
        if given is None or not tests:
            return None
        code = code_of(sample.text)
        deadline = time.monotonic() + self.seconds
        passed = 0
        for test in tests:
            left = deadline - time.monotonic()
            if left > 0 and passes(code, test, seconds=left, memory=self.memory):
                passed += 1
            elif self.all_or_nothing:
                return 0.0
        return passed / len(tests)


def code_of(text: str) -> str:
    """The last fenced block of a text, or the whole text."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def passes(
    code: str, test: str | Mapping[str, str], *, seconds: float = 10.0, memory: float = 1.0
) -> bool:
    """True if the code passes a test, in a process of its own that ends with it.

    Raises:
        ValueError: if the test is neither a text nor a mapping of input and output.
    """
    if isinstance(test, str):
        return _passes_asserts(code, test, seconds, memory)
    if isinstance(test, Mapping) and {*test} == {"input", "output"}:
        status, printed = _run({"program.py": code}, str(test["input"]), seconds, memory)
        return status == 0 and _lines(printed) == _lines(str(test["output"]))
    raise ValueError(
        f"code: a test is a text of Python, or a mapping of input and output, got {test!r}"
    )


def _passes_asserts(code: str, test: str, seconds: float, memory: float) -> bool:
    # Printed after the test, so that code which ends the process before has not passed.
    token = secrets.token_hex(16)
    files = {"program.py": code, "test.py": test, "token": token}
    status, printed = _run(files, "", seconds, memory)
    return status == 0 and printed.endswith(token)


def _run(
    files: Mapping[str, str], given: str, seconds: float, memory: float
) -> tuple[int | None, str]:
    """The status of the process, None if it ran out of time, and what it printed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        directory = Path(place)
        for name, text in files.items():
            (directory / name).write_text(text, errors="replace")
        limits = {"seconds": seconds, "memory": int(memory * (1 << 30))}
        command = [sys.executable, "-I", str(code_runner.__file__), json.dumps(limits)]
        # a file, as a pipe would hold all that is printed in the memory of this process
        with (
            tempfile.TemporaryFile() as printed,
            tempfile.TemporaryFile() as standard_input,
        ):
            standard_input.write(given.encode(errors="replace"))
            standard_input.seek(0)
            process = subprocess.Popen(
                command,
                cwd=place,
                env={"PATH": os.defpath, "HOME": place, "LANG": "C.UTF-8"},
                stdin=standard_input,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=seconds)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            process.wait()
            printed.seek(0)
            return status, printed.read(_LARGEST_OUTPUT).decode(errors="replace")


def _lines(text: str) -> list[str]:
    """The lines without the spaces at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
