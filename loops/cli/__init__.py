"""``burnish <recipe> [--config file.yaml] [--any.field value]``"""

import io
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

from ... import __version__
from ..registry import nearest
from .arguments import completion, parse
from .trl import read, to_yaml


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
    if given[0] == "data":
        return _data(given[1:])
    if given[0] == "env":
        from .env import environment

        try:
            print(environment(given[1:]))
        except OSError as error:
            print(f"burnish env: {error.filename}: {error.strerror}", file=sys.stderr)
            return 1
        return 0
    if given[0] == "completion":
        return _completion(given[1:])
    if given[0] not in _RECIPES:
        kind, known = "recipe", [*_RECIPES, "bench", "completion", "data", "env", "translate"]
        if given[0].startswith("-"):
            kind, known = "flag", ["--help", "--version"]
        print(f"{nearest(f'burnish: no {kind}', given[0], known)}\n\n{_usage()}", file=sys.stderr)
        return 2
    return _run(given[0], given[1:])


class _Output(io.FileIO):
    """Standard output that leaves the run to itself where its reader goes away, as ``| head`` does, or its disk is
    full. A pipe that is full is waited for, also where its reader has set it not to block."""

    def write(self, data: Any) -> int:
        try:
            while (written := cast(int | None, super().write(data))) is None:
                select.select([], [self], [])
            return written
        except OSError:
            return len(data)


_PACKAGE = __package__.partition(".")[0]

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
_TRANSLATE = "Print a configuration of TRL as burnish's: burnish translate dpo trl.yaml."
_DATA = "Show rows as they will be trained on, and count them: burnish data dpo dpo.yaml --rows 3."
_ENV = "Print versions and devices for a report of a bug: burnish env config.yaml."
_COMPLETION = 'Complete recipes and flags in a shell: eval "$(burnish completion bash)"; or zsh.'
_BENCH = "Measure the kernels, or the loop, beside others: every figure behind a check that the numbers are right."


def _usage() -> str:
    purposes = {
        name: _load("settings", settings).__doc__.partition("\n")[0] for name, (settings, _) in _RECIPES.items()
    }
    others = {"bench": _BENCH, "completion": _COMPLETION, "data": _DATA, "env": _ENV, "translate": _TRANSLATE}
    lines = "\n".join(f"  {name:10} {purpose}" for name, purpose in {**purposes, **others}.items())
    usage = "usage: burnish <recipe> [--config file.yaml] [--any.field value]"
    return f"{usage}\n\n{lines}\n\nburnish <recipe> --help lists its fields."


def _data(arguments: list[str]) -> int:
    recipe, *words = arguments or [""]
    if recipe not in _RECIPES or recipe == "demo" or not words:
        print("usage: burnish data <recipe> recipe.yaml [--rows 3] [--any.field value]", file=sys.stderr)
        return 2
    rows = "3"
    if "--rows" in words[:-1]:
        at = words.index("--rows")
        _, rows = words[at : at + 2]
        words[at : at + 2] = []
    file = [] if words[0].startswith("--") else ["--config"]
    # A configuration needs a directory for its run, and this is none.
    words = ["--output", "none", *file, *words]
    if not rows.isdecimal():
        print(f"burnish data: rows: wanted a number, got {rows}", file=sys.stderr)
        return 2

    def show(_: Any, config: Any) -> None:
        import_module(".data", __package__).print_data(recipe, config, int(rows))

    return _run(recipe, words, show)


def _run(
    name: str, arguments: list[str], perform: Callable[[Any, Any], Any] = lambda recipe, config: recipe(config)
) -> int:
    settings, path = _RECIPES[name]
    traceback = "--traceback" in arguments or bool(os.environ.get("BURNISH_TRACEBACK"))
    arguments = [word for word in arguments if word != "--traceback"]
    try:
        config = parse(name, _load("settings", settings), arguments)
        # Threads that spin while they wait take the cores from each other: read when torch is first imported.
        if name == "demo":
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        recipe = _load(*path.split(":"))
        models: Any = import_module("transformers.dynamic_module_utils")
        models.TIME_OUT_REMOTE_CODE = 0  # code that comes with a model is refused, and nothing is asked
        if not sys.stderr.isatty():  # bars of loading and tokenizing are for a terminal
            import datasets
            import transformers

            datasets.disable_progress_bars()
            transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        perform(recipe, config)
    except KeyboardInterrupt:
        print(f"burnish {name}: interrupted before the first step; nothing is lost", file=sys.stderr)
        return 130
    except Exception as error:
        message = _message(error)
        if traceback or message is None:
            raise
        print(f"burnish {name}: {message}", file=sys.stderr)
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


def _completion(arguments: list[str]) -> int:
    if arguments not in (["bash"], ["zsh"]):
        print("usage: burnish completion bash, or zsh", file=sys.stderr)
        return 2
    print(completion(arguments[0], {name: _load("settings", settings) for name, (settings, _) in _RECIPES.items()}))
    return 0


def _load(module: str, name: str) -> Any:
    return getattr(import_module(f"..recipes.{module}", __package__), name)


def _message(error: Exception) -> str | None:
    """What to tell the person at the terminal; None if it is a bug of ours, whose traceback is worth more.

    Our own checks raise messages for them. Beyond these, a file, a package or memory that is missing is the machine's
    matter wherever it is found out; what libraries refuse is named where they are called (`registry.blaming`).
    """
    where = "--traceback shows where"
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of memory: lower micro_tokens, or set gradient_checkpointing, lora.r or dtype bfloat16; {where}"
    if isinstance(error, ImportError) and not str(error.name).startswith(_PACKAGE):
        return f'{error}; install what is missing (pip install "burnish[train]" has what recipes need); {where}'
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    ours = trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(f"{_PACKAGE}.")
    if ours and isinstance(error, ValueError | OSError | RuntimeError | FloatingPointError):
        return str(error)
    return f"{error}; {where}" if isinstance(error, OSError) else None
