"""Flags and YAML files into a configuration. One message tells all mistakes, each with its field and its range."""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from ..config import Common, OfflineConfig, readable_range
from ..registry import nearest
from .trl import flattened, messages, read, read_files, split_flags

_log = logging.getLogger(__name__)

# Fields of other recipes, habits, and ours.
MEANT = {"batch_size": "prompts_per_rollout", "old": "old_logprobs", "lr": "learning_rate", "bf16": "dtype"}
# The order of the shared fields in --help; those that are in none of these stand with the run.
_SECTIONS = {
    "data": """data eval_data max_length truncation on_bad_row chat_template chat_template_kwargs dataset_num_proc
        shuffle""",
    "training": "steps epochs batch_size learning_rate schedule warmup weight_decay max_grad_norm seed",
    "memory and precision": """dtype micro_tokens gradient_checkpointing layout backend keep_bytes attention quantize
        lora""",
}
_RUN = "model and run directory"
_NEEDED = ("output", None)  # from Python a run may have no directory
# The value in the messages of jsonargparse.
_GIVEN = r"Given value: ([^\n]*)|Got value: ([^\n]*)|([^\s:]+) does not conform|: '([^'\n]*)'$"


def parse(name: str, config_class: type, arguments: Sequence[str]) -> Any:
    """The configuration of YAML file and flags; flags win, wherever they stand. Exits with status 2 on a mistake."""
    arguments = _spelled(config_class, arguments)
    parser = _parser(name, config_class)
    translated, left, translation = read(name, config_class, arguments)
    if translated:
        left = ["--config", yaml.safe_dump(translated), *left]

    def names_file(i: int) -> bool:
        return left[i].startswith("--config=") or "--config" in left[max(i - 1, 0) : i + 1]

    # Of two settings jsonargparse lets the later one win.
    files_first = [left[i] for i in sorted(range(len(left)), key=names_file, reverse=True)]
    if os.environ.get("RANK", "0") == "0" and not translation.refused:
        for message in messages(translation):
            _log.warning("TRL: %s", message)
    first_mistake = ""
    try:
        parsed = parser.parse_args(files_first) if not translation.refused else None
    except _Mistake as first:
        parsed, first_mistake = None, str(first)
    if parsed is not None and parsed.get("output", "") is None:
        parsed = None
    if parsed is None:
        others = _mistakes(parser, config_class, translated, left)
        mistakes = [*translation.refused.values(), *(text for name, text in others if name not in translation.refused)]
        mistakes = mistakes or [first_mistake]
        parser.exit(2, _message(parser.prog, mistakes))
    assert parsed is not None
    parsed.pop("config", None)
    groups: Any = {field.name: field.default_factory for field in dataclasses.fields(config_class)}
    values = {
        field: groups[field](**vars(value)) if isinstance(value, Namespace) else value
        for field, value in vars(parsed).items()
    }
    return config_class(**values)


def completion(shell: str, recipes: Mapping[str, Any]) -> str:
    """The script by which a shell completes recipes, flags and the values that a flag can have.

    Args:
        shell: bash or zsh.
        recipes: the configuration of each.
    """
    script = io.StringIO()
    set_parsing_settings(add_print_completion_argument=True)
    try:
        parser = ArgumentParser(prog="burnish")
        commands = parser.add_subcommands()
        for name, config_class in recipes.items():
            commands.add_subcommand(name, _parser(name, config_class, ArgumentParser))
        with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
            parser.parse_args([f"--print_completion=shtab-{shell}"])
    finally:
        set_parsing_settings(add_print_completion_argument=False)
    return script.getvalue()


def _message(prog: str, mistakes: Sequence[str]) -> str:
    said = mistakes[0] if len(mistakes) == 1 else "\n  ".join([f"{len(mistakes)} mistakes", *mistakes])
    return f"{prog}: {said}\n{prog} --help lists its fields\n"


def _parser(name: str, config_class: Any, kind: Any = None) -> Any:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = (kind or _Parser)(prog=f"burnish {name}", description=config_class.__doc__, allow_abbrev=False)
    parser.add_argument(
        "--config",
        action="config",
        help="a YAML file with these fields, or TRL's; --defaults trl takes TRL's defaults too",
    )
    parser.add_class_arguments(config_class)
    parser.fields = config_class
    return parser


def _spelled(config_class: Any, arguments: Sequence[str]) -> list[str]:
    """Flags by the names of fields: ``--learning-rate`` is ``--learning_rate``, and ``--resume`` is on."""
    hints = get_type_hints(config_class)
    switches = {name for name, hint in hints.items() if hint is bool or True in get_args(hint)}
    words: list[str] = []
    for name, values, tokens in split_flags(arguments):
        flag, *others = tokens
        if flag.startswith("--"):
            flag, equals, value = flag.partition("=")
            flag = "--" + name.replace("-", "_") + equals + value
        words += [flag, *others, *["true"] * (name.replace("-", "_") in switches and not values)]
    return words


