"""The worth of sampling: ``grpo``, ``rloo`` and ``ppo`` from one SFT start, and distillation on the
student's answers.

    python -m burnish.benchmarks.experiments.online [recipe ...]    writes benchmarks/results/online.json and .png

The model, its SFT and the sums of two-digit numbers are the demo's. Every run has a seed of its own
for the order of its data, for its samples, and for the questions it trains on; none trains on a
question that is held out. The teacher of ``distill`` is the model of grpo's first seed, and its
students begin where that began; both models are kept in ``runs/online``.
"""

import os
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...loops.config import Teacher
from ...loops.recipes import demo
from ...loops.recipes.distill import open_distill
from ...loops.recipes.grpo import open_grpo
from ...loops.recipes.ppo import open_ppo
from ...loops.recipes.settings import GRPO, PPO, RLOO, Distill
from ..operation import Json
from ..report import figure
from . import common

RESULTS = common.RESULTS / "online.json"
# students differ by less, and from seed to seed by more
SEEDS = {"grpo": 3, "rloo": 3, "ppo": 3, "distill": 6}
TRAINED = 6000  # questions of a run

SHORT: dict[str, Any] = {"max_tokens": demo.TERM + 3, "schedule": "linear", "show_every": 0}
# Every rollout is trained on three times. Failures are pushed down only until they are rarer than
# they were, successes raised by up to 40 %: most of the noise of a small batch is in what failures
# teach.
LEARNED: dict[str, Any] = {
    **SHORT,
    "prompts_per_rollout": 128,
    "rewards": {"exact_match": {"ignore": ["whitespace"]}},
    "group_size": 8,
    "temperature": 0.7,
    "steps": 225,
    "epochs_per_rollout": 3,
    "learning_rate": 3e-4,
    "warmup": 20,
    "beta": 0.0,
    "loss_kwargs": {"clip_low": 0.02, "clip_high": 0.4},
    "eval_every": 25,
}
RECIPES: dict[str, tuple[type, Callable[[Any], Any], dict[str, Any]]] = {
    "grpo": (GRPO, open_grpo, LEARNED),
    "rloo": (RLOO, open_grpo, LEARNED),
    "ppo": (PPO, open_ppo, {**LEARNED, "lam": 1.0}),
}
DISTILLED: dict[str, Any] = {
    **SHORT,
    "batch_size": 128,
    "steps": 100,
    "learning_rate": 5e-4,
    "warmup": 10,
}
SHARES = (0.0, 0.5, 1.0)  # of the steps of distillation that learn from the student's own answers


@cache
def questions() -> tuple[list[str], list[str], list[str]]:
    """Held-out questions, those that SFT teaches, and the others."""
    every = demo.questions(random.Random(0), 10 ** (2 * demo.TERM))
    taught = every[demo.HELD_OUT :][: demo.TAUGHT]
    return every[: demo.HELD_OUT], taught, every[demo.HELD_OUT + demo.TAUGHT :]


def trained_on(seed: int) -> list[str]:
    """The questions of the run with this seed."""
    _, taught, others = questions()
    return random.Random(seed).sample([*taught, *others], TRAINED)


def start(directory: Path) -> Path:
    """The model that every run begins with."""
    model = directory / "sft" / "model"
    if not model.exists():
        demo.save_start(directory / "start", seed=0)
        demo.teach(directory, questions()[1], steps=300, seed=0, batch_size=128)
    return model


def learn(recipe: str, seed: int, directory: Path) -> Json:
    """Accuracy on the held-out questions as the run goes on, by step, and the seconds that it
    took.
    """
    make, open_recipe, settings = RECIPES[recipe]
    model, out = start(directory), directory / f"{recipe}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    asked, held_out = (
        str(
            demo.write(
                directory / f"{name}.jsonl", ({"prompt": q, "answer": demo.solve(q)} for q in some)
            )
        )
        for name, some in ((f"asked-{seed}", trained_on(seed)), ("held_out", questions()[0]))
    )
    seconds, cpu = time.perf_counter(), time.process_time()
    open_recipe(
        make(str(model), asked, str(out), eval_data=held_out, seed=seed, **settings)
    ).train()
    curve = {
        line["step"]: line["eval/reward"]
        for line in common.read_metrics(out)
        if "eval/reward" in line
    }
    before, *_, after = curve.values()
    took = {"seconds": time.perf_counter() - seconds, "cpu_seconds": time.process_time() - cpu}
    return {
        "before": before,
        "after": after,
        "points": 100 * (after - before),
        **took,
        "accuracy": curve,
    }


