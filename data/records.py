"""Records: rows of named columns, from a file, a saved dataset, the Hub or memory, that know where they came from."""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from datasets import Dataset, DatasetDict

from .columns import TEXT_COLUMNS

READERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}

Data: TypeAlias = str | os.PathLike[str] | Dataset | DatasetDict | Sequence[Mapping[str, Any]]


class DataError(ValueError):
    """Data that can't be trained on as given: the message names the source, the row and the fix."""


@dataclass(frozen=True)
class Records:
    """Rows and their source.

    Attributes:
        dataset: the rows, memory-mapped where they came from a disk.
        source: what messages call it: a file name, a Hub name, or "records".
        lines: the JSON Lines file whose lines are the rows, if there is one.
    """

    dataset: Dataset
    source: str
    lines: Path | None = None

    def where(self, row: int) -> str:
        """Name a row for a message: its line in a JSON Lines file, its number elsewhere; both count from 1."""
        if self.lines is not None:
            numbers = [number for number, line in enumerate(self.lines.read_bytes().split(b"\n"), 1) if line.strip()]
            if len(numbers) == len(self.dataset):
                return f"{self.source} line {numbers[row]}"
        return f"{self.source} row {row + 1}"


def load(data: Data, *, split: str = "train") -> Records:
    """Read records from wherever they are.

    Args:
        data: a .json, .jsonl, .csv or .parquet file; a directory that `Dataset.save_to_disk` wrote; the name of a
            dataset on the Hub, ``name`` or ``name:config``; or the rows themselves.
        split: of a dataset that has several; ``train[:1000]`` takes a part.

    Raises:
        DataError: if there is no such data, it can't be read, or it holds no rows.
    """
    if isinstance(data, DatasetDict):
        records = Records(_split_of(data, split, "records"), "records")
    elif isinstance(data, Dataset):
        records = Records(data, "records")
    elif isinstance(data, str | os.PathLike):
        records = _from_path(os.fspath(data), split)
    elif isinstance(data, list | tuple):
        records = Records(_from_rows(data), "records")
    else:
        raise DataError(f"load: wanted a path, a Hub name, a Dataset or a list of dicts, got {type(data).__name__}")
    if len(records.dataset) == 0:
        raise DataError(f"{records.source}: no rows")
    if records.dataset.format["type"] == "custom":
        raise DataError(
            f"{records.source}: Dataset.with_transform changes rows as they are read; use Dataset.map instead"
        )
    return replace(records, dataset=records.dataset.with_format(None))


def _from_path(data: str, split: str) -> Records:
    path = Path(data)
    reader = READERS.get(path.suffix)
    if path.is_dir():
        return Records(_from_directory(path, split), path.name)
    if reader is None and path.exists():
        raise DataError(f"{data}: wanted a file that ends in {', '.join(READERS)}, got {path.suffix or 'no ending'}")
    if reader is None:
        return Records(_from_hub(data, split), data)
    if not path.exists():
        raise DataError(f"{data}: no such file")
    # Otherwise the reader lets broken UTF-8 through, and a mark at the start of a file from Windows makes it fail.
    options: dict[str, Any] = {} if reader == "parquet" else {"encoding": "utf-8-sig"}
    if reader == "csv":
        options |= _csv_options(path)
    with _quiet():
        try:
            dataset = datasets.load_dataset(reader, data_files=str(path), split=split, **options)
        except Exception as error:  # the readers raise whatever their parsers do
            raise DataError(_diagnose(path, reader, error)) from error
    # Of a part of a file we don't know the first line.
    return Records(dataset, path.name, path if reader == "json" and split == "train" else None)


def _from_directory(path: Path, split: str) -> Dataset:
    try:
        saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
        dataset = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path), split=split)
    except Exception as error:
        raise DataError(f"{path.name}: not a dataset that can be read: {_root(error)}") from error
    return _split_of(dataset, split, path.name) if isinstance(dataset, DatasetDict) else dataset


def _from_hub(data: str, split: str) -> Dataset:
    name, _, config = data.partition(":")
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except Exception as error:
        raise DataError(
            f"{data}: no such file, and not read from the Hub: {_root(error)}; "
            f"wanted a path, or name or name:config of a dataset with the split '{split}'"
        ) from error


def _split_of(dataset: DatasetDict, split: str, source: str) -> Dataset:
    if split not in dataset:
        raise DataError(f"{source}: no split '{split}'; there are {', '.join(map(str, dataset))}")
    return dataset[split]


def _from_rows(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(f"records row {number}: wanted a dict of columns, got {type(row).__name__}")
    # from_list would keep the columns of the first row only.
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return Dataset.from_list([{name: row.get(name) for name in columns} for row in rows], on_mixed_types="use_json")
    except Exception as error:
        raise DataError(f"records: the rows don't fit into one table: {_root(error)}") from error


def _csv_options(path: Path) -> dict[str, Any]:
    """A completion of "42" or "None" is text; in other columns, an empty cell means that a value is missing."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        header = next(csv.reader(file), [])
    return {
        "converters": {name: str for name in header if name in TEXT_COLUMNS},
        "keep_default_na": False,
        "na_values": {name: [""] for name in header if name not in TEXT_COLUMNS},
    }


def _diagnose(path: Path, reader: str, error: Exception) -> str:
    """Say what is wrong with a file that its reader refused: in JSON, on which line."""
    content = path.read_bytes()
    if not content.strip() or "no data" in _root(error):
        return f"{path.name}: no rows"
    if reader == "json" and content.lstrip()[:1] == b"[":
        try:
            json.loads(content)
        except ValueError as wrong:
            return f"{path.name}: not JSON: {wrong}"
    elif reader == "json":
        for number, line in enumerate(content.split(b"\n"), 1):
            problem = _problem_of_line(line)
            if problem:
                return f"{path.name} line {number}: {problem}; fix or remove the line"
    return f"{path.name}: the {reader} reader failed: {_root(error)}"


def _problem_of_line(line: bytes) -> str | None:
    if not line.strip():
        return None
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at column {error.colno}"
    except UnicodeDecodeError:
        return "not UTF-8 text"
    return None if isinstance(value, dict) else f"wanted a JSON object with named columns, got {type(value).__name__}"


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """The JSON reader logs what it then raises."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
