"""GRPO on a real model: which questions are asked, what counts as right, what is written. The model
here is tiny.
"""

import json

import pytest
from burnish.benchmarks.experiments import reasoning
from burnish.loops.rewards import resolve_rewards
from burnish.loops.rollouts.replay import write_samples
from burnish.loops.rollouts.sample import Sample, VersionSpan
from tiny import save_model

pytest.importorskip("reasoning_gym")


def test_no_question_that_is_measured_on_is_trained_on(monkeypatch):
    monkeypatch.setitem(reasoning.TASK, "min_digits", 1)
    # of which there are few enough to meet again
    monkeypatch.setitem(reasoning.TASK, "max_digits", 1)
    trained, held_out = reasoning.questions(200, 40)
    asked = {row["prompt"] for row in trained}
    assert not asked & {row["prompt"] for row in held_out}
    assert len({row["prompt"] for row in held_out}) == len(held_out) == 40
    assert 50 < len(trained) < 200


@pytest.mark.parametrize(
    ("text", "right", "first", "verified"),
    [
        (" -30", 1, 1, 1),
        ("-30.", 1, 1, 1),
        (" -30 and so on", 0, 1, None),
        ("57 - 87 = -30", 0, 0, None),
        (" 30", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_a_right_answer_is_told_from_a_right_number(text, right, first, verified):
    row = next(row for row in reasoning.questions(2, 40)[1] if int(row["answer"]) < 0)
    said = text.replace("30", row["answer"][1:])
    sample = Sample(0, 0, [1], [2], [True], [0.0], [], "stop", said)
    scores = {
        reward.name: reward.function(row, sample) for reward in resolve_rewards(reasoning.REWARDS)
    }
    assert (scores["right"], scores["first_number_right"]) == (right, first)
    assert scores["reasoning_gym"] == verified or (
        verified is None and 0 < scores["reasoning_gym"] < 1
    )


def test_only_the_verifier_is_learned_from():
    weights = {reward.name: reward.weight for reward in resolve_rewards(reasoning.REWARDS)}
    assert weights == {"reasoning_gym": 1, "right": 0, "first_number_right": 0}


def test_the_best_constant_answer_is_the_commonest():
    rows = [{"answer": answer} for answer in ("3", "7", "7", "-1")]
    assert reasoning.best_constant(rows) == {"answer": "7", "right": 0.5}


def test_the_standard_error_is_that_of_a_share():
    names = [f"eval/rewards/{name}/mean" for name in reasoning.REWARDS]
    found = reasoning.summary([dict.fromkeys(names, 0.5), dict.fromkeys(names, 0.9)], 100)
    assert found["rewards/right/mean"] == {
        "before": 0.5, "after": 0.9, "standard errors": pytest.approx([0.05, 0.03])
    }  # fmt: skip


def test_rewards_of_a_step_are_those_of_all_answers_that_were_drawn_for_it(tmp_path):
    scores = [(0, 1.0), (1, 0.0), (1, None), (1, 0.6)]
    for task, (version, score) in enumerate(scores):
        rewards = {"right": score}
        sample = Sample(
            task, 0, [1], [2], [True], [-1.0], [VersionSpan(version, 0, 1)], "stop", "", rewards
        )
        write_samples(tmp_path / "samples.jsonl", [sample])
    kept = [
        {"step": 0, "eval/reward": 0.5},
        {"step": 1, "rewards/right/mean": 0.9, "loss": 3.0},
        {"step": 2},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    start, first, second = reasoning.read_steps(tmp_path)
    assert start == {"step": 0}
    assert first == {"step": 1, "rewards/right/mean": 1.0}
    assert second == {"step": 2, "rewards/right/mean": pytest.approx(0.2)}


@pytest.mark.slow
def test_a_run_writes_its_figures_and_a_picture_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(reasoning, "smollm2", lambda: save_model(tmp_path / "model"))
    monkeypatch.setattr(reasoning, "RESULTS", tmp_path)
    monkeypatch.setattr(reasoning, "TRAINED", 8)
    monkeypatch.setattr(reasoning, "HELD_OUT", 4)
    tiny = {
        "steps": 2,
        "dynamic_sampling": False,
        "prompts_per_rollout": 2,
        "group_size": 2,
        "eval_every": 1,
    }
    tiny["show_every"] = 0
    monkeypatch.setattr(reasoning, "SETTINGS", reasoning.SETTINGS | tiny)
    reasoning.main([str(tmp_path / "kept")])
    written = (tmp_path / "smollm2_grpo.json").read_text()
    report = json.loads(written)
    assert str(tmp_path) not in written
    assert [step["step"] for step in report["steps"]] == [0, 1, 2]
    assert all("eval/rewards/right/mean" in step for step in report["steps"])
    assert report["questions"] == {"trained": 8, "held out": 4}
    assert (tmp_path / "smollm2_grpo.png").read_bytes().startswith(b"\x89PNG")
