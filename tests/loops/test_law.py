"""The law: loss, gradient and every metric are the same for every split of a step and every layout of its rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from law import RECIPES, one_step

SUPPORT = Path(__file__).parents[1] / "support"
EXACT = 1e-12
ON_RANKS = ["shared:", "packed:60", "padded:1"]


def assert_same(result, expected):
    assert result["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=EXACT, abs=EXACT), name
    gradient = torch.as_tensor(result["gradient"], dtype=torch.float64)
    assert float(gradient.abs().max()) > 1e-6
    torch.testing.assert_close(gradient, expected["gradient"], rtol=EXACT, atol=EXACT)


@pytest.fixture(scope="module", params=RECIPES)
def whole(request):
    """The recipe's step in one piece, padded."""
    torch.set_default_dtype(torch.float64)
    try:
        yield request.param, one_step(request.param, "padded", None)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    output = tmp_path_factory.mktemp("law") / "results.json"
    run_ranks(2, output, *ON_RANKS)
    return json.loads(output.read_text())


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("micro_tokens", [None, 60, 1])
def test_a_step_does_not_depend_on_layout_or_micro_batches(whole, layout, micro_tokens):
    name, expected = whole
    result = one_step(name, layout, micro_tokens)
    assert result["micro_batches"] == {None: 1, 1: 9}.get(micro_tokens, result["micro_batches"])
    assert_same(result, expected)


def test_a_step_does_not_depend_on_the_number_of_ranks(whole, on_two_ranks):
    name, expected = whole
    for setting in ON_RANKS:
        assert_same(on_two_ranks[f"{name}:{setting}"], expected)


def run_ranks(ranks, output, *settings):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*command, str(SUPPORT / "law.py"), str(output), *settings],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
