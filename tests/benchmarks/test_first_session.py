"""The script of the first half hour on a GPU: what it calls exists, and a part that fails is said."""

import subprocess
from pathlib import Path

import pytest
from burnish.benchmarks.gpu.run import PARTS
from burnish.loops.recipes import settings_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "first_session"
# In place of Python: notes what it is called with, and fails where it is called for a benchmark.
STUB = """#!/usr/bin/env bash
(IFS=$'\\t'; printf '%s\\n' "$*" >> '{calls}')
case "$*" in *"{failing}"*) exit 3 ;; esac
"""


def called(directory, call, failing="nothing"):
    """What each call of Python in this part of the session is given, and its exit status."""
    calls = directory / "calls"
    stub = directory / "python"
    stub.write_text(STUB.format(calls=calls, failing=failing))
    stub.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(stub), "HOME": str(directory)}
    command = [str(SCRIPT), call, str(directory / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return [line.split("\t") for line in calls.read_text().splitlines()], done


@pytest.mark.parametrize("call", ["tests", "head", "steps", "graphs"])
def test_each_call_names_what_exists(tmp_path, call):
    calls, done = called(tmp_path, call)
    assert done.returncode == 0, done.stderr
    benchmarks = [words for words in calls if words[:3] == ["-m", "burnish.benchmarks", "gpu"]]
    assert len(benchmarks) == (call != "graphs")
    for words in benchmarks:
        if "--parts" in words:
            first = words.index("--parts") + 1
            assert set(words[first : words.index("--minutes")]) <= set(PARTS)
    for words in calls:
        if words[:2] == ["-m", "pytest"]:
            assert all(Path(word).exists() for word in words if word.startswith("/"))
        if words[:2] == ["-m", "burnish"]:
            fields = {word[2:] for word in words if word.startswith("--")}
            assert fields <= set(settings_of(words[2]).__dataclass_fields__)


def test_a_part_that_fails_is_said_and_the_next_is_measured(tmp_path):
    calls, done = called(tmp_path, "tests", failing="pytest")
    assert done.returncode == 1
    assert "FAILED: tests.txt" in done.stdout
    assert calls[-1][:3] == ["-m", "burnish.benchmarks", "gpu"]


def test_without_a_call_it_says_how_it_is_used(tmp_path):
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "first_session tests" in done.stdout
