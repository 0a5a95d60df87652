"""`burnish bench gpu`: one report of everything, and the figures that the head is to meet."""

import json

import pytest
import torch
from burnish.benchmarks import gpu
from burnish.benchmarks.__main__ import main
from burnish.benchmarks.gpu import PARTS, targets


def seconds(median):
    return {"median": median, "min": median, "max": median, "rounds": [median]}


def row(provider, median, *, backward=None, ratio=None, extra=None, error=1e-6):
    errors = {"logprob": error, "d_hidden": 1e-3}
    measured = {"seconds": seconds(median), "backward": backward and seconds(backward), "ratio": ratio or {}}
    return {"provider": provider, "status": "measured", "errors": errors, "extra_bytes": extra, **measured}


def case(kind, rows, dead_rows=0.0):
    floor = {"forward": {"2NDV": {}}, "train": {"6NDV": {}, "8NDV": {}}}[kind]
    shape = {"operation": "kernels", "shape": [8192, 4096, 151936], "dtype": "bfloat16", "outputs": ["logprob"]}
    return {**shape, "pass": kind, "dead_rows": dead_rows, "floor": floor, "rows": rows}


def found(*cases):
    return {target["what"]: (target["found"], target["met"]) for target in targets(cases)}


def test_the_figures_are_those_of_the_issue():
    gradients = 2 * 4096 * (8192 + 151936)
    allowed = 0.35e9 + 4 * 4096 * 151936
    train = [
        row("naive", 0.090, ratio={"6NDV": 2.0, "8NDV": 1.5}),
        row("liger-scaled", 0.058, ratio={"6NDV": 1.4, "8NDV": 1.06}),
        row("burnish-triton", 0.048, backward=0.030, ratio={"6NDV": 1.24, "8NDV": 0.9}),
        row("burnish-triton-recompute", 0.060, ratio={"6NDV": 1.6, "8NDV": 1.21}, extra=gradients + allowed - 1e6),
    ]
    forward = [row("burnish-fused", 0.014, ratio={"2NDV": 1.2}, error=2e-5)]
    sparse = [row("burnish-triton", 0.030, backward=0.008)]
    assert found(case("train", train), case("forward", forward), case("train", sparse, dead_rows=0.8)) == {
        "logprob, train: burnish-triton ÷ 6NDV": ("1.24", True),
        "logprob, train: burnish-triton-recompute ÷ 8NDV": ("1.21", False),
        "logprob, train: burnish-triton-recompute, memory above inputs and gradients": ("2.838 GB", True),
        "logprob, train: burnish-triton ÷ liger-scaled, the fastest of the others": ("0.83", True),
        "logprob, train: burnish-triton, error of a log-prob": ("1.0e-06", True),
        "logprob, forward: burnish-fused ÷ 2NDV": ("1.20", False),
        "logprob, forward: burnish-fused, error of a log-prob": ("2.0e-05", False),
        "burnish-triton: backward with 80% dead rows ÷ with none": ("0.27", True),
    }


def test_more_memory_than_is_allowed_is_told():
    again = row("burnish-triton-recompute", 1.0, ratio={"6NDV": 1.0, "8NDV": 1.0}, extra=4.2e9)
    what = "logprob, train: burnish-triton-recompute, memory above inputs and gradients"
    assert found(case("train", [again]))[what] == ("2.888 GB", False)


def test_who_failed_is_no_figure():
    failed = {"provider": "burnish-triton", "status": "failed", "reason": "off", "errors": {}}
    assert found(case("train", [failed])) == {"logprob, train: ours": ("nothing measured", None)}


def test_everything_stands_in_one_report(tmp_path, capsys):
    arguments = ["--shapes", "tiny", "--rounds", "1", "--no-memory", "--device", "cpu", "--dtypes", "float32"]
    arguments += ["--providers", "naive", "burnish-tiled", "burnish", "--output", str(tmp_path)]
    parts = ["head", "dead_rows", "divergence", "objectives"]
    assert main(["gpu", *arguments, "--parts", *parts]) == 0
    report = json.loads((tmp_path / "gpu-head-dead_rows-divergence-objectives.json").read_text())
    assert {case["operation"] for case in report["cases"]} == {"kernels", "divergence", "objectives"}
    assert {case["dead_rows"] for case in report["cases"]} == {0.0, 0.8}
    assert {case["settings"].get("beta") for case in report["cases"]} == {None, 0.0, 0.5, 1.0}
    rows = [row for case in report["cases"] for row in case["rows"]]
    assert {row["status"] for row in rows} == {"measured"}
    out = capsys.readouterr().out
    markdown = next(tmp_path.glob("*.md")).read_text()
    for target in report["targets"]:
        assert target["what"] in out and f"| {target['what']} | {target['found']} |" in markdown
    assert any("80% dead rows" in target["what"] for target in report["targets"])


def test_a_provider_takes_part_where_it_is_known(tmp_path, capsys):
    arguments = [
        "gpu",
        "--shapes",
        "tiny",
        "--rounds",
        "1",
        "--no-memory",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    parts = ["--parts", "divergence", "objectives", "--dtypes", "float32"]
    assert main([*arguments, *parts, "--providers", "burnish-tiled-1KiB"]) == 0
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert {row["provider"] for case in report["cases"] for row in case["rows"]} == {"burnish-tiled-1KiB"}
    assert {case["operation"] for case in report["cases"]} == {"divergence"}
    assert main([*arguments, "--providers", "burnisch"]) == 2
    assert "no provider 'burnisch', did you mean" in capsys.readouterr().err


def test_each_part_can_be_asked_for_at_its_own_shapes():
    for part in PARTS:
        options, _ = gpu.arguments().parse_known_args([])
        asked = gpu.parsed(part, ["--rounds", "2"], options)
        assert asked.rounds == 2 and asked.shapes
        operation = gpu.named(PARTS[part][0])
        assert operation.parse_shapes(asked.shapes)
        assert all(operation.parse_outputs(text) for text in asked.outputs or [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert main(["gpu", "--device", "cuda", "--output", str(tmp_path / "none")]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
