"""Rates of the machine: the lines that run on a GPU, at sizes for a CPU."""

import importlib
import os
import sys
import threading
import time

import pytest
import torch
from burnish.benchmarks import measure
from burnish.benchmarks.gpu import ceilings
from burnish.benchmarks.measure import clocks
from burnish.benchmarks.report import shown
from burnish.kernels import passes

SHAPE = (40, 32, 257)


def test_a_rate_is_the_work_of_a_step_over_its_seconds(monkeypatch):
    given = []
    monkeypatch.setattr(
        ceilings, "timed", lambda step, *_, **__: given.append(step(lambda: None)) or [1e-3]
    )
    assert ceilings.copy("cpu", 5000, 0.1) == {"TB/s": pytest.approx(1e4 / 1e9)}
    assert given[0].numel() == 5000 and given[0].any()
    rates = ceilings.square("cpu", 16, 0.1)
    assert rates == dict.fromkeys(("burst of ten", "sustained"), pytest.approx(2 * 16**3 / 1e9))
    rates = ceilings.products("cpu", 6, 10, 4, 0.1)
    assert list(rates) == ["z f32", "z bf16", "dh += f32", "dW += f32", "dW bf16"]
    assert rates == dict.fromkeys(rates, pytest.approx(2 * 6 * 10 * 4 / 1e9))


def test_the_products_are_those_of_a_tile_forward_and_backward(monkeypatch):
    random, made = ceilings._random, []
    monkeypatch.setattr(ceilings, "_random", lambda *given: made.extend(random(*given)) or made)
    found = {}

    def rates(steps, *_):
        for name, (step, _) in steps.items():
            found[name] = step(lambda: None)
        return {}

    monkeypatch.setattr(ceilings, "_rates", rates)
    outs = []
    multiply = ceilings._multiply
    monkeypatch.setattr(
        ceilings, "_multiply", lambda a, b, out, beta: multiply(a, b, out, beta) or outs.append(out)
    )
    ceilings.products("cpu", 6, 10, 4, 0.1)
    h, w, dc = (x.float() for x in made)
    expected = [h @ w.t(), dc @ w, dc.t() @ h]
    for out, product in zip(outs, expected, strict=True):
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, product)
    torch.testing.assert_close(found["z bf16"].float(), expected[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found["dW bf16"].float(), expected[2], rtol=1e-2, atol=1e-2)


def test_a_sum_adds_to_what_is_there():
    a, b, out = torch.ones(2, 3).bfloat16(), torch.ones(3, 4).bfloat16(), torch.full((2, 4), 5.0)
    ceilings._multiply(a, b, out, 1.0)
    assert (out == 8).all()
    ceilings._multiply(a, b, out, 0.0)
    assert (out == 3).all()


def test_a_product_that_is_cut_off_is_seen_to_err_toward_zero(monkeypatch):
    found = ceilings.truncation("cpu", 64, 32, 48)
    assert float(found["largest error"]) < 1e-4 and abs(float(found["toward 0 on average"])) < 1e-7
    exact = ceilings._float32_product
    monkeypatch.setattr(ceilings, "_float32_product", lambda h, w: exact(h, w) * (1 - 2**-10))
    assert float(ceilings.truncation("cpu", 64, 32, 48)["toward 0 on average"]) > 1e-4


def test_log_probs_are_held_to_float64_and_cublas_beside_them():
    ceilings._exact.cache_clear()
    inputs, exact = ceilings._exact("cpu", SHAPE)
    hidden, weight, target = (inputs.tensors[name] for name in ("hidden", "weight", "target"))
    expected = torch.nn.functional.cross_entropy(
        hidden.double() @ weight.double().t(), target, reduction="none"
    )
    torch.testing.assert_close(exact, -expected)
    found = {
        name: ceilings.logprobs("cpu", SHAPE, name) for name in ("cublas", "naive", "burnish-torch")
    }
    assert max(float(found[name]["largest"]) for name in ("cublas", "burnish-torch")) < 1e-5
    assert float(found["naive"]["largest"]) > 1e-3  # its logits are bfloat16


def test_tiles_of_another_size_are_really_used_and_put_back(monkeypatch):
    before, seen = (passes.ROWS, passes.COLUMNS, passes.GPU_ROWS, passes.GPU_COLUMNS), []
    module = importlib.import_module("burnish.kernels.linear_logprob")
    plan = module.plan
    monkeypatch.setattr(module, "plan", lambda *a, **k: seen.append(plan(*a, **k)) or seen[-1])
    found = ceilings.tiles("cpu", SHAPE, 16, 64, 0.001)
    assert list(found) == ["ms recompute", "ms", "ms 4GiB"] and all(
        value > 0 for value in found.values()
    )
    assert {(plan.rows, plan.columns) for plan in seen} == {(16, 64)}
    assert {plan.keep_bytes for plan in seen} >= {0, 2**32}
    assert before == (passes.ROWS, passes.COLUMNS, passes.GPU_ROWS, passes.GPU_COLUMNS)


def test_the_profile_names_the_operators_of_a_step():
    text = ceilings.profile("cpu", SHAPE)["text"]
    assert "linear_logprob_backward" in text and "aten::addmm" in text


SMI = """#!{python}
import sys
assert "--query-gpu=clocks.sm,power.draw,temperature.gpu" in sys.argv, sys.argv
print("1755, 690.5, 61")
open(sys.argv[0] + ".asked", "a").write("again")
"""


def test_clocks_are_what_nvidia_smi_says_meanwhile(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.format(python=sys.executable))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(measure, "_which", lambda device: [])
    with clocks(torch.device("cuda"), pause=0.01) as state:
        asked, end = tmp_path / "nvidia-smi.asked", time.monotonic() + 30
        while (
            not (asked.exists() and len(asked.read_text()) > len("again"))
            and time.monotonic() < end
        ):
            time.sleep(0.01)  # until it is asked a second time
    assert state.pop("samples") >= 1
    assert state == {"mhz": 1755, "watts": 690.5, "celsius": 61}
    assert shown(state) == "1755 / 690 / 61"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "FileNotFoundError"),
        ("#!/bin/sh\nexit 9\n", "CalledProcessError"),
        ("#!/bin/sh\necho '[N/A], [N/A], [N/A]'\n", "ValueError"),
    ],
)
def test_clocks_that_are_not_to_be_had_are_said_to_be_absent(tmp_path, monkeypatch, script, why):
    if script:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with clocks(torch.device("cuda")) as state:
        for thread in threading.enumerate():
            if thread.name == "nvidia-smi":
                thread.join(30)  # it ends with the first failure
    assert why in state["absent"] and shown(state) == "unknown"


def test_on_a_cpu_there_are_no_clocks():
    with clocks(torch.device("cpu")) as state:
        pass
    assert state == {} and shown(state) == ""


def test_the_clocks_are_medians_and_the_highest_temperature():
    found = measure.summarize([(1000, 500, 50), (1700, 700, 60), (1800, 690, 55)])
    assert found == {"mhz": 1700, "watts": 690, "celsius": 60, "samples": 3}
