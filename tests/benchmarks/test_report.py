"""The table, the JSON and the Markdown say the same."""

import json
from pathlib import Path

import torch
from burnish.benchmarks import report
from burnish.benchmarks.gpu.run import grid
from matplotlib.image import imread

RESULTS = Path(report.__file__).parent / "results"


def test_the_json_holds_what_the_table_and_the_markdown_show(bench, register, capsys, tmp_path):
    wrong = register("zero", lambda hidden, weight, target: (hidden @ weight.t())[:, 0] * 0)
    saved = bench(
        "--providers", "naive", "burnish-torch", wrong, "--outputs", "logprob", "--dead_rows", "0.5"
    )
    table, markdown = (
        capsys.readouterr().out.splitlines(),
        (tmp_path / "kernels.md").read_text().splitlines(),
    )
    assert len(saved["cases"]) == 3
    for case in saved["cases"]:
        title = report.title(case)
        assert title in [line.strip() for line in table]
        assert f"## {title}" in markdown
        for row in [report.header(case), *report.cells(case)]:
            assert f"| {' | '.join(row)} |" in markdown
            assert [part for cell in row for part in cell.split()] in [
                line.split() for line in table
            ]
        (reason,) = report.reasons(case)
        assert reason.startswith("mine:zero failed: logprob is off by")
        assert f"- {reason}" in markdown
        assert reason in [line.strip() for line in table]


def test_a_row_shows_milliseconds_megabytes_and_the_worst_errors():
    seconds = {"median": 0.0123456, "min": 0.012, "max": 1.5, "rounds": []}
    floor = {
        "6NDV": {"seconds": seconds, "tflops": 0.5},
        "8NDV": {"seconds": seconds, "tflops": 0.5},
    }
    row = {
        "provider": "fast",
        "status": "measured",
        "errors": {"logprob": 1e-6, "entropy": 3e-6, "d_hidden": 2e-3, "d_weight": 1e-3},
        "seconds": seconds,
        "tflops": 123.456,
        "ratio": {"6NDV": 1.234, "8NDV": 0.9},
        "extra_bytes": 250e6,
    }
    case = {"floor": floor, "products_in": "bfloat16", "baseline": "naive", "rows": [row]}
    assert report.header(case)[4:7] == ["÷6NDV", "÷8NDV", "÷naive"]
    kept, twice, shown = report.cells(case)
    assert kept[:4] == ["6NDV in bfloat16", "12.3", "12–1500", "0.5"]
    assert twice[0] == "8NDV in bfloat16"
    assert shown == ["fast", "12.3", "12–1500", "123", "1.23", "0.90", "", "250", "3e-06", "2e-03"]
    clocks = {"mhz": 1755.0, "watts": 690.2, "celsius": 61.0, "samples": 9}
    failed = {"provider": "slow", "status": "failed", "reason": "off", "errors": {}}
    on_gpu = case | {
        "rows": [row | {"clocks": clocks}, row | {"clocks": {"absent": "no nvidia-smi"}}, failed]
    }
    assert report.header(on_gpu)[-1] == "MHz / W / °C"
    assert [cells[-1] for cells in report.cells(on_gpu)] == [
        "",
        "",
        "1755 / 690 / 61",
        "unknown",
        "",
    ]
    assert {len(cells) for cells in report.cells(on_gpu)} == {len(report.header(on_gpu))}


def test_a_table_has_the_columns_of_all_its_rows():
    head, cells = grid({"copy": {"TB/s": 4.2345}, "square": {"burst": 790.4, "state": "1755"}})
    assert head == ["", "TB/s", "burst", "state"]
    assert cells == [["copy", "4.23", "", ""], ["square", "", "790", "1755"]]


def test_a_title_says_what_was_asked_of_whom():
    case = {
        "operation": "kernels",
        "shape": [64, 32, 257],
        "dtype": "bfloat16",
        "outputs": ["logprob", "entropy"],
        "settings": {},
        "pass": "train",
        "inputs": "random",
        "dead_rows": 0.0,
    }
    assert report.title(case) == "64x32x257 bfloat16, logprob + entropy, train"
    title = report.title(case | {"inputs": "smollm2", "dead_rows": 0.8})
    assert title.endswith("train, smollm2 inputs, 80% of the rows without a gradient")
    other = case | {"operation": "divergence", "outputs": ["divergence"], "settings": {"beta": 0.5}}
    assert report.title(other) == "divergence 64x32x257 bfloat16, divergence, beta 0.5, train"


def test_there_is_a_plot_even_if_every_provider_fails(bench, register, tmp_path):
    wrong = register("zero", lambda hidden, weight, target: (hidden @ weight.t())[:, 0] * 0)
    assert bench("--providers", wrong, "--outputs", "logprob")["status"] == 1
    assert imread(tmp_path / "kernels.png").size > 0


def test_the_machine_is_named_by_kind_and_versions():
    found = report.machine(torch.device("cpu"))
    assert found["versions"]["torch"] == torch.__version__
    assert json.loads(json.dumps(found)) == found
