"""A provider that ends its process, or never answers, loses its row and not the report."""

import json
import math
import os
from contextlib import closing

import pytest
import torch
from burnish.benchmarks import harness, worker
from burnish.benchmarks.kernels import OPERATION, naive
from burnish.benchmarks.operation import Provider


@pytest.mark.slow
def test_a_provider_that_dies_or_hangs_is_shown_with_the_reason_and_the_others_are_measured(
    tmp_path, cli
):
    names = ["danger:dies", "naive", "danger:hangs", "danger:well", "danger:broken"]
    arguments = [
        "--shapes",
        "tiny",
        "--outputs",
        "logprob",
        "--passes",
        "forward",
        "--rounds",
        "1",
        "--no-memory",
    ]
    arguments += ["--device", "cpu", "--isolate", "--patience", "20", "--output", str(tmp_path)]
    done = cli("kernels", "--providers", *names, *arguments)
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert report["unavailable"] == {"danger:broken": "ended its process with status 5"}
    (case,) = report["cases"]
    rows = {row["provider"]: row for row in case["rows"]}
    assert {name: (row["status"], row.get("reason")) for name, row in rows.items()} == {
        "naive": ("measured", None),
        "danger:well": ("measured", None),
        "danger:dies": ("lost", "ended its process with status -11"),
        "danger:hangs": ("lost", "no answer in 20 s"),
    }
    assert rows["danger:well"]["ratio"].keys() == {"2NDV", "naive"}
    assert "danger:dies lost: ended its process" in done.stdout


def plan(**changes):
    setting = (
        "kernels",
        (64, 32, 257),
        "float32",
        "cpu",
        0.0,
        (),
        "random",
        ("logprob",),
        ("forward",),
    )
    return harness.Plan(*setting, 1, 0.0, False, 1)._replace(**changes)


def test_a_lost_gpu_ends_the_case_for_all_and_an_error_does_not(monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(OPERATION.providers, "broken", Provider("broken", broken))
    (case,) = harness.measured(plan(), ["broken", "naive"])
    assert [row["status"] for row in case["rows"]] == ["failed", "measured"]

    failure = harness.failure
    monkeypatch.setattr(
        harness, "failure", lambda error, device: failure(error, torch.device("cuda"))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(worker.Lost, match="illegal memory access"):
        harness.measured(plan(), ["broken", "naive"])


def test_a_gpu_that_does_not_answer_is_lost_and_one_without_memory_is_not(monkeypatch):
    def synchronize(device):
        raise problem

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    problem = torch.OutOfMemoryError("CUDA out of memory")
    raised = ValueError("no such tile\nmore")
    failed = {"status": "failed", "reason": "ValueError: no such tile"}
    assert (
        harness.failure(raised, torch.device("cuda"))
        == harness.failure(raised, torch.device("cpu"))
        == failed
    )
    problem = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(worker.Lost, match=r"ValueError: no such tile$"):
        harness.failure(raised, torch.device("cuda"))
    assert harness.failure(raised, torch.device("cpu")) == failed


def test_a_provider_that_fails_only_when_timed_has_failed(monkeypatch):
    calls = []

    def tired(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("out of workspace")
        return naive(*arguments)

    monkeypatch.setitem(OPERATION.providers, "tired", Provider("tired", tired))
    (case,) = harness.measured(plan(), ["tired", "naive"])
    tired_row, naive_row = case["rows"]
    assert tired_row["reason"] == "RuntimeError: out of workspace" and "seconds" not in tired_row
    assert naive_row["status"] == "measured" and not math.isnan(naive_row["ratio"]["2NDV"])


def mistaken():
    raise ValueError("smollm2 has width 576")


def fails():
    raise RuntimeError("out of memory")


@pytest.mark.slow
def test_an_error_in_the_other_process_is_raised_here_and_the_next_call_has_a_new_process():
    with closing(worker.Worker()) as other:
        first = other.call(os.getpid, seconds=60)
        assert other.call(os.getpid, seconds=60) == first != os.getpid()
        with pytest.raises(ValueError, match="smollm2 has width 576"):
            other.call(mistaken, seconds=60)
        with pytest.raises(worker.CallFailed, match="out of memory"):
            other.call(fails, seconds=60)
        with pytest.raises(worker.Lost, match="ended its process with status 3") as lost:
            other.call(os._exit, 3, seconds=60)
        assert not lost.value.silent
        assert other.call(os.getpid, seconds=60) != first


def test_a_case_without_memory_for_the_truth_is_named_and_the_next_one_measured(bench, monkeypatch):
    calls = []

    def call(self, function, *arguments, seconds):
        calls.append(function)
        if function is harness.prepared and calls.count(harness.prepared) == 1:
            raise worker.CallFailed("OutOfMemoryError: CUDA out of memory")
        if function is harness.measured and arguments[1] == ["trl"]:
            raise worker.Lost("no answer in 8 s")
        return function(*arguments)

    monkeypatch.setattr(worker.Worker, "call", call)
    arguments = [
        "--providers",
        "naive",
        "trl",
        "--outputs",
        "loss",
        "logprob",
        "--passes",
        "forward",
    ]
    report = bench("--isolate", *arguments)
    assert report["unavailable"] == {
        "kernels 64x32x257 float32 loss": "OutOfMemoryError: CUDA out of memory"
    }
    (case,) = report["cases"]
    assert case["outputs"] == ["logprob"] and [row["status"] for row in case["rows"]] == [
        "measured",
        "lost",
    ]
