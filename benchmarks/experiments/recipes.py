"""Every offline recipe once on SmolLM2-135M-Instruct: what each moves on held-out data, from
reasoning-gym questions.

    python -m burnish.benchmarks.experiments.recipes [recipe ...]       writes benchmarks/results/smollm2_recipes.json

The teacher of ``distill`` is the model that ``sft`` makes here; the process reward model judges
chains of additions.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ...loops.cli import main as burnish
from ..operation import Json
from ..real_model import conversations, labeled, preference_pairs, smollm2, write_jsonl
from . import common

RESULTS = common.RESULTS / "smollm2_recipes.json"
TRAINED, HELD_OUT = 160, 64
STEPS = 16

# Recipe -> its flags, and the metrics that it is to move.
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "sft": (["--learning_rate", "5e-5"], ["nll"]),
    "kto": (
        ["--learning_rate", "1e-5"],
        ["kto", "rewards/chosen", "rewards/rejected", "rewards/accuracies"],
    ),
    "orpo": (["--learning_rate", "2e-5"], ["nll", "orpo", "rewards/accuracies"]),
    "cpo": (
        ["--learning_rate", "1e-5", "--loss", "simpo", "--beta", "2"],
        ["nll", "simpo", "rewards/accuracies"],
    ),
    "reward": (["--learning_rate", "2e-5"], ["bradley_terry", "margin", "accuracy"]),
    "prm": (["--learning_rate", "1e-4", "--steps", "240"], ["step_loss", "accuracy"]),
    "distill": (["--learning_rate", "2e-5"], ["distillation"]),
}


def chains(count: int, seed: int, steps: int = 4) -> Iterator[Json]:
    """Chains of additions, each from the last sum, up to the first wrong one.

    A fifth of them have none.
    """
    rng = random.Random(seed)
    for _ in range(count):
        total, wrong = rng.randint(1, 9), rng.randrange(steps + 1)
        row: Json = {
            "prompt": f"Start with {total} and go on adding.\n",
            "completions": [],
            "labels": [],
        }
        for step in range(min(steps, wrong + 1)):
            term = rng.randint(1, 9)
            shown = total + term + (rng.choice([-3, -2, -1, 1, 2, 3]) if step == wrong else 0)
            row["completions"].append(f"{total} + {term} = {shown}")
            row["labels"].append(step != wrong)
            total = shown
        yield row


def rows(recipe: str, count: int, seed: int) -> Iterator[Json]:
    pairs = preference_pairs(count, seed)
    match recipe:
        case "sft" | "distill":
            return conversations(pairs)
        case "kto":
            rng = random.Random(seed)
            return labeled(pairs, iter(lambda: rng.choice(["chosen", "rejected"]), None))
        case "prm":
            return chains(count, seed)
    return pairs


def run(recipe: str, directory: Path, *flags: str) -> Json:
    """Train one recipe.

    Returns its target metrics on held-out data before and after, and where the model is.
    """
    trained = 12 * TRAINED if recipe == "prm" else TRAINED  # its rows are short
    data = write_jsonl(directory / "data.jsonl", rows(recipe, trained, seed=0))
    held_out = write_jsonl(directory / "held_out.jsonl", rows(recipe, HELD_OUT, seed=1_000_000))
    own_flags, metrics = RUNS[recipe]
    arguments = [
        recipe,
        "--model",
        str(smollm2()),
        "--data",
        str(data),
        "--eval_data",
        str(held_out),
    ]
    arguments += ["--output", str(directory / "run"), "--batch_size", "8", "--micro_tokens", "2048"]
    arguments += ["--steps", str(STEPS), *own_flags, *flags]
    began = time.perf_counter()
    if burnish(arguments) != 0:
        raise RuntimeError(f"{recipe} failed")
    lines = common.read_metrics(directory / "run")
    before, after = (
        {name: line[f"eval/{name}"] for name in metrics} for line in (lines[0], lines[-1])
    )
    return {
        "flags": own_flags,
        "before": before,
        "after": after,
        "minutes": (time.perf_counter() - began) / 60,
    }


def main(recipes: list[str]) -> None:
    recipes = common.chosen(recipes, RUNS)
    rows = {"trained": TRAINED, "held out": HELD_OUT, "steps": STEPS, "batch size": 8}
    results = common.earlier(RESULTS) | {"rows": rows}
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as name:
        for recipe in recipes:
            directory = Path(name) / recipe
            flags = []
            if recipe == "distill":
                if not (Path(name) / "sft").exists():
                    run("sft", Path(name) / "sft")
                flags = ["--teacher.model", str(Path(name) / "sft" / "run" / "model")]
            results[recipe] = run(recipe, directory, *flags)
            print(recipe, json.dumps(results[recipe]), flush=True)
            common.write(RESULTS, results)


if __name__ == "__main__":
    main(sys.argv[1:])
