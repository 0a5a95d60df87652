"""The rules of measuring: what is held against what, and in which order."""

import pytest
import torch
from burnish.benchmarks import measure
from burnish.benchmarks.inputs import Shape, random_inputs
from burnish.benchmarks.providers import Provider, naive
from burnish.kernels import linear_logprob

CPU = torch.device("cpu")
SHAPE = Shape(24, 8, 61)


@pytest.mark.parametrize("outputs", [("loss",), ("logprob",), ("logprob", "entropy", "logsumexp")], ids="+".join)
def test_the_truth_is_the_definition_in_float64_however_it_is_split(outputs):
    inputs = random_inputs(SHAPE, torch.bfloat16, CPU)
    hidden, weight = (x.double().requires_grad_() for x in inputs[:2])
    result = linear_logprob(hidden, weight, inputs.target, backend="reference")
    if outputs == ("loss",):
        values = {"loss": -result.logprob.mean()}
    else:
        values = {output: getattr(result, output) for output in outputs}
    sum((values[o] * inputs.upstream[o].double()).sum() for o in outputs).backward()
    for truth in (measure.exact(inputs, outputs), measure.plain(inputs, outputs, torch.float64, 5 * SHAPE.vocab)):
        for found, expected in [(truth.outputs, values), ({"h": truth.d_hidden}, {"h": hidden.grad})]:
            assert found.keys() == expected.keys()
            for name in found:
                torch.testing.assert_close(found[name], expected[name].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(truth.d_weight, weight.grad, rtol=1e-12, atol=1e-12)


def test_the_limit_is_twice_the_error_of_the_naive_formula_rounded_to_the_dtype_of_the_inputs():
    inputs = random_inputs(SHAPE, torch.bfloat16, CPU)
    truth = measure.exact(inputs, ("logprob",))
    hidden, weight = (x.clone().requires_grad_() for x in inputs[:2])
    (logprob,) = naive(hidden, weight, inputs.target, ("logprob",))
    logprob.backward(inputs.upstream["logprob"])
    error = (logprob.detach().bfloat16().double() - truth.outputs["logprob"]).abs().max()
    share = (weight.grad.double() - truth.d_weight).abs().max() / truth.d_weight.abs().max()
    limits = measure.limits(inputs, ("logprob",), truth)
    assert limits["logprob"] == pytest.approx(2 * error.item() + 1e-6)
    assert limits["d_weight"] == pytest.approx(2 * share.item() + 1e-6)
    assert 1e-4 < share < 1e-2


def test_the_gate_names_the_worst_error_and_lets_no_nan_pass():
    limits = {"logprob": 1e-6, "d_hidden": 1e-3, "d_weight": 1e-3}
    assert measure.gate({"logprob": 1e-6, "d_hidden": 1e-3, "d_weight": 0.0}, limits, "train") is None
    assert "d_hidden" in measure.gate({"logprob": 2e-6, "d_hidden": 1e-2, "d_weight": 0.0}, limits, "train")
    assert "logprob" in measure.gate({"logprob": float("nan")}, limits, "forward")


def test_the_gate_wants_the_gradients_of_the_pass():
    limits = {"logprob": 1.0, "d_hidden": 1.0, "d_weight": 1.0}
    found = {"logprob": 0.0, "d_hidden": 0.0}
    assert measure.gate(found, limits, "frozen") is None
    assert measure.gate(found, limits, "train") == "d_weight is missing"
    assert measure.gate({"logprob": 0.0}, limits, "forward") is None
    assert measure.gate({"logprob": 0.0}, limits, "frozen") == "d_hidden is missing"


@pytest.mark.parametrize(
    ("kind", "gradients"), [("forward", set()), ("frozen", {"d_hidden"}), ("train", {"d_hidden", "d_weight"})]
)
def test_a_pass_asks_for_its_gradients_and_no_others(kind, gradients):
    inputs, asked = random_inputs(SHAPE, torch.float32, CPU), []

    def compute(hidden, weight, target, outputs):
        asked.append((torch.is_grad_enabled(), hidden.requires_grad, weight.requires_grad))
        return naive(hidden, weight, target, outputs)

    found = measure.run(Provider("spy", compute), inputs, ("logprob",), kind)
    assert found.tensors().keys() == {"logprob"} | gradients
    assert asked == [(kind != "forward", kind != "forward", kind == "train")]


def test_in_each_round_everyone_runs_once_and_every_other_round_is_backwards():
    order = []
    steps = {name: lambda mark, name=name: order.append(name) for name in "abc"}
    taken = measure.interleave(steps, 3, CPU)
    assert order == [*"abc", *"cba", *"abc", *"cba"]  # the first round warms up
    assert {name: len(spans) for name, spans in taken.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_round_that_warms_up_is_not_counted(monkeypatch):
    ticks = iter([100.0, 107.0, *(t for i in range(3) for t in (10.0 * i, 10.0 * i + 1, 10.0 * i + 3))])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    calls = []

    def step(mark):
        calls.append(1)
        if len(calls) > 1:
            mark()

    assert measure.interleave({"a": step}, 3, CPU) == {"a": [[1.0, 2.0]] * 3}


def test_the_floor_is_the_sum_of_the_products_with_the_logits_once_or_twice():
    taken = {"logits": [1.0, 2.0], "d_hidden": [10.0, 20.0], "d_weight": [100.0, 200.0]}
    assert measure.floors(taken) == {"6NDV": [111.0, 222.0], "8NDV": [112.0, 224.0]}
    del taken["d_weight"]
    assert measure.floors(taken) == {"4NDV": [11.0, 22.0], "6NDV": [12.0, 24.0]}
    del taken["d_hidden"]
    assert measure.floors(taken) == {"2NDV": [1.0, 2.0]}


def test_a_ratio_is_taken_round_by_round():
    assert measure.ratio([1.0, 30.0, 4.0], [1.0, 10.0, 2.0]) == 2.0


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("forward", ["logits"]),
        ("frozen", ["logits", "d_hidden"]),
        ("train", ["logits", "d_hidden", "d_weight"]),
    ],
)
def test_the_products_of_a_pass_are_those_that_it_can_not_avoid(kind, names, monkeypatch):
    inputs, flops = random_inputs(SHAPE, torch.float32, CPU), []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: flops.append(2 * a.numel() * b.shape[1]) or mm(a, b, out=out))
    steps = measure.products(inputs, kind, torch.float32)
    for step in steps.values():
        step(lambda: None)
    assert list(steps) == names
    assert sum(flops) == 2 * len(names) * inputs.shape.flops


