"""Parse flags and YAML files into a configuration; one message lists all mistakes.

jsonargparse stops at the first mistake. So when it refuses, each setting is parsed again by itself,
and told of in the words of its type: ``beta: must be > 0, got -1``.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from ..config import Lora, OfflineConfig, Settings, kinds, range_complaint, several, wording
from ..registry import nearest
from .trl import Flag, files_of, flattened, headlines, loaded, read, read_files, split_flags
from .trl_rules import Translation

_log = logging.getLogger(__name__)

ConfigClass: TypeAlias = Any  # the class of a recipe's settings; of the demo it is no `Settings`

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


def parse(
    name: str, config_class: ConfigClass, arguments: Sequence[str], *, rules: bool = True
) -> Any:
    """Parse YAML file and flags into a configuration; flags win in any order.

    Exits with status 2 on a mistake.

    Args:
        rules: whether settings that contradict each other are a mistake, too.
    """
    helps = any(word == "-h" or "help" in word or "print_" in word for word in arguments)
    parser = _parser(name, config_class, documented=helps)
    translated, left, translation = read(name, config_class, _spelled(config_class, arguments))
    if translated:
        left = ["--config", yaml.safe_dump(translated), *left]
    _tell_of(name, translation)
    settings = _settings(translated, left)
    refused = {**translation.refused, **_refused_lora(settings)}
    parsed = None
    unclear = ""
    if not refused:
        try:
            parsed = parser.parse_args(_files_first(left))
        except argparse.ArgumentError as error:
            unclear = str(error)  # told of only if no setting is wrong by itself
    if parsed is None or parsed.get("output", "") is None:
        # a failed parser keeps its print flag
        fresh = _parser(name, config_class, documented=False)
        mistakes = list(refused.values())
        for setting, mistake in _mistakes(fresh, settings):
            if setting not in refused:
                mistakes.append(mistake)
        _exit(parser, several(mistakes or [unclear]))
    parsed.pop("config", None)
    config = config_class(**vars(parser.instantiate(parsed)))
    if rules and isinstance(config, Settings):  # the demo has no rules
        try:
            config.refuse_contradictions()
        except ValueError as contradictions:
            _exit(parser, str(contradictions))
    return config


def _tell_of(name: str, translation: Translation) -> None:
    """Log what matters of a translation from TRL's names, on one rank, unless it fails anyway."""
    if os.environ.get("RANK", "0") == "0" and not translation.refused:
        for message in headlines(name, translation):
            _log.warning("TRL: %s", message)


def _refused_lora(settings: "Sequence[_Setting]") -> dict[str, str]:
    """The complaint about settings of LoRA that do not go together, by the name of their group."""
    names = [setting.name for setting in settings]
    given = [name.removeprefix("lora.") for name in names if name.startswith("lora.")]
    complaint = Lora.complaint(given)
    return {"lora": complaint} if complaint else {}


def _files_first(arguments: Sequence[str]) -> list[str]:
    """The same arguments, files before flags: jsonargparse lets the later of two settings win."""
    flags = split_flags(arguments)
    ordered = sorted(flags, key=lambda flag: flag.name != "config")
    return [token for flag in ordered for token in flag.tokens]


def _exit(parser: ArgumentParser, message: str) -> NoReturn:
    parser.exit(2, f"{parser.prog}: {message}\n{parser.prog} --help lists its fields\n")


def completion(shell: str, recipes: Mapping[str, ConfigClass]) -> str:
    """The script by which a shell, bash or zsh, completes recipes, flags and their values."""
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
    """The words without a switch, and whether it is on.

    It may be followed by true or false, as other switches are.
    """
    left: list[str] = []
    on = False
    for name, values, tokens in split_flags(words):
        is_switch = name.replace("-", "_") == switch and tokens[0].startswith("--")
        if not is_switch:
            left += tokens
            continue
        on = values[:1] != ["false"]
        if "=" in tokens[0]:
            left += tokens[1:]
        elif values[:1] in (["true"], ["false"]):
            left += values[1:]
        else:  # what follows is the command's, such as a file
            left += values
    return left, on


