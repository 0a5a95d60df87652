"""`burnish bench startup`: seconds of processes."""

import json
import sys

import pytest
from burnish.benchmarks.__main__ import main
from burnish.benchmarks.experiments import startup
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM


def test_the_first_line_that_matches_is_timed():
    code = "import time; print('begin', flush=True); time.sleep(0.3); print('step 1/3'); print('step 2/3')"
    figures = startup.timed([sys.executable, "-c", code], first=r"step +\d+/")
    assert 0.3 < figures["first line"] <= figures["seconds"]
    assert 0 < figures["cpu_seconds"] < figures["seconds"] + 1


def test_a_process_that_fails_is_named_with_its_output():
    with pytest.raises(RuntimeError, match=r"(?s)status 3:.*no such model"):
        startup.timed([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])


def test_a_run_of_one_step_is_a_multiple_of_the_same_work_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("reasoning_gym")
    code = (
        "import sys, time; time.sleep(0.4); print('step 1/1'); sys.exit(2 * ('--bta' in sys.argv))"
    )
    monkeypatch.setattr(startup, "BURNISH", [sys.executable, "-c", code])
    monkeypatch.setattr(
        startup, "ALONE", [sys.executable, "-c", "import sys; print(len(sys.argv))"]
    )
    assert (
        main(
            [
                "startup",
                "--rounds",
                "1",
                "--model",
                "some/model",
                "--demo",
                "--output",
                str(tmp_path),
            ]
        )
        == 0
    )
    figures = json.loads((tmp_path / "startup.json").read_text())["figures"]
    assert figures.keys() == {
        *startup.COMMANDS,
        "dpo: load, step, save",
        "burnish dpo, one step",
        "grpo: load, step, save",
        "burnish grpo, one step",
        "burnish demo",
    }
    for recipe in ("dpo", "grpo"):
        run, alone = figures[f"burnish {recipe}, one step"], figures[f"{recipe}: load, step, save"]
        assert run["ratio"] == pytest.approx(run["seconds"] / alone["seconds"])
        assert run["cpu_ratio"] == pytest.approx(run["cpu_seconds"] / alone["cpu_seconds"])
    assert figures["burnish demo"]["first line"] > 0.4
    assert "burnish dpo --help" in capsys.readouterr().out


def test_a_command_line_that_does_not_answer_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "BURNISH", [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(RuntimeError, match="--version ended with status 1"):
        main(["startup", "--rounds", "1", "--output", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dpo", "grpo"])
def test_the_work_alone_is_one_step_of_the_recipe(tmp_path, recipe):
    pairs = list(sums(8))
    rows = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in pairs]
    data = write_rows(tmp_path / "rows.jsonl", pairs if recipe == "dpo" else rows)
    model = save_model(tmp_path / "model")
    startup.alone(recipe, str(model), str(data), str(tmp_path / "saved"))
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (model, tmp_path / "saved")
    )
    moved = max((after[name] - before[name]).abs().max() for name in before)
    # AdamW at 1e-6; no sampled completion is right
    assert moved < 2e-6 and (moved > 0) == (recipe == "dpo")
