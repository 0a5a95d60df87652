"""Parse flags and YAML files into a configuration. One message lists all mistakes, each with its field and range."""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from ..config import Lora, OfflineConfig, Settings, kinds, range_complaint, several, wording
from ..registry import nearest
from .trl import flattened, headlines, loaded, read, read_files, split_flags

_log = logging.getLogger(__name__)

# The order of the shared fields in --help; all others are in the section of the run.
_SECTIONS = {
    "data": """data eval_data max_length truncation on_bad_row chat_template chat_template_kwargs dataset_num_proc
        shuffle""",
    "training": "steps epochs batch_size learning_rate schedule warmup weight_decay max_grad_norm seed",
    "memory and precision": """dtype micro_tokens gradient_checkpointing layout backend keep_bytes attention quantize
        lora""",
}
_RUN = "model and run directory"
_NEEDED = ("output", None)  # from Python a run may have no directory


def parse(name: str, config_class: Any, arguments: Sequence[str], *, rules: bool = True) -> Any:
    """Parse YAML file and flags into a configuration; flags win in any order. Exits with status 2 on a mistake.

    Args:
        rules: whether settings that contradict each other are a mistake, too.
    """
    helps = any(word == "-h" or "help" in word or "print_" in word for word in arguments)
    parser = _parser(name, config_class, documented=helps)
    translated, left, translation = read(name, config_class, _spelled(config_class, arguments))
    if translated:
        left = ["--config", yaml.safe_dump(translated), *left]
    if os.environ.get("RANK", "0") == "0" and not translation.refused:
        for message in headlines(name, translation):
            _log.warning("TRL: %s", message)
    given = [name for name, _ in _settings(translated, left)]
    if complaint := Lora.complaint([name.removeprefix("lora.") for name in given if name.startswith("lora.")]):
        translation.refused["lora"] = complaint
    # jsonargparse lets the later of two settings win.
    files_first = sorted(split_flags(left), key=lambda flag: flag[0] != "config")
    parsed: Any = None
    unclear = ""
    if not translation.refused:
        try:
            parsed = parser.parse_args([token for _, _, tokens in files_first for token in tokens])
        except argparse.ArgumentError as error:
            unclear = str(error)
    if parsed is None or parsed.get("output", "") is None:
        fresh = _parser(name, config_class, documented=False)  # a failed parser keeps its print flag
        others = [text for name, text in _mistakes(fresh, translated, left) if name not in translation.refused]
        mistakes = [*translation.refused.values(), *others] or [unclear]
        parser.exit(2, f"{parser.prog}: {several(mistakes)}\n{parser.prog} --help lists its fields\n")
    parsed.pop("config", None)
    config = config_class(**vars(parser.instantiate(parsed)))
    if rules and isinstance(config, Settings):  # the demo has no rules
        try:
            config.refuse_contradictions()
        except ValueError as contradictions:
            parser.exit(2, f"{parser.prog}: {contradictions}\n{parser.prog} --help lists its fields\n")
    return config


def completion(shell: str, recipes: Mapping[str, Any]) -> str:
    """The script by which a shell, bash or zsh, completes recipes, flags and the values that a flag can have."""
    script = io.StringIO()
    set_parsing_settings(add_print_completion_argument=True)
    try:
        parser = ArgumentParser(prog="burnish")
        commands = parser.add_subcommands()
        for name, config_class in recipes.items():
            commands.add_subcommand(name, _parser(name, config_class))
        with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
            parser.parse_args([f"--print_completion=shtab-{shell}"])
    finally:
        set_parsing_settings(add_print_completion_argument=False)
    return script.getvalue()


# Switches of every recipe that are no settings of a run.
SWITCHES = {
    "dry_run": "check settings, data and model, and predict memory, without training; as burnish plan does",
    "no_code": "refuse all code but burnish's own that a configuration names",
}


def without_switch(words: Sequence[str], switch: str) -> tuple[list[str], bool]:
    """The words without a switch, and whether it is on; it may be followed by true or false, as other switches are."""
    left: list[str] = []
    on = False
    for name, values, tokens in split_flags(words):
        if name.replace("-", "_") != switch or not tokens[0].startswith("--"):
            left += tokens
            continue
        on = values[:1] != ["false"]
        rest = values[1:] if values[:1] in (["true"], ["false"]) else values
        left += rest if "=" not in tokens[0] else tokens[1:]
    return left, on


def _parser(name: str, config_class: Any, documented: bool = True) -> Any:
    set_parsing_settings(docstring_parse_attribute_docstrings=documented)  # a third to a half of its time
    parser = _Parser(prog=f"burnish {name}", description=config_class.__doc__, allow_abbrev=False, exit_on_error=False)
    files = "a YAML file with these fields, or TRL's; --defaults trl takes TRL's defaults too"
    parser.add_argument("--config", action="config", help=files)
    parser.add_class_arguments(config_class)
    parser.fields = config_class
    return parser


def _needed(config_class: Any) -> list[str]:
    """The fields that a command must give."""
    return [
        field.name
        for field in dataclasses.fields(config_class)
        if field.default is field.default_factory is dataclasses.MISSING or (field.name, field.default) == _NEEDED
    ]


