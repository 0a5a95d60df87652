"""Our recipe against the peer's trainer, on the same model, examples and steps:
``burnish bench loops``.

SmolLM2-135M-Instruct, or the model of a directory, learns from conversations; for grpo a new model
of 17M parameters completes prompts of some 256 tokens with 64, 8 times each (``--max_tokens``,
``--group_size``). Both sides take the same examples in the same order, with AdamW (0.9, 0.999,
1e-8, no decay), a constant rate and clipping at 1.0, each in its own process. Agreement first: a
side that is not within 1e-4 of the peer's losses, or for grpo within 1e-5 of its gradient on the
same completions, is shown as failed, and its time and memory are not compared. Under bfloat16
autocast (``--dtype bfloat16``) the difference is that from the peer in float32, and may be twice
the peer's own. A step is all that happens between two calls of the optimizer, so that the first one
is not timed. Time is that of the wall and of all processors; memory is the peak of the process,
beside which stands what it takes before it has loaded a model.
"""

import argparse
import importlib
import io
import json
import math
import os
import platform
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from datetime import date
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...loops.recipes import opener, settings_of
from ..measure import resident_bytes
from ..operation import Json, unknown_name
from ..real_model import labeled, preference_pairs, smollm2, write_jsonl
from ..report import figure, load, show_table, table, versions
from ..worker import Worker
from . import sampled

PEER = "trl"
AGREEMENT = 1e-4
HEADER = ["provider", "difference", "s per step", "min–max", "÷peer", "CPU s", "÷peer"]
HEADER += ["peak MB", "÷peer", "imports MB"]
Rows = Iterator[Json]
# Fields of our settings, and of the peer's configuration, that say how much is sampled.
_OUR_SAMPLES = {"group": "group_size", "tokens": "max_tokens"}
_PEER_SAMPLES = {"group": "num_generations", "tokens": "max_completion_length"}


@dataclass(frozen=True)
class Recipe:
    """One of our recipes beside the trainer that does the same."""

    name: str  # of our settings, and of the peer's trainer and its configuration
    rows: Callable[[Rows], Rows]  # examples from preference pairs; as many as there are
    ours: dict[str, Any]  # fields of our settings
    theirs: dict[str, Any]  # fields of the peer's configuration
    # further providers, with the fields that they change
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    # written to the directory
    model: Callable[[Path | None, Path], Path] = lambda given, directory: given or smollm2()

    @property
    def providers(self) -> dict[str, Json]:
        """Names, with the fields that each changes."""
        return {
            PEER: {},
            f"{PEER} without checkpointing": {"gradient_checkpointing": False},
            "burnish": {},
            **self.more,
        }

    @property
    def samples(self) -> dict[str, int] | None:
        """Completions to a prompt, and their tokens, if each side samples its own.

        None if both are given them.
        """
        if "group_size" not in self.ours:
            return None
        return {name: self.ours[field] for name, field in _OUR_SAMPLES.items()}


def completions(pairs: Rows) -> Rows:
    """The chosen side, as prompt and completion: loss is on the completion, here and there."""
    for pair in pairs:
        yield {"prompt": pair["prompt"], "completion": pair["chosen"]}


def alternating(pairs: Rows) -> Rows:
    """The right answer to a question, and the wrong one to the next."""
    return labeled(pairs, cycle(("chosen", "rejected")))


