"""Columns whose texts `datasets` changes where it finds out their types, kept as they are written.

"2024-05-01"                 a time, where every row has one
"06", beside a number        the number 6, where a column has texts and numbers
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value, concatenate_datasets

from .columns import LAYOUT_COLUMNS

# Recipes read these, and say of a row whose value is of another type that it is a bad one.
_CHECKED = LAYOUT_COLUMNS | {"margin", "weight"}


def changed_columns(dataset: Dataset, *, of_file: bool) -> list[str]:
    """The columns whose texts are numbers now or, in the dataset of a JSON file, times; rows in
    memory hold times.
    """
    times = [name for name, kind in dataset.features.items() if of_file and _has_times(kind)]
    free = [name for name in dataset.column_names if name not in _CHECKED]
    return times + [name for name in free if _mixes_scalars(dataset, name)]


def as_written(dataset: Dataset, rows: Sequence[Mapping[str, Any]], *, of_file: bool) -> Dataset:
    """The dataset of these rows, in which the columns above are text as they are written; a number
    among texts, too.
    """
    read_again: dict[str, list[Any]] = {}
    kinds: dict[str, Any] = {}
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
    texts = Dataset.from_dict(read_again, features=Features(kinds))
    others = [name for name in dataset.column_names if name not in kinds]
    parts = [dataset.select_columns(others), texts] if others else [texts]
    return concatenate_datasets(parts, axis=1).select_columns(dataset.column_names)


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON file: of lines, or of one list."""
    with fsspec.open(str(file), "rt", compression="infer", encoding="utf-8-sig") as opened:
        first = opened.readline()
        if first.lstrip().startswith("["):
            yield from json.loads(first + opened.read())
            return
        for line in chain([first], opened):
            if line.strip():
                yield json.loads(line)


def _has_times(kind: Any) -> bool:
    if isinstance(kind, dict):
        return any(map(_has_times, kind.values()))
    if isinstance(kind, List):
        return _has_times(kind.feature)
    return isinstance(kind, Value) and kind.dtype.startswith("timestamp")


def _without_times(kind: Any) -> Any:
    """The feature with text in the place of times."""
    if isinstance(kind, dict):
        return {name: _without_times(inner) for name, inner in kind.items()}
    if isinstance(kind, List):
        return List(_without_times(kind.feature))
    return Value("string") if _has_times(kind) else kind


def _mixes_scalars(dataset: Dataset, name: str) -> bool:
    """True for a column of texts and numbers, which is kept as JSON; one with lists or mappings
    stays JSON.
    """
    if type(dataset.features[name]).__name__ != "Json":
        return False
    stored = dataset.data.column(name)
    return not pc.any(pc.match_substring_regex(stored.cast("string"), r"^\s*[\[{]")).as_py()


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)