def test_the_products_of_float32_are_in_float32():
    assert measure.fastest_dtype(random_inputs(SHAPE, torch.float32, CPU)) == torch.float32
    assert measure.fastest_dtype(random_inputs(SHAPE, torch.bfloat16, CPU)) in (torch.bfloat16, torch.float32)


def test_extra_memory_is_what_a_pass_adds_to_its_inputs():
    inputs = random_inputs(Shape(512, 32, 16384), torch.float32, CPU)
    logits = 4 * 512 * 16384
    found = measure.extra_bytes("naive", inputs, ("logprob",), ["forward", "train"])
    if found["forward"] is None:
        pytest.skip("this system does not tell")
    assert 1.9 * logits < found["forward"] < 2.4 * logits  # the logits, and their log-softmax
    assert 2.9 * logits < found["train"] < 4.4 * logits  # and the gradient, which passes through two of them


def test_a_loss_is_made_from_logprobs_for_those_who_have_only_them():
    inputs = random_inputs(SHAPE, torch.float32, CPU)
    provider = Provider("naive", naive, ("logprob",))
    loss = measure.run(provider, inputs, ("loss",), "train")
    truth = measure.exact(inputs, ("loss",))
    assert measure.gate(measure.errors(loss, truth), measure.limits(inputs, ("loss",), truth), "train") is None
