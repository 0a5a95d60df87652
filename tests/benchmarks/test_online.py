"""`burnish.benchmarks.experiments.online`: what its runs are given, and how the distance to a
teacher is measured.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from burnish.benchmarks.experiments import online
from burnish.loops.recipes import demo
from matplotlib.image import imread
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The configurations of all runs, which do not train; accuracies are 0.5 before, and 0.6, 0.75
    afterwards.
    """
    found = []

    def run(config):
        found.append(config)
        (Path(config.output) / "model").mkdir(parents=True)
        lines = [{"step": 0, "eval/reward": 0.5}, {"step": 1}, {"step": 25, "eval/reward": 0.6}]
        lines.append({"step": 50, "eval/reward": 0.75})
        (Path(config.output) / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        return SimpleNamespace(train=dict)

    recipes = {name: (make, run, settings) for name, (make, _, settings) in online.RECIPES.items()}
    monkeypatch.setattr(online, "RECIPES", recipes)
    monkeypatch.setattr(online, "open_distill", run)
    monkeypatch.setattr(online, "nearness", lambda *models: {"accuracy": 0.5, "own: KL": 0.25})
    monkeypatch.setattr(
        online.demo,
        "teach",
        lambda directory, *_, **__: (directory / "sft/model").mkdir(parents=True),
    )
    monkeypatch.setattr(online, "TRAINED", 300)
    monkeypatch.setattr(online, "RESULTS", tmp_path / "online.json")
    monkeypatch.chdir(tmp_path)
    return found


def asked(config):
    return {json.loads(line)["prompt"] for line in Path(config.data).read_text().splitlines()}


def test_no_run_trains_on_a_held_out_question_and_every_seed_trains_on_others(runs):
    online.main([])
    held_out, taught, others = map(set, online.questions())
    assert len(held_out | taught | others) == 10_000 and len(held_out) == 1000
    for config in runs:
        assert not held_out & asked(config)
        if config.eval_data:
            assert {
                json.loads(line)["prompt"]
                for line in Path(config.eval_data).read_text().splitlines()
            } == held_out
    of_seeds = [
        {frozenset(asked(config)) for config in runs if config.seed == s and config.eval_data}
        for s in (0, 1)
    ]
    assert [len(questions) for questions in of_seeds] == [1, 1] and of_seeds[0] != of_seeds[1]
    assert all(asked(config) <= taught for config in runs if not config.eval_data)


def test_all_recipes_begin_with_one_model_and_differ_in_nothing_that_decides_how_much_they_see(
    runs,
):
    online.main(["grpo", "rloo", "ppo"])
    assert [(type(config).__name__, config.seed) for config in runs] == [
        (name, seed) for name in ("GRPO", "RLOO", "PPO") for seed in (0, 1, 2)
    ]
    sizes = ("steps", "prompts_per_rollout", "group_size", "epochs_per_rollout", "minibatches")
    for name in ("model", *sizes, "temperature"):
        assert len({getattr(config, name) for config in runs}) == 1


def test_distillation_differs_in_the_share_of_own_answers_alone(runs):
    online.main(["distill"])
    teacher, *students = runs  # which grpo makes if there is none
    assert (type(teacher).__name__, teacher.seed) == ("GRPO", 0)
    assert {config.teacher.model for config in students} == {f"{teacher.output}/model"}
    assert {config.model for config in students} == {teacher.model}
    assert sorted((c.on_policy, c.seed) for c in students) == [
        (s, n) for s in (0.0, 0.5, 1.0) for n in range(6)
    ]
    assert (
        len({(config.steps, config.batch_size, config.learning_rate) for config in students}) == 1
    )


def test_figures_of_other_recipes_are_kept(runs):
    online.main(["grpo"])
    online.main(["distill"])
    results = json.loads(online.RESULTS.read_text())
    assert results["grpo"]["2"]["points"] == pytest.approx(25)
    assert results["grpo"]["0"]["accuracy"] == {"0": 0.5, "25": 0.6, "50": 0.75}
    assert results["distill"]["0.5"]["1"] == {"accuracy": 0.5, "own: KL": 0.25}
    assert imread(online.RESULTS.with_suffix(".png")).size > 0
    with pytest.raises(SystemExit, match="no recipe 'gppo'"):
        online.main(["gppo"])


@pytest.fixture
def models(tmp_path):
    """Two untrained models, the second of which says other things and ends often."""
    for seed in (0, 1):
        demo.save_start(tmp_path / str(seed), seed=seed)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "1")
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    model.save_pretrained(tmp_path / "1")
    return tmp_path / "0", tmp_path / "1"


def test_a_model_is_at_no_distance_from_itself(models):
    found = online.nearness(models[0], models[0], ["12+34=", "56+78="])
    assert [value for name, value in found.items() if name != "accuracy"] == [0, 0, 0, 0]


@torch.no_grad()
def test_the_distance_is_the_mean_over_tokens_up_to_the_end_of_each_answer(models):
    questions = [f"{a}+{b}=" for a in range(20, 24) for b in range(30, 34)]
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in reversed(models)
    )
    found = online.nearness(models[1], models[0], questions)
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    prompts = torch.tensor(tokenizer(questions)["input_ids"])
    torch.manual_seed(0)
    drawn = student.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=5
    )[:, 6:].tolist()
    own = [answer[: answer.index(0) + 1] if 0 in answer else answer for answer in drawn]
    assert len({len(answer) for answer in own}) > 2
    right = [[*tokenizer(demo.solve(question))["input_ids"], 0] for question in questions]
    for name, answers in (("own", own), ("right", right)):
        forward, reverse = [], []
        for prompt, answer in zip(prompts.tolist(), answers, strict=True):
            for end in range(len(answer)):
                text = torch.tensor([prompt + answer[:end]])
                p, q = (model(text).logits[0, -1].softmax(-1) for model in (student, teacher))
                reverse.append(float((p * (p / q).log()).sum()))
                forward.append(float((q * (q / p).log()).sum()))
        assert found[f"{name}: KL(teacher||student)"] == pytest.approx(
            sum(forward) / len(forward), rel=1e-6
        )
        assert found[f"{name}: KL(student||teacher)"] == pytest.approx(
            sum(reverse) / len(reverse), rel=1e-6
        )