_PRECOMPUTED = {"burnish precompute": {"reference": "precompute"}}
# not the loss `kto`: each side pairs prompts with other completions of its own for z0
_APO = "apo_zero_unpaired"
_SAMPLED: dict[str, Any] = {
    "group_size": 8,
    "max_tokens": 64,
    "rewards": {f"{sampled.__name__}:vowels": 1.0},
}
_SAMPLED |= {"old_logprobs": "recomputed", "max_prompt_length": None}
_TRL_SAMPLED: dict[str, Any] = {
    "num_generations": 8,
    "max_completion_length": 64,
    "loss_type": "grpo",
}
_TRL_SAMPLED |= {"shuffle_dataset": False}
# its default; on a CPU it makes logits of every token of these rows
_TRL_SAMPLED |= {"per_device_train_batch_size": 8}
_MORE_SAMPLED: dict[str, dict[str, Any]] = {
    "burnish by groups": {"micro_tokens": 1024},
    # as the peer's trainers do by default
    "burnish with checkpointing": {"gradient_checkpointing": True},
}
RECIPES = {
    "dpo": Recipe("DPO", lambda pairs: pairs, {"reference": "copy"}, {"beta": 0.1}, _PRECOMPUTED),
    "sft": Recipe("SFT", completions, {}, {}),
    "kto": Recipe(
        "KTO",
        alternating,
        {"reference": "copy", "loss": _APO},
        {"beta": 0.1, "loss_type": _APO},
        _PRECOMPUTED,
    ),
    "grpo": Recipe(
        "GRPO", sampled.questions, _SAMPLED, _TRL_SAMPLED, _MORE_SAMPLED, sampled.talkative
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if ours does not agree with the peer, or one could not run; 2 for a mistake in
    the arguments.
    """
    parser = argparse.ArgumentParser(
        prog="burnish bench loops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--recipe", choices=RECIPES, default="dpo")
    providers = "; ".join(
        f"{name}: {', '.join(recipe.providers)}" for name, recipe in RECIPES.items()
    )
    add(
        "--providers",
        nargs="+",
        metavar="NAME",
        help=f"the peer, and some of the recipe's: {providers}",
    )
    add("--model", type=Path, help="directory of another model")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of both sides' computation",
    )
    add("--steps", type=int, default=6, help="the first is not timed")
    add("--batch_size", type=int, default=8, help="examples a step, or prompts")
    add("--group_size", type=int, help="completions to a prompt, where each side samples its own")
    add("--max_tokens", type=int, help="of each of these completions")
    add(
        "--rounds",
        type=int,
        default=2,
        help="in each, every provider runs once, in a process of its own",
    )
    add(
        "--output",
        type=Path,
        default=Path("runs/bench"),
        help="directory of loops.json, loops.md and loops.png",
    )
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments)
    known = RECIPES[options.recipe].providers
    wanted = options.providers or list(known)
    samples = RECIPES[options.recipe].samples
    problem = _problem(options, wanted, samples)
    if problem:
        print(f"burnish bench loops: {problem}", file=sys.stderr)
        return 2
    names = (PEER, *(name for name in known if name in wanted and name != PEER))
    sizes = options.steps, options.batch_size, options.rounds
    if samples is not None:
        samples["group"] = options.group_size or samples["group"]
        samples["tokens"] = options.max_tokens or samples["tokens"]
    try:
        report = compare(options.recipe, *sizes, names, options.model, options.dtype, samples)
    except (RuntimeError, ImportError, ValueError) as error:
        print(f"burnish bench loops: {error}", file=sys.stderr)
        return 1
    report = {"command": shlex.join(["burnish", "bench", "loops", *arguments]), **report}
    show_table(HEADER, cells(report))
    save(report, options.output)
    return 0 if all(figures["agrees"] for figures in report["figures"].values()) else 1


def _problem(
    options: argparse.Namespace, wanted: Sequence[str], samples: Mapping[str, int] | None
) -> ValueError | None:
    """What is wrong with the options, if anything is."""
    known = RECIPES[options.recipe].providers
    for name in wanted:
        if name not in known:
            names = ", ".join(map(repr, known))
            return unknown_name("provider", name, known, f"Known are {names}")
    if options.steps < 2 or options.rounds < 1 or options.batch_size < 1:
        return ValueError("--steps must be >= 2, --rounds and --batch_size >= 1")
    group, tokens = options.group_size, options.max_tokens
    if group is None and tokens is None:
        return None
    if samples is None:
        sampling = ", ".join(name for name, each in RECIPES.items() if each.samples)
        return ValueError(
            f"--group_size and --max_tokens: --recipe {options.recipe} samples nothing; "
            f"leave them out, or take --recipe {sampling}"
        )
    if (group is not None and group < 2) or (tokens is not None and tokens < 1):
        return ValueError("--group_size must be >= 2, --max_tokens >= 1")
    return None


def compare(
    recipe: str,
    steps: int,
    batch_size: int,
    rounds: int,
    names: tuple[str, ...],
    model: Path | None = None,
    dtype: str = "float32",
    samples: Mapping[str, int] | None = None,
) -> Json:
    """Figures of every provider, over ``rounds`` interleaved processes each.

    Args:
        samples: see `Recipe.samples`.
    """
    before, chosen = load(), RECIPES[recipe]
    results: dict[str, list[Json]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as temporary:
        directory = Path(temporary)
        model = chosen.model(model, directory)
        data = write_jsonl(
            directory / "rows.jsonl", chosen.rows(preference_pairs(steps * batch_size, seed=0))
        )
        differences = (
            gradient_differences(recipe, names, model, data, dtype, samples) if samples else {}
        )
        for _ in range(rounds):
            for name in names:
                results[name].append(
                    in_own_process(recipe, name, model, data, batch_size, steps, dtype, samples)
                )
        if not samples:
            losses = {name: runs[0]["losses"] for name, runs in results.items()}
            exact = losses[PEER]
            if dtype != "float32":
                exact = in_own_process(recipe, PEER, model, data, batch_size, steps)["losses"]
            both = {name: zip(each, exact, strict=True) for name, each in losses.items()}
            differences = {name: max(abs(a - b) for a, b in pairs) for name, pairs in both.items()}
    limit = sampled.AGREEMENT if samples else AGREEMENT
    if dtype != "float32":
        limit = 2 * differences[PEER]
    return {
        "recipe": recipe,
        "model": model.name,
        "dtype": dtype,
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": {"before": before, "after": load()},
        "versions": versions(("torch", "transformers", "trl", "accelerate")),
        "steps": steps,
        "batch_size": batch_size,
        "answers": samples,
        "rounds": rounds,
        "figures": {
            name: summarize(runs, differences.get(name), limit) for name, runs in results.items()
        },
    }


def gradient_differences(
    recipe: str,
    names: Iterable[str],
    model: Path,
    data: Path,
    dtype: str,
    samples: Mapping[str, int],
) -> dict[str, float]:
    """From the peer in float32, in loss or gradient, whichever is more, of a step on the
    completions of ours.
    """
    differences: dict[str, float] = {}
    for ours in [name for name in names if not name.startswith(PEER)] or ["burnish"]:
        with tempfile.TemporaryDirectory(prefix="burnish-bench-") as directory:
            evidence, exact = Path(directory), (PEER, "float32")
            losses: dict[tuple[str, str], float] = {}
            for name, precision in dict.fromkeys([(ours, dtype), (PEER, dtype), exact]):
                step = in_own_process(
                    recipe, name, model, data, sampled.COMPARED, 1, precision, samples, evidence
                )
                losses[name, precision] = step["losses"][0]
            for name in (ours, PEER):
                gradients = (
                    evidence / f"{side}.{kind}.pt" for side, kind in ((name, dtype), exact)
                )
                both = abs(losses[name, dtype] - losses[exact]), sampled.distance(*gradients)
                differences[name] = max(differences.get(name, 0.0), *both)
    return differences


def summarize(runs: list[Json], difference: float | None, limit: float) -> Json:
    """Figures of the runs of one provider.

    The ``difference`` from the peer is None for the peer in another setting.
    """
    agrees = difference is None or difference <= limit
    seconds = [s for run in runs for s in run["seconds"]]
    return {
        "losses": runs[0]["losses"],
        "difference": difference,
        "agrees": agrees and all(run["full_length"] for run in runs),
        "seconds_median": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "processor_seconds_median": median(s for run in runs for s in run["processor_seconds"]),
        "imported_mib": max(run["imported_mib"] for run in runs),
        "peak_mib": max(run["peak_mib"] for run in runs),
    }


def cells(report: Json) -> Iterator[list[str]]:
    """The rows of the table as text."""
    peer, keys = report["figures"][PEER], ("seconds_median", "processor_seconds_median", "peak_mib")
    for name, figures in report["figures"].items():
        difference = "" if figures["difference"] is None else f"{figures['difference']:.0e}"
        if not figures["agrees"]:
            yield [name, difference, "failed", *[""] * (len(HEADER) - 3)]
            continue
        time_share, processor_share, memory_share = (
            f"{figures[key] / peer[key]:.2f}" for key in keys
        )
        span = f"{figures['seconds_min']:.3g}–{figures['seconds_max']:.3g}"
        seconds, processors = (f"{figures[key]:.3g}" for key in keys[:2])
        peak, imports = (
            f"{figures[key] * 2**20 / 1e6:.0f}" for key in ("peak_mib", "imported_mib")
        )
        yield [
            name,
            difference,
            seconds,
            span,
            time_share,
            processors,
            processor_share,
            peak,
            memory_share,
            imports,
        ]


def save(report: Json, directory: Path) -> None:
    """``loops.json``, ``loops.md`` and ``loops.png``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "loops.json").write_text(json.dumps(report, indent=1) + "\n")
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    load = "load {before} before, {after} after".format_map(report["load"])
    setting = (
        f"{report['model']}, {report['dtype']}, {report['steps']} steps of {report['batch_size']}, "
    )
    setting += f"{report['rounds']} rounds, {load}"
    if report["answers"]:
        setting += ", {group} completions of {tokens} tokens to a prompt".format_map(
            report["answers"]
        )
    machine = report["gpu"] or report["machine"]
    lines = [
        f"# `{report['command']}`",
        "",
        f"{machine}; {packages}; {report['date']}; {setting}.",
        "",
    ]
    (directory / "loops.md").write_text("\n".join([*lines, *table(HEADER, cells(report))]) + "\n")
    plot(report, directory / "loops.png")


def plot(report: Json, path: Path) -> None:
    """Time and memory over the peer's, of those that agree."""
    agreeing = {name: figures for name, figures in report["figures"].items() if figures["agrees"]}
    picture = figure(9, 1 + 0.4 * len(agreeing))
    both = [("seconds_median", "time"), ("peak_mib", "peak memory")]
    for axes, (key, label) in zip(picture.subplots(1, 2, sharey=True), both, strict=True):
        axes.barh(
            list(agreeing),
            [figures[key] / report["figures"][PEER][key] for figures in agreeing.values()],
        )
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel(f"{label} ÷ {PEER}'s")
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    picture.savefig(path, dpi=120)


def in_own_process(recipe: str, provider: str, *arguments: object) -> Json:
    """`run_provider`, in another process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with closing(Worker()) as worker:
        try:
            result: Json = worker.call(run_provider, recipe, provider, *arguments)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"{provider} failed: {error}") from error
    return result


def run_provider(
    recipe: str,
    provider: str,
    model: Path,
    data: Path,
    batch_size: int,
    steps: int,
    dtype: str = "float32",
    samples: Mapping[str, int] | None = None,
    evidence: Path | None = None,
) -> Json:
    """Train; the gradient of the first step and its completions are kept in ``evidence``, if it is
    given.

    Args:
        samples: other sizes than the recipe's; see `Recipe.samples`.
    """
    chosen = RECIPES[recipe]
    samples = samples or chosen.samples
    fields, train = (
        chosen.providers[provider],
        train_trl if provider.startswith(PEER) else train_burnish,
    )
    if samples is not None:
        names = _PEER_SAMPLES if train is train_trl else _OUR_SAMPLES
        fields = fields | {names[name]: size for name, size in samples.items()}
    if train is train_trl:
        getattr(importlib.import_module("trl"), f"{chosen.name}Trainer")
    else:
        opener(recipe)  # its memory counts before the model's
    imported = _peak_mib()
    if evidence is not None and train is train_trl:
        drawn = next(evidence.glob(f"*/{sampled.SAMPLES}"))
        fields = fields | {"rollout": sampled.replay(drawn), "max_grad_norm": 0.0}
    elif evidence is not None:
        fields = fields | {"output": str(evidence / provider), "max_grad_norm": float("inf")}
    kept = sampled.gradient_kept(evidence / f"{provider}.{dtype}.pt") if evidence else nullcontext()
    precision: dict[str, Any] = (
        {"bf16": dtype == "bfloat16"} if train is train_trl else {"dtype": dtype}
    )
    with redirect_stdout(io.StringIO()), clock() as marks, kept:
        metrics = train(model, data, batch_size, steps, recipe=recipe, **precision, **fields)
    wall, processors = ([b - a for a, b in pairwise(times)] for times in zip(*marks, strict=True))
    return {
        "losses": [line["loss"] for line in metrics],
        "full_length": samples is None or sampled.full_length(metrics, samples["tokens"]),
        "seconds": wall,
        "processor_seconds": processors,
        "imported_mib": imported,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20
        if torch.cuda.is_available()
        else _peak_mib(),
    }


@contextmanager
def clock() -> Iterator[list[tuple[float, float]]]:
    """Wall-clock and processor seconds after each call of an optimizer."""
    marks: list[tuple[float, float]] = []
    hook = register_optimizer_step_post_hook(
        lambda *call: marks.append((time.perf_counter(), time.process_time()))
    )
    try:
        yield marks
    finally:
        hook.remove()


def _peak_mib() -> float:
    """The peak of this process; `resource` would begin a child's at its parent's."""
    if Path("/proc/self/status").exists():
        return resident_bytes("VmHWM") / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train_burnish(
    model: Path,
    data: Path,
    batch_size: int,
    steps: int,
    learning_rate: float = 1e-6,
    recipe: str = "dpo",
    **fields: object,
) -> list[Json]:
    """Metrics of each step."""
    chosen = RECIPES[recipe]
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as output:
        batch = {"prompts_per_rollout" if chosen.samples else "batch_size": batch_size}
        fixed = {
            "steps": steps,
            "learning_rate": learning_rate,
            "schedule": "constant",
            "shuffle": False,
        }
        places = {"model": str(model), "data": str(data), "output": output}
        config = settings_of(recipe)(**(places | batch | fixed | chosen.ours | fields))
        opener(recipe)(config).train()
        return [
            json.loads(line)
            for line in Path(config.output, "metrics.jsonl").read_text().splitlines()
        ]


def train_trl(
    model: Path,
    data: Path,
    batch_size: int,
    steps: int,
    learning_rate: float = 1e-6,
    recipe: str = "dpo",
    rollout: Callable[..., object] | None = None,
    **fields: Any,
) -> list[Json]:
    """Metrics of each step of the peer's trainer, with its defaults where nothing is said.

    Args:
        rollout: gives it completions, which it samples itself otherwise.
    """
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    peer = RECIPES[recipe]
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = batch_size * fields.get("num_generations", 1)
    more: dict[str, Any] = (
        {"reward_funcs": sampled.vowels, "rollout_func": rollout} if peer.samples else {}
    )
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as output:
        settings = {
            "output_dir": output,
            "per_device_train_batch_size": rows,
            "max_steps": steps,
            "learning_rate": learning_rate,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1.0,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.0,
            "train_sampling_strategy": "sequential",
            "bf16": False,
            "use_cpu": not torch.cuda.is_available(),
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **peer.theirs,
            **fields,
        }
        at_once = math.gcd(rows, settings["per_device_train_batch_size"])
        settings["per_device_train_batch_size"] = at_once
        settings["gradient_accumulation_steps"] = rows // at_once
        trainer = getattr(trl, f"{peer.name}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            train_dataset=load_dataset("json", data_files=str(data), split="train"),
            args=getattr(trl, f"{peer.name}Config")(**settings),
            **more,
        )
        trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]