def _mistakes(
    parser: "_Parser", config_class: Any, translated: Mapping[str, Any], arguments: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Each setting that is wrong by itself, and what is wrong with it; and the fields that are missing."""
    flags = [(name, tokens) for name, _, tokens in split_flags(arguments)]
    files = [values[0] for name, values, _ in split_flags(arguments) if name == "config" and values]
    in_files = translated or read_files([path for path in files if "\n" not in path])
    if in_files is None:
        yield from (("config", problem) for problem in _unreadable(files))
        return
    settings = [
        (name, [f"--{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"])
        for name, value in flattened(in_files).items()
    ]
    settings += [(name, tokens) for name, tokens in flags if name != "config"]
    for name, tokens in settings:
        if complaint := parser.complaint(tokens):
            yield name, complaint
    missing = [
        field.name
        for field in dataclasses.fields(config_class)
        if (field.default is field.default_factory is dataclasses.MISSING or (field.name, field.default) == _NEEDED)
        and field.name not in dict(settings)
    ]
    if missing:
        yield "", f"needed as well: {', '.join(f'--{name}' for name in missing)}"


def _unreadable(files: Sequence[str]) -> Iterator[str]:
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:
                if not isinstance(yaml.safe_load(file), Mapping):
                    yield f"config: {path}: wanted fields and their values, such as beta: 0.1"
        except yaml.MarkedYAMLError as error:
            line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
            yield f"config: {path}{line}: not YAML: {error.problem}"
        except (OSError, ValueError, yaml.YAMLError) as error:
            yield f"config: {path}: {error.strerror if isinstance(error, OSError) else error}"


class _Mistake(Exception):
    """A complaint of the parser about one setting."""


class _Parser(ArgumentParser):
    """Says what is wrong with a setting in one line, in the words of its type."""

    fields: Any = None  # the class of the configuration

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise _Mistake(self._worded(message))

    def complaint(self, arguments: list[str]) -> str:
        """What is wrong with these arguments, beside others that are missing."""
        try:
            self.parse_args(arguments)
        except _Mistake as mistake:
            return "" if "arguments are required" in str(mistake) else str(mistake)
        return ""

    def _worded(self, message: str) -> str:
        unknown = re.search(r"unrecognized arguments: -*([\w.:-]+)|Option '([\w.]+)' is not accepted", message)
        if unknown:
            name, fields = unknown[1] or unknown[2], list(self.get_defaults().keys())
            if MEANT.get(name) in fields:
                return f"no field {name!r}, did you mean {MEANT[name]!r}?"
            return nearest("no field", name, fields)
        named = re.search(r"(?:key \"|argument --)([\w.]+)\"?:(?!.*(?:key \"|argument --)[\w.]+\"?:)", message, re.S)
        hint = _hint(self.fields, named[1]) if named else None
        if named is None or hint is None or "Unable to load" in message:
            return message
        given = re.search(_GIVEN, message)
        got = next((text.strip() for text in (given.groups() if given else ()) if text), "nothing")
        outside = re.search(r"does not conform to restriction ([^\n]+)", message)
        if outside:
            return f"{named[1]}: must be {readable_range(outside[1])}, got {got}"
        choices = [choice for kind in _kinds(hint) if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices:
            near = nearest("", got, choices).partition(", did")
            return f"{named[1]}: must be {wording(hint)}, got {got!r}" + "".join(near[1:])
        return f"{named[1]}: wanted {wording(hint)}, got {got!r}"

    def format_help(self, formatter: Any = None) -> str:
        """The recipe's own fields first, then those that several recipes share, by what they are about."""
        own = [kind for kind in self.fields.__mro__ if kind.__module__ != "builtins"] if self.fields else []
        shared = {name: title for title, names in _SECTIONS.items() for name in names.split()}
        sections: dict[str, list[argparse.Action]] = {title: [] for title in ("", *_SECTIONS, _RUN)}
        for action in self._actions:
            name = action.dest.partition(".")[0]
            home = next((kind for kind in reversed(own) if name in vars(kind).get("__annotations__", ())), None)
            common = home in (Common, OfflineConfig) or home is None
            sections[shared.get(name, _RUN) if common else ""].append(action)
        formatter = formatter or self._get_formatter()
        formatter.add_text(f"usage: {self.prog} [--config file.yaml] [--field value]")
        formatter.add_text(self.description)
        for title, actions in sections.items():
            if actions:
                formatter.start_section(title or f"{self.prog.rpartition(' ')[2]}")
                formatter.add_arguments(actions)
                formatter.end_section()
        return str(formatter.format_help())


def _hint(config_class: Any, name: str) -> Any:
    """The type of a field, or of a field of one of its groups; None if there is none."""
    hint: Any = config_class
    for part in name.split("."):
        hint = get_type_hints(hint).get(part) if dataclasses.is_dataclass(hint) else None
    return hint


def _kinds(hint: Any) -> Collection[Any]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def wording(hint: Any) -> str:
    """A type in words: ``a whole number > 0 or null``."""
    simple = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    words = []
    for kind in _kinds(hint):
        if get_origin(kind) is Literal:
            choices = (str(each).lower() if isinstance(each, bool) else str(each) for each in get_args(kind))
            words.append(f"one of {', '.join(choices)}")
        elif hasattr(kind, "_expression"):
            words.append(f"{simple[kind._type]} {readable_range(kind._expression)}")
        elif get_origin(kind) is dict:
            words.append(f"a mapping {{name: {wording(get_args(kind)[1])}}}")
        elif get_origin(kind) is list:
            words.append(f"a list [{wording(get_args(kind)[0])}, ...]")
        else:
            words.append(simple.get(kind, "a value"))
    return " or ".join(words)
