"""Who can be asked, and for what."""

import sys

import pytest
import torch
from burnish.benchmarks.providers import PROVIDERS, Provider, find, naive, needs

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_users_module_is_found_where_the_command_is_called(tmp_path, monkeypatch):
    source = "def zero(hidden, weight, target):\n    return hidden.new_zeros(len(target))\n"
    (tmp_path / "my_heads.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", ".")])
    provider = find("my_heads:zero")
    assert provider.name == "my_heads:zero"
    (logprob,) = provider(torch.ones(3, 2), torch.ones(5, 2), torch.zeros(3, dtype=torch.int64), ("logprob",))
    assert torch.equal(logprob, torch.zeros(3))


def test_a_package_that_is_broken_or_wants_a_gpu_says_so(tmp_path, monkeypatch):
    (tmp_path / "broken_head.py").write_text("raise OSError('libcuda.so.1 is not here')")
    monkeypatch.syspath_prepend(tmp_path)
    assert needs("no_such_head", gpu=True)(CPU) == "no_such_head is not installed"
    assert needs("broken_head", gpu=True)(CPU) == "runs on a GPU only, this is cpu"
    reason = needs("broken_head", gpu=True)(GPU)
    assert reason == "broken_head can't be imported: OSError: libcuda.so.1 is not here"
    assert needs("json", gpu=False)(CPU) is None


def test_whoever_gives_logprob_can_be_asked_for_the_loss_and_nothing_more():
    provider = Provider("naive", naive)
    assert provider.can_give(("loss",)) and provider.can_give(("logprob",))
    assert not provider.can_give(("logprob", "entropy"))
    assert not PROVIDERS["quack"].can_give(("logprob",))


def test_an_output_of_the_wrong_shape_is_an_error_not_a_broadcast():
    provider = Provider("mean", lambda hidden, weight, target, outputs: (hidden.mean(),))
    with pytest.raises(ValueError, match=r"mean: logprob must be \[3\], got \[\]"):
        provider(torch.ones(3, 2), torch.ones(5, 2), torch.zeros(3, dtype=torch.int64), ("logprob",))
