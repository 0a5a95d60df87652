"""``burnish <recipe> [--config file.yaml] [--any.field value]``"""

import argparse
import errno
import faulthandler
import gc
import io
import logging
import os
import re
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, cast

from ... import __version__
from ..own_code import burnish_alone, check_names, whose_code
from ..recipes import RECIPES, opener, settings_of
from ..redaction import HidingFormatter, check_settings, hide
from ..registry import nearest
from .arguments import completion, parse, without_switch
from .launch import command as launch_line
from .offline import go_offline
from .trl import Command, from_command, read, to_yaml
from .trl_rules import table


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script; returns its exit status."""
    if arguments is None:
        arguments = sys.argv[1:]
        _prepare_output()
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # a crash in compiled code ends with the stacks of all threads
    name, *words = [*arguments] or [""]
    # before anything is imported that logs: the first call of basicConfig wins
    handler = logging.StreamHandler()
    handler.setFormatter(HidingFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own
    if name in (*RECIPES, *_COMMANDS):
        flags, alone = without_switch(words, "no_code")
        with burnish_alone(alone):
            return _command(name, flags)
    if name in ("", "-h", "--help"):
        print(_usage())
        return 0 if name else 2
    if name == "--version":
        print(f"burnish {__version__}")
        return 0
    print(f"{_unknown_command(name)}\n\n{_usage()}", file=sys.stderr)
    return 2


def _prepare_output() -> None:
    """Standard output that outlives its reader, and tracebacks without secrets."""
    if sys.stdout is None:  # it is closed
        return
    output = io.BufferedWriter(_Output(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(
        output, sys.stdout.encoding, "backslashreplace", line_buffering=True
    )
    sys.excepthook = _print_traceback


def _unknown_command(name: str) -> str:
    if name.startswith("-"):
        return nearest("burnish: no flag", name, ["--help", "--version"])
    return nearest("burnish: no recipe", name, [*RECIPES, *_COMMANDS])


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error that nothing caught, as Python does, without secrets."""
    print(hide("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def _command(name: str, words: list[str]) -> int:
    if name in _COMMANDS:
        return _COMMANDS[name][0](words)
    flags, checked_only = without_switch(words, "dry_run")
    return _COMMANDS["plan"][0]([name, *flags]) if checked_only else _run(name, flags)


class _Output(io.FileIO):
    """Standard output that outlives its reader, such as ``| head``, and a disk that is full.

    It waits for a full pipe, even if its reader has made it non-blocking.
    """

    def write(self, data: Any) -> int:
        try:
            written = cast(int | None, super().write(data))
            while written is None:  # the pipe is full, and not blocking
                select.select([], [self], [])
                written = cast(int | None, super().write(data))
            return written
        except OSError:
            return len(data)  # as if it was written: the run goes on


_PACKAGE = __package__.partition(".")[0]


def _usage() -> str:
    """What ``burnish --help`` prints: recipes and commands, a line each."""
    purposes = {}
    for name in RECIPES:
        purposes[name], _, _ = settings_of(name).__doc__.partition("\n")
    for name, (_, purpose) in _COMMANDS.items():
        purposes[name] = purpose
    lines = "\n".join(f"  {name:10} {purpose}" for name, purpose in purposes.items())
    usage = "usage: burnish <recipe> [--config file.yaml] [--any.field value]"
    return (
        f"{usage}\n\n{lines}\n\nburnish <recipe> --help lists its fields; TRL's files and flags work as they are.\n"
        "--dry_run checks a run without training, --no_code refuses all code but burnish's own that a configuration "
        "names."
    )


def _completion(arguments: list[str]) -> int:
    if arguments not in (["bash"], ["zsh"]):
        print("usage: burnish completion bash, or zsh", file=sys.stderr)
        return 2
    print(completion(arguments[0], {name: settings_of(name) for name in RECIPES}))
    return 0


def _examine(command: str, flag: str, argument: Mapping[str, Any], arguments: list[str]) -> int:
    """``data`` or ``plan``: print a run instead of training; ``flag`` is the command's own."""
    usage = f"burnish {command} <recipe> [--config] recipe.yaml [--any.field value] [--{flag} {argument['metavar']}]"
    parser = argparse.ArgumentParser(
        f"burnish {command}", usage, _COMMANDS[command][1], allow_abbrev=False
    )
    parser.add_argument(f"--{flag}", **argument)
    options, words = parser.parse_known_args(arguments)
    recipe, *words = words or [""]
    if recipe not in RECIPES or recipe == "demo":
        complaint = nearest(f"burnish {command}: no recipe", recipe, RECIPES.keys() - {"demo"})
        print(complaint, file=sys.stderr)
        parser.print_usage(sys.stderr)
        return 2

    def show(recipe: str, config: object) -> bool | None:
        if os.environ.get("RANK", "0") == "0":
            print(whose_code(config))
        module = import_module(f".{command}", __package__)
        fits: bool | None = module.show(recipe, config, getattr(options, flag))
        return fits

    flags = _with_file(words)
    # it uses no run directory, which a configuration must name, and trains on nothing
    if command == "data":
        return _run(recipe, ["--output", "none", *flags], show, rules=False)
    return _run(recipe, flags, show)


def _env(arguments: list[str]) -> int:
    from .env import environment

    try:
        print(environment(arguments))
    except OSError as error:
        print(f"burnish env: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _translate(arguments: list[str]) -> int:
    """Print the configuration in burnish's names, under the line that starts it."""
    words = arguments or [""]
    if words[0] in RECIPES:
        command = Command(words[0], words[1:])
    else:
        command = from_command(words)
    recipe = command.recipe
    if recipe not in RECIPES or not command.flags:
        known = [*RECIPES, *table()["scripts"]]
        print(nearest("burnish translate: no recipe for", recipe, known), file=sys.stderr)
        print("usage: burnish translate <recipe> trl.yaml [--flags of TRL]", file=sys.stderr)
        command_line = "burnish translate accelerate launch dpo.py --beta 0.2"
        print(f"    or a command: {command_line}", file=sys.stderr)
        return 2
    flags = _with_file(command.flags)
    ours, left, translation = read(recipe, settings_of(recipe), flags, to_run=False)
    if "config" in translation.refused:
        why = translation.refused["config"]
        print(f"burnish translate: {why}", file=sys.stderr)
        return 1
    translation.notes += command.notes
    line = launch_line(recipe, translation.given, command.variables)
    print(f"# {line} --config with this file\n{to_yaml(ours, left, translation)}", end="")
    return int(bool(translation.refused))


def _tool(name: str, words: list[str]) -> int:
    """Run a command on what was trained, ``run(words)`` of its module; errors are one message."""
    shows_traceback = "--traceback" in words or bool(os.environ.get("BURNISH_TRACEBACK"))
    words = [word for word in words if word != "--traceback"]
    try:
        import_module(f".{name}", __package__).run(words)
    except KeyboardInterrupt:
        print(f"burnish {name}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        message = _message(error)
        if shows_traceback or message is None:
            raise
        print(hide(f"burnish {name}: {message}"), file=sys.stderr)
        return 1
    return 0


_BENCH = "Measure the kernels, or the loop, beside others: every figure behind a check that the numbers are right."
_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "bench": (
        lambda words: int(import_module(f"{_PACKAGE}.benchmarks.__main__").main(words)),
        _BENCH,
    ),
    "chat": (
        partial(_tool, "chat"),
        "Talk to what was trained, a line of standard input each turn: burnish chat runs/sft.",
    ),
    "completion": (
        _completion,
        'Complete recipes and flags in a shell: eval "$(burnish completion bash)"; or zsh.',
    ),
    "data": (
        partial(
            _examine,
            "data",
            "rows",
            {"metavar": "3", "type": int, "default": 3, "help": "of each part"},
        ),
        "Show rows as they will be trained on, and count them: burnish data dpo dpo.yaml --rows 3.",
    ),
    "env": (_env, "Print versions and devices for a bug report: burnish env config.yaml."),
    "export": (
        partial(_tool, "export"),
        "Write a checkpoint of a run as a model that transformers loads: burnish export runs/sft --step 100.",
    ),
    "merge": (
        partial(_tool, "merge"),
        "Merge an adapter of peft into its base model: burnish merge runs/sft/adapter merged.",
    ),
    "plan": (
        partial(
            _examine, "plan", "gpus", {"metavar": "8x80GB", "help": "those there are, unless given"}
        ),
        "Check a run and predict its memory, without training: burnish plan dpo dpo.yaml --gpus 8x80GB.",
    ),
    "score": (
        partial(_tool, "score"),
        "Write what a model says of completions as JSON Lines: burnish score runs/reward pairs.jsonl.",
    ),
    "translate": (
        _translate,
        "Print a file or command of TRL as a file of burnish: burnish translate trl dpo --beta 0.2.",
    ),
}


def _with_file(words: list[str]) -> list[str]:
    """Flags, in which a file may come first without its flag."""
    return ["--config", *words] if words and not words[0].startswith("--") else words


def _train(name: str, config: object) -> bool:
    """Train; returns false if the model should be on the Hub, and is not."""
    opened = opener(name)(config)
    if name == "demo":
        return True
    opened.train()
    return bool(opened.uploaded)


def _run(
    name: str,
    arguments: list[str],
    perform: Callable[[str, Any], bool | None] = _train,
    *,
    rules: bool = True,
) -> int:
    """Perform a command with the configuration that its arguments make; returns the exit status.

    Args:
        rules: whether settings that contradict each other are refused.
    """
    shows_traceback = "--traceback" in arguments or bool(os.environ.get("BURNISH_TRACEBACK"))
    arguments = [word for word in arguments if word != "--traceback"]
    config: Any = None
    try:
        config = parse(name, settings_of(name), arguments, rules=rules)
        check_names(config)
        check_settings(config)
        # imports make millions of objects that stay, and would be searched for garbage for seconds
        gc.disable()
        _prepare_libraries(config)
        opener(name)  # imports the recipe, and with it torch
        gc.enable()
        done = perform(name, config)
    except KeyboardInterrupt:
        print(
            f"burnish {name}: interrupted; --resume true continues from the last checkpoint, if any",
            file=sys.stderr,
        )
        return 130
    except SystemExit as stopped:
        if name == "demo" and stopped.code not in (0, 2):
            _advise_after_demo(config)
        raise
    except Exception as error:
        message = _message(error)
        if shows_traceback or message is None:
            raise
        print(hide(f"burnish {name}: {message}"), file=sys.stderr)
        return 1
    finally:
        gc.enable()
    return int(done is False)


def _prepare_libraries(config: object) -> None:
    """Keep libraries from warnings, waits and questions that help nobody who starts a run."""
    # peft's use of transformers
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    teacher = getattr(config, "teacher", None)
    models = (getattr(config, "model", None), getattr(config, "value_model", None))
    go_offline((*models, getattr(teacher, "model", None)))
    remote_code: Any = import_module("transformers.dynamic_module_utils")
    remote_code.TIME_OUT_REMOTE_CODE = 0  # a model's own code is refused without asking the user
    if not sys.stderr.isatty():  # bars of loading and tokenizing are for a terminal
        import datasets
        import transformers

        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _advise_after_demo(config: Any) -> None:
    stage = f"burnish sft --config {config.output}/sft/config.yaml --resume true"
    print(
        f"burnish demo: starts anew each time; to continue a single stage: {stage}", file=sys.stderr
    )


# What torch says where the rank that others meet at has been there, and is gone.
_HUNG_UP = re.compile("Broken pipe|Connection reset|Connection was likely closed")


def _message(error: Exception) -> str | None:
    """The message for the user; None for a bug in burnish, whose traceback is shown.

    burnish's own checks raise messages for users. A missing file or package, or a lack of memory,
    is reported wherever it is found; refusals of libraries are named where they are called
    (`registry.as_setting_error`).
    """
    where = "--traceback shows where"
    kind = type(error).__name__
    if kind == "OutOfMemoryError":
        return f"out of memory: lower micro_tokens, or set gradient_checkpointing, lora.r or dtype bfloat16; {where}"
    if kind in ("DistStoreError", "DistNetworkError"):
        return _message_of_ranks(error)
    if isinstance(error, ImportError) and not str(error.name).startswith(_PACKAGE):
        advice = '; install what is missing (pip install "burnish[train]" has what recipes need)'
        if "pip install" in str(error):
            advice = ""
        return f"{error}{advice}; {where}"
    if _is_ours(error) and isinstance(
        error, ValueError | OSError | RuntimeError | FloatingPointError
    ):
        return str(error)
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        from ..runs.checkpoint import remedy_of

        reason, remedy = remedy_of(error) or ("", "")
        return f"{error}: {reason}; {remedy}, and start again, with --resume true if steps were taken; {where}"
    return f"{error}; {where}"


def _message_of_ranks(error: Exception) -> str:
    first = str(error).splitlines()[0]
    if _HUNG_UP.search(str(error)):
        return f"another rank has ended, and says why; this one was told: {first}"
    return f"ranks can't meet at MASTER_ADDR and a free MASTER_PORT; start them all: {first}"


def _is_ours(error: Exception) -> bool:
    """True if a line of burnish raised the error, not of a library that it calls."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace is None:
        return False
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.startswith(f"{_PACKAGE}.")
