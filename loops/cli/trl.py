"""Read configuration files and flags of TRL; both vocabularies may be mixed.

beta: 0.2, num_train_epochs: 2       a file of TRL's, or ours, or both; --flags are read likewise
-> beta: 0.2, epochs: 2              our fields, which jsonargparse then parses
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import get_loader

from ..registry import nearest
from . import launch, trl_rules
from .trl_rules import Fields, Translation, as_list, table

_load = get_loader("yaml")  # in which 1e-4 is a number, as it is not in YAML 1.1
_HEADLINES = 3  # lines about TRL's names at the start of a run
_OURS = ("config", "defaults", "help", "h", "print_config")  # names of the command line itself
_GROUPS = (
    "lora",
    "teacher",
    "vllm",
    "limits",
    "parallel",
    "hub",
)  # fields that are settings themselves


class Flag(NamedTuple):
    """A flag of a command line: ``--lora.r=8`` is ("lora.r", ["8"], ["--lora.r=8"]).

    Attributes:
        name: without its dashes.
        values: what follows it.
        tokens: all of it as it was written.
    """

    name: str
    values: list[str]
    tokens: list[str]


@cache
def entries(recipe: str) -> dict[str, tuple[str, Any]]:
    """Each name of TRL in a recipe: (renamed, values, ignored, refused or rules; its entry)."""
    found: dict[str, tuple[str, Any]] = {}
    # the recipe's own entries come last, and replace the ones of all recipes
    for part in (launch.names(), table(), table()["recipes"].get(recipe, {})):
        for name in part.get("same", ()):
            found[name] = ("renamed", name)
        if part is not launch.names():  # whose renamed names are keys of files
            for name, field in part.get("renamed", {}).items():
                found[name] = ("renamed", field)
        for name, field in part.get("values", {}).items():
            found[name] = ("values", field)
        for why, names in part.get("ignored", {}).items():
            for name in names:
                found[name] = ("ignored", why)
        for why, names in part.get("refused", {}).items():
            for name, harmless in names.items():
                found[name] = ("refused", (why, harmless))
        for names in part.get("rules", {}).values():
            for name in names:
                found[name] = ("rules", None)
    return found


def translate(
    recipe: str,
    known: Collection[str],
    given: Mapping[str, Any],
    elsewhere: Mapping[str, object] | None = None,
    *,
    ranks: int | None = 1,
) -> Translation:
    """Translate a mapping of TRL's names, which are all in the table, to values.

    Args:
        known: our fields in this recipe.
        elsewhere: our fields that are set in our own vocabulary.
        ranks: of this run, where neither a name nor a launcher says so; None if no run is started.
    """
    out = Translation(given, known, trl_defaults(recipe), elsewhere or {}, ranks=ranks)
    for name in _values_last(recipe, given):
        kind, entry = entries(recipe)[name]
        _translate_name(out, name, kind, entry)
    rules = {**_of_recipe(recipe, "rules"), **launch.names()["rules"]}
    for rule, names in rules.items():
        _apply_rule(out, rule, names)
    out.notes += _notes_of_names(recipe, given, rules)
    kept = _without_effect(out)
    if kept:
        out.ignored["nothing to change for these values"] = kept
    return out


def _values_last(recipe: str, given: Mapping[str, Any]) -> list[str]:
    """The given names; names that choose a field's value come last, in the order of the table.

    Several of them may choose the value of one field, and the last wins.
    """
    order = {}
    for position, (name, (kind, _)) in enumerate(entries(recipe).items()):
        if kind == "values":
            order[name] = position
    return sorted(given, key=lambda name: order.get(name, 0))


def _of_recipe(recipe: str, part: str) -> dict[str, Any]:
    """The rules or the notes of the table; those of the recipe replace the ones of all recipes."""
    overlay = table()["recipes"].get(recipe, {})
    return {**table()[part], **overlay.get(part, {})}


def _translate_name(out: Translation, name: str, kind: str, entry: Any) -> None:
    """Translate one name by its entry in the table; the rules take several names together."""
    value = out.given[name]
    if kind == "ignored":
        out.ignored.setdefault(entry, []).append(name)
    elif kind == "refused":
        why, harmless = entry
        is_off = value is None or (harmless is None and not value)
        if not is_off and value not in as_list(harmless):
            out.refuse(name, why)
    elif kind == "renamed" and entry in out.ours:
        out.refuse(name, f"{entry} is given twice, by {out.sources[entry][0]} too")
    elif kind in ("renamed", "values"):
        leaves_field_alone = value is None and name in table()["optional"]
        if not leaves_field_alone:
            out.set([name], _fields(out, name, value, entry))


def _apply_rule(out: Translation, rule: str, names: Collection[str]) -> None:
    """Set the fields that names make together, by a function or by a switch of the table."""
    present = [name for name in names if name in out.given]
    if not present:
        return
    try:
        if isinstance(names, Mapping):
            fields = _switched(out, names)
        elif rule == "sharding":
            fields = launch.sharding(out)
        else:
            fields = vars(trl_rules)[rule](out)
        made_of = [name for name in present if out.given[name] is not None]
        out.set(made_of or present, fields)
    except (TypeError, ValueError) as error:  # a word where a number belongs
        said = ", ".join(f"{name}: {out.given[name]!r}" for name in present)
        out.refused[rule] = f"{said}: {error}"


def _notes_of_names(
    recipe: str, given: Mapping[str, Any], rules: Mapping[str, Collection[str]]
) -> list[str]:
    """The notes of names that are on, and of rules that read one of these."""
    on = {name for name, value in given.items() if value and value != "no"}
    notes = []
    for name, note in _of_recipe(recipe, "notes").items():
        read_together = rules.get(name, ())
        if on & {name, *read_together}:
            notes.append(f"{name}: {note}")
    return notes


def _without_effect(out: Translation) -> list[str]:
    """The given names that made no field, and were neither ignored nor refused."""
    done = set(out.refused)
    done.update(*out.sources.values(), *out.ignored.values())
    return [name for name in out.given if name not in done]


def trl_defaults(recipe: str) -> Fields:
    """TRL's defaults in this recipe, by TRL's names."""
    return {**table()["defaults"]["all"], **table()["defaults"].get(recipe, {})}


def _switched(out: Translation, names: Mapping[str, Any]) -> Fields:
    """The fields of names that are not off; none, if the first switches the others and is off."""
    switch = next(iter(names))
    if switch in table()["switches"] and not out[switch]:
        why = table()["switches"][switch]
        if why:
            out.ignored[why] = [name for name in names if name in out.given]
        return {}
    fields: Fields = {}
    for name, entry in names.items():
        # a mapping chooses a field's value for off, too
        is_on = bool(out[name]) or isinstance(entry, dict)
        if entry and is_on:
            _merge(fields, _fields(out, name, out[name], entry))
        if name in table()["open"] and out.given.get(name) is None:
            out.notes.append(table()["open"][name])
    return fields


def _merge(fields: dict[str, Any], more: Mapping[str, object]) -> None:
    """Add fields; ``field:key`` is one key of a field that is a mapping."""
    for field, value in more.items():
        field, _, key = field.partition(":")
        if key:
            fields[field] = {**fields.get(field, {}), key: value}
        else:
            fields[field] = value


def _fields(out: Translation, name: str, value: Any, entry: Any) -> Fields:
    """The field that an entry of the table names, and its value.

    Args:
        entry: "field", whose value is TRL's; ["field"], whose value is a list of it; or {field:
            name, theirs: ours, ...}, which chooses it.
    """
    if isinstance(entry, list):
        return {entry[0]: value if isinstance(value, list) else [value]}
    if isinstance(value, list) and len(value) == 1:  # a flag that may have several values
        value = value[0]
    if isinstance(entry, str):
        return {entry: value}
    choices = {theirs: ours for theirs, ours in entry.items() if theirs != "field"}
    if isinstance(value, list | dict) or value not in choices:
        complaint = f"{value!r} is none of {', '.join(map(str, choices))}"
        return out.refuse(name, complaint, instead=entry["field"])
    return {} if choices[value] is None else {entry["field"]: choices[value]}


def read(
    recipe: str, config_class: type, arguments: Sequence[str], *, to_run: bool = True
) -> tuple[Fields, list[str], Translation]:
    """Translate configuration files and TRL's flags into our fields.

    Flags win over files. Mistakes are listed in ``refused``.

    Args:
        to_run: false only to show the translation. In a run in which no name is TRL's, all
            arguments remain; and its processes are the ones that were started.

    Returns:
        Our fields; the remaining flags, which are ours; and what is to be said of the translation.
    """
    own = {each.name: each.default for each in dataclasses.fields(config_class)}
    try:
        words = _words(recipe, own, arguments)
    except ValueError as error:
        return {}, list(arguments), Translation({}, own, refused={"config": str(error)})
    if to_run and words.defaults is None and not _has_names_of_trl(recipe, own, words):
        return {}, list(arguments), Translation({}, own)

    unknown = _unknown(recipe, own, words)
    in_file, by_flag = _in_our_names(recipe, words, unknown)
    elsewhere = {**in_file, **flattened(by_flag)}
    given, launch_notes, unreadable = launch.expanded(_in_names_of_trl(recipe, words))
    for name in list(given):  # as names are deleted on the way
        if name not in entries(recipe):  # a key of a launcher's file
            unknown[name] = nearest("accelerate_config: no key", name, entries(recipe))
            del given[name]
    ranks = 1 if to_run else None

    out = translate(recipe, own, given, elsewhere, ranks=ranks)
    out.notes += launch_notes
    out.refused = {**unknown, **out.refused, **unreadable}
    out.refused |= _given_twice(recipe, out, words, in_file, by_flag)
    ours = {**in_file, **_without(out.ours, by_flag)}

    # TRL's defaults, as fields that neither vocabulary gives
    everything = {**trl_defaults(recipe), **given}
    theirs = translate(recipe, own, everything, elsewhere, ranks=ranks).ours
    defaults = _without(theirs, {*ours, *by_flag})
    if words.defaults is None:
        out.differ = _differing(own, defaults)
    else:
        ours = {**defaults, **ours}
    silent = _without(table()["silent"].get(recipe, {}), {*ours, *by_flag})
    out.silent = [f"{name}: {why}" for name, why in silent.items()]
    left = []
    for flag in words.flags:
        if flag.name in by_flag:
            left += flag.tokens
    return _grouped(ours), left, out


@dataclasses.dataclass(frozen=True)
class _Words:
    """What configuration files and flags say, in either vocabulary.

    Attributes:
        file: the keys of all files and their values.
        by_flag: the flags and their values, each flag by its whole name.
        flags: the same flags as they were written, but by their whole names.
        defaults: whose defaults are wanted: trl, or None for burnish's own.
    """

    file: dict[str, object]
    by_flag: dict[str, object]
    flags: list[Flag]
    defaults: object

    @property
    def all(self) -> dict[str, object]:
        """Names and values; flags win over files."""
        return {**self.file, **self.by_flag}


def _words(recipe: str, own: Collection[str], arguments: Sequence[str]) -> _Words:
    """Read flags, and the files that they name.

    Raises:
        ValueError: naming the file that can't be read.
    """
    flags = split_flags(arguments)
    file = read_files(files_of(flags))
    given = {}
    for flag in flags:
        if flag.name != "config":
            given[flag.name] = _value(flag.name, flag.values)
    in_file = file.pop("defaults", None)
    defaults = given.pop("defaults", in_file)
    return _Words(
        file=file,
        by_flag={_whole(recipe, own, name): value for name, value in given.items()},
        flags=[flag._replace(name=_whole(recipe, own, flag.name)) for flag in flags],
        defaults=defaults,
    )


def _foreign(own: Collection[str], words: _Words) -> list[str]:
    """The names that are neither fields of ours, or keys of these, nor the command line's own."""
    ours = {*own, *_OURS}
    return [name for name in words.all if name.rstrip("+").partition(".")[0] not in ours]