def _parser(name: str, config_class: ConfigClass, documented: bool = True) -> Any:
    """The parser of a recipe's flags and files.

    Args:
        documented: whether it has the text of each field, for --help.
    """
    # To read the texts takes a third to a half of its time.
    set_parsing_settings(docstring_parse_attribute_docstrings=documented)
    parser = _Parser(
        prog=f"burnish {name}",
        description=config_class.__doc__,
        allow_abbrev=False,
        exit_on_error=False,
    )
    files = "a YAML file with these fields, or TRL's; --defaults trl takes TRL's defaults too"
    parser.add_argument("--config", action="config", help=files)
    parser.add_class_arguments(config_class)
    parser.fields = config_class
    return parser


def _needed(config_class: ConfigClass) -> list[str]:
    """The fields that a command must give."""
    needed = []
    for field in dataclasses.fields(config_class):
        has_no_default = field.default is field.default_factory is dataclasses.MISSING
        if has_no_default or (field.name, field.default) == _NEEDED:
            needed.append(field.name)
    return needed


def _spelled(config_class: ConfigClass, arguments: Sequence[str]) -> list[str]:
    """Flags as jsonargparse takes them.

    ``--learning-rate`` is ``--learning_rate``, ``--resume`` is ``--resume true``, and ``.inf``, as
    YAML writes it, inf.
    """
    hints = get_type_hints(config_class)
    switches = {name for name, hint in hints.items() if hint is bool or True in get_args(hint)}
    words: list[str] = []
    for name, values, tokens in split_flags(arguments):
        flag, *others = [re.sub(r"(^|=)\.inf$", r"\1inf", token) for token in tokens]
        ours = name.replace("-", "_")
        if flag.startswith("--"):
            flag = flag.replace(name, ours, 1)
        words += [flag, *others]
        if ours in switches and not values:
            words.append("true")
    return words


class _Setting(NamedTuple):
    """A setting of a file or a flag: its name, with a dot in a group, and its tokens as a flag."""

    name: str
    tokens: list[str]


def _mistakes(parser: Any, settings: Sequence[_Setting]) -> Iterator[tuple[str, str]]:
    """Yield each wrong setting with its mistake, and the missing fields."""
    for setting in settings:
        complaint = _complaint(parser, setting.name.rstrip("+"), setting.tokens)
        if complaint:
            yield setting.name, complaint
    given = {setting.name for setting in settings}
    missing = [f"--{name}" for name in _needed(parser.fields) if name not in given]
    if missing:
        # unless the file, which may have them, can't be read
        yield "config", f"needed as well: {', '.join(missing)}"


def _settings(translated: Mapping[str, object], arguments: Sequence[str]) -> list[_Setting]:
    """The settings of files and flags."""
    flags = split_flags(arguments)
    settings: list[_Setting] = []
    with contextlib.suppress(ValueError):  # a file that can't be read is refused already
        in_files = translated or read_files(files_of(flags))
        for name, value in flattened(in_files).items():
            settings.append(_as_flag(name, value))
    for flag in flags:
        if flag.name not in ("config", "print_config"):
            settings += _settings_of(flag)
    return settings


def _settings_of(flag: Flag) -> list[_Setting]:
    """A flag as it is; or the settings of a group, such as ``--lora '{r: 8}'``."""
    values = flattened({flag.name: loaded(" ".join(flag.values))})
    if list(values) == [flag.name]:
        return [_Setting(flag.name, flag.tokens)]
    return [_as_flag(name, value) for name, value in values.items()]


def _as_flag(name: str, value: object) -> _Setting:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _Setting(name, [f"--{name}={text}"])


