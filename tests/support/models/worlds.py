"""Small tasks for the demo's model: what each recipe learns from, in seconds, on questions that it
has not seen.
"""

import json
import random

from burnish.loops.cli import main
from burnish.loops.recipes import demo
from tiny import write_rows


def save_start(directory):
    """The demo's untrained model and its tokenizer of one token per character; returns the
    directory.
    """
    demo.save_start(directory, seed=0)
    return directory


def successors(count, seed):
    """Pairs: the answer to four digits is the successor of the last one, modulo ten."""
    rng = random.Random(seed)
    for _ in range(count):
        prompt = "".join(rng.choices("0123456789", k=4)) + "="
        right = str((int(prompt[3]) + 1) % 10)
        yield {
            "prompt": prompt,
            "chosen": right,
            "rejected": rng.choice([c for c in "0123456789" if c != right]),
        }


def demonstrations(pairs):
    return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]


def feedback(pairs, seed):
    """One answer of each pair, and whether it is the right one."""
    rng = random.Random(seed)
    kinds = (rng.choice(["chosen", "rejected"]) for _ in iter(int, 1))
    return [
        {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
        for pair, kind in zip(pairs, kinds, strict=False)
    ]


def chains(count, seed, steps=4):
    """Additions modulo ten, each of which goes on from the last: up to the first that is wrong, if
    any is.
    """
    rng = random.Random(seed)
    for _ in range(count):
        total, wrong = rng.randrange(10), rng.randrange(steps + 1)
        row = {"prompt": f"{total}=", "completions": [], "labels": []}
        for step in range(min(steps, wrong + 1)):
            term = rng.randint(1, 3)
            shown = (total + term + (rng.randint(1, 9) if step == wrong else 0)) % 10
            row["completions"].append(f"{total}+{term}={shown}")
            row["labels"].append(step != wrong)
            total = shown
        yield row


def train(recipe, directory, model, data, eval_data, *flags):
    """Run a recipe; returns the first and the last line of its metrics, and where the model is."""
    directory.mkdir(parents=True)
    paths = [
        write_rows(directory / name, list(rows))
        for name, rows in (("d.jsonl", data), ("e.jsonl", eval_data))
    ]
    arguments = ["--model", str(model), "--data", str(paths[0]), "--eval_data", str(paths[1])]
    arguments += ["--output", str(directory / "run"), "--batch_size", "32", "--warmup", "5", *flags]
    assert main([recipe, *arguments]) == 0
    lines = [
        json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()
    ]
    return lines[0], lines[-1], directory / "run/model"
