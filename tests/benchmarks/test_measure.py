"""The rules of measuring: what is held against what, and in which order."""

import math

import pytest
import torch
from burnish.benchmarks import measure
from burnish.benchmarks.kernels import OPERATION, naive, products
from burnish.benchmarks.measure import RoundedProducts
from burnish.benchmarks.operation import Products, Provider
from burnish.kernels import linear_logprob

CPU = torch.device("cpu")
SHAPE = (24, 8, 61)


@pytest.mark.parametrize(
    "outputs", [("loss",), ("logprob",), ("logprob", "entropy", "logsumexp")], ids="+".join
)
def test_the_truth_is_the_definition_in_float64_however_it_is_split(outputs):
    inputs = OPERATION.make_inputs(SHAPE, torch.bfloat16)
    hidden, weight = (
        inputs.tensors[name].double().requires_grad_() for name in ("hidden", "weight")
    )
    result = linear_logprob(hidden, weight, inputs.tensors["target"], backend="reference")
    if outputs == ("loss",):
        values = {"loss": -result.logprob.mean()}
    else:
        values = {output: getattr(result, output) for output in outputs}
    sum((values[o] * inputs.upstream[o].double()).sum() for o in outputs).backward()
    expected = values | {"d_hidden": hidden.grad, "d_weight": weight.grad}
    in_parts = measure.plain(inputs, outputs, torch.float64, 5 * SHAPE[-1])
    for truth in (measure.exact(inputs, outputs), in_parts):
        assert truth.keys() == expected.keys()
        for name, found in truth.items():
            torch.testing.assert_close(found, expected[name].detach(), rtol=1e-12, atol=1e-12)


def test_the_limit_is_twice_the_error_of_the_naive_formula_rounded_to_the_dtype_of_the_inputs():
    inputs = OPERATION.make_inputs(SHAPE, torch.bfloat16)
    truth = measure.exact(inputs, ("logprob",))
    found = measure.run(inputs, Provider("naive", naive), ("logprob",), "train")
    found["logprob"] = found["logprob"].bfloat16()
    limits = measure.limits(inputs, ("logprob",), truth)
    assert limits.keys() == {"logprob", "d_hidden", "d_weight"}
    for name, expected in truth.items():
        error = (found[name].double() - expected).abs().max()
        error = error if name == "logprob" else error / expected.abs().max()
        assert limits[name] == pytest.approx(2 * error.item() + 1e-6, rel=1e-3)
        assert 1e-4 < limits[name] < 1e-1


def test_products_that_are_rounded_once_are_those_of_16_bits():
    draw = torch.Generator().manual_seed(0)
    given = [
        torch.randn(size, generator=draw).bfloat16() for size in ((48, 300), (300, 80), (48, 80))
    ]
    a, b, above = given[0].requires_grad_(), given[1].requires_grad_(), given[2]
    expected = [a @ b, *torch.autograd.grad(a @ b, (a, b), above)]
    with RoundedProducts(torch.bfloat16):
        product = a @ b
        assert (a.float() @ b.float()).dtype == torch.float32  # of another dtype: as ever
        found = [product, *torch.autograd.grad(product, (a, b), above)]
    assert type(product.grad_fn).__name__ == "ToCopyBackward0"  # of float32
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        # at most the last digit, by the order of sums
        torch.testing.assert_close(mine, other, rtol=2**-8, atol=1e-2)
        assert (mine == other).float().mean() > 0.95


def test_the_gate_names_the_worst_error_and_lets_no_nan_pass():
    limits = {"logprob": 1e-6, "d_hidden": 1e-3, "d_weight": 1e-3}
    assert (
        measure.gate({"logprob": 1e-6, "d_hidden": 1e-3, "d_weight": 0.0}, limits, {"d_hidden"})
        is None
    )
    assert "d_hidden" in measure.gate(
        {"logprob": 2e-6, "d_hidden": 1e-2, "d_weight": 0.0}, limits, {"d_hidden"}
    )
    assert "logprob" in measure.gate({"logprob": float("nan")}, limits, set())


def test_the_gate_wants_the_gradients_of_the_pass():
    limits = {"logprob": 1.0, "d_hidden": 1.0, "d_weight": 1.0}
    found = {"logprob": 0.0, "d_hidden": 0.0}
    assert measure.gate(found, limits, {"d_hidden"}) is None
    assert measure.gate(found, limits, {"d_hidden", "d_weight"}) == "d_weight is missing"
    assert measure.gate({"logprob": 0.0}, limits, set()) is None
    assert measure.gate({"logprob": 0.0}, limits, {"d_hidden"}) == "d_hidden is missing"
    assert measure.gate({"d_hidden": 0.0}, limits, {"d_hidden"}) == "logprob is missing"


@pytest.mark.parametrize(
    ("kind", "gradients"),
    [("forward", set()), ("frozen", {"d_hidden"}), ("train", {"d_hidden", "d_weight"})],
)
def test_a_pass_asks_for_its_gradients_and_no_others(kind, gradients):
    inputs, asked = OPERATION.make_inputs(SHAPE, torch.float32), []

    def compute(hidden, weight, target, outputs):
        asked.append((torch.is_grad_enabled(), hidden.requires_grad, weight.requires_grad))
        return naive(hidden, weight, target, outputs)

    found = measure.run(inputs, Provider("spy", compute), ("logprob",), kind)
    assert found.keys() == {"logprob"} | gradients
    assert asked == [(kind != "forward", kind != "forward", kind == "train")]


