"""Fixtures of the benchmark tests."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from burnish.benchmarks.__main__ import main


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Puts an object where the command line finds it, as if a user had written a module; returns
    ``module:object``.
    """

    def put(name: str, found: Any) -> str:
        mine = sys.modules.get("mine", SimpleNamespace())
        setattr(mine, name, found)
        monkeypatch.setitem(sys.modules, "mine", mine)
        return f"mine:{name}"

    return put


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The saved report of ``burnish bench`` at a tiny shape, and under "status" its exit status."""

    def run(*arguments: str, benchmark: str = "kernels") -> dict[str, Any]:
        fixed = [
            "--shapes",
            "tiny",
            "--rounds",
            "2",
            "--no-memory",
            "--device",
            "cpu",
            "--output",
            str(tmp_path),
        ]
        status = main([benchmark, *fixed, *arguments])
        (found,) = tmp_path.glob("*.json")
        return {**json.loads(found.read_text()), "status": status}

    return run


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """``python -m burnish.benchmarks`` in a process that finds the modules of tests/support."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        support = (Path(__file__).parents[1] / "support").iterdir()
        places = [*map(str, support), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        command = [sys.executable, "-W", "ignore", "-m", "burnish.benchmarks", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    return run
