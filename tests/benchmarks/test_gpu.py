"""`burnish bench gpu`: parts in one report, and the figures that the head is to meet."""

import importlib.metadata
import json
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from burnish.benchmarks.__main__ import main
from burnish.benchmarks.gpu import run as gpu
from burnish.benchmarks.gpu.chain import version
from burnish.benchmarks.gpu.run import PARTS
from burnish.benchmarks.gpu.targets import targets
from burnish.benchmarks.kernels import PROVIDERS
from burnish.benchmarks.operation import Provider
from burnish.benchmarks.report import merged
from burnish.benchmarks.worker import Worker

H200 = {"gpu": "NVIDIA H200"}
TINY = [
    "gpu",
    "--device",
    "cpu",
    "--shapes",
    "tiny",
    "--rounds",
    "1",
    "--seconds",
    "0.001",
    "--no-memory",
]


def seconds(*rounds):
    return {"median": rounds[0], "min": min(rounds), "max": max(rounds), "rounds": list(rounds)}


def row(provider, median, *, backward=None, ratio=None, extra=None, error=1e-6):
    errors = {"logprob": error, "d_hidden": 1e-3}
    measured = {
        "seconds": seconds(median),
        "backward": backward and seconds(backward),
        "ratio": ratio or {},
    }
    return {
        "provider": provider,
        "status": "measured",
        "errors": errors,
        "extra_bytes": extra,
        **measured,
    }


def case(kind, rows, dead_rows=0.0, outputs=("logprob", "entropy"), **changes):
    flops = {"forward": {"2NDV": {}}, "train": {"6NDV": {}, "8NDV": {}}}[kind]
    shape = {
        "operation": "kernels",
        "shape": [8192, 4096, 151936],
        "dtype": "bfloat16",
        "outputs": list(outputs),
    }
    return {**shape, "pass": kind, "dead_rows": dead_rows, "floor": flops, "rows": rows, **changes}


def found(*cases, machine=H200):
    return {target["what"]: (target["found"], target["met"]) for target in targets(cases, machine)}


def test_the_figures_are_those_of_the_issue():
    gradients = 2 * 4096 * (8192 + 151936)
    allowed = 0.35e9 + 4 * 4096 * 151936
    train = [
        row("trl", 0.090, ratio={"6NDV": 2.0, "8NDV": 1.5}, error=2.8e-2),
        row("liger-scaled", 0.058, ratio={"6NDV": 1.4, "8NDV": 1.06}, error=1e-4),
        row("burnish-triton", 0.050, backward=0.031, ratio={"6NDV": 1.2, "8NDV": 0.9}),
        row(
            "burnish-triton-4GiB",
            0.048,
            backward=0.030,
            ratio={"6NDV": 1.149, "8NDV": 0.9},
            error=9e-5,
        ),
        row(
            "burnish-triton-recompute",
            0.060,
            ratio={"6NDV": 1.6, "8NDV": 1.151},
            extra=gradients + allowed - 1e6,
        ),
    ]
    forward = [row("burnish-fused", 0.014, ratio={"2NDV": 1.12})]
    sparse = [row("burnish-triton-4GiB", 0.030, backward=0.008)]
    others = case(
        "train", [row("cce", 0.01, ratio={"6NDV": 1.0, "8NDV": 1.0})], outputs=["logprob"]
    )
    assert found(
        case("train", train), case("forward", forward), case("train", sparse, dead_rows=0.8), others
    ) == {
        "train, tiles kept ÷ sustained products": (
            "1.149 of 6NDV (burnish-triton-4GiB, 48.0 ms)",
            True,
        ),
        "train, recomputing ÷ sustained products": (
            "1.151 of 8NDV (burnish-triton-recompute, 60.0 ms)",
            False,
        ),
        "forward ÷ sustained products": ("1.120 of 2NDV (burnish-fused, 14.0 ms)", True),
        "train ÷ the fastest of the others": ("0.83 (liger-scaled)", True),
        "backward with 80 % dead rows ÷ with none": ("0.27 (burnish-triton-4GiB)", True),
        "extra memory, recomputing, less gradients": ("2.838 GB", True),
        "error of a log-prob, in nats": ("9.0e-05 (liger-scaled 1.0e-04, trl 2.8e-02)", True),
    }


