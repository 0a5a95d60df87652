"""Every Triton kernel is compiled for GPUs that are not here, and costs no more than was committed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from grids import slow

pytest.importorskip("triton", reason="needs triton")

TOOL = Path(__file__).parents[1] / "support" / "aot.py"
CASE = "sm_90 forward bf16 plain"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled once in this file."""
    return tmp_path_factory.mktemp("triton")


def run(cache: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    return subprocess.run([sys.executable, TOOL, *options], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("architecture", ["sm_90", slow("sm_80"), slow("sm_100"), slow("gfx942")])
def test_every_kernel_is_within_its_budget(cache: Path, architecture: str) -> None:
    result = run(cache, "--only", f"{architecture} ")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.slow
def test_what_is_over_the_budget_is_red(cache: Path, tmp_path: Path) -> None:
    """One register less, then no figure at all, then those of another triton, which say nothing and are kept."""
    budget = tmp_path / "budget.json"
    options = "--only", CASE, "--budget", budget
    assert run(cache, *options, "--update").returncode == 0
    ((version, figures),) = json.loads(budget.read_text()).items()
    less = figures[CASE] | {"registers": figures[CASE]["registers"] - 1}

    budget.write_text(json.dumps({version: {CASE: less}}))
    result = run(cache, *options)
    numbers = f"registers are {figures[CASE]['registers']}, the budget is {less['registers']}"
    wanted = f"{CASE}: {numbers}; if worth it, run with --update"
    assert result.returncode == 1 and wanted in result.stdout.splitlines()

    budget.write_text(json.dumps({version: {}}))
    result = run(cache, *options)
    assert result.returncode == 1 and f"{CASE}: has no budget; run with --update" in result.stdout.splitlines()

    budget.write_text(json.dumps({"0": {CASE: less}}))
    result = run(cache, *options)
    assert result.returncode == 0 and f"There is no budget for triton {version}, only for 0" in result.stdout
    assert run(cache, *options, "--update").returncode == 0
    assert json.loads(budget.read_text()) == {"0": {CASE: less}, version: figures}
