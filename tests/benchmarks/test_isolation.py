"""Who takes the process along, or never answers, loses a row and not the report."""

import json
import math
import os
import subprocess
import sys
from contextlib import closing

import pytest
import torch
from burnish.benchmarks import harness, isolation
from burnish.benchmarks.kernels import OPERATION
from burnish.benchmarks.operation import Provider

PROVIDERS = """
import os, signal, time
from burnish.benchmarks.isolation import LostDevice
from burnish.benchmarks.providers import naive

def _right(hidden, weight, target):
    return naive(hidden, weight, target, ("logprob",))[0]

def dies(hidden, weight, target):
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(hidden, weight, target):
    time.sleep(1000)

def well(hidden, weight, target):
    return _right(hidden, weight, target)
"""


def test_who_dies_or_hangs_is_shown_with_the_reason_and_the_others_are_measured(tmp_path):
    (tmp_path / "danger.py").write_text(PROVIDERS)
    names = ["danger:dies", "naive", "danger:hangs", "danger:well"]
    command = [sys.executable, "-W", "ignore", "-m", "burnish.benchmarks", "kernels", "--providers", *names]
    command += ["--shapes", "tiny", "--outputs", "logprob", "--passes", "forward", "--rounds", "1", "--no-memory"]
    command += ["--device", "cpu", "--isolate", "--patience", "8", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads((tmp_path / "kernels.json").read_text())["cases"]
    rows = {row["provider"]: row for row in case["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "naive": "measured",
        "danger:well": "measured",
        "danger:dies": "lost",
        "danger:hangs": "lost",
    }
    assert rows["danger:dies"]["reason"] == "ended its process with status -11"
    assert rows["danger:hangs"]["reason"] == "no answer in 8 s"
    assert "danger:dies lost: ended its process" in done.stdout


def asked(**changes):
    values = (
        "kernels",
        "random",
        (64, 32, 257),
        "float32",
        "cpu",
        0.0,
        (),
        ("logprob",),
        ("forward",),
        1,
        0.0,
        False,
        1,
    )
    return harness.Asked(*values)._replace(**changes)


def test_a_lost_gpu_ends_the_case_for_everybody_and_an_error_does_not(monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(OPERATION.providers, "broken", Provider("broken", broken))
    (case,) = harness.measured(asked(), ["broken", "naive"], lambda name: None)
    assert [row["status"] for row in case["rows"]] == ["failed", "measured"]

    def no_device(device):
        raise isolation.LostDevice("unspecified launch failure")

    monkeypatch.setattr(harness, "check_device", no_device)
    told = []
    with pytest.raises(isolation.LostDevice, match="illegal memory access"):
        harness.measured(asked(), ["broken", "naive"], told.append)
    assert told == ["broken"]


def test_a_gpu_that_does_not_answer_is_lost(monkeypatch):
    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    isolation.check_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(isolation.LostDevice, match=r"illegal memory access was encountered$"):
        isolation.check_device(torch.device("cuda"))


def test_who_fails_only_when_timed_has_failed(monkeypatch):
    calls = []

    def tired(hidden, weight, target, outputs):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("out of workspace")
        return OPERATION.definition(hidden, weight, target, outputs)

    monkeypatch.setitem(OPERATION.providers, "tired", Provider("tired", tired))
    (case,) = harness.measured(asked(), ["tired", "naive"], lambda name: None)
    tired_row, naive_row = case["rows"]
    assert tired_row["reason"] == "RuntimeError: out of workspace" and "seconds" not in tired_row
    assert naive_row["status"] == "measured" and not math.isnan(naive_row["ratio"]["2NDV"])


def mistaken(notice):
    raise ValueError("smollm2 has width 576")


def fails(names, notice):
    for name in names:
        notice(name)
    raise RuntimeError("out of memory")


def dies(names, notice):
    notice(names[0])
    os._exit(3)


def test_a_mistake_of_the_arguments_in_the_other_process_is_told_here():
    with closing(isolation.Room(60)) as room:
        with pytest.raises(ValueError, match="smollm2 has width 576"):
            room.once(mistaken, ())
        with pytest.raises(isolation.Failure, match="out of memory"):
            room(fails, (), ["naive"])
        with pytest.raises(isolation.Lost, match="ended its process with status 3") as lost:
            room.once(dies, (["naive"],))
        assert lost.value.provider == "naive" and not lost.value.silent
        with pytest.raises(isolation.Failure, match="IndexError"):  # nobody is there who could be blamed
            room(dies, (), [])


def test_a_case_without_room_for_the_truth_is_named_and_the_next_one_measured(bench, monkeypatch):
    calls = []

    def room(self, function, arguments, names):
        calls.append(function)
        if calls.count(harness.measured) == 1 and function is harness.measured:
            raise isolation.Failure("OutOfMemoryError: CUDA out of memory")
        if function is harness.absent:
            return {}, {}
        return function(*arguments, names, lambda name: None), {"trl": "no answer in 8 s"}

    monkeypatch.setattr(isolation.Room, "__call__", room)
    report = bench("--isolate", "--providers", "naive", "--outputs", "loss", "logprob", "--passes", "forward")
    assert report["unavailable"] == {"kernels 64x32x257 float32 loss": "OutOfMemoryError: CUDA out of memory"}
    (case,) = report["cases"]
    assert case["outputs"] == ["logprob"] and [row["status"] for row in case["rows"]] == ["measured", "lost"]