def test_in_each_round_every_step_runs_once_and_every_other_round_is_backwards():
    order = []
    steps = {name: lambda mark, name=name: order.append(name) for name in "abc"}
    taken = measure.interleave(steps, 3, CPU, pytest.fail)
    assert order == [*"abc", *"cba", *"abc", *"cba"]  # the first round warms up
    assert {name: len(spans) for name, spans in taken.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_round_that_warms_up_is_not_counted(monkeypatch):
    ticks = iter(
        [100.0, 107.0, *(t for i in range(3) for t in (10.0 * i, 10.0 * i + 1, 10.0 * i + 3))]
    )
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    calls = []

    def step(mark):
        calls.append(1)
        if len(calls) > 1:
            mark()

    assert measure.interleave({"a": step}, 3, CPU, pytest.fail) == {"a": [[1.0, 2.0]] * 3}


def test_steps_that_follow_each_other_fill_the_time_and_count_by_their_median(monkeypatch):
    now, taken = [0.0], iter([9.0, 0.1, *(0.1, 0.3, 0.1, 0.1, 0.2)])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def step(mark):
        now[0] += next(taken)
        mark()
        now[0] += 1.0

    # the first may compile; the second says how many fill 5 s
    spans = measure.timed(step, CPU, seconds=5.0)
    assert spans == pytest.approx([0.1, 1.0]) and next(taken, None) is None


def test_a_round_is_filled_but_for_the_one_that_warms_up(monkeypatch):
    asked = []
    monkeypatch.setattr(
        measure, "timed", lambda step, device, seconds: asked.append(seconds) or [1.0]
    )
    measure.interleave({"a": print}, 2, CPU, pytest.fail, seconds=0.3)
    assert asked == [0.0, 0.3, 0.3]


def test_a_floor_is_the_sum_of_its_steps_as_often_as_they_are_done():
    nothing = lambda mark: None  # noqa: E731
    floors = {"once": {"a": 1, "b": 1}, "twice": {"a": 2, "b": 1}}
    products = Products({"a": nothing, "b": nothing}, {"a": 7, "b": 5}, floors)
    assert measure.floors(products, {"a": [1.0, 2.0], "b": [10.0, 20.0], "other": [0.0, 0.0]}) == {
        "once": {"rounds": [11.0, 22.0], "flops": 12},
        "twice": {"rounds": [12.0, 24.0], "flops": 19},
    }


def test_a_step_that_raises_while_timed_is_dropped_and_the_others_go_on():
    order, stumbled = [], []

    def step(name, fails_at=None):
        def run(mark):
            order.append(name)
            if order.count(name) == fails_at:
                raise RuntimeError("no such tile")

        return run

    steps = {"a": step("a"), "b": step("b", fails_at=2), "c": step("c")}
    taken = measure.interleave(steps, 2, CPU, lambda *failure: stumbled.append(failure))
    assert order == [*"abc", *"cba", *"ac"]
    assert taken.keys() == {"a", "c"} and len(taken["a"]) == 2
    assert [(name, str(error)) for name, error in stumbled] == [("b", "no such tile")]


def test_a_ratio_is_taken_round_by_round():
    assert measure.ratio([1.0, 30.0, 4.0], [1.0, 10.0, 2.0]) == 2.0


@pytest.mark.parametrize(
    ("kind", "floors"),
    [("forward", ["2NDV"]), ("frozen", ["4NDV", "6NDV"]), ("train", ["6NDV", "8NDV"])],
)
def test_the_products_of_a_pass_are_those_that_it_can_not_avoid(kind, floors, monkeypatch):
    inputs, flops = OPERATION.make_inputs(SHAPE, torch.float32), []
    mm = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out: flops.append(2 * a.numel() * b.shape[1]) or mm(a, b, out=out)
    )
    found = products(inputs, kind, torch.float32)
    for step in found.steps.values():
        step(lambda: None)
    assert flops == list(found.flops.values())
    assert list(found.floors) == floors
    for name, counts in found.floors.items():
        done = sum(count * found.flops[step] for step, count in counts.items())
        assert done == int(name.removesuffix("NDV")) * math.prod(SHAPE)


def test_the_products_of_float32_are_in_float32():
    assert measure.fastest_dtype(torch.float32, CPU) == torch.float32
    assert measure.fastest_dtype(torch.bfloat16, CPU) in (torch.bfloat16, torch.float32)
    assert measure.fastest_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16


@pytest.mark.slow
def test_extra_memory_is_what_a_pass_adds_to_its_inputs():
    inputs = OPERATION.make_inputs((512, 32, 16384), torch.float32)
    logits = 4 * 512 * 16384
    found = measure.extra_bytes(inputs, "naive", ("logprob",), ["forward", "train"], 0.0)
    if found["forward"] is None:
        pytest.skip("this system does not tell")
    assert 1.9 * logits < found["forward"] < 2.4 * logits  # the logits, and their log-softmax
    # and the gradient, which passes through two of them
    assert 2.9 * logits < found["train"] < 4.4 * logits


def test_a_loss_is_made_from_logprobs_where_a_provider_has_only_them():
    inputs = OPERATION.make_inputs(SHAPE, torch.float32)
    provider = Provider("naive", naive, ("logprob",))
    found = measure.run(inputs, provider, ("loss",), "train")
    truth = measure.exact(inputs, ("loss",))
    limits = measure.limits(inputs, ("loss",), truth)
    assert truth["loss"] > 0
    assert measure.gate(measure.errors(found, truth), limits, {"d_hidden", "d_weight"}) is None