def _has_names_of_trl(recipe: str, own: Collection[str], words: _Words) -> bool:
    meant = {_name(recipe, name) for name in _foreign(own, words)}
    return bool(meant - {"", *own})


def _unknown(recipe: str, own: Collection[str], words: _Words) -> dict[str, str]:
    """Complaints about names of neither vocabulary, and about ``defaults`` that are nobody's."""
    unknown = {}
    for name in _foreign(own, words):
        if not _name(recipe, name):
            unknown[name] = nearest("no field", name, {*own, *entries(recipe)})
    if words.defaults not in (None, "trl"):
        wanted = "wanted trl, or nothing for burnish's own"
        unknown["defaults"] = f"defaults: {wanted}, got {words.defaults}"
    return unknown


def _in_our_names(recipe: str, words: _Words, unknown: Collection[str]) -> tuple[Fields, Fields]:
    """Our fields in files, a group's fields by names with a dot; and by flags, as they are given."""
    in_file = {}
    for name, value in words.file.items():
        if not _name(recipe, name) and name not in unknown:
            in_file[name] = value
    by_flag = {name: value for name, value in words.by_flag.items() if not _name(recipe, name)}
    return flattened(in_file), by_flag


def _in_names_of_trl(recipe: str, words: _Words) -> dict[str, object]:
    """The values of TRL's names, each by the name that is in the table."""
    given = {}
    for name, value in words.all.items():
        theirs = _name(recipe, name)
        if theirs:
            given[theirs] = value
    return given


