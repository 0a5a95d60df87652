"""Read configuration files and flags of TRL; both vocabularies may be mixed."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from ..registry import nearest
from . import launch, trl_rules
from .trl_rules import Translation, as_list, table

_load = get_loader("yaml")  # in which 1e-4 is a number, as it is not in YAML 1.1
_HEADLINES = 3  # lines about TRL's names at the start of a run
_OURS = ("config", "defaults", "help", "h", "print_config")  # names of the command line itself


@cache
def entries(recipe: str) -> dict[str, tuple[str, Any]]:
    """Each name of TRL in a recipe: (renamed, values, ignored, refused or rules; its entry)."""
    found: dict[str, tuple[str, Any]] = {}
    for part in (launch.names(), table(), table()["recipes"].get(recipe, {})):
        found |= {name: ("renamed", name) for name in part.get("same", ())}
        if part is not launch.names():  # whose other names are those of files
            found |= {name: ("renamed", field) for name, field in part.get("renamed", {}).items()}
        found |= {name: ("values", field) for name, field in part.get("values", {}).items()}
        found |= {name: ("ignored", why) for why, names in part.get("ignored", {}).items() for name in names}
        for why, names in part.get("refused", {}).items():
            found |= {name: ("refused", (why, harmless)) for name, harmless in names.items()}
        found |= {name: ("rules", None) for names in part.get("rules", {}).values() for name in names}
    return found


def translate(
    recipe: str,
    known: Collection[str],
    given: Mapping[str, Any],
    elsewhere: Mapping[str, Any] | None = None,
    *,
    ranks: int | None = 1,
) -> Translation:
    """Translate a mapping of TRL's names to values, all in the table, beside fields of ours that are set elsewhere.

    Args:
        ranks: of this run, where neither a name nor a launcher says so; None if no run is started.
    """
    overlay = table()["recipes"].get(recipe, {})
    rules, notes = ({**table()[part], **overlay.get(part, {})} for part in ("rules", "notes"))
    rules = {**rules, **launch.names()["rules"]}
    functions = {**vars(trl_rules), "sharding": launch.sharding}
    out = Translation(given, known, trl_defaults(recipe), elsewhere or {}, ranks=ranks)
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
                fields = _switched(out, names) if isinstance(names, Mapping) else functions[rule](out)
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


def read(
    recipe: str, config_class: type, arguments: Sequence[str], *, to_run: bool = True
) -> tuple[dict[str, Any], list[str], Translation]:
    """Translate configuration files and TRL's flags into our fields; also return the remaining flags, which are ours.

    Flags win over files. Mistakes are listed in ``refused``.

    Args:
        to_run: false only to show the translation. In a run in which no name is TRL's, all arguments remain; and its
            processes are those that were started.
    """
    ranks = 1 if to_run else None
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
    words = {_whole(recipe, own, name) if name in flagged else name: value for name, value in words.items()}
    flagged = {_whole(recipe, own, name): value for name, value in flagged.items()}
    flags = [(_whole(recipe, own, name), values, tokens) for name, values, tokens in flags]
    foreign = [name for name in words if name.rstrip("+").partition(".")[0] not in {*own, *_OURS}]
    if to_run and defaults is None and not any(_name(recipe, name) not in {"", *own} for name in foreign):
        return {}, list(arguments), out

    names = {name: _name(recipe, name) for name in words}
    unknown = {name: nearest("no field", name, {*own, *entries(recipe)}) for name in foreign if not names[name]}
    if defaults not in (None, "trl"):
        unknown["defaults"] = f"defaults: wanted trl, or nothing for burnish's own, got {defaults}"

    in_file = flattened({name: value for name, value in file.items() if not names[name] and name not in unknown})
    by_flag = {name: value for name, value in flagged.items() if not names[name]}
    given = {names[name]: value for name, value in words.items() if names[name]}
    elsewhere = {**in_file, **flattened(by_flag)}
    given, launch_notes, unreadable = launch.expanded(given)
    for name in [name for name in given if name not in entries(recipe)]:
        unknown[name] = nearest("accelerate_config: no key", name, entries(recipe))
        del given[name]
    out = translate(recipe, own, given, elsewhere, ranks=ranks)
    out.notes += launch_notes
    out.refused = {**unknown, **out.refused, **unreadable}
    for field, sources in out.sources.items():
        if _has(by_flag if {names[name] for name in flagged} & {*sources} else in_file, field):
            out.refused[field] = f"{field}: given twice, here and as {', '.join(sources)}; leave one of them out"
    ours = {**in_file, **{field: value for field, value in out.ours.items() if not _has(by_flag, field)}}
    theirs = translate(recipe, own, {**trl_defaults(recipe), **given}, elsewhere, ranks=ranks).ours
    theirs = {name: value for name, value in theirs.items() if not _has({*ours, *by_flag}, name)}
    if defaults is not None:
        ours, theirs = {**theirs, **ours}, {}
    silent = {name: why for name, why in table()["silent"].get(recipe, {}).items() if not _has({*ours, *by_flag}, name)}
    differ = [f"{name} {own.get(name)} ({value})" for name, value in theirs.items() if own.get(name) != value]
    if differ:
        out.differ = f"defaults that differ (TRL's, which --defaults trl takes): {', '.join(differ)}"
    out.silent = [f"{name}: {why}" for name, why in silent.items()]
    return _grouped(ours), [token for name, _, tokens in flags if name in by_flag for token in tokens], out


def _grouped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of groups, which have a dot, as mappings."""
    merged: dict[str, Any] = {}
    for field, value in fields.items():
        group, _, inner = field.rpartition(".")
        (merged.setdefault(group, {}) if group else merged)[inner] = value
    return merged


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of TRL's: the recipe, all flags of launcher and script, and what stood before the launcher."""

    recipe: str
    flags: list[str]
    variables: Sequence[str] = ()
    notes: Sequence[str] = ()


