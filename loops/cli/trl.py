"""Configuration files and flags of TRL, read as ours; a mixture of both vocabularies is read too."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..registry import nearest
from .trl_rules import Translation, entries, table, translate

_UNTRANSLATED = ("config", "defaults", "help", "h", "print_config")


def read(recipe: str, config_class: type, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str], Translation]:
    """The fields that configuration files and TRL's flags come to, and the flags that are left, which are ours.

    Flags win over files. Where no name is TRL's, the arguments are all left; what is wrong is among the ``refused``.
    """
    missing = dataclasses.MISSING
    fields = {each.name: each.default for each in dataclasses.fields(config_class) if each.default is not missing}
    known = {each.name for each in dataclasses.fields(config_class)}
    out, flags = Translation({}, (), known), split_flags(arguments)
    file = read_files([values[0] for name, values, _ in flags if name == "config" and values])
    if file is None:  # the parser says what is wrong with it
        return {}, list(arguments), out
    defaults = [file.pop("defaults", None), *(" ".join(values) for name, values, _ in flags if name == "defaults")][-1]
    words = dict.fromkeys([*file, *(name for name, *_ in flags)])
    foreign = [name for name in words if name.rstrip("+").partition(".")[0] not in {*known, *_UNTRANSLATED}]
    if not foreign and defaults is None:
        return {}, list(arguments), out

    names = {name: _name(recipe, name) for name in words}
    is_trl = any(names[name] not in {"", *known} for name in foreign)
    for name in foreign:
        if not names[name] and (name in file or is_trl):
            candidates = {*known, *entries(recipe)} if is_trl else known
            out.refused[name] = nearest("no field", name, candidates)
    if defaults not in (None, "trl"):
        out.refused["defaults"] = f"defaults: wanted trl, or nothing for burnish's own, got {defaults}"
    if not is_trl and defaults is None:
        return {}, list(arguments), out

    from_file = {names[name]: _number(value) for name, value in file.items() if names[name]}
    from_flags = {names[name]: _value(name, values) for name, values, _ in flags if names[name]}
    ours = flattened({name: value for name, value in file.items() if not names[name] and name not in out.refused})
    left = [(name, tokens) for name, _, tokens in flags if not names[name] and name not in ("config", "defaults")]
    by_flag = {name for name, _ in left}
    given, unknown = {**from_file, **from_flags}, out.refused
    out = translate(recipe, known, given, elsewhere={*by_flag, *ours})
    out.refused = {**unknown, **out.refused}
    for field, sources in out.sources.items():
        if _has(by_flag if any(name in from_flags for name in sources) else ours, field):
            out.refused[field] = f"{field}: given twice, here and as {', '.join(sources)}; leave one of them out"
    translated = {field: value for field, value in out.ours.items() if not _has(by_flag, field)}
    given = {**table()["defaults"]["all"], **table()["defaults"].get(recipe, {}), **given}
    theirs = translate(recipe, known, given).ours
    theirs = {name: value for name, value in theirs.items() if not _has({*translated, *ours, *by_flag}, name)}
    if defaults is None:
        differ = [f"{name} {fields.get(name)} ({value})" for name, value in theirs.items() if fields.get(name) != value]
        if differ:
            out.notes.append(f"defaults that differ (TRL's, which --defaults trl takes): {', '.join(differ)}")
        theirs = {}
    for field, note in table()["silent"].get(recipe, {}).items():
        if not _has({*translated, *ours, *by_flag}, field):
            out.notes.append(f"{field}: {note}")
    merged: dict[str, Any] = {}
    for field, value in {**theirs, **ours, **translated}.items():
        group, _, inner = field.rpartition(".")
        (merged.setdefault(group, {}) if group else merged)[inner] = value
    return merged, [token for _, tokens in left for token in tokens], out


def to_yaml(ours: Mapping[str, Any], left: Sequence[str], out: Translation) -> str:
    """The configuration in our fields, with what has no effect or is refused as comments, and our flags too."""
    comments = [
        *(f"and the flags {' '.join(left)}" for _ in left[:1]),
        *messages(out),
        *(f"refused: {why}" for why in out.refused.values()),
    ]
    return "".join(f"# {comment}\n" for comment in comments) + yaml.safe_dump(dict(ours), sort_keys=False)


def messages(out: Translation) -> list[str]:
    """What a translation leaves out or changes, a line for each reason."""
    return [f"no effect here: {', '.join(names)}: {why}" for why, names in out.ignored.items()] + out.notes


def split_flags(arguments: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """Name, values and tokens of each flag."""
    flags: list[tuple[str, list[str], list[str]]] = []
    for token in arguments:
        if token.startswith("--") or not flags:
            name, equals, value = token.removeprefix("--").partition("=")
            flags.append((name, [value] if equals else [], [token]))
        else:
            flags[-1][1].append(token)
            flags[-1][2].append(token)
    return flags


def read_files(paths: Sequence[str]) -> dict[str, Any] | None:
    """The keys of all files, where later ones win; None if one of them can't be read."""
    try:
        parts = [yaml.safe_load(Path(path).read_text()) for path in paths]
        return {str(name): value for part in parts for name, value in part.items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None


def _name(recipe: str, name: str) -> str:
    """TRL's name that a key or a flag means, or nothing."""
    name = name.replace("-", "_")
    return next((each for each in (name, name.removeprefix("no_")) if each in entries(recipe)), "")


def _value(name: str, values: Sequence[str]) -> Any:
    if not values:
        return not name.startswith("no_")
    parsed = [_number(yaml.safe_load(value)) for value in values]
    return parsed[0] if len(parsed) == 1 else parsed


def _number(value: Any) -> Any:
    """1e-4 is text in YAML 1.1."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value


def flattened(ours: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of groups by their names with a dot."""
    flat: dict[str, Any] = {}
    for name, value in ours.items():
        inner = value if name in ("lora", "teacher", "vllm", "limits") and isinstance(value, Mapping) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": each for key, each in inner.items()}
    return flat


def _has(names: Collection[str], field: str) -> bool:
    return field in names or ("." in field and field.partition(".")[0] in names)
