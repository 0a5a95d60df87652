"""Families whose processors need torchvision, tested beside a torch for the CPU.

torchvision is no requirement of the tests: the package registry's builds bring a torch for CUDA. It
is installed into a folder of its own, without what it requires, and the tests of images run once
more with it.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vision

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(vision.HAS_TORCHVISION, reason="torchvision is installed, and tested with"),
]
TESTS = Path(__file__).parents[2]
# Ranks are tried with families that need no torchvision.
FILES = sorted(
    path
    for path in TESTS.rglob("test_images*.py")
    if not path.stem.endswith(("on_ranks", "peer", "killed"))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with torchvision, and with what the processor of SmolVLM needs."""
    folder = tmp_path_factory.mktemp("torchvision")
    minor = int(torch.__version__.split(".")[1])
    packages = [f"torchvision==0.{minor + 15}.*", "num2words", "docopt"]
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"torchvision can't be installed: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def run_with(folder, *arguments):
    """What pytest prints where torchvision is; its tests must pass, and some must run."""
    paths = [os.environ.get("PYTHONPATH"), TESTS / "support" / "torchvision", folder]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
    }
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-rs", "-n0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest_here, "-m", "slow or not slow", *map(str, arguments)],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    return done.stdout


def test_all_tests_of_images_pass_where_torchvision_is(folder):
    printed = run_with(folder, *FILES)
    assert "needs torchvision" not in printed and "needs num2words" not in printed


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_positions_in_three_axes_train_as_trl_trains_them(folder):
    peer = TESTS / "loops" / "recipes" / "test_images_peer.py"
    assert "3 passed" in run_with(folder, peer, "-k", "qwen2_5_vl")
