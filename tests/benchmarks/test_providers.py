"""Providers: how they are found, and what they can be asked for."""

import sys
import tomllib
from pathlib import Path

import pytest
import torch
from burnish.benchmarks.__main__ import main
from burnish.benchmarks.kernels import OPERATION, PROVIDERS, naive, our_provider, our_providers
from burnish.benchmarks.measure import compute
from burnish.benchmarks.operation import Provider, needs

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_users_module_is_found_where_the_command_is_called(tmp_path, monkeypatch):
    source = "def zero(hidden, weight, target):\n    return hidden.new_zeros(len(target))\n"
    (tmp_path / "my_heads.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", ".")])
    provider = OPERATION.find("my_heads:zero")
    assert provider.name == "my_heads:zero"
    (logprob,) = provider.compute(
        torch.ones(3, 2), torch.ones(5, 2), torch.zeros(3, dtype=torch.int64), ("logprob",)
    )
    assert torch.equal(logprob, torch.zeros(3))


def test_a_package_that_is_broken_or_wants_a_gpu_says_so(tmp_path, monkeypatch):
    (tmp_path / "broken_head.py").write_text("raise OSError('libcuda.so.1 is not here')")
    monkeypatch.syspath_prepend(tmp_path)
    assert needs("no_such_head", gpu=True)(CPU) == "no_such_head is not installed"
    assert needs("broken_head", gpu=True)(CPU) == "runs on a GPU only, this is cpu"
    reason = needs("broken_head", gpu=True)(GPU)
    assert reason == "broken_head can't be imported: OSError: libcuda.so.1 is not here"
    assert needs("json", gpu=False)(CPU) is None


def test_a_provider_of_logprob_can_be_asked_for_the_loss_and_nothing_more():
    provider = Provider("naive", naive)
    assert OPERATION.can_give(provider, ("loss",)) and OPERATION.can_give(provider, ("logprob",))
    assert not OPERATION.can_give(provider, ("logprob", "entropy"))
    assert not OPERATION.can_give(PROVIDERS["quack"], ("logprob",))


def test_an_output_of_the_wrong_shape_is_an_error_not_a_broadcast():
    inputs = OPERATION.make_inputs((3, 2, 5), torch.float32)
    provider = Provider("mean", lambda hidden, weight, target, outputs: (hidden.mean(),))
    with pytest.raises(ValueError, match=r"mean: logprob must be \[3\], got \[\]"):
        compute(inputs, provider, inputs.tensors, ("logprob",))


def test_every_backend_of_ours_is_measured_and_the_one_that_keeps_logits_in_each_mode():
    found = our_providers(lambda **options: lambda *_: options, ("logprob",))
    assert {provider.name: provider.compute() for provider in found} == {
        "burnish-triton": {"backend": "triton"},
        "burnish-triton-recompute": {"backend": "triton", "keep_bytes": 0},
        "burnish-triton-4GiB": {"backend": "triton", "keep_bytes": 2**32},
        "burnish-fused": {"backend": "fused"},
        "burnish-torch": {"backend": "torch"},
        "burnish-reference": {"backend": "reference"},
    }


def test_any_budget_of_ours_can_be_named():
    def options(name):
        found = our_provider(name, lambda **options: lambda *_: options, ("logprob",))
        return found and found.compute()

    assert options("burnish-torch-3MiB") == {"backend": "torch", "keep_bytes": 3 * 2**20}
    assert options("burnish-torch-recompute") == {"backend": "torch", "keep_bytes": 0}
    assert options("burnish-quick-3MiB") is None and options("burnish-torch-3") is None
    assert OPERATION.find("burnish-torch-3MiB").name == "burnish-torch-3MiB"


def test_the_wheel_has_the_benchmarks_that_need_no_peer():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    shipped = {
        name
        for name in project["tool"]["setuptools"]["packages"]
        if name.startswith("burnish.benchmarks")
    }
    assert shipped == {"burnish.benchmarks", "burnish.benchmarks.gpu"}


def test_a_benchmark_that_the_wheel_has_not_says_so(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("burnish.benchmarks.peer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "burnish.benchmarks.peer", None)
    assert main(["objectives"]) == 2
    assert "burnish bench objectives: needs a checkout of the repository" in capsys.readouterr().err
