"""Every Triton kernel is compiled for GPUs that are not here, and costs no more than was
committed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from grids import slow

pytest.importorskip("triton", reason="needs triton")

TOOL = Path(__file__).parents[1] / "support" / "tools" / "aot.py"
CASE = "sm_90 forward bf16 plain"
# one of most kernels
PLAIN = "sm_90 ((forward|fold|backward) bf16|divergence (fold|backward reverse KL)) plain"
OTHERS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942", "gfx950"]
FULL = "(forward bf16 plain|.* everything)"  # tensor cores, and all that the plain ones do and more
# Runs it with each list of options in one interpreter; prints, for each, its exit status and its
# output as JSON.
SEVERAL = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
import aot
for options in json.loads(sys.argv[2]):
    sys.argv, printed = ["aot", *options], io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            aot.main()
        except SystemExit as end:
            status = int(end.code or 0)
    print(json.dumps([status, printed.getvalue()]))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled once in this file."""
    return tmp_path_factory.mktemp("triton")


def run(cache: Path, *options: list[str]) -> list[tuple[int, str]]:
    """Exit status and output of the tool with each of these lists of options."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-c", SEVERAL, str(TOOL.parent), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "cases",
    [
        PLAIN,
        slow("sm_90 "),
        *(slow(f"{other} {FULL}") for other in OTHERS),
        *(pytest.param(f"{other} ", marks=pytest.mark.exhaustive) for other in OTHERS),
    ],
    ids=["plain", "sm_90", *OTHERS, *(f"all of {other}" for other in OTHERS)],
)
def test_every_kernel_is_within_its_budget(cache: Path, cases: str) -> None:
    ((status, printed),) = run(cache, ["--only", cases])
    assert status == 0, printed[-4000:]
    assert cases != PLAIN or "5 compiled, 0 complaints" in printed


@pytest.mark.slow
def test_what_is_over_the_budget_is_red(cache: Path, tmp_path: Path) -> None:
    """One register less, then no figure at all, then those of another triton, which say nothing and
    are kept.
    """
    compare = ["--only", CASE, "--budget"]
    files = measured, less, none, other = [
        tmp_path / f"{name}.json" for name in ("measured", "less", "none", "other")
    ]
    ((status, _),) = run(cache, [*compare, str(measured), "--update"])
    ((version, figures),) = json.loads(measured.read_text()).items()
    fewer = figures[CASE] | {"registers": figures[CASE]["registers"] - 1}
    less.write_text(json.dumps({version: {CASE: fewer}}))
    none.write_text(json.dumps({version: {}}))
    other.write_text(json.dumps({"0": {CASE: fewer}}))
    options = [[*compare, str(budget)] for budget in files]
    outcomes = run(cache, *options, [*compare, str(other), "--update"])
    assert status == 0 and [status for status, _ in outcomes] == [0, 1, 1, 0, 0]
    _, over, unknown, of_another, _ = (printed.splitlines() for _, printed in outcomes)
    numbers = f"registers are {figures[CASE]['registers']}, the budget is {fewer['registers']}"
    assert f"{CASE}: {numbers}; if worth it, run with --update" in over
    assert f"{CASE}: has no budget; run with --update" in unknown
    assert any(
        f"There is no budget for triton {version}, only for 0" in line for line in of_another
    )
    assert json.loads(other.read_text()) == {"0": {CASE: fewer}, version: figures}


@pytest.mark.parametrize("architecture", ["sm_86", "sm_89", "sm_120"])
@pytest.mark.parametrize(
    ("figures", "complaint"),
    [
        ({"spills": 0, "shared": 66_560}, None),
        ({"spills": 0, "shared": 16_384}, "two buffers of blocks are 65536"),
        ({"spills": 0, "shared": 101_377}, "has 101376"),
    ],
    ids=["as it is", "one buffer", "too much"],
)
def test_the_plain_forward_has_two_buffers_in_the_memory_that_there_is(
    architecture: str, figures: dict[str, int], complaint: str | None
) -> None:
    import aot

    label = f"{architecture} forward bf16 plain"
    found = list(aot.complaints({label: figures}, {}))
    assert (found == []) if complaint is None else (len(found) == 1 and complaint in found[0])
