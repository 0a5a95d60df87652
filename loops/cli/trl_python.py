"""TRL's argument names in a call from Python: which of ours each of them means."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .trl import entries, translate
from .trl_rules import Translation, table


def complaint(recipe: str, settings: Any, foreign: Mapping[str, Any]) -> str:
    """Say what takes the place of TRL's names among these arguments; nothing if none of them is
    TRL's.
    """
    words: Mapping[str, str] = table()["python"]
    given = {
        name: value
        for name, value in foreign.items()
        if name in entries(recipe) and name not in words
    }
    own = {each.name for each in dataclasses.fields(settings)}
    out = translate(recipe, own, given)
    told = [f"{name} is {words[name]}" for name in foreign if name in words]
    told += [_meaning(name, out) for name in given]
    return f"{recipe}: of TRL's arguments, {'; '.join(told)}" if told else ""


def _meaning(name: str, out: Translation) -> str:
    if name in out.refused:
        return out.refused[name]
    fields = [
        f"{field}={out.ours[field]!r}" for field, sources in out.sources.items() if name in sources
    ]
    if fields:
        return f"{name} is {', '.join(map(_as_argument, fields))}"
    why = next(
        (why for why, names in out.ignored.items() if name in names),
        "nothing to change for this value",
    )
    return f"{name} is to be left out ({why})"


def _as_argument(setting: str) -> str:
    """``lora={'r': 8}`` for ``lora.r=8``."""
    field, _, value = setting.partition("=")
    group, _, inner = field.partition(".")
    return f"{group}={{{inner!r}: {value}}}" if inner else setting
