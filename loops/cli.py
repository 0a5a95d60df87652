"""``burnish <recipe> [--config file.yaml] [--any.field value]``"""

import dataclasses
import difflib
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from .. import __version__
from .config import readable_range


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0 if given else 2
    if given[0] == "--version":
        print(f"burnish {__version__}")
        return 0
    if given[0] == "bench":
        from ..benchmarks.__main__ import main as bench

        return bench(given[1:])
    if given[0] not in _RECIPES:
        kind, known = ("flag", ["--help", "--version"]) if given[0].startswith("-") else ("recipe", list(_LINES))
        nearest = difflib.get_close_matches(given[0], known, n=1, cutoff=0.0)[0]
        print(f"burnish: no {kind} {given[0]!r}, did you mean {nearest!r}?\n\n{_usage()}", file=sys.stderr)
        return 2
    return _run(given[0], given[1:])


# The class in `recipes.settings`, the function in `recipes`, and the purpose. Nothing is imported before it is used.
_RECIPES = {
    "sft": ("SFT", "sft:run_sft", "supervised fine-tuning on messages, text, or prompts with completions"),
    "dpo": ("DPO", "preference:run_dpo", "preference training on pairs: dpo, ipo, hinge, ... or a mix of them"),
    "kto": (
        "KTO",
        "kto:run_kto",
        "training on completions marked desirable or not: kto, bco, apo_zero_unpaired",
    ),
    "orpo": ("ORPO", "preference:run_orpo", "preference training in one stage, without a reference"),
    "cpo": ("CPO", "preference:run_cpo", "preference training without a reference: cpo, simpo, alpha_po"),
    "reward": ("Reward", "reward:run_reward", "a reward model, from pairs, scores or rankings"),
    "prm": ("PRM", "prm:run_prm", "a process reward model, from solutions whose steps are labeled"),
    "distill": (
        "Distill",
        "distill:run_distill",
        "training on a teacher's distribution of the next token: another model, or its stored top-k",
    ),
    "grpo": (
        "GRPO",
        "grpo:run_grpo",
        "reinforcement learning from rewards: grpo, dr_grpo, dapo, cispo, gspo, gmpo, sapo, vespo, dppo",
    ),
    "rloo": ("RLOO", "grpo:run_grpo", "reinforcement learning from rewards, against the mean of the other completions"),
    "ppo": ("PPO", "ppo:run_ppo", "reinforcement learning from rewards with a value function"),
    "online_dpo": (
        "OnlineDPO",
        "online_dpo:run_online_dpo",
        "preference training on pairs of the policy's own completions",
    ),
    "demo": ("Demo", "demo:demo", "train a small model from scratch, offline, in a minute and a half"),
}
_MEANT = {  # names that TRL or other recipes have, and ours
    "per_device_train_batch_size": "batch_size", "batch_size": "prompts_per_rollout",
    "max_seq_length": "max_length", "max_length": "max_prompt_length",
    "max_completion_length": "max_tokens", "max_new_tokens": "max_tokens", "num_generations": "group_size",
    "num_iterations": "epochs_per_rollout", "num_ppo_epochs": "epochs_per_rollout", "num_mini_batches": "minibatches",
    "num_train_epochs": "epochs", "max_steps": "steps", "reward_funcs": "rewards", "old": "old_logprobs",
    "model_name_or_path": "model", "dataset_name": "data", "output_dir": "output", "lr_scheduler_type": "schedule",
}  # fmt: skip
_LINES = {name: line for name, (_, _, line) in _RECIPES.items()} | {
    "bench": "measure the kernels, or the loop, beside others: every figure behind a check that the numbers are right"
}


def _usage() -> str:
    lines = "\n".join(f"  {name:10} {line}" for name, line in _LINES.items())
    usage = "usage: burnish <recipe> [--config file.yaml] [--any.field value]"
    return f"{usage}\n\n{lines}\n\nburnish <recipe> --help lists its fields."


def _run(name: str, arguments: list[str]) -> int:
    settings, path, _ = _RECIPES[name]
    try:
        config = parse(name, _load("settings", settings), arguments)
        # Threads that spin while they wait take the cores from each other: read when torch is first imported.
        if name == "demo":
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        recipe = _load(*path.split(":"))
        _hide_progress_bars()
        recipe(config)
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        if os.environ.get("BURNISH_TRACEBACK") or not _is_ours(error):
            raise
        print(f"burnish {name}: {error}", file=sys.stderr)
        return 1
    return 0


def _load(module: str, name: str) -> Any:
    return getattr(import_module(f".recipes.{module}", __package__), name)


def _hide_progress_bars() -> None:
    """Bars of loading and tokenizing are for a terminal."""
    import datasets
    import transformers

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _is_ours(error: BaseException) -> bool:
    """True if the message was written for the person at the terminal, rather than by a bug."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return raised_in.startswith(__package__.partition(".")[0] + ".")


def parse(name: str, config_class: type, arguments: list[str]) -> Any:
    """The configuration of YAML file and flags; flags win, wherever they stand. Exits with status 2 on a mistake."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(prog=f"burnish {name}", description=config_class.__doc__)
    parser.add_argument("--config", action="config", help="a YAML file with these fields")
    parser.add_class_arguments(config_class)
    parser.fields = _fields(config_class)
    parsed: Namespace = parser.parse_args(_config_first(arguments))
    parsed.pop("config", None)
    return _build(config_class, parsed)


def _build(config_class: type, parsed: Namespace) -> Any:
    values = {}
    for field in dataclasses.fields(config_class):
        value = parsed[field.name]
        nested = field.default_factory
        is_group = isinstance(value, Namespace) and dataclasses.is_dataclass(nested)
        values[field.name] = nested(**vars(value)) if is_group else value  # type: ignore[operator]
    return config_class(**values)


def _config_first(arguments: list[str]) -> list[str]:
    """jsonargparse lets the later of two settings win; a flag should win over the file in either order."""
    files, rest = [], []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--config":
            files += [argument, *([value] if (value := next(waiting, None)) is not None else [])]
        elif argument.startswith("--config="):
            files.append(argument)
        else:
            rest.append(argument)
    return files + rest


def _fields(config_class: type, prefix: str = "") -> list[str]:
    names = []
    for field in dataclasses.fields(config_class):
        names.append(prefix + field.name)
        if dataclasses.is_dataclass(field.default_factory):
            names += _fields(field.default_factory, f"{field.name}.")
    return names


class _Parser(ArgumentParser):
    """Says in two lines what was wrong and which field was probably meant, instead of repeating every flag."""

    fields: Sequence[str] = ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: -*([\w.]+)|Option '([\w.]+)' is not accepted", message)
        if unknown:
            name = unknown[1] or unknown[2]
            meant = name
            while meant in _MEANT and meant not in self.fields:
                meant = _MEANT[meant]
            nearest = difflib.get_close_matches(meant, self.fields, n=1, cutoff=0.0)
            message = f"no field {name!r}" + (f", did you mean {nearest[0]!r}?" if nearest else "")
        outside = re.search(r'key "([\w.]+)":.*: (\S+ |)does not conform to restriction ([^\n]+)', message, re.S)
        if outside:
            value = outside[2].strip() or message.rpartition("Given value: ")[2].strip()
            message = f"{outside[1]}: must be {readable_range(outside[3])}, got {value}"
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists its fields\n")
        raise AssertionError("exit returned")