def test_what_was_not_measured_is_said_to_be_so():
    nothing = found()
    assert len(nothing) == 7 and set(nothing.values()) == {("not measured", None)}
    failed = {"provider": "burnish-triton", "status": "failed", "reason": "off", "errors": {}}
    assert set(found(case("train", [failed])).values()) == {("not measured", None)}
    peers = found(case("train", [row("trl", 1.0, ratio={"6NDV": 1.0})]))
    assert set(peers.values()) == {("not measured", None)}
    one = found(case("forward", [row("burnish-fused", 1.0, ratio={"2NDV": 1.3}, error=2e-4)]))
    assert {what: met for what, (_, met) in one.items() if met is not None} == {
        "forward ÷ sustained products": False,
        "error of a log-prob, in nats": False,
    }


def test_more_memory_than_is_allowed_is_told():
    again = row("burnish-triton-recompute", 1.0, ratio={"6NDV": 1.0, "8NDV": 1.0}, extra=4.2e9)
    assert found(case("train", [again]))["extra memory, recomputing, less gradients"] == (
        "2.888 GB",
        False,
    )


@pytest.mark.parametrize(
    ("machine", "error", "met"), [(H200, 9e-5, True), (H200, 2e-4, False), ({}, 9e-5, False)]
)
def test_without_tensor_cores_a_log_prob_has_more_digits(machine, error, met):
    one = case("forward", [row("burnish-fused", 1.0, ratio={"2NDV": 1.0}, error=error)])
    assert found(one, machine=machine)["error of a log-prob, in nats"][1] is met


def test_units_of_one_case_are_one_table_with_the_floor_of_all_their_rounds():
    def record(rows, *rounds):
        floor = {"6NDV": {"seconds": seconds(*rounds), "tflops": 12 / rounds[0]}}
        changes = {"settings": {}, "inputs": "random", "floor": floor, "baseline": "b"}
        return {"found": [case("train", rows, **changes)]}

    again = [record([row("a", 2.0)], 1.0), {"found": {"TB/s": 4.0}}, {"status": "lost"}]
    (whole,) = merged([record([row("a", 1.0), row("b", 1.0)], 3.0, 2.0, 4.0), *again])
    assert [(r["provider"], r["seconds"]["median"]) for r in whole["rows"]] == [
        ("b", 1.0),
        ("a", 2.0),
    ]
    assert [r["ratio"]["b"] for r in whole["rows"]] == [1.0, 2.0]
    assert whole["floor"]["6NDV"]["seconds"]["rounds"] == [3.0, 2.0, 4.0, 1.0]
    assert whole["floor"]["6NDV"]["seconds"]["median"] == 2.5
    assert whole["floor"]["6NDV"]["tflops"] == pytest.approx(12 / 2.5)


def test_every_part_is_measured_once_and_stands_in_one_report(tmp_path, capsys, monkeypatch):
    arguments = [
        *TINY,
        "--providers",
        "naive",
        "burnish-torch",
        "burnish-torch-recompute",
        "burnish",
    ]
    arguments += ["--outputs", "logprob+entropy", "--output", str(tmp_path)]
    # they have other outputs
    parts = [part for part in PARTS if part not in ("divergence", "objectives")]
    assert main([*arguments, "--parts", *parts]) == 0
    out = capsys.readouterr().out
    assert "nothing is left" in out and "profile  step  burnish: see profile.txt" in out
    assert (
        main(
            [
                *TINY,
                "--output",
                str(tmp_path),
                "--parts",
                "divergence",
                "--providers",
                "burnish-torch",
            ]
        )
        == 0
    )
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert {case["operation"] for case in report["cases"]} == {"kernels", "divergence"}
    assert {case["dead_rows"] for case in report["cases"]} == {0.0, 0.8}
    assert {row["status"] for case in report["cases"] for row in case["rows"]} == {"measured"}
    assert report["tables"].keys() == {"ceilings", "digits", "tiles"}
    assert "sustained" in report["tables"]["ceilings"]["64^3, cublas"]
    assert float(report["tables"]["digits"]["log-probs, cublas"]["largest"]) < 1e-5
    assert [
        target["found"] for target in report["targets"] if target["found"] == "not measured"
    ] == [
        "not measured"  # memory
    ]
    assert "linear_logprob_backward" in (tmp_path / "profile.txt").read_text()
    markdown = (tmp_path / "gpu.md").read_text()
    for part in ("ceilings", "digits", "tiles"):
        assert f"## {part}" in markdown
    for target in report["targets"]:
        assert f"| {target['what']} | {target['found']} |" in markdown
    assert (tmp_path / "gpu.png").stat().st_size > 0

    def measured(*_):
        raise AssertionError("it was measured already")

    for name in ("copy", "square", "products", "truncation", "logprobs", "tiles", "profile"):
        monkeypatch.setattr(gpu.ceilings, name, measured)
    monkeypatch.setattr(gpu.harness, "measured", measured)
    assert main([*arguments, "--parts", *parts]) == 0


