"""Predicted against measured memory at the peak of a run: ``burnish bench memory``.

    predicted    by `burnish plan`, without weights
    measured     of the same run for two steps: bytes of all tensors when training begins, and the highest sum of what
                 torch's profiler reports of the CPU allocator from then on. That counts what
                 operators allocate for themselves, which a simulation can't see, but neither
                 Python's memory nor what malloc keeps, as the resident size of a process does.

Of online runs the prediction is the worst that may come: the longest prompts of the data, and
completions that never end. The runs that are measured take all prompts in each rollout, sample at a
temperature at which hardly any completion ends, and have a reward that differs from completion to
completion: where it does not, there is no gradient, so no step is taken, and AdamW has no state.

``bytes per parameter`` of the model are those of its weights, their gradients and the optimizer's
state.

Every run is a process of its own: the model, or a random one of --width and --layers with its
tokenizer.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from ..operation import Json
from ..real_model import preference_pairs, write_jsonl
from ..report import machine, say

_LORA: dict[str, Any] = {"lora": {"r": 16}}
_BFLOAT16, _RECOMPUTED = {"dtype": "bfloat16"}, {"gradient_checkpointing": True}
_SMALL = {"optimizer": "adamw_8bit"}
_NESTED = {"quantize": "4bit", "quantize_kwargs": {"bnb_4bit_use_double_quant": True}}
_GRPO: dict[str, Any] = {
    "rewards": {"varied": {"function": f"{__name__}:varied"}},
    "prompts_per_rollout": 4,
    "group_size": 4,
    "max_tokens": 48,
    "temperature": 4.0,
    "show_every": 0,
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "sft, 8-bit AdamW": ("sft", _SMALL),
    "sft, gradient checkpointing": ("sft", _RECOMPUTED),
    "sft, bfloat16": ("sft", _BFLOAT16),
    "sft, bfloat16 weights, 8-bit AdamW": (
        "sft",
        _BFLOAT16 | {"weights_dtype": "bfloat16"} | _SMALL,
    ),
    "sft, bfloat16 weights, 8-bit AdamW, gradient checkpointing": (
        "sft",
        _BFLOAT16 | {"weights_dtype": "bfloat16"} | _SMALL | _RECOMPUTED,
    ),
    "sft, QLoRA, bfloat16, gradient checkpointing": (
        "sft",
        _LORA | _BFLOAT16 | _RECOMPUTED | {"quantize": "4bit"},
    ),
    "sft, nested QLoRA in bfloat16, 8-bit AdamW, gradient checkpointing": (
        "sft",
        _LORA | _BFLOAT16 | _RECOMPUTED | _NESTED | {"weights_dtype": "bfloat16"} | _SMALL,
    ),
    "sft, LoRA, bfloat16, gradient checkpointing": ("sft", _LORA | _BFLOAT16 | _RECOMPUTED),
    "dpo": ("dpo", {}),
    "dpo, bfloat16, gradient checkpointing": ("dpo", _BFLOAT16 | _RECOMPUTED),
    "dpo, LoRA, bfloat16": ("dpo", _LORA | _BFLOAT16),
    "grpo, reference, bfloat16": ("grpo", _GRPO | _BFLOAT16 | {"beta": 0.1}),
    "grpo, LoRA": ("grpo", _GRPO | _LORA),
}
_OTHERS = (FakeTensor, DTensor)  # that stand for tensors


def varied(row: object, sample: Any) -> float:
    """A reward that differs within every group."""
    return float(sample.index % 2)


def configured(recipe: str, values: Json) -> tuple[Callable[[Any], Any], Any]:
    """The function that opens a recipe, and its configuration."""
    from ...loops.recipes import opener, settings_of
    from ...loops.registry import build

    return opener(recipe), build(recipe, settings_of(recipe), values)


def allocated() -> int:
    """Bytes of all tensors that there are, but for those of a simulation."""
    gc.collect()
    sizes: dict[int, int] = {}  # by the address of a storage, which views share
    for each in gc.get_objects():
        kind = type(each)  # not isinstance, which asks some objects for a class that they lack
        if issubclass(kind, torch.Tensor) and kind not in _OTHERS:
            storage = each.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def measured_peak(open_recipe: Any, config: Any) -> int:
    """Bytes at the peak of a run, from where it begins to train."""
    before = allocated()
    training = open_recipe(config)
    at_start = allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        training.train()
    total = highest = 0
    # Events come in no order; those of memory have the bytes taken, or below 0 given back.
    for event in sorted(
        profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        if event.name() == "[memory]":
            total += event.nbytes()
            highest = max(highest, total)
    return at_start + highest


def compare(recipe: str, values: Json) -> dict[str, float]:
    """Predicted and measured bytes of one run, and the relative error of the prediction."""
    from ...loops.cli.rehearsal import rehearse

    run = configured(recipe, values)
    planned = rehearse(*run)
    measured = measured_peak(*run)
    parts = {f"predicted {label}": float(size) for label, size in planned.memory.most_common()}
    trained, frozen, state = (
        planned.memory[label] for label in ("weights, trained", "weights, frozen", "optimizer")
    )
    # Adapters are no parameters of the model.
    parameters = planned.parameters - (planned.trained if frozen > trained else 0)
    return {
        "predicted": float(planned.total),
        "measured": float(measured),
        "error": planned.total / measured - 1,
        "bytes per parameter": (2 * trained + frozen + state) / parameters,
        **parts,
    }


def random_model(directory: Path, tokenizer: str, width: int, layers: int) -> Path:
    """A Llama with random weights and the vocabulary of this tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words: Any = AutoTokenizer.from_pretrained(tokenizer)
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
    }
    shape |= {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 256)}
    config = LlamaConfig(
        **shape,
        vocab_size=len(words),
        eos_token_id=words.eos_token_id,
        max_position_embeddings=2048,
    )
    config.dtype = torch.bfloat16
    kind: Any = LlamaForCausalLM
    kind._from_config(config).save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="burnish bench memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of a model")
    parser.add_argument(
        "--width", type=int, default=2048, help="of the random model; 0 measures none"
    )
    parser.add_argument("--layers", type=int, default=16, help="of the random model")
    parser.add_argument(
        "--only", help="runs whose name, with that of the model, matches this expression"
    )
    parser.add_argument("--rows", type=int, default=16, help="examples of a step")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench"), help="directory of memory.json"
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    report: Json = {"machine": machine(torch.device("cpu")), "figures": {}}
    path = options.output / "memory.json"
    if options.only and path.exists():  # the others stay as they were measured
        report["figures"] = json.loads(path.read_text())["figures"]
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as name:
        scratch = Path(name)
        data = write_data(scratch, options.rows)
        random = f"random, {options.layers} layers of {options.width}"
        models = (options.model.name, random) if options.width else (options.model.name,)
        for model, run in product(models, RUNS):
            title = f"{model}: {run}"
            if options.only and not re.search(options.only, title):
                continue
            directory = options.model
            if model == random:
                directory = scratch / "random"
                if not directory.exists():
                    random_model(directory, str(options.model), options.width, options.layers)
            figures = in_own_process(run, directory, data, scratch, options.rows)
            say(
                f"{title:80} predicted {figures['predicted'] / 1e9:7.3f} GB  "
                f"measured {figures['measured'] / 1e9:7.3f} GB  {figures['error']:+.1%}"
            )
            report["figures"][title] = figures
            # After each run: the whole table takes hours.
            options.output.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def write_data(directory: Path, rows: int) -> dict[str, str]:
    """The file of each recipe: pairs, their chosen completions, or some of their prompts."""
    pairs = list(preference_pairs(4 * rows, seed=0))
    texts = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    prompts = [{"prompt": pair["prompt"]} for pair in pairs[: _GRPO["prompts_per_rollout"]]]
    data = {"sft": texts, "dpo": pairs, "grpo": prompts}
    files = {}
    for recipe, content in data.items():
        files[recipe] = str(write_jsonl(directory / f"{recipe}.jsonl", content))
    return files


def in_own_process(
    run: str, model: Path, data: Mapping[str, str], scratch: Path, rows: int
) -> dict[str, float]:
    """The figures of a run, from a process that has nothing else in memory; see `compare`."""
    recipe, values = RUNS[run]
    settings = {"model": str(model), "data": data[recipe], "steps": 2, "save_every": None}
    settings |= {"output": tempfile.mkdtemp(dir=scratch), **values}
    if "group_size" not in settings:
        settings["batch_size"] = rows
    command = [sys.executable, "-m", f"{__package__}.memory", recipe, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{run} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1], json.loads(sys.argv[2]))))
