"""`burnish bench divergence`: the same gate, on two heads."""

import math

import pytest
import torch
from burnish.benchmarks import divergence
from burnish.benchmarks.divergence import OPERATION, PROVIDERS, naive
from burnish.benchmarks.operation import Provider, with_triton

CPU = torch.device("cpu")
SHAPE = (12, 8, 16, 61)


def rows(report):
    return {row["provider"]: row for case in report["cases"] for row in case["rows"]}


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_definition_is_that_of_the_paper(beta):
    inputs = OPERATION.make_inputs(SHAPE, torch.float64)
    hs, ws, ht, wt = inputs.tensors.values()
    (found,) = naive(hs, ws, ht, wt, ("divergence",), beta=beta)
    p, q = (hs @ ws.t()).softmax(-1), (ht @ wt.t()).softmax(-1)
    m = (1 - beta) * p + beta * q
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    expected = {0.0: kl(q, p), 1.0: kl(p, q)}.get(beta, beta * kl(q, m) + (1 - beta) * kl(p, m))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_every_provider_here_passes_the_gate(bench):
    slow = with_triton  # interpreted: a test of its own
    names = [
        n
        for n, p in PROVIDERS.items()
        if p.missing is not slow and p.missing(CPU) is None and n != "compiled"
    ]
    assert {"naive", "trl", "burnish-torch", "burnish-reference"} <= set(names)
    arguments = [
        "--providers",
        *names,
        "--rounds",
        "1",
        "--outputs",
        "loss",
        "divergence",
        "--beta",
        "0",
        "0.5",
        "1",
    ]
    report = bench(*arguments, "--passes", "train", "forward", benchmark="divergence")
    assert [
        (case["outputs"], case["settings"]["beta"], case["pass"]) for case in report["cases"]
    ] == [
        ([output], beta, kind)
        for beta in (0, 0.5, 1)
        for output in ("loss", "divergence")
        for kind in ("train", "forward")
    ]
    assert [
        row for case in report["cases"] for row in case["rows"] if row["status"] != "measured"
    ] == []
    assert report["status"] == 0


@pytest.mark.slow
@pytest.mark.skipif(with_triton(CPU) is not None, reason="Triton is not interpreted here")
def test_our_triton_backend_passes_the_gate_in_every_mode(bench):
    names = [name for name, provider in PROVIDERS.items() if provider.missing is with_triton]
    assert {"burnish-triton", "burnish-triton-recompute"} <= set(names)
    arguments = ["--shapes", "20x8x12x61", "--passes", "train", "--rounds", "1", "--beta", "0.5"]
    report = bench("--providers", *names, *arguments, benchmark="divergence")
    assert {name: row["status"] for name, row in rows(report).items()} == dict.fromkeys(
        names, "measured"
    )


def test_another_divergence_and_a_lost_gradient_are_told_apart(bench, register):
    other = register(
        "other", lambda hs, ws, ht, wt, *, beta: naive(hs, ws, ht, wt, (), beta=1 - beta)[0]
    )
    frozen = register(
        "frozen", lambda hs, ws, ht, wt, *, beta: naive(hs, ws.detach(), ht, wt, (), beta=beta)[0]
    )
    report = bench(
        "--providers", other, frozen, "--passes", "train", "--beta", "0", benchmark="divergence"
    )
    # of the two gradients the worse one is named, which processors differ in
    reason = rows(report)[other]["reason"]
    assert reason.startswith(("d_student_hidden is off by", "d_student_weight is off by"))
    assert rows(report)[other]["errors"]["divergence"] > 1
    assert rows(report)[frozen]["reason"] == "d_student_weight is missing"
    assert report["status"] == 1  # none was measured


def test_only_the_student_gets_gradients(bench, register):
    asked = []

    def spy(hs, ws, ht, wt, outputs, *, beta):
        asked.append([x.requires_grad for x in (hs, ws, ht, wt)])
        return naive(hs, ws, ht, wt, outputs, beta=beta)

    name = register("spy", Provider("spy", spy, ("divergence",)))
    bench("--providers", name, "--rounds", "1", "--beta", "0", benchmark="divergence")
    assert asked[:3] == [[False] * 4, [True, True, False, False], [True, False, False, False]]


def test_shapes_have_one_width_or_two():
    assert OPERATION.parse_shapes(["4x8x61", "4x8x16x61"]) == [(4, 8, 8, 61), (4, 8, 16, 61)]
    with pytest.raises(ValueError, match="no shape '4x8'; wanted tokens x width x vocabulary"):
        OPERATION.parse_shapes(["4x8"])


@pytest.mark.parametrize(
    ("kind", "beta", "floors"),
    [
        ("forward", 0.0, ["4NDV"]),
        ("forward", 0.5, ["4NDV", "8NDV"]),
        ("train", 1.0, ["8NDV", "12NDV"]),
        ("train", 0.5, ["8NDV", "16NDV"]),
        ("frozen", 0.0, ["6NDV", "10NDV"]),
    ],
)
def test_a_floor_is_named_by_its_operations(kind, beta, floors):
    for widths in ((8, 8), (4, 12)):
        inputs = OPERATION.make_inputs((12, *widths, 61), torch.float32, settings=[("beta", beta)])
        found = divergence.products(inputs, kind, torch.float32)
        for name, counts in found.floors.items():
            done = sum(found.flops[step] * count for step, count in counts.items())
            assert math.isclose(float(name.removesuffix("NDV")), done / (12 * 8 * 61), rel_tol=5e-3)
        if widths == (8, 8):
            assert list(found.floors) == floors