def distill(share: float, seed: int, directory: Path) -> Json:
    """`nearness` of the student after learning from its own completions in this share of the
    steps.
    """
    student, teacher = start(directory), directory / "grpo-0" / "model"
    out = directory / f"distill-{share}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    if not teacher.exists():
        learn("grpo", 0, directory)
    chosen = set(trained_on(seed))
    taught = [{"prompt": q, "completion": demo.solve(q)} for q in questions()[1] if q in chosen]
    data = demo.write(directory / f"taught-{seed}.jsonl", taught)
    settings = {**DISTILLED, "teacher": Teacher(model=str(teacher))}
    open_distill(
        Distill(str(student), str(data), str(out), on_policy=share, seed=seed, **settings)
    ).train()
    return nearness(out / "model", teacher, questions()[0])


@torch.no_grad()
def nearness(student: Path, teacher: Path, asked: Sequence[str]) -> dict[str, float]:
    """The student's accuracy, and its distance from its teacher: means over the tokens of
    completions, in nats.

    own     completions that the student samples
    right   the right completions, which the data has
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(student)
    models: Any = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (student, teacher)
    ]
    prompts = torch.tensor(tokenizer(list(asked))["input_ids"])
    ends = torch.full((len(asked), 1), tokenizer.eos_token_id)
    torch.manual_seed(0)
    sampling: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": demo.TERM + 3}
    own = models[0].generate(prompts, attention_mask=torch.ones_like(prompts), **sampling)
    right = torch.cat(
        [torch.tensor(tokenizer([q + demo.solve(q) for q in asked])["input_ids"]), ends], 1
    )
    distances = {"accuracy": demo.score(student, asked)}
    for answers, ids in (("own", own), ("right", right)):
        end = (ids[:, prompts.shape[1] :] == tokenizer.eos_token_id).long()
        kept = end.cumsum(1) - end == 0  # up to the first end
        s, t = (
            model(ids).logits[:, prompts.shape[1] - 1 : -1][kept].log_softmax(-1)
            for model in models
        )
        distances[f"{answers}: KL(teacher||student)"] = float((t.exp() * (t - s)).sum(-1).mean())
        distances[f"{answers}: KL(student||teacher)"] = float((s.exp() * (s - t)).sum(-1).mean())
    return distances


def draw(results: Json, path: Path) -> None:
    """Accuracy by step of every run; and how far students are from their teacher, by share of own
    answers.
    """
    picture = figure(10, 3.4)
    curves, near = picture.subplots(1, 2)
    for i, recipe in enumerate(RECIPES):
        for seed, run in results.get(recipe, {}).items():
            steps, label = [int(step) for step in run["accuracy"]], None if seed != "0" else recipe
            curves.plot(steps, [*run["accuracy"].values()], color=f"C{i}", label=label)
    curves.set(title="accuracy on unseen sums, a line per seed", xlabel="step", ylim=(0, 1))
    for i, (share, runs) in enumerate(results.get("distill", {}).items()):
        for run in runs.values():
            distances = {
                name.replace(": ", "\n"): value for name, value in run.items() if name != "accuracy"
            }
            at = [k + (i - 1) / 4 for k in range(len(distances))]
            near.scatter(
                at,
                [*distances.values()],
                s=12,
                color=f"C{i}",
                label=share if run is runs["0"] else None,
            )
            near.set_xticks(range(len(distances)), [*distances], fontsize=7)
    near.set(title="nats per token, by share of own answers", ylim=(0, None))
    for axis in (curves, near):
        axis.grid(alpha=0.3)
        if axis.has_data():
            axis.legend(fontsize=8)
    picture.savefig(path, dpi=110)


def main(recipes: Sequence[str]) -> None:
    recipes = common.chosen(recipes, SEEDS)
    learned = {name: settings for name, (_, _, settings) in RECIPES.items()}
    results = common.earlier(RESULTS) | {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "settings": {"held out": demo.HELD_OUT, **learned, "distill": DISTILLED},
    }
    directory = Path("runs/online")
    for recipe in recipes:
        runs: Json = results.setdefault(recipe, {})
        for seed in range(SEEDS[recipe]):
            if recipe == "distill":
                for share in SHARES:
                    runs.setdefault(str(share), {})[str(seed)] = distill(share, seed, directory)
            else:
                runs[str(seed)] = learn(recipe, seed, directory)
            common.write(RESULTS, results)
        draw(results, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