def test_a_call_says_what_is_left_and_how_long_it_takes(tmp_path, capsys):
    arguments = [*TINY, "--output", str(tmp_path), "--parts", "ceilings", "profile"]
    assert main([*arguments, "--minutes", "0"]) == 1  # nothing was measured yet
    out = capsys.readouterr().out
    assert (
        "left: ceilings, 4 measurements, about 60 s" in out
        and "left: profile, 1 measurements, about 18 s" in out
    )
    assert "left in all: about 2 minutes; the same command goes on" in out
    assert "not measured" in out
    # the first measurement takes all there is
    ticks = iter([0.0, 0.0, 0.0, 0.0, 100.0, *[100.0] * 99])
    assert gpu.main([*arguments[1:], "--minutes", "1"], clock=lambda: next(ticks)) == 0
    out = capsys.readouterr().out
    assert "ceilings  copy  torch: TB/s" in out and "left: ceilings, 3 measurements" in out


def test_a_missing_broken_or_wrong_provider_is_named_and_the_others_are_measured(
    tmp_path, capsys, monkeypatch
):
    def off(*arguments):
        return tuple(2 * x for x in PROVIDERS["naive"].compute(*arguments))

    def broken(*_):
        raise RuntimeError("no such symbol")

    absent = Provider("absent", off, missing=lambda device: "absent is not installed")
    for name, provider in {
        "absent": absent,
        "off": Provider("off", off),
        "broken": Provider("broken", broken),
    }.items():
        monkeypatch.setitem(PROVIDERS, name, provider)
    arguments = [*TINY, "--parts", "logprob", "--output", str(tmp_path)]
    assert main([*arguments, "--providers", "absent", "off", "broken", "naive"]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["unavailable"] == {"absent": "absent is not installed"}
    rows = {row["provider"]: row for case in report["cases"] for row in case["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "off": "failed",
        "broken": "failed",
        "naive": "measured",
    }
    assert "RuntimeError: no such symbol" in capsys.readouterr().out
    monkeypatch.setitem(PROVIDERS, "burnish-torch", Provider("burnish-torch", off))
    assert main([*arguments, "--providers", "burnish-torch", "naive"]) == 1  # one of ours


@pytest.mark.slow
def test_a_provider_that_dies_or_hangs_loses_a_row_and_the_chain_goes_on(tmp_path, cli):
    names = ["danger:broken", "danger:stuck", "danger:hangs", "danger:dies", "danger:well"]
    arguments = [
        *TINY,
        "--isolate",
        "--patience",
        "20",
        "--outputs",
        "logprob",
        "--output",
        str(tmp_path),
    ]
    done = cli(*arguments, "--parts", "logprob", "dead_rows", "--providers", *names)
    records = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [(r["part"], r["provider"], r["status"], r.get("reason")) for r in records] == [
        ("logprob", "danger:hangs", "lost", "no answer in 20 s"),
        ("logprob", "danger:dies", "lost", "ended its process with status -11"),
        ("logprob", "danger:well", "done", None),
        ("dead_rows", "danger:dies", "lost", "ended its process with status -11"),
        ("dead_rows", "danger:well", "done", None),
    ]
    for line in (
        "danger:broken is not measured: ended its process with status 5",
        "danger:stuck is not measured: no a",
    ):
        assert line in done.stdout  # they are lost while they are imported
    assert (
        "danger:hangs is not asked again: logprob" in done.stdout
        and "nothing is left" in done.stdout
    )


def options_for(device, shapes, providers, shape):
    here = {"more": [], "missing": {}, "worker": Worker(isolated=False), "patience": 60.0}
    return Namespace(device=device, shapes=shapes, providers=providers, shape=shape, **here)


def test_each_part_names_units_for_a_gpu_without_the_slow_ones(monkeypatch):
    """As on a GPU with every package, which none of this needs."""
    for name in ("kernels", "divergence", "objectives"):
        operation = gpu.named(name)
        for key, provider in list(operation.providers.items()):
            present = Provider(key, provider.compute, provider.gives)
            monkeypatch.setitem(operation.providers, key, present)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = options_for("cuda", None, None, (8192, 4096, 151936))
    units = {part: list(PARTS[part](part, options)) for part in PARTS}
    assert options.missing == {} and all(units.values())
    assert [unit.provider for unit in units["compiled"]] == ["compiled"]
    unwanted = {"burnish-reference", "burnish-torch", "compiled"}
    assert not unwanted & {
        unit.provider for part, each in units.items() if part != "compiled" for unit in each
    }
    guesses = {
        part: sum(unit.seconds + unit.setup for unit in each) for part, each in units.items()
    }
    assert all(unit.seconds + unit.setup < 120 for each in units.values() for unit in each)
    assert guesses["ceilings"] + guesses["head"] < 9 * 60
    sizes = [
        unit.arguments[1:4] for unit in units["ceilings"] if unit.function is gpu.ceilings.products
    ]
    (asked, _), *_ = (unit.arguments for unit in units["head"])
    assert (asked.rounds, asked.seconds, asked.dtype, asked.shape) == (
        3,
        0.3,
        "bfloat16",
        (8192, 4096, 151936),
    )
    assert sizes == [
        (rows, columns, 4096) for rows in (4096, 8192) for columns in (4096, 8192, 16384)
    ]


def test_digits_are_asked_of_cublas_and_of_the_named_providers():
    options = options_for("cpu", ["tiny"], ["burnish", "naive"], (64, 32, 257))
    units = PARTS["digits"]("digits", options)
    assert [unit.provider for unit in units if unit.case == "log-probs"] == ["cublas", "naive"]


@pytest.mark.slow
def test_without_trl_datasets_and_matplotlib_the_rest_is_measured(tmp_path):
    code = "import sys; sys.modules.update(dict.fromkeys(['trl', 'datasets', 'matplotlib', 'liger_kernel']))\n"
    arguments = [
        *TINY,
        "--parts",
        "ceilings",
        "logprob",
        "objectives",
        "--minutes",
        "5",
        "--output",
        str(tmp_path),
    ]
    code += f"from burnish.benchmarks.__main__ import main; sys.exit(main({[*arguments, '--outputs', 'logprob']}))"
    code = code.replace(
        "'--outputs', 'logprob'", "'--providers', 'naive', 'trl', 'liger', 'burnish'"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in (
        "objectives is not measured: trl is not installed",
        "liger is not measured: liger_kernel is not",
    ):
        assert line in done.stdout
    assert not (tmp_path / "gpu.png").exists() and "naive" in (tmp_path / "gpu.md").read_text()


def test_a_version_is_that_of_the_package_of_a_peer(monkeypatch):
    seen = []
    distributions = importlib.metadata.distributions
    monkeypatch.setattr(
        "importlib.metadata.distributions",
        lambda name: seen.append(name) or distributions(name=name),
    )
    version.cache_clear()
    version("liger-scaled", "cpu")
    assert seen == ["torch", "triton", "liger-kernel"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--providers", "burnisch"], "no provider 'burnisch', did you mean"),
        *[(["--device", "cuda"], "torch sees no GPU here")] * (not torch.cuda.is_available()),
    ],
)
def test_a_mistake_is_named(tmp_path, capsys, arguments, message):
    assert main(["gpu", "--device", "cpu", *arguments, "--output", str(tmp_path / "none")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
