"""Read configuration files and flags of TRL; both vocabularies may be mixed."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from ..registry import nearest
from . import trl_rules
from .trl_rules import Translation, as_list, table

_load = get_loader("yaml")  # in which 1e-4 is a number, as it is not in YAML 1.1
_OURS = ("config", "defaults", "help", "h", "print_config")  # names of the command line itself


@cache
def entries(recipe: str) -> dict[str, tuple[str, Any]]:
    """Each name of TRL in a recipe: (renamed, values, ignored, refused or rules; its entry)."""
    found: dict[str, tuple[str, Any]] = {}
    for part in (table(), table()["recipes"].get(recipe, {})):
        found |= {name: ("renamed", name) for name in part.get("same", ())}
        found |= {name: ("renamed", field) for name, field in part.get("renamed", {}).items()}
        found |= {name: ("values", field) for name, field in part.get("values", {}).items()}
        found |= {name: ("ignored", why) for why, names in part.get("ignored", {}).items() for name in names}
        for why, names in part.get("refused", {}).items():
            found |= {name: ("refused", (why, harmless)) for name, harmless in names.items()}
        found |= {name: ("rules", None) for names in part.get("rules", {}).values() for name in names}
    return found


def translate(
    recipe: str, known: Collection[str], given: Mapping[str, Any], elsewhere: Mapping[str, Any] | None = None
) -> Translation:
    """Translate a mapping of TRL's names to values, all in the table, beside fields of ours that are set elsewhere."""
    overlay = table()["recipes"].get(recipe, {})
    rules, notes = ({**table()[part], **overlay.get(part, {})} for part in ("rules", "notes"))
    out = Translation(given, known, trl_defaults(recipe), elsewhere or {})
    later = {name: n for n, (name, (kind, _)) in enumerate(entries(recipe).items()) if kind == "values"}
    for name, value in sorted(given.items(), key=lambda item: later.get(item[0], 0)):
        kind, entry = entries(recipe)[name]
        if kind == "renamed" and entry in out.ours:
            out.refuse(name, f"{entry} is given twice, by {out.sources[entry][0]} too")
        elif kind in ("renamed", "values") and (value is not None or name not in table()["optional"]):
            out.set([name], _fields(out, name, value, entry))
        elif kind == "ignored":
            out.ignored.setdefault(entry, []).append(name)
        elif kind == "refused":
            why, harmless = entry
            if value not in (None, *as_list(harmless)) and (value or harmless is not None):
                out.refuse(name, why)
    for rule, names in rules.items():
        present = [name for name in names if name in given]
        try:
            if present:
                fields = _switched(out, names) if isinstance(names, Mapping) else getattr(trl_rules, rule)(out)
                out.set([name for name in present if given[name] is not None] or present, fields)
        except (TypeError, ValueError) as error:  # a word where a number belongs
            out.refused[rule] = f"{', '.join(f'{name}: {given[name]!r}' for name in present)}: {error}"
    on = {name for name, value in given.items() if value and value != "no"}
    out.notes += [f"{name}: {note}" for name, note in notes.items() if on & {name, *rules.get(name, ())}]
    done = {*out.refused, *(name for names in (*out.sources.values(), *out.ignored.values()) for name in names)}
    if kept := [name for name in given if name not in done]:
        out.ignored["nothing to change for these values"] = kept
    return out


def trl_defaults(recipe: str) -> dict[str, Any]:
    return {**table()["defaults"]["all"], **table()["defaults"].get(recipe, {})}


