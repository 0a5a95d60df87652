"""TRL's argument names in a call from Python: which of ours each of them means."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .trl import entries, translate
from .trl_rules import Translation, table


def complaint(recipe: str, settings: Any, foreign: Mapping[str, object]) -> str:
    """Say what takes the place of TRL's names among arguments; nothing if none of them is TRL's."""
    # arguments of TRL's trainers themselves, such as train_dataset, and what they are here
    words: Mapping[str, str] = table()["python"]
    given = {}
    for name, value in foreign.items():
        if name in entries(recipe) and name not in words:
            given[name] = value
    own = {each.name for each in dataclasses.fields(settings)}
    out = translate(recipe, own, given)
    told = [f"{name} is {words[name]}" for name in foreign if name in words]
    told += [_meaning(name, out) for name in given]
    return f"{recipe}: of TRL's arguments, {'; '.join(told)}" if told else ""


def _meaning(name: str, out: Translation) -> str:
    """``per_device_train_batch_size is batch_size=4``, or why the name is to be left out."""
    if name in out.refused:
        return out.refused[name]
    arguments = []
    for field, sources in out.sources.items():
        if name in sources:
            arguments.append(_as_argument(field, out.ours[field]))
    if arguments:
        return f"{name} is {', '.join(arguments)}"
    for why, names in out.ignored.items():
        if name in names:
            return f"{name} is to be left out ({why})"
    return f"{name} is to be left out (nothing to change for this value)"


def _as_argument(field: str, value: object) -> str:
    """``beta=0.1``, or ``lora={'r': 8}`` for the field lora.r."""
    group, _, inner = field.partition(".")
    return f"{group}={{{inner!r}: {value!r}}}" if inner else f"{field}={value!r}"
