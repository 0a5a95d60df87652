"""The scripts of examples/: short, and each does what it says, on a small model and made-up
rows.
"""

import asyncio
import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from burnish.loops.rewards import score
from burnish.loops.rewards.resolve import resolve_rewards
from burnish.loops.rewards.scoring import score_samples
from burnish.loops.rollouts.sample import Sample, VersionSpan
from tiny import write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_fake import Fake, error
from worlds import demonstrations, save_start, successors

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags are not valid")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start"))


@pytest.fixture
def rows(tmp_path):
    """``rows(name, count, seed)`` writes demonstrations, or pairs, and returns the file."""

    def rows(name, count, seed, kind=demonstrations):
        return write_rows(tmp_path / f"{name}.jsonl", kind(list(successors(count, seed))))

    return rows


@pytest.fixture
def run(monkeypatch, capsys):
    """``run(name, *arguments)`` returns what the script of this name prints."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# Programs of their own, with options.
PROGRAMS = ("sweep.py", "shapes.py")
SHORT = sorted(path for path in EXAMPLES.glob("*.py") if path.name not in PROGRAMS)


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.name)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 60


def test_a_run_stops_when_the_held_out_loss_has_not_fallen_twice(start, rows, run, tmp_path):
    data, held_out = rows("data", 24, 1), rows("held_out", 50, 2)  # few rows, soon learned by heart
    printed = run("early_stopping.py", start, data, held_out, tmp_path / "run")
    losses = [line["eval/loss"] for line in lines(tmp_path / "run") if "eval/loss" in line]
    best = losses.index(min(losses[1:]))
    assert len(losses) == best + 3 and min(losses[best:]) == losses[best]
    (stopped,) = re.findall(r"stopped at step (\d+), best held-out loss ([\d.]+)", printed)
    assert stopped == (str(5 * (best + 2)), f"{losses[best]:.4f}")
    assert (tmp_path / "run/model/config.json").exists()


def test_the_best_model_is_that_of_the_lowest_held_out_loss(start, rows, run, tmp_path):
    printed = run(
        "best_model.py", start, rows("data", 24, 1), rows("held_out", 50, 2), tmp_path / "best"
    )
    (best,) = re.findall(r"best held-out loss ([\d.]+)", printed)
    import burnish

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    held_out = str(tmp_path / "held_out.jsonl")
    run = iter(
        burnish.sft(
            model, held_out, eval_data=held_out, learning_rate=0.0, steps=1, micro_tokens=None
        )
    )
    assert f"{next(run).metrics['eval/loss']:.4f}" == best


def test_a_metric_of_ones_own_is_logged_beside_the_others(start, rows, run, tmp_path):
    printed = run(
        "own_metric.py", start, rows("data", 1500, 1), rows("held_out", 40, 2), tmp_path / "run"
    )
    accuracies = [
        line["eval/accuracy"] for line in lines(tmp_path / "run") if "eval/accuracy" in line
    ]
    assert len(accuracies) == 3 and accuracies[-1] > 0.9
    assert f"accuracy {accuracies[-1]:.2f}" in printed


def test_samples_of_held_out_prompts_are_printed(start, rows, run, tmp_path):
    printed = run("samples.py", start, rows("pairs", 100, 1, kind=list), tmp_path / "run")
    shown = re.findall(r"^ +(\d+) \d{4}=", printed, re.M)
    assert shown == ["10"] * 3 + ["20"] * 3


def test_a_callback_of_transformers_stops_the_run(start, rows, run):
    printed = run("callback.py", start, rows("data", 1500, 1))
    ((step, loss),) = re.findall(r"stopped at step (\d+), loss ([\d.]+)", printed)
    assert 0 < int(step) < 200 and float(loss) < 1.0


def test_a_loss_of_ones_own_reads_a_column_of_the_data(start, rows, run, tmp_path):
    def with_margin(pairs):
        return [pair | {"margin": 2.0} for pair in pairs]

    printed = run(
        "own_loss.py", start, rows("pairs", 100, 1, with_margin), tmp_path / "run"
    ).splitlines()
    losses = [
        float(line.split()[0]) for line in printed if re.fullmatch(r"\d\.\d{4} \d\.\d\d", line)
    ]
    assert losses[0] == pytest.approx(math.log(1 + math.e), abs=1e-4)  # no reward yet, α·margin = 1
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_the_averaged_model_is_saved(start, rows, run, tmp_path):
    run("ema.py", start, rows("data", 100, 1), tmp_path / "averaged")
    before, averaged = (
        AutoModelForCausalLM.from_pretrained(path) for path in (start, tmp_path / "averaged")
    )
    assert not torch.equal(before.lm_head.weight, averaged.lm_head.weight)


def test_new_tokens_are_learned_and_saved(start, rows, run, tmp_path):
    def with_token(pairs):
        return [
            {"prompt": pair["prompt"], "completion": "<next>" + pair["chosen"]} for pair in pairs
        ]

    assert re.search(
        r"loss 0\.\d+, 15 embeddings",
        run("new_tokens.py", start, rows("d", 1500, 1, with_token), tmp_path),
    )
    model, tokenizer = (
        auto.from_pretrained(tmp_path / "model") for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = tokenizer(["1234=", "9870="], return_tensors="pt").input_ids
    assert model.lm_head.weight.shape[0] == len(tokenizer) == 15
    said = tokenizer.batch_decode(
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)[:, 5:]
    )
    assert said == ["<next>5<eos>", "<next>1<eos>"]


def test_a_served_judge_grades_and_is_never_taken_for_a_0(monkeypatch):
    """A busy judge is asked again; an answer without a grade, or no answer, masks a completion."""
    monkeypatch.syspath_prepend(EXAMPLES)
    server = Fake(tokenizer=())
    server.key = "secret"
    asked = []

    def grade(body):
        asked.append(body)
        if len(asked) == 1:
            return error(503, "it is busy")
        text = body["messages"][-1]["content"]
        if "broken" in text:
            return error(400, "it is too long")
        verdict = "I'd rather not say." if "unclear" in text else "Grade: 2? No.\nGrade: 7"
        return 200, {"choices": [{"message": {"content": verdict}}]}

    server.odd["/v1/chat/completions"] = grade
    monkeypatch.setattr("asyncio.sleep", pause_of(asyncio.sleep))
    settings = {"url": f"{server.url}/v1", "model": "my/judge", "key": "secret", "timeout": 10}
    rewards = resolve_rewards({"judge:Judge": settings})
    texts = ["right", "unclear", "broken"]
    samples = [
        Sample(0, i, [1], [5], [True], [-1.0], [VersionSpan(0, 0, 1)], "stop", text)
        for i, text in enumerate(texts)
    ]
    rows = [{"prompt": [{"role": "user", "content": "Why?"}]}] * len(samples)
    try:
        asyncio.run(score_samples(rewards, rows, samples))
    finally:
        server.close()
    assert score(rewards, samples).total.tolist()[0] == 0.7
    assert score(rewards, samples).total.isnan().tolist() == [False, True, True]
    assert len(asked) == 4
    assert all(body["model"] == "my/judge" and body["temperature"] == 0 for body in asked)
    assert "Why?" in asked[0]["messages"][-1]["content"]


def pause_of(sleep):
    """``sleep`` that lasts no time."""
    return lambda seconds: sleep(0)


def test_shapes_are_drawn_learned_and_counted(run, tmp_path):
    """All of it but the learning, which takes minutes."""
    few = ("--taught", 64, "--asked", 32, "--held_out", 8, "--sft_steps", 2, "--grpo_steps", 2)
    printed = run("shapes.py", tmp_path / "shapes", *few)
    found = json.loads((tmp_path / "shapes" / "accuracy.json").read_text())
    assert found["weights"] < 500_000
    assert found["steps"] == [0, 1, 2]
    assert len(found["accuracy"]) == 3
    assert f"after GRPO {found['accuracy'][-1]:.1%}" in printed
    assert (tmp_path / "shapes" / "accuracy.png").stat().st_size > 1000


def test_the_stored_curve_of_shapes_rises_by_15_points():
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "shapes.json"
    found = json.loads(results.read_text())
    assert found["after GRPO"] - found["after SFT"] >= 0.15
    page = (results.parents[2] / "docs" / "images.md").read_text()
    for stage in ("after SFT", "after GRPO"):
        assert f"{found[stage]:.1%}".replace("%", " %") in page