def _complaint(parser: Any, name: str, tokens: list[str]) -> str:
    """Describe the mistake of a setting by itself, in the words of its type; empty if none."""
    try:
        parser.parse_args(tokens)
        return ""
    except argparse.ArgumentError as error:
        message = str(error)
    value = tokens[0].split("=", 1)[1:]
    text = " ".join([*value, *tokens[1:]]) or "nothing"
    # other fields, of which `_mistakes` tells: the setting itself is right
    if "arguments are required" in message:
        return _unknown_reward(text) if name == "rewards" else ""
    hint = _hint(parser.fields, name)
    if hint is None:
        if name.endswith((".yaml", ".yml")):
            return f"no field {name!r}, did you mean --config {name}?"
        return nearest("no field", name, list(parser.get_defaults().keys()))
    complaint = range_complaint(text, hint)
    if complaint:
        return f"{name}: {complaint}{_meant(text, hint)}"
    inner = re.search(r"(?:Given|Got) value: ([^\n]*)", message)
    got = inner[1] if inner and inner[1] else text
    return f"{name}: wanted {wording(hint)}, got {got!r}"


def _unknown_reward(text: str) -> str:
    """Complain about the first reward that neither ships nor is a ``module:function``, if any."""
    # imported late: a parser of other settings needs no rewards
    from ..rewards.resolve import SHIPPED

    rewards = loaded(text)  # one name, a list of names, or a mapping of names to settings
    if not isinstance(rewards, list | dict):
        rewards = [rewards]
    for key in rewards:
        function = str(key)
        settings = rewards[key] if isinstance(rewards, dict) else None
        if isinstance(settings, dict):
            function = settings.get("function", function)
        if ":" not in function and function not in SHIPPED:
            return nearest("rewards: no", function, SHIPPED)
    return ""


def _hint(fields: ConfigClass, name: str) -> object:
    """The type of a field, or of a group's field by its name with a dot; None if there is none."""
    hint = fields
    for part in name.split("."):
        if not dataclasses.is_dataclass(hint):
            return None
        hint = get_type_hints(hint).get(part)
    return hint


def _meant(text: str, hint: object) -> str:
    """``, did you mean ...?`` with the nearest choice; empty if none is near, or there are none."""
    choices: set[str] = set()
    for kind in kinds(hint):
        if get_origin(kind) is Literal:
            choices |= {str(choice) for choice in get_args(kind)}
    if not choices:
        return ""
    _, found, suggestion = nearest("", text, choices).partition(", did")
    return found + suggestion


class _Parser(ArgumentParser):
    """Argument parser whose help lists fields by topic."""

    fields: ConfigClass = OfflineConfig  # the class of the configuration

    def format_help(self, formatter: Any = None) -> str:
        """List the recipe's own fields first, then the shared ones by topic."""
        own = {each.name for each in dataclasses.fields(self.fields)}
        offline = {each.name for each in dataclasses.fields(OfflineConfig)}
        shared: dict[str, str] = {}  # the section of each shared field
        for title, names in _SECTIONS.items():
            shared |= dict.fromkeys(names.split(), title)
        sections: dict[str, list[argparse.Action]] = {title: [] for title in ("", *_SECTIONS, _RUN)}
        for action in self._actions:
            name = action.dest.partition(".")[0]
            is_own = name in own - offline
            sections["" if is_own else shared.get(name, _RUN)].append(action)
        for switch, purpose in SWITCHES.items():
            action = argparse.Action(
                [f"--{switch}"], switch, nargs=0, default=argparse.SUPPRESS, help=purpose
            )
            sections[_RUN].append(action)
        needed = _needed(self.fields)
        for action in self._actions:
            action.required |= action.dest in needed
        formatter = formatter or self._get_formatter()
        formatter.add_text(f"usage: {self.prog} [--config file.yaml] [--field value]")
        formatter.add_text(self.description)
        for title, actions in sections.items():
            if actions:
                recipe = self.prog.rpartition(" ")[2]
                formatter.start_section(title or recipe)
                formatter.add_arguments(actions)
                formatter.end_section()
        return str(formatter.format_help())
