"""`burnish bench loops`: what it makes of the losses, seconds and memory of each process."""

import json

import pytest
from burnish.benchmarks import trainers
from burnish.benchmarks.__main__ import main
from burnish.benchmarks.trainers import RECIPES
from matplotlib.image import imread


@pytest.fixture
def processes(monkeypatch):
    """Stands in for training: losses, seconds and memory by provider; returns the order in which they ran."""
    order = []
    factors = {"trl": 1.0, "trl without checkpointing": 0.7, "burnish": 0.25, "burnish precompute": 0.2}

    def run(recipe, provider, model, data, batch_size, steps):
        assert len(data.read_text().splitlines()) == steps * batch_size
        order.append((recipe, provider, model.name))
        off = 1e-3 if provider == "burnish precompute" else 1e-6 if provider == "burnish" else 0.0
        seconds = [100.0, *[8 * factors[provider]] * (steps - 1)]
        measured = [{"loss": 0.6 + off, "seconds": s} for s in seconds]
        return {"steps": measured, "peak_mib": 1000 * factors[provider]}

    monkeypatch.setattr(trainers, "in_own_process", run)
    return order


def bench(directory, *arguments):
    fixed = ["--steps", "3", "--batch_size", "2", "--model", "some/model", "--output", str(directory)]
    return main(["loops", *fixed, *arguments])


def test_time_and_memory_are_shares_of_the_peers_and_the_first_step_is_not_timed(processes, tmp_path, capsys):
    assert bench(tmp_path, "--providers", "burnish") == 0
    assert processes == [("dpo", "trl", "model"), ("dpo", "burnish", "model")] * 2  # the peer in any case, in turns
    row = ["burnish", "1e-06", "2", "2–2", "0.25", "262", "0.25"]
    assert row in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert f"| {' | '.join(row)} |" in (tmp_path / "loops.md").read_text().splitlines()
    report = json.loads((tmp_path / "loops.json").read_text())
    assert report["figures"]["burnish"]["seconds_median"] == 2.0 and report["figures"]["burnish"]["peak_mib"] == 250.0
    assert report["load"].keys() == {"before", "after"} and report["recipe"] == "dpo"
    assert imread(tmp_path / "loops.png").size > 0


def test_whose_losses_are_not_the_peers_has_failed_and_is_not_compared(processes, tmp_path, capsys):
    assert bench(tmp_path) == 1
    assert ["burnish", "precompute", "1e-03", "failed"] in [x.split() for x in capsys.readouterr().out.splitlines()]


def test_a_mistake_is_named_with_the_fix(processes, tmp_path, capsys):
    assert bench(tmp_path, "--providers", "burnisch") == 2
    assert "no provider 'burnisch', did you mean 'burnish'?" in capsys.readouterr().err
    assert bench(tmp_path, "--recipe", "sft", "--providers", "burnish precompute") == 2
    assert "no provider 'burnish precompute'" in capsys.readouterr().err
    assert bench(tmp_path, "--rounds", "0") == 2
    assert "--rounds" in capsys.readouterr().err
    assert processes == []


def test_both_sides_are_given_the_same_answers():
    pairs = [
        {"prompt": [f"{i}?"], "chosen": [f"right {i}"], "rejected": [f"wrong {i}"]} for i in range(3)
    ]  # as conversations, of which only the order of the parts matters here
    assert list(RECIPES["dpo"].rows(iter(pairs))) == pairs
    assert [row["completion"] for row in RECIPES["sft"].rows(iter(pairs))] == [["right 0"], ["right 1"], ["right 2"]]
    kto = list(RECIPES["kto"].rows(iter(pairs)))
    assert [(row["completion"], row["label"]) for row in kto] == [
        (["right 0"], True),
        (["wrong 1"], False),
        (["right 2"], True),
    ]
