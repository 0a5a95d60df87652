"""Columns whose texts `datasets` changes when it guesses their types, kept as they are written.

"2024-05-01"                 a time, where every row has one
"06", beside a number        the number 6, where a column has texts and numbers
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import fsspec
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value, concatenate_datasets

from .columns import LAYOUT_COLUMNS

# The feature of a column: a type, a list of one, or a dict of them for a struct.
Feature: TypeAlias = "Value | List | dict[str, Feature] | object"

# Recipes read these, and say of a row whose value is of another type that it is a bad one.
_CHECKED = LAYOUT_COLUMNS | {"margin", "weight"}


def changed_columns(dataset: Dataset, *, of_file: bool) -> list[str]:
    """Name the columns whose texts have become numbers or times.

    Args:
        of_file: the dataset is of a JSON file, which knows no times. Rows in memory may hold some.
    """
    changed = []
    if of_file:
        changed += [name for name, kind in dataset.features.items() if _has_times(kind)]
    for name in dataset.column_names:
        if name not in _CHECKED and _mixes_scalars(dataset, name):
            changed.append(name)
    return changed


def as_written(dataset: Dataset, rows: Sequence[Mapping[str, object]], *, of_file: bool) -> Dataset:
    """Put the texts of ``rows`` back into the columns that were changed.

    A number among texts becomes text, too: a column has one type.
    """
    read_again: dict[str, list[object]] = {}
    kinds: dict[str, Feature] = {}
    for name in changed_columns(dataset, of_file=of_file):
        values = [row.get(name) for row in rows]
        kind = dataset.features[name]
        if _has_times(kind):
            read_again[name] = values
            kinds[name] = _without_times(kind)
        else:
            read_again[name] = [_as_text(value) for value in values]
            kinds[name] = Value("string")
    if not read_again:
        return dataset
    parts = [Dataset.from_dict(read_again, features=Features(kinds))]
    others = [name for name in dataset.column_names if name not in kinds]
    if others:  # a dataset of no columns would have no rows
        parts.append(dataset.select_columns(others))
    return concatenate_datasets(parts, axis=1).select_columns(dataset.column_names)


def rows_of(file: Path) -> Iterator[dict[str, object]]:
    """The rows of a JSON file: of lines, or of one list."""
    with fsspec.open(str(file), "rt", compression="infer", encoding="utf-8-sig") as opened:
        first = opened.readline()
        if first.lstrip().startswith("["):
            yield from json.loads(first + opened.read())
            return
        for line in chain([first], opened):
            if line.strip():
                yield json.loads(line)


def _has_times(kind: Feature) -> bool:
    if isinstance(kind, dict):
        return any(map(_has_times, kind.values()))
    if isinstance(kind, List):
        return _has_times(kind.feature)
    return isinstance(kind, Value) and kind.dtype.startswith("timestamp")


def _without_times(kind: Feature) -> Feature:
    """The feature with text in the place of times."""
    if isinstance(kind, dict):
        return {name: _without_times(inner) for name, inner in kind.items()}
    if isinstance(kind, List):
        return List(_without_times(kind.feature))
    return Value("string") if _has_times(kind) else kind


def _mixes_scalars(dataset: Dataset, name: str) -> bool:
    """True for a column of texts and numbers; `datasets` keeps such a column as JSON.

    One that has lists or mappings stays JSON.
    """
    if type(dataset.features[name]).__name__ != "Json":  # a class of new versions only
        return False
    stored = dataset.data.column(name).cast("string")
    is_structure = pc.match_substring_regex(stored, r"^\s*[\[{]")
    return not pc.any(is_structure).as_py()


def _as_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)
