"""Models, data and rewards for `tests/identity.py`."""

import random
from pathlib import Path
from typing import Any

from tiny import save_model, sums, write_rows
from transformers import GenerationConfig


def even(row: Any, sample: Any) -> float:
    """A reward: the share of even token ids."""
    return sum(token % 2 == 0 for token in sample.tokens) / len(sample.tokens)


def brief(row: Any, sample: Any) -> float:
    """A reward: the shorter, the better."""
    return 1 / len(sample.tokens)


def write_inputs(directory: Path) -> None:
    """Two models on bytes, which end their completions early, and data for every recipe."""
    for seed, name in enumerate(("model", "teacher")):
        save_model(directory / name, seed=seed)
        GenerationConfig(eos_token_id=list(range(1, 258, 5))).save_pretrained(directory / name)
    draw, rows = random.Random(0), []
    for pair in sums(20):
        prompt, chosen, rejected = {"prompt": pair["prompt"]}, pair["chosen"], pair["rejected"]
        rejected[0]["content"] += "!" * draw.randrange(6)
        completion, good = draw.choice([(chosen, True), (rejected, False)])
        steps = [str(draw.randrange(10**6)) for _ in range(draw.randint(1, 4))]
        third = [{"role": "assistant", "content": "?"}]
        rows.append({
            "pairs": {**pair, "better": draw.random()},
            "demonstrations": prompt | {"completion": chosen},
            "feedback": prompt | {"completion": completion, "label": good},
            "scores": prompt | {"completion": completion, "score": draw.random()},
            "rankings": prompt | {"completions": [rejected, chosen, third], "ranks": [1, 0, 2]},
            "solutions": {"prompt": "Go.", "completions": steps, "labels": [draw.random() < 0.5 for _ in steps]},
            "prompts": prompt | {"low": 1, "high": 7, "secret": draw.randint(1, 7)},
        })  # fmt: skip
    for name in rows[0]:
        write_rows(directory / name, [row[name] for row in rows]).rename(
            directory / f"{name}.jsonl"
        )