def _spelled(config_class: Any, arguments: Sequence[str]) -> list[str]:
    """Flags by the names of fields: ``--learning-rate`` is ``--learning_rate``, ``--resume`` is on, ``.inf`` is inf."""
    hints = get_type_hints(config_class)
    switches = {name for name, hint in hints.items() if hint is bool or True in get_args(hint)}
    words: list[str] = []
    for name, values, tokens in split_flags(arguments):
        flag, *others = [re.sub(r"(^|=)\.inf$", r"\1inf", token) for token in tokens]
        ours = name.replace("-", "_")
        words += [flag.replace(name, ours, 1) if flag.startswith("--") else flag, *others]
        words += ["true"] * (ours in switches and not values)
    return words


def _mistakes(parser: Any, translated: Mapping[str, Any], arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each wrong setting with its mistake, and the missing fields."""
    settings = _settings(translated, arguments)
    for name, tokens in settings:
        if complaint := _complaint(parser, name.rstrip("+"), tokens):
            yield name, complaint
    if missing := [f"--{name}" for name in _needed(parser.fields) if name not in dict(settings)]:
        yield "config", f"needed as well: {', '.join(missing)}"  # unless the file, which may have them, can't be read


def _settings(translated: Mapping[str, Any], arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The settings of files and flags, those of groups with a dot, and each as the words of a flag."""
    flags = [flag for flag in split_flags(arguments) if flag[0] not in ("config", "print_config")]
    files = [values[0] for name, values, _ in split_flags(arguments) if name == "config" and values]
    settings: list[tuple[str, list[str]]] = []
    with contextlib.suppress(ValueError):  # a file that can't be read is refused already
        settings += [(name, [_flag(name, value)]) for name, value in flattened(translated or read_files(files)).items()]
    for name, values, tokens in flags:
        group = flattened({name: loaded(" ".join(values))})
        settings += [(key, tokens if key == name else [_flag(key, value)]) for key, value in group.items()]
    return settings


def _flag(name: str, value: Any) -> str:
    return f"--{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"


def _complaint(parser: Any, name: str, tokens: list[str]) -> str:
    """Describe the mistake of a setting by itself, in one line, in the words of its type."""
    try:
        parser.parse_args(tokens)
        return ""
    except argparse.ArgumentError as error:
        message = str(error)
    text = " ".join([*tokens[0].split("=", 1)[1:], *tokens[1:]]) or "nothing"
    if "arguments are required" in message:
        if name != "rewards":
            return ""
        from ..rewards.resolve import SHIPPED

        rewards: Any = loaded(text)
        rewards = rewards if isinstance(rewards, list | dict) else [rewards]
        mix = rewards if isinstance(rewards, dict) else dict.fromkeys(map(str, rewards))
        names = [each.get("function", key) if isinstance(each, dict) else key for key, each in mix.items()]
        unknown = [key for key in names if ":" not in key and key not in SHIPPED]
        return nearest("rewards: no", unknown[0], SHIPPED) if unknown else ""
    hint: Any = parser.fields
    for part in name.split("."):
        hint = get_type_hints(hint).get(part) if dataclasses.is_dataclass(hint) else None
    if hint is None:
        fields = list(parser.get_defaults().keys())
        if name.endswith((".yaml", ".yml")):
            return f"no field {name!r}, did you mean --config {name}?"
        return nearest("no field", name, fields)
    if complaint := range_complaint(text, hint):
        choices = {str(choice) for kind in kinds(hint) if get_origin(kind) is Literal for choice in get_args(kind)}
        near = nearest("", text, choices).partition(", did") if choices else ()
        return f"{name}: {complaint}" + "".join(near[1:])
    inner = re.search(r"(?:Given|Got) value: ([^\n]*)", message)
    return f"{name}: wanted {wording(hint)}, got {inner[1] if inner and inner[1] else text!r}"


class _Parser(ArgumentParser):
    """Argument parser whose help lists fields by topic."""

    fields: Any = OfflineConfig  # the class of the configuration

    def format_help(self, formatter: Any = None) -> str:
        """List the recipe's own fields first, then the shared ones by topic."""
        own, offline = ({each.name for each in dataclasses.fields(kind)} for kind in (self.fields, OfflineConfig))
        shared = {name: title for title, names in _SECTIONS.items() for name in names.split()}
        sections: dict[str, list[argparse.Action]] = {title: [] for title in ("", *_SECTIONS, _RUN)}
        for action in self._actions:
            name = action.dest.partition(".")[0]
            sections["" if name in own - offline else shared.get(name, _RUN)].append(action)
        for switch, purpose in SWITCHES.items():
            sections[_RUN].append(
                argparse.Action([f"--{switch}"], switch, nargs=0, default=argparse.SUPPRESS, help=purpose)
            )
        for action in self._actions:
            action.required |= action.dest in _needed(self.fields)
        formatter = formatter or self._get_formatter()
        formatter.add_text(f"usage: {self.prog} [--config file.yaml] [--field value]")
        formatter.add_text(self.description)
        for title, actions in sections.items():
            if actions:
                formatter.start_section(title or f"{self.prog.rpartition(' ')[2]}")
                formatter.add_arguments(actions)
                formatter.end_section()
        return str(formatter.format_help())