def _given_twice(
    recipe: str,
    out: Translation,
    words: _Words,
    in_file: Collection[str],
    by_flag: Collection[str],
) -> dict[str, str]:
    """Complaints about fields that both vocabularies give in one place.

    A flag may replace a field of a file, whichever names they have.
    """
    flagged = {_name(recipe, name) for name in words.by_flag}
    twice = {}
    for field, sources in out.sources.items():
        same_place = in_file if flagged.isdisjoint(sources) else by_flag
        if _has(same_place, field):
            names = ", ".join(sources)
            twice[field] = f"{field}: given twice, here and as {names}; leave one of them out"
    return twice


def _differing(own: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """A line of the defaults of TRL's that differ from ours; empty if none does."""
    differ = []
    for name, value in theirs.items():
        if own.get(name) != value:
            differ.append(f"{name} {own.get(name)} ({value})")
    if not differ:
        return ""
    return f"defaults that differ (TRL's, which --defaults trl takes): {', '.join(differ)}"


def _without(fields: Mapping[str, object], names: Collection[str]) -> Fields:
    """The fields that are not among some names, by themselves or by their group."""
    return {field: value for field, value in fields.items() if not _has(names, field)}


def _grouped(fields: Mapping[str, object]) -> Fields:
    """Fields of groups, which have a dot, as mappings."""
    merged: dict[str, Any] = {}
    for field, value in fields.items():
        group, _, inner = field.rpartition(".")
        if group:
            merged.setdefault(group, {})[inner] = value
        else:
            merged[inner] = value
    return merged


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of TRL's.

    Attributes:
        flags: of the launcher and the script.
        variables: of the environment, which stand before the launcher.
        notes: what is to be said of the launcher.
    """

    recipe: str
    flags: list[str]
    variables: Sequence[str] = ()
    notes: Sequence[str] = ()


def from_command(words: Sequence[str]) -> Command:
    """Read a command of TRL's, from ``trl dpo`` or the launcher of a script to its last flag."""
    words = [launch.names()["short"].get(word, word) for word in words]
    at = _script(words)
    name = words[at].removesuffix(".py").replace("/", ".").rpartition(".")[2]
    recipe, *flags = table()["scripts"].get(name, name).split(" ")
    first = 0
    while first < at and not words[first].startswith("--"):
        first += 1
    launcher = [(flag.name, flag.values) for flag in split_flags(words[first:at])]
    started, variables, notes = launch.launched(words[:at], launcher)
    return Command(recipe, [*started, *flags, *words[at + 1 :]], variables, notes)


def _script(words: Sequence[str]) -> int:
    """Where the script of a command is: after ``trl``, or the first file or module of Python."""
    if "trl" in words[:-1]:
        return words.index("trl") + 1
    for number, word in enumerate(words):
        if word.endswith(".py") or word.startswith("trl.scripts."):
            return number
    return 0


def to_yaml(ours: Mapping[str, object], left: Sequence[str], out: Translation) -> str:
    """The configuration in our fields, below comments on what has no effect or is refused.

    Args:
        left: our own flags, which become fields, too.
    """
    flags = {}
    for flag in split_flags(left):
        if flag.name not in out.refused:
            flags[flag.name] = _value(flag.name, flag.values)
    fields = flattened(ours) | flattened(flags)
    comments = messages(out)
    comments += [f"refused: {why}" for why in out.refused.values()]
    heading = "".join(f"# {comment}\n" for comment in comments)
    return heading + yaml.safe_dump(_grouped(fields), sort_keys=False)


def messages(out: Translation) -> list[str]:
    """The names that a translation leaves out and the meanings it changes, a line a reason."""
    ignored = [f"no effect here: {', '.join(names)}: {why}" for why, names in out.ignored.items()]
    differ = [out.differ] if out.differ else []
    return [*ignored, *out.notes, *differ, *out.silent]


def headlines(recipe: str, out: Translation) -> list[str]:
    """Three messages to begin a run with: what matters most, and how many more there are."""
    weighty = tuple(f"{name}: " for name in table()["weighty"])
    minor = tuple(f"{name}: " for name in table()["minor"])
    first = [out.differ] if out.differ else []
    first += [each for each in out.silent if each.startswith(weighty)]
    first += [each for each in out.notes if not each.startswith(minor)]
    everything = messages(out)
    if len(first) == len(everything) <= _HEADLINES:
        return first
    shown = first[: _HEADLINES - 1]
    more = len(everything) - len(shown)
    if more:
        prints = f"burnish translate {recipe}, with the same file and flags, prints them"
        shown.append(f"{more} more, of less weight: {prints}")
    return shown


def split_flags(arguments: Sequence[str]) -> list[Flag]:
    """Each flag of a command line; a token before the first flag counts as one."""
    flags: list[Flag] = []
    for token in arguments:
        if token.startswith("--") or not flags:
            name, equals, value = token.removeprefix("--").partition("=")
            flags.append(Flag(name, [value] if equals else [], [token]))
        else:
            flags[-1].values.append(token)
            flags[-1].tokens.append(token)
    return flags


def files_of(flags: Sequence[Flag]) -> list[str]:
    """The files that flags name."""
    return [flag.values[0] for flag in flags if flag.name == "config" and flag.values]


def read_files(paths: Sequence[str]) -> dict[str, object]:
    """The keys of all files, where later ones win.

    Raises:
        ValueError: naming the file, and the line, that can't be read.
    """
    keys: dict[str, object] = {}
    for path in paths:
        try:
            found = _load(Path(path).read_text("utf-8"))
        except yaml.MarkedYAMLError as error:
            line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
            raise ValueError(f"config: {path}{line}: not YAML: {error.problem}") from error
        except (OSError, ValueError, yaml.YAMLError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"config: {path}: {why}") from error
        if not isinstance(found, dict):
            raise ValueError(f"config: {path}: wanted fields and their values, such as beta: 0.1")
        for name, value in found.items():
            keys[str(name)] = value  # YAML's names may be numbers, or true
    return keys


def _name(recipe: str, name: str) -> str:
    """TRL's name that a key or a flag means, or nothing."""
    name = name.replace("-", "_")
    for candidate in (name, name.removeprefix("no_")):
        if candidate in entries(recipe):
            return candidate
    return ""


def _whole(recipe: str, own: Collection[str], flag: str) -> str:
    """The name that a flag begins, as TRL's parser takes it: ``--beta_`` for an only beta_1.

    The flag itself if it is whole, or may begin several names.
    """
    plain = flag.replace("-", "_")
    if not plain or "." in flag or plain in {*own, *_OURS} or _name(recipe, flag):
        return flag
    begun = [name for name in {*own, *_OURS, *entries(recipe)} if name.startswith(plain)]
    if len(begun) != 1:
        return flag
    kind, _ = entries(recipe).get(begun[0], ("refused", None))
    return flag if kind == "refused" else begun[0]


def _value(name: str, values: Sequence[str]) -> object:
    """The value of a flag; a switch such as ``--no_cuda`` has none."""
    if not values:
        return not name.startswith("no_")
    if len(values) == 1:
        return loaded(values[0])
    # TRL's documentation has commas between the values of a list.
    return [loaded(value.removesuffix(",")) for value in values]


def loaded(text: str) -> object:
    """The value of a flag in YAML; a text that is not YAML, such as a template, as it is."""
    try:
        value: object = _load(text)
    except yaml.YAMLError:
        return text
    return value


def flattened(ours: Mapping[str, object]) -> Fields:
    """The fields of groups by their names with a dot: {"lora": {"r": 8}} is {"lora.r": 8}."""
    flat: Fields = {}
    for name, value in ours.items():
        if name in _GROUPS and isinstance(value, Mapping):
            for key, each in value.items():
                flat[f"{name}.{key}"] = each
        else:
            flat[name] = value
    return flat


def _has(names: Collection[str], field: str) -> bool:
    return field in names or ("." in field and field.partition(".")[0] in names)
