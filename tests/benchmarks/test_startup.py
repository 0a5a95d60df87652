"""`burnish bench startup`: seconds of processes."""

import json
import sys

import pytest
from burnish.benchmarks.__main__ import main
from burnish.benchmarks.experiments import startup


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
    monkeypatch.setattr(startup, "BURNISH", [sys.executable, "-c", "import time; time.sleep(0.4); print('step 1/1')"])
    monkeypatch.setattr(startup, "ALONE", [sys.executable, "-c", "import sys; print(len(sys.argv))"])
    assert main(["startup", "--rounds", "1", "--model", "some/model", "--demo", "--output", str(tmp_path)]) == 0
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
    assert figures["burnish demo"]["first line"] > 0.4
    assert "burnish dpo --help" in capsys.readouterr().out
