"""`burnish bench kernels`: which providers are measured, which are not and why, and its
messages.
"""

import dataclasses
from statistics import median

import pytest
import torch
from burnish.benchmarks.__main__ import main
from burnish.benchmarks.kernels import PROVIDERS, SHAPES, naive
from burnish.benchmarks.operation import Provider, with_triton
from burnish.benchmarks.report import cells as report_rows

CPU = torch.device("cpu")
LOGPROB = ["--outputs", "logprob", "--passes", "train"]


def plain(hidden, weight, target):
    return naive(hidden, weight, target, ("logprob",))[0]


# Compiled, or interpreted: they have tests of their own.
SLOW = {
    "compiled",
    *(name for name, provider in PROVIDERS.items() if provider.missing is with_triton),
}


def rows(report):
    return {row["provider"]: row for case in report["cases"] for row in case["rows"]}


class Spy:
    """A provider that counts its calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def wrong_value(hidden, weight, target):
    return plain(hidden, weight, target) + 1e-4


def wrong_gradient(hidden, weight, target):
    logprob = plain(hidden, weight, target)
    return logprob + 1e-3 * (logprob - logprob.detach())


def no_gradient_of_the_last_token_of_the_vocabulary(hidden, weight, target):
    return plain(hidden, torch.cat([weight[:-1], weight[-1:].detach()]), target)


def half_a_gradient(hidden, weight, target):
    return plain(hidden, weight.detach(), target)


def one_row_is_not_a_number(hidden, weight, target):
    logprob = plain(hidden, weight, target)
    return torch.cat([logprob[:-1], logprob[-1:] * torch.nan])


def one_column_too_many(hidden, weight, target):
    return plain(hidden, weight, target)[:, None]


def at_a_loss(hidden, weight, target):
    raise RuntimeError("no such tile\nand a long trace")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (wrong_value, "logprob is off by 1.0e-04"),
        (wrong_gradient, "d_weight is off by 1.0e-03"),
        (no_gradient_of_the_last_token_of_the_vocabulary, "d_weight is off by"),
        (half_a_gradient, "d_weight is missing"),
        (one_row_is_not_a_number, "is off by nan"),
        (one_column_too_many, "logprob must be [64], got [64, 1]"),
        (at_a_loss, "RuntimeError: no such tile"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_provider_is_shown_with_its_error_and_not_timed(
    bench, register, capsys, function, reason
):
    spy = Spy(function)
    name = register("wrong", Provider("wrong", lambda h, w, t, outputs: (spy(h, w, t),)))
    report = bench("--providers", name, "naive", *LOGPROB)
    row = rows(report)[name]
    assert row["status"] == "failed"
    assert reason in row["reason"]
    assert "seconds" not in row and "ratio" not in row
    assert spy.calls == 1
    assert f"{name} failed: {row['reason']}" in capsys.readouterr().out
    shown = next(row for row in report_rows(report["cases"][0]) if row[0] == name)
    assert shown[1] == "failed" and ("nan" in shown[-2:]) == ("nan" in reason)
    assert rows(report)["naive"]["status"] == "measured"
    assert report["status"] == 0  # not one of ours


def test_a_right_function_of_the_users_is_measured(bench, register):
    name = register("right", plain)
    row = rows(bench("--providers", name, *LOGPROB))[name]
    assert row["status"] == "measured"
    assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]


def test_one_of_ours_that_fails_makes_the_command_fail(bench, monkeypatch):
    broken = dataclasses.replace(
        PROVIDERS["burnish-torch"], compute=lambda h, w, t, o: (wrong_value(h, w, t),)
    )
    monkeypatch.setitem(PROVIDERS, "burnish-torch", broken)
    assert bench("--providers", "burnish-torch", "naive", *LOGPROB)["status"] == 1


def test_to_need_more_memory_than_there_is_is_no_mistake(bench, monkeypatch, capsys):
    def large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB.")

    monkeypatch.setitem(
        PROVIDERS, "burnish-reference", dataclasses.replace(PROVIDERS["naive"], compute=large)
    )
    report = bench("--providers", "burnish-reference", "naive", *LOGPROB)
    assert rows(report)["burnish-reference"]["status"] == "out of memory"
    assert (
        "burnish-reference out of memory: OutOfMemoryError: CUDA out of memory."
        in capsys.readouterr().out
    )
    assert report["status"] == 0


def test_a_provider_that_is_not_available_is_named_with_the_reason(
    bench, register, capsys, tmp_path
):
    name = register(
        "absent", Provider("absent", naive, missing=lambda device: f"no license for this {device}")
    )
    report = bench("--providers", name, "quack", "naive", *LOGPROB)
    assert report["unavailable"] == {
        name: "no license for this cpu",
        "quack": "quack is not installed",
    }
    out, markdown = capsys.readouterr().out, (tmp_path / "kernels.md").read_text()
    for line in (
        f"{name} is not measured: no license for this cpu",
        "quack is not measured: quack is not installed",
    ):
        assert line in out
        assert line in markdown
    assert list(rows(report)) == ["naive"]


def test_if_no_provider_can_be_measured_the_command_fails(bench):
    assert bench("--providers", "quack", *LOGPROB)["status"] == 1


def test_every_provider_here_passes_the_gate_in_everything_it_gives(bench):
    names = [name for name, p in PROVIDERS.items() if p.missing(CPU) is None and name not in SLOW]
    assert {"naive", "burnish-torch", "burnish-reference", "burnish-logits", "trl"} <= set(names)
    outputs = ["loss", "logprob", "logprob+entropy", "logprob+entropy+logsumexp"]
    report = bench("--providers", *names, "--rounds", "1", "--outputs", *outputs)
    assert len(report["cases"]) == 3 * len(outputs)
    rows = [row for case in report["cases"] for row in case["rows"]]
    assert {row["status"] for row in rows} == {"measured", "lacks"}
    by_outputs = {
        tuple(case["outputs"]): {
            row["provider"] for row in case["rows"] if row["status"] == "measured"
        }
        for case in report["cases"]
    }
    assert by_outputs["loss",] == by_outputs["logprob",] == set(names)
    assert (
        "trl" in by_outputs["logprob", "entropy"]
        and "torch" not in by_outputs["logprob", "entropy"]
    )
    assert "trl" not in by_outputs["logprob", "entropy", "logsumexp"]


@pytest.mark.slow
@pytest.mark.skipif(with_triton(CPU) is not None, reason="Triton is not interpreted here")
def test_our_triton_backends_pass_the_gate_in_every_mode(bench):
    names = sorted(SLOW - {"compiled"})
    assert {
        "burnish-triton",
        "burnish-triton-recompute",
        "burnish-triton-4GiB",
        "burnish-fused",
    } <= set(names)
    arguments = [
        "--shapes",
        "20x8x61",
        "--outputs",
        "logprob+entropy",
        "--passes",
        "train",
        "--rounds",
        "1",
    ]
    report = bench("--providers", *names, *arguments)
    assert {name: row["status"] for name, row in rows(report).items()} == dict.fromkeys(
        names, "measured"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_the_compiled_formula_is_measured(bench):
    report = bench("--providers", "compiled", "--outputs", "logprob", "--passes", "forward")
    assert rows(report)["compiled"]["status"] == "measured"


def test_in_bfloat16_ours_has_more_digits_than_is_allowed(bench):
    report = bench("--providers", "naive", "burnish-torch", "--dtypes", "bfloat16", *LOGPROB)
    found = rows(report)
    assert (
        found["burnish-torch"]["errors"]["logprob"]
        < 1e-5
        < 1e-3
        < found["naive"]["errors"]["logprob"]
    )


def test_rates_and_ratios_follow_from_the_seconds(bench):
    report = bench("--providers", "naive", "burnish-torch", "--outputs", "logprob")
    ndv = 64 * 32 * 257
    costs = {case["pass"]: list(case["floor"]) for case in report["cases"]}
    assert costs == {"forward": ["2NDV"], "train": ["6NDV", "8NDV"], "frozen": ["4NDV", "6NDV"]}
    for case in report["cases"]:
        for name, floor in case["floor"].items():
            assert floor["tflops"] == pytest.approx(
                int(name[0]) * ndv / floor["seconds"]["median"] / 1e12
            )
        other = next(row for row in case["rows"] if row["provider"] == "naive")
        for row in case["rows"]:
            seconds = row["seconds"]["rounds"]
            assert len(seconds) == case["rounds"] == 2
            assert row["tflops"] == pytest.approx(
                int(costs[case["pass"]][0][0]) * ndv / median(seconds) / 1e12
            )
            for name, against in [*case["floor"].items(), ("naive", other)]:
                expected = median(
                    s / o for s, o in zip(seconds, against["seconds"]["rounds"], strict=True)
                )
                assert row["ratio"][name] == pytest.approx(expected)
            backward = row["backward"]
            assert (
                backward is None
                if case["pass"] == "forward"
                else backward["median"] < row["seconds"]["median"]
            )


def test_dead_rows_are_measured_where_rows_have_gradients_of_their_own(bench):
    report = bench(
        "--providers", "naive", "--dead_rows", "0", "0.75", "--outputs", "loss", "logprob"
    )
    cases = [
        (case["dead_rows"], case["outputs"][0])
        for case in report["cases"]
        if case["pass"] == "train"
    ]
    assert cases == [(0.0, "loss"), (0.0, "logprob"), (0.75, "logprob")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--providers", "burnish-toch"],
            "no provider 'burnish-toch', did you mean 'burnish-torch'?",
        ),
        (
            ["--providers", "nowhere:at_all"],
            "'nowhere:at_all' can't be loaded: ModuleNotFoundError",
        ),
        (["--providers", "math:nothing"], "'math:nothing' can't be loaded: AttributeError"),
        (["--providers", "math:pi"], "'math:pi' must be a Provider or a function, got float"),
        (["--shapes", "smolm2"], "no shape 'smolm2', did you mean 'smollm2'?"),
        (
            ["--shapes", "64x32"],
            "no shape '64x32'; wanted tokens x width x vocabulary as in 2048x576x49152",
        ),
        (["--shapes", "64x32x0"], "no shape '64x32x0'"),
        (
            ["--outputs", "logprob+entropie"],
            "no output 'entropie', wanted some of loss, logprob, entropy, logsumexp",
        ),
        (["--outputs", "loss+entropy"], "the loss is asked for alone"),
        (["--dead_rows", "1"], "--dead_rows in [0, 1)"),
        (["--rounds", "0"], "--rounds must be >= 1"),
        *[(["--device", "cuda"], "torch sees no GPU here")] * (not torch.cuda.is_available()),
    ],
)
def test_a_mistake_is_named_with_the_fix(capsys, tmp_path, arguments, message):
    assert main(["kernels", "--output", str(tmp_path / "none"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_unknown_benchmark_is_told_the_nearest(capsys):
    assert main(["kernel"]) == 2
    assert "did you mean 'kernels'?" in capsys.readouterr().err
    assert main([]) == 2 and main(["--help"]) == 0
    assert "kernels" in capsys.readouterr().out


def test_the_grid_is_that_of_the_study():
    sizes = [
        (n, d, v) for n in (8192, 16384) for d in (2048, 4096) for v in (128256, 151936, 262144)
    ]
    assert list(SHAPES["grid"]) == sizes
