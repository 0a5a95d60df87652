"""``burnish <recipe> [--config file.yaml] [--any.field value]``"""

import dataclasses
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from ... import __version__
from ..config import readable_range
from ..registry import nearest
from .trl import messages, read, to_yaml

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script; returns its exit status."""
    if arguments is None:
        output, usual = io.BufferedWriter(_Output(1, "w", closefd=False)), sys.stdout
        sys.stdout = io.TextIOWrapper(output, usual.encoding, usual.errors, line_buffering=True)
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0 if given else 2
    if given[0] == "--version":
        print(f"burnish {__version__}")
        return 0
    if given[0] == "bench":
        from ...benchmarks.__main__ import main as bench

        return bench(given[1:])
    if given[0] == "translate":
        return _translate(given[1:])
    if given[0] not in _RECIPES:
        kind, known = "recipe", [*_RECIPES, "bench", "translate"]
        if given[0].startswith("-"):
            kind, known = "flag", ["--help", "--version"]
        print(f"{nearest(f'burnish: no {kind}', given[0], known)}\n\n{_usage()}", file=sys.stderr)
        return 2
    return _run(given[0], given[1:])


class _Output(io.FileIO):
    """Standard output whose reader may go away, such as ``| head``, and leave the run to itself."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


# The class in `recipes.settings`, whose docstring is the purpose, and the function in `recipes`.
# Nothing is imported before it is used.
_RECIPES = {
    "sft": ("SFT", "sft:run_sft"),
    "dpo": ("DPO", "preference:run_dpo"),
    "kto": ("KTO", "kto:run_kto"),
    "orpo": ("ORPO", "preference:run_orpo"),
    "cpo": ("CPO", "preference:run_cpo"),
    "reward": ("Reward", "reward:run_reward"),
    "prm": ("PRM", "prm:run_prm"),
    "distill": ("Distill", "distill:run_distill"),
    "grpo": ("GRPO", "grpo:run_grpo"),
    "rloo": ("RLOO", "grpo:run_grpo"),
    "ppo": ("PPO", "ppo:run_ppo"),
    "online_dpo": ("OnlineDPO", "online_dpo:run_online_dpo"),
    "demo": ("Demo", "demo:demo"),
}
# Fields of other recipes, and ours.
_MEANT = {"batch_size": "prompts_per_rollout", "old": "old_logprobs"}
_TRANSLATE = "Print a configuration of TRL as burnish's: burnish translate dpo trl.yaml."
_BENCH = "Measure the kernels, or the loop, beside others: every figure behind a check that the numbers are right."


def _usage() -> str:
    purposes = {
        name: _load("settings", settings).__doc__.partition("\n")[0] for name, (settings, _) in _RECIPES.items()
    }
    others = {"bench": _BENCH, "translate": _TRANSLATE}
    lines = "\n".join(f"  {name:10} {purpose}" for name, purpose in {**purposes, **others}.items())
    usage = "usage: burnish <recipe> [--config file.yaml] [--any.field value]"
    return f"{usage}\n\n{lines}\n\nburnish <recipe> --help lists its fields."


def _run(name: str, arguments: list[str]) -> int:
    settings, path = _RECIPES[name]
    try:
        config = parse(name, _load("settings", settings), arguments)
        # Threads that spin while they wait take the cores from each other: read when torch is first imported.
        if name == "demo":
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        recipe = _load(*path.split(":"))
        if not sys.stderr.isatty():  # bars of loading and tokenizing are for a terminal
            import datasets
            import transformers

            datasets.disable_progress_bars()
            transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        recipe(config)
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        if os.environ.get("BURNISH_TRACEBACK") or not _is_ours(error):
            raise
        print(f"burnish {name}: {error}", file=sys.stderr)
        return 1
    return 0


def _translate(arguments: list[str]) -> int:
    recipe, *words = arguments or [""]
    if recipe not in _RECIPES or not words:
        print("usage: burnish translate <recipe> trl.yaml [--flags of TRL]", file=sys.stderr)
        return 2
    file = [] if words[0].startswith("--") else ["--config"]
    ours, left, translation = read(recipe, _load("settings", _RECIPES[recipe][0]), [*file, *words])
    if not ours and not translation.refused:
        print(f"burnish translate: {words[0]}: can't be read, or has no name of TRL's", file=sys.stderr)
        return 1
    print(to_yaml(ours, left, translation), end="")
    return int(bool(translation.refused))


def _load(module: str, name: str) -> Any:
    return getattr(import_module(f"..recipes.{module}", __package__), name)


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
    parser = _Parser(prog=f"burnish {name}", description=config_class.__doc__, allow_abbrev=False)
    parser.add_argument(
        "--config",
        action="config",
        help="a YAML file with these fields, or TRL's; --defaults trl takes TRL's defaults too",
    )
    parser.add_class_arguments(config_class)
    translated, arguments, translation = read(name, config_class, arguments)
    if translation.refused:
        parser.exit(2, f"{parser.prog}: " + "\n  ".join(translation.refused.values()) + "\n")
    if translated:
        arguments = ["--config", yaml.safe_dump(translated), *arguments]
    if os.environ.get("RANK", "0") == "0":
        for message in messages(translation):
            _log.warning("TRL: %s", message)

    def names_file(i: int) -> bool:
        return arguments[i].startswith("--config=") or "--config" in arguments[max(i - 1, 0) : i + 1]

    # Of two settings jsonargparse lets the later one win.
    files_first = sorted(range(len(arguments)), key=names_file, reverse=True)
    parsed = parser.parse_args([arguments[i] for i in files_first])
    parsed.pop("config", None)
    if parsed.get("output", "") is None:
        parser.error("the following arguments are required: output")
    groups: Any = {field.name: field.default_factory for field in dataclasses.fields(config_class)}
    values = {
        field: groups[field](**vars(value)) if isinstance(value, Namespace) else value
        for field, value in vars(parsed).items()
    }
    return config_class(**values)


class _Parser(ArgumentParser):
    """Says in two lines what was wrong and which field was probably meant, instead of repeating every flag."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: -*([\w.]+)|Option '([\w.]+)' is not accepted", message)
        if unknown:
            name, fields = unknown[1] or unknown[2], list(self.get_defaults().keys())
            message = nearest("no field", name, fields, cutoff=0.0)
            if _MEANT.get(name) in fields:
                message = f"no field {name!r}, did you mean {_MEANT[name]!r}?"
        outside = re.search(r'key "([\w.]+)":.*: (\S+ |)does not conform to restriction ([^\n]+)', message, re.S)
        if outside:
            value = outside[2].strip() or message.rpartition("Given value: ")[2].strip()
            message = f"{outside[1]}: must be {readable_range(outside[3])}, got {value}"
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists its fields\n")
        raise AssertionError("exit returned")