def _switched(out: Translation, names: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of names that are not off; none, if the first of them switches the others and is off."""
    switch, fields = next(iter(names)), dict[str, Any]()
    if switch in table()["switches"] and not out[switch]:
        if why := table()["switches"][switch]:
            out.ignored[why] = [name for name in names if name in out.given]
        return {}
    for name, entry in names.items():
        if entry and (out[name] or isinstance(entry, dict)):
            for field, value in _fields(out, name, out[name], entry).items():
                field, _, key = field.partition(":")
                fields[field] = {**fields.get(field, {}), key: value} if key else value
        if name in table()["open"] and out.given.get(name) is None:
            out.notes.append(table()["open"][name])
    return fields


def _fields(out: Translation, name: str, value: Any, entry: Any) -> dict[str, Any]:
    """The field that an entry of the table names, and its value: as it is, as a list, or as the table chooses it."""
    if isinstance(entry, list):
        return {entry[0]: value if isinstance(value, list) else [value]}
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(entry, str):
        return {entry: value}
    choices = {theirs: ours for theirs, ours in entry.items() if theirs != "field"}
    if isinstance(value, list | dict) or value not in choices:
        return out.refuse(name, f"{value!r} is none of {', '.join(map(str, choices))}", instead=entry["field"])
    return {} if choices[value] is None else {entry["field"]: choices[value]}


def read(recipe: str, config_class: type, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str], Translation]:
    """Translate configuration files and TRL's flags into our fields; also return the remaining flags, which are ours.

    Flags win over files. If no name is TRL's, all arguments remain; mistakes are listed in ``refused``.
    """
    own = {each.name: each.default for each in dataclasses.fields(config_class)}
    out, flags = Translation({}, own), split_flags(arguments)
    try:
        file = read_files([values[0] for name, values, _ in flags if name == "config" and values])
    except ValueError as error:
        out.refused["config"] = str(error)
        return {}, list(arguments), out
    flagged = {name: _value(name, values) for name, values, _ in flags if name != "config"}
    defaults = flagged.pop("defaults", file.pop("defaults", None))
    words = {**file, **flagged}
    foreign = [name for name in words if name.rstrip("+").partition(".")[0] not in {*own, *_OURS}]
    if defaults is None and not any(_name(recipe, name) not in {"", *own} for name in foreign):
        return {}, list(arguments), out

    names = {name: _name(recipe, name) for name in words}
    unknown = {name: nearest("no field", name, {*own, *entries(recipe)}) for name in foreign if not names[name]}
    if defaults not in (None, "trl"):
        unknown["defaults"] = f"defaults: wanted trl, or nothing for burnish's own, got {defaults}"

    in_file = flattened({name: value for name, value in file.items() if not names[name] and name not in unknown})
    by_flag = {name: value for name, value in flagged.items() if not names[name]}
    given = {names[name]: value for name, value in words.items() if names[name]}
    elsewhere = {**in_file, **flattened(by_flag)}
    out = translate(recipe, own, given, elsewhere)
    out.refused = {**unknown, **out.refused}
    for field, sources in out.sources.items():
        if _has(by_flag if {names[name] for name in flagged} & {*sources} else in_file, field):
            out.refused[field] = f"{field}: given twice, here and as {', '.join(sources)}; leave one of them out"
    ours = {**in_file, **{field: value for field, value in out.ours.items() if not _has(by_flag, field)}}
    theirs = translate(recipe, own, {**trl_defaults(recipe), **given}, elsewhere).ours
    theirs = {name: value for name, value in theirs.items() if not _has({*ours, *by_flag}, name)}
    if defaults is not None:
        ours, theirs = {**theirs, **ours}, {}
    silent = {name: why for name, why in table()["silent"].get(recipe, {}).items() if not _has({*ours, *by_flag}, name)}
    differ = [f"{name} {own.get(name)} ({value})" for name, value in theirs.items() if own.get(name) != value]
    if differ:
        out.notes.append(f"defaults that differ (TRL's, which --defaults trl takes): {', '.join(differ)}")
    out.notes += [f"{name}: {why}" for name, why in silent.items()]
    merged: dict[str, Any] = {}
    for field, value in ours.items():
        group, _, inner = field.rpartition(".")
        (merged.setdefault(group, {}) if group else merged)[inner] = value
    return merged, [token for name, _, tokens in flags if name in by_flag for token in tokens], out


def from_command(words: Sequence[str]) -> list[str]:
    """The recipe and the flags of a command of TRL's, from ``trl dpo`` or the launcher of a script to its last flag."""
    scripts = [n for n, word in enumerate(words) if word.endswith(".py") or word.startswith("trl.scripts.")]
    at = words.index("trl") + 1 if "trl" in words[:-1] else min(scripts, default=0)
    name = words[at].removesuffix(".py").replace("/", ".").rpartition(".")[2]
    recipe, *flags = table()["scripts"].get(name, name).split(" ")
    started = {name.replace("-", "_"): values for name, values, _ in split_flags(words[:at]) if values}
    ranks = started.get("num_processes") or started.get("nproc_per_node") or []
    return [recipe, *(f"--num_processes={rank}" for rank in ranks[:1]), *flags, *words[at + 1 :]]


def to_yaml(ours: Mapping[str, Any], left: Sequence[str], out: Translation) -> str:
    """The configuration in our fields, with what has no effect or is refused as comments, and our flags too."""
    comments = [
        *(f"and the flags {' '.join(left)}" for _ in left[:1]),
        *messages(out),
        *(f"refused: {why}" for why in out.refused.values()),
    ]
    return "".join(f"# {comment}\n" for comment in comments) + yaml.safe_dump(dict(ours), sort_keys=False)


def messages(out: Translation) -> list[str]:
    """List what a translation leaves out or changes, one line for each reason."""
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


def read_files(paths: Sequence[str]) -> dict[str, Any]:
    """The keys of all files, where later ones win.

    Raises:
        ValueError: naming the file, and the line, that can't be read.
    """
    keys: dict[str, Any] = {}
    for path in paths:
        try:
            keys |= {str(name): value for name, value in _load(Path(path).read_text("utf-8")).items()}
        except yaml.MarkedYAMLError as error:
            line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
            raise ValueError(f"config: {path}{line}: not YAML: {error.problem}") from error
        except AttributeError as error:
            raise ValueError(f"config: {path}: wanted fields and their values, such as beta: 0.1") from error
        except (OSError, ValueError, yaml.YAMLError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"config: {path}: {why}") from error
    return keys


def _name(recipe: str, name: str) -> str:
    """TRL's name that a key or a flag means, or nothing."""
    name = name.replace("-", "_")
    return next((each for each in (name, name.removeprefix("no_")) if each in entries(recipe)), "")


def _value(name: str, values: Sequence[str]) -> Any:
    if not values:
        return not name.startswith("no_")
    # TRL's documentation has commas between the values of a list.
    parsed = [loaded(value.removesuffix(",") if len(values) > 1 else value) for value in values]
    return parsed[0] if len(parsed) == 1 else parsed


def loaded(text: str) -> Any:
    """The value of a flag in YAML; the text itself if it is none, such as that of a template."""
    try:
        return _load(text)
    except yaml.YAMLError:
        return text


def flattened(ours: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of groups by their names with a dot."""
    flat: dict[str, Any] = {}
    for name, value in ours.items():
        is_group = name in ("lora", "teacher", "vllm", "limits", "parallel") and isinstance(value, Mapping)
        flat |= {f"{name}.{key}": each for key, each in value.items()} if is_group else {name: value}
    return flat


def _has(names: Collection[str], field: str) -> bool:
    return field in names or ("." in field and field.partition(".")[0] in names)
