"""A healthy run of every recipe: the curves on its page.

    python -m burnish.benchmarks.docs.curves [recipe ...]

trains the demo's small model on successors of digits, a minute or two for all on one core, and
writes docs/pictures/RECIPE.png. The start of all but sft and orpo is a model that SFT has taught a
little.
"""

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...loops import api
from ...loops.recipes import RECIPES, demo
from ...loops.runs.report import read_curves
from ..report import figure
from .recipes import HOME

COMMAND = "python -m burnish.benchmarks.docs.curves"
HELD_OUT = 200
Row = dict[str, Any]

_PAIRS = ["rewards/chosen", "rewards/rejected", "rewards/accuracies"]
_ONLINE = ["reward", "frac_reward_zero_std", "entropy"]
PANELS = {
    "sft": ["nll", "grad_norm"],
    "dpo": ["dpo", *_PAIRS],
    "kto": ["kto", *_PAIRS],
    "orpo": ["nll", "orpo", "rewards/margins", "rewards/accuracies"],
    "cpo": ["nll", "cpo", "rewards/margins", "rewards/accuracies"],
    "reward": ["bradley_terry", "accuracy", "margin"],
    "prm": ["step_loss", "accuracy"],
    "distill": ["distillation", "entropy"],
    "grpo": _ONLINE,
    "rloo": [*_ONLINE, "kl"],
    "ppo": ["reward", "val/explained_variance", "objective/kl", "entropy"],
    "online_dpo": ["reward", "ties", "rewards/margins", "entropy"],
}
_TRAINED = {"batch_size": 64, "steps": 60, "warmup": 0.1}
_SAMPLED = {
    "rewards": "exact_match",
    "max_tokens": 3,
    "prompts_per_rollout": 64,
    "group_size": 4,
    "steps": 40,
    "learning_rate": 5e-4,
    "warmup": 0.1,
    "show_every": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {**_TRAINED, "learning_rate": 2e-3},
    "dpo": {**_TRAINED, "learning_rate": 3e-4},
    "kto": {**_TRAINED, "learning_rate": 5e-4},
    "orpo": {**_TRAINED, "learning_rate": 2e-3},
    "cpo": {**_TRAINED, "learning_rate": 5e-4},
    "reward": {**_TRAINED, "learning_rate": 2e-3, "centering": 0.01},
    "prm": {**_TRAINED, "learning_rate": 1e-3, "steps": 180, "separator": "="},
    "distill": {**_TRAINED, "learning_rate": 1e-3},
    "grpo": _SAMPLED,
    "rloo": {**_SAMPLED, "beta": 0.02},
    "ppo": {**_SAMPLED, "beta": 0.02, "value_coefficient": 2.0},
    "online_dpo": _SAMPLED,
}


def rows_for(recipe: str, count: int, rng: random.Random) -> Iterator[Row]:
    """Rows for a recipe: the successor, modulo ten, of the last of four digits."""
    for _ in range(count):
        prompt = "".join(rng.choices("0123456789", k=4)) + "="
        right = str((int(prompt[3]) + 1) % 10)
        wrong = rng.choice([digit for digit in "0123456789" if digit != right])
        if recipe in ("sft", "distill"):
            yield {"prompt": prompt, "completion": right}
        elif recipe in ("dpo", "orpo", "cpo", "reward"):
            yield {"prompt": prompt, "chosen": right, "rejected": wrong}
        elif recipe == "kto":
            label = rng.random() < 0.5
            yield {"prompt": prompt, "completion": right if label else wrong, "label": label}
        elif recipe == "prm":
            yield _chain(rng)
        else:
            yield {"prompt": prompt, "answer": right}


def _chain(rng: random.Random, steps: int = 4) -> Row:
    """Additions modulo ten, each of which goes on from the last, up to the first wrong one."""
    total = rng.randrange(10)
    first_wrong = rng.randrange(steps + 1)
    row: Row = {"prompt": f"{total}=", "completions": [], "labels": []}
    for step in range(min(steps, first_wrong + 1)):
        term = rng.randint(1, 3)
        error = rng.randint(1, 9) if step == first_wrong else 0
        shown = (total + term + error) % 10
        row["completions"].append(f"{total}+{term}={shown}")
        row["labels"].append(not error)
        total = shown
    return row


def draw(recipe: str, directory: Path) -> Path:
    """Train, and draw the panels of the recipe."""
    rng = random.Random(1)
    settings = dict(SETTINGS[recipe])
    if recipe == "distill":
        settings["teacher"] = {"model": str(directory / "good/model")}
    start = directory / ("start" if recipe in ("sft", "orpo") else "weak/model")
    getattr(api, recipe)(
        str(start),
        list(rows_for(recipe, 4000, rng)),
        eval_data=list(rows_for(recipe, HELD_OUT, rng)),
        eval_every=settings["steps"] // 6,
        output=str(directory / recipe),
        **settings,
    ).train()

    curves = read_curves(directory / recipe / "metrics.jsonl")
    drawing = figure(2.7 * len(PANELS[recipe]), 2.1)
    panels = drawing.subplots(1, len(PANELS[recipe]), squeeze=False)
    for axes, name in zip(panels.flat, PANELS[recipe], strict=True):
        for label, points in curves[name].items():
            steps, values = zip(*points, strict=True)
            marker = "o" if label == "held out" else None
            axes.plot(steps, values, label=label, marker=marker, markersize=3)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(color="#e4e4e4", linewidth=0.7)
    panels.flat[0].legend(fontsize=7, frameon=False)
    picture = HOME / "pictures" / f"{recipe}.png"
    drawing.savefig(picture, dpi=100)
    return picture


def main() -> None:
    recipes = sys.argv[1:] or [name for name in RECIPES if name != "demo"]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        demo.save_start(directory / "start", seed=0)
        for name, steps in (("weak", 30), ("good", 100)):
            rows = list(rows_for("sft", 4000, random.Random(0)))
            settings = {**SETTINGS["sft"], "steps": steps, "output": str(directory / name)}
            api.sft(str(directory / "start"), rows, **settings).train()
        for recipe in recipes:
            print(draw(recipe, directory))


if __name__ == "__main__":
    main()
