"""Fixtures of the benchmark tests."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from burnish.benchmarks.kernels import main


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Puts an object where the command line finds it, as if a user had written a module; returns ``module:object``."""

    def put(name: str, found: Any) -> str:
        mine = sys.modules.get("mine", SimpleNamespace())
        setattr(mine, name, found)
        monkeypatch.setitem(sys.modules, "mine", mine)
        return f"mine:{name}"

    return put


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The saved report of ``burnish bench kernels`` at a tiny shape, and under "status" its exit status."""

    def run(*arguments: str) -> dict[str, Any]:
        fixed = ["--shapes", "tiny", "--rounds", "2", "--no-memory", "--device", "cpu", "--output", str(tmp_path)]
        status = main([*fixed, *arguments])
        return {**json.loads((tmp_path / "kernels.json").read_text()), "status": status}

    return run