def from_command(words: Sequence[str]) -> Command:
    """Read a command of TRL's, from ``trl dpo`` or the launcher of a script to its last flag."""
    words = [launch.names()["short"].get(word, word) for word in words]
    scripts = [n for n, word in enumerate(words) if word.endswith(".py") or word.startswith("trl.scripts.")]
    at = words.index("trl") + 1 if "trl" in words[:-1] else min(scripts, default=0)
    name = words[at].removesuffix(".py").replace("/", ".").rpartition(".")[2]
    recipe, *flags = table()["scripts"].get(name, name).split(" ")
    first = next((n for n, word in enumerate(words[:at]) if word.startswith("--")), at)
    launcher = [(flag, values) for flag, values, _ in split_flags(words[first:at])]
    started, variables, notes = launch.launched(words[:at], launcher)
    return Command(recipe, [*started, *flags, *words[at + 1 :]], variables, notes)


def to_yaml(ours: Mapping[str, Any], left: Sequence[str], out: Translation) -> str:
    """The configuration in our fields, our own flags among them; what has no effect or is refused as comments."""
    flags = {name: _value(name, values) for name, values, _ in split_flags(left) if name not in out.refused}
    fields = flattened(ours) | flattened(flags)
    comments = [*messages(out), *(f"refused: {why}" for why in out.refused.values())]
    return "".join(f"# {comment}\n" for comment in comments) + yaml.safe_dump(_grouped(fields), sort_keys=False)


def messages(out: Translation) -> list[str]:
    """List what a translation leaves out or changes, one line for each reason."""
    ignored = [f"no effect here: {', '.join(names)}: {why}" for why, names in out.ignored.items()]
    return [*ignored, *out.notes, *filter(None, [out.differ]), *out.silent]


def headlines(recipe: str, out: Translation) -> list[str]:
    """The messages to begin a run with, three at most: what matters most, and how many more there are."""
    weighty, minor = (tuple(f"{name}: " for name in table()[kind]) for kind in ("weighty", "minor"))
    everything = messages(out)
    first = [*filter(None, [out.differ]), *(each for each in out.silent if each.startswith(weighty))]
    first += [each for each in out.notes if not each.startswith(minor)]
    shown = first if len(first) == len(everything) <= _HEADLINES else first[: _HEADLINES - 1]
    if more := len(everything) - len(shown):
        shown.append(
            f"{more} more, of less weight: burnish translate {recipe}, with the same file and flags, prints them"
        )
    return shown


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


def _whole(recipe: str, own: Collection[str], flag: str) -> str:
    """The only name that a flag may begin, as TRL's parser takes it; the flag itself if it is whole, or ambiguous."""
    plain = flag.replace("-", "_")
    if not plain or "." in flag or plain in {*own, *_OURS} or _name(recipe, flag):
        return flag
    begun = [name for name in {*own, *_OURS, *entries(recipe)} if name.startswith(plain)]
    taken = len(begun) == 1 and entries(recipe).get(begun[0], ("refused",))[0] != "refused"
    return begun[0] if taken else flag


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
