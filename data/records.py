"""Records: rows from a file, a saved dataset, the Hub or memory, that know where they came from."""

import csv
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeAlias

import datasets
import fsspec
import numpy as np
import numpy.typing as npt
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, Value
from datasets.table import CastError

from .as_written import as_written, changed_columns, rows_of
from .columns import TEXT_COLUMNS
from .images import undecoded, with_text_for_pictures

log = logging.getLogger(__name__)

# The readers of `datasets`, by the ending of a file.
READERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_DIAGNOSED = 64 << 20  # bytes of a file that are looked at for a mistake

Data: TypeAlias = str | os.PathLike[str] | Dataset | DatasetDict | Sequence[Mapping[str, object]]


class DataError(ValueError):
    """Data that can't be trained on as given: the message names the source, the row and the fix."""


@dataclass(frozen=True)
class Records:
    """Rows and their source.

    Attributes:
        dataset: the rows, memory-mapped where they came from a disk.
        source: what messages call it: a file name, a Hub name, or "records".
        lines: the JSON Lines file whose lines are the rows, if there is one.
        picked: where each row is in the source, if not all of them were taken.
        available: rows of the source.
        untyped: all columns are text, as of a CSV; where numbers are wanted, texts that write them
            are taken.
        system_prompt: first message of its conversations that have no system message of their own;
            "" for none.
        folder: where relative paths of images begin; "" is the working directory.
    """

    dataset: Dataset
    source: str
    lines: Path | None = None
    picked: npt.NDArray[np.int64] | None = None
    available: int | None = None
    untyped: bool = False
    system_prompt: str = ""
    folder: str = ""

    def where(self, row: int) -> str:
        """Name a row for a message: by its line in a file of JSON lines, or else by its number.

        Both count from 1.
        """
        if self.picked is not None:
            row = int(self.picked[row])
        if self.lines is not None:
            # The file is read again: lines may be empty, and only a message asks for their numbers.
            with _open(self.lines) as file:
                filled = (number for number, line in enumerate(file, 1) if line.strip())
                numbers = np.fromiter(filled, dtype=np.int64)
            # else the file is one list, or has changed since
            if len(numbers) == (self.available or len(self.dataset)):
                return f"{self.source} line {numbers[row]}"
        return f"{self.source} row {row + 1}"

    def pick(self, rows: npt.NDArray[np.int64]) -> "Records":
        """Some of the rows, or all in another order, or some several times."""
        picked = rows if self.picked is None else self.picked[rows]
        available = self.available or len(self.dataset)
        return replace(self, dataset=self.dataset.select(rows), picked=picked, available=available)


def load(data: Data | Records, *, split: str = "train", **options: Any) -> Records:
    """Read records from files, the Hub or memory.

    Args:
        data: a .json, .jsonl, .csv, .tsv, .parquet or .arrow file, or one in .gz, .zst, .xz or
            .bz2; several of one kind, as in ``rows-*.jsonl``; a directory that
            `Dataset.save_to_disk` wrote, or one of such files; the name of a dataset on the Hub; or
            the rows themselves. Text may name more than the path: ``path:config@revision#split``,
            where each of the three may be left out. Cells of a CSV are text.
        split: of a dataset that has several; ``train[:1000]`` takes a part.
        options: others of `datasets.load_dataset`: name (of the configuration), revision,
            data_files, data_dir; streaming gives an IterableDataset.

    Raises:
        DataError: if there is no such data, it can't be read, or it holds no rows.
    """
    if isinstance(data, Records):
        return data
    if isinstance(data, IterableDataset):
        records = Records(data, "records")
    elif isinstance(data, Dataset | DatasetDict | IterableDatasetDict):
        records = Records(_split_of(data, split, "records"), "records")
    elif isinstance(data, str | os.PathLike):
        named = {"split": split, **options, **parse_name(os.fspath(data))}
        given = {key: value for key, value in named.items() if value is not None}
        records = _from_path(source=os.fspath(data), **given)
    elif isinstance(data, list | tuple):
        records = Records(table(data), "records")
    else:
        wanted = "wanted a path, a Hub name, a Dataset or a list of dicts"
        raise DataError(f"load: {wanted}, got {type(data).__name__}")
    reader = records.dataset.info.builder_name
    records = replace(
        records, untyped=reader == "csv", dataset=_with_images_as_files(records.dataset)
    )
    if isinstance(records.dataset, IterableDataset):
        return records
    if len(records.dataset) == 0:
        raise DataError(f"{records.source}: no rows")
    if records.dataset.format["type"] == "custom":
        problem = "Dataset.with_transform changes rows as they are read"
        raise DataError(f"{records.source}: {problem}; use Dataset.map instead")
    if reader == "json":
        _warn_of_changed(records)
    # rows as Python's objects, whatever the caller's Dataset was formatted as (torch, numpy)
    return replace(records, dataset=records.dataset.with_format(None))


def _with_images_as_files(
    dataset: Dataset | IterableDataset,
) -> Dataset | IterableDataset:
    """The dataset, or the stream, whose images are not decoded when rows are read."""
    features = dataset.features
    if features is None or undecoded(features) == features:
        return dataset
    with quiet():
        for name, kind in undecoded(features).items():
            if kind != features[name]:
                dataset = dataset.cast_column(name, kind)
    return dataset


def _warn_of_changed(records: Records) -> None:
    """Say which columns of JSON hold texts that `datasets` reads as times or numbers."""
    changed = changed_columns(records.dataset, of_file=True)
    if changed:
        log.warning(
            "%s: texts of %s are read as times or numbers, and are so for rewards; "
            "name each file as a part to have them as text",
            records.source,
            ", ".join(changed),
        )


def parse_name(text: str) -> dict[str, str]:
    """Take ``path:config@revision#split`` apart, by the names of `datasets.load_dataset`.

    "openai/gsm8k:main#test" is {path: openai/gsm8k, name: main, split: test}.
    """
    if Path(text).exists():  # a file whose name has such characters
        return {"path": text}
    path, _, split = text.partition("#")
    if split:
        return {**parse_name(path), "split": split}
    if _reader(Path(path)) or Path(path).exists():
        return {"path": path}
    match = re.fullmatch(r"(?P<path>[^:@]*)(:(?P<name>[^@]+))?(@(?P<revision>.+))?", path)
    if match is None:
        return {"path": path}
    return {key: value for key, value in match.groupdict().items() if value}


def _from_path(
    path: str, *, source: str, split: str, streaming: bool = False, **options: Any
) -> Records:
    """Read a directory, a file, or a dataset of the Hub, whichever a path is.

    Args:
        source: the path and what was named with it.
        options: others of `datasets.load_dataset`, which name a dataset of the Hub.
    """
    file = Path(path)
    reader = _reader(file)
    if file.is_dir() and not options:
        folder = file.resolve()  # "." has no name, and `datasets` takes it for none
        dataset = _from_directory(folder, split, streaming)
        name = folder.name + source.removeprefix(path)
        return Records(dataset, name, folder=str(folder))
    if reader is None and file.is_file():
        wanted = f"wanted a file that ends in {', '.join(READERS)}"
        raise DataError(f"{path}: {wanted}, got {file.suffix or 'no ending'}")
    if reader is None or options:
        return Records(_from_hub(path, source, split, streaming=streaming, **options), source)
    if not file.exists() and "*" not in path:
        raise DataError(f"{path}: no such file")
    return _from_file(path, reader, split, streaming)


def _from_file(path: str, reader: str, split: str, streaming: bool) -> Records:
    """The rows of a file, or of all files that a pattern matches."""
    file = Path(path)
    options: dict[str, Any] = {}  # of the reader
    if reader in ("json", "csv"):
        # Otherwise the reader lets broken UTF-8 through, and a mark at the start of a file from
        # Windows makes it fail.
        options["encoding"] = "utf-8-sig"
    if reader == "csv":
        options |= _csv_options(_first(file))
    with quiet():
        try:
            dataset = datasets.load_dataset(
                reader, data_files=path, split=split, streaming=streaming, **options
            )
        except Exception as error:  # the readers raise any error of their parsers
            raise DataError(_diagnose(file, reader, error)) from error
    is_one_json_file = reader == "json" and file.exists()
    if is_one_json_file and not streaming and changed_columns(dataset, of_file=True):
        dataset = _with_texts(file, split)
    lines = None
    # of a part of a file, such as train[100:], we don't know the first line
    if is_one_json_file and split == "train":
        lines = file
    return Records(dataset, file.name, lines, folder=str(file.parent.absolute()))


def _with_texts(file: Path, split: str) -> Dataset:
    """The split, in which texts that were read as times or numbers are text."""
    with quiet():
        every = datasets.load_dataset(
            "json", data_files=str(file), split="train", encoding="utf-8-sig"
        )
    written = as_written(every, list(rows_of(file)), of_file=True)
    return _split_of(written, split, file.name)


def _reader(file: Path) -> str | None:
    """The reader of a file by its ending, behind which it may have a compression's: rows.csv.gz."""
    if file.suffix in COMPRESSED:
        file = file.with_suffix("")
    return READERS.get(file.suffix)


def _open(file: Path) -> IO[bytes]:
    """A file's content, decompressed by its ending."""
    opened: IO[bytes] = fsspec.open(str(file), "rb", compression="infer")
    return opened


def _from_directory(path: Path, split: str, streaming: bool) -> Dataset:
    """A dataset that `save_to_disk` wrote, or the files in a directory."""
    is_saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    has_card = (path / "README.md").exists()  # which may say which files are read
    try:
        if is_saved:
            dataset = datasets.load_from_disk(str(path))
        else:
            if not has_card:
                _refuse_unread_files(path)
            dataset = _read(str(path), None, split=split, streaming=streaming)
    except Exception as error:
        raise DataError(f"{path.name}: not a dataset that can be read: {_root(error)}") from error
    return _split_of(dataset, split, path.name) if is_saved else dataset


def _refuse_unread_files(path: Path) -> None:
    """Refuse a directory of which `datasets` would read some files only: it takes one format.

    Raises:
        ValueError: names them.
    """
    found = datasets.load_dataset_builder(str(path)).config.data_files or {}
    read = set()
    for files in found.values():
        for file in files:
            read.add(Path(file).resolve())
    left = []
    for file in sorted(path.glob("[!._]*")):
        # a .json beside rows is often settings
        if _reader(file) and file.suffix != ".json" and file.resolve() not in read:
            left.append(file.name)
    if left:
        fix = f"name the files that are to be read as parts: data: [{path.name}/{left[0]}, ...]"
        raise ValueError(f"{', '.join(left)} would be left out beside {min(read).name}; {fix}")


def _from_hub(path: str, source: str, split: str, *, streaming: bool, **options: Any) -> Dataset:
    name = options.pop("name", None)
    try:
        return _read(path, name, split=split, streaming=streaming, **options)
    except Exception as error:  # of the network, of the Hub, of a reader
        problem = f"{source}: no such file, and not read from the Hub: {_root(error)}"
        wanted = "wanted a path, or name:config@revision#split of a dataset"
        raise DataError(f"{problem}; {wanted}; the split is '{split}' here") from error


def _read(path: str, name: str | None, **options: Any) -> Dataset:
    """A dataset of files; the cells of CSV files are text.

    `datasets` would make numbers and nulls of some: of "06" and of "None".
    """
    dataset = datasets.load_dataset(path, name, **options)
    if dataset.info.builder_name != "csv":
        return dataset
    # the columns of a stream are unknown before its first row
    names = dataset.column_names or list(next(iter(dataset), {}))
    text = Features({name: Value("string") for name in names})
    return datasets.load_dataset(
        path, name, **options, features=text, keep_default_na=False, na_values=[""]
    )


def _split_of(
    dataset: Dataset | DatasetDict | IterableDatasetDict, split: str, source: str
) -> Dataset | IterableDataset:
    """A split, or a part such as ``train[:100]``, or several with a + between."""
    splits = DatasetDict({"train": dataset}) if isinstance(dataset, Dataset) else dataset
    if split in splits:
        return splits[split]
    try:
        sizes = {name: len(part) for name, part in splits.items()}
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError, TypeError) as error:  # a part of a stream has no length
        there = ", ".join(map(str, splits))
        raise DataError(f"{source}: no split '{split}'; there are {there}") from error
    selected = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return datasets.concatenate_datasets(selected)


def is_text(kind: object) -> bool:
    """True for the feature of a column of text."""
    return isinstance(kind, Value) and kind.dtype.endswith("string")


def table(rows: Sequence[Mapping[str, object]]) -> Dataset:
    """Rows in memory as a dataset; a column that a row lacks is None there."""
    # from_list would keep the columns of the first row only; a dict keeps their order.
    names: dict[str, None] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            wanted = f"wanted a dict of columns, got {type(row).__name__}"
            raise DataError(f"records row {number}: {wanted}")
        names |= dict.fromkeys(row)
    try:
        complete = [{name: _storable(row.get(name)) for name in names} for row in rows]
        dataset = Dataset.from_list(complete, on_mixed_types="use_json")
        return as_written(dataset, complete, of_file=False)
    except Exception as error:
        raise DataError(f"records: the rows don't fit into one table: {_root(error)}") from error


def _storable(value: object) -> object:
    """A value of a row; the pictures in a conversation as base64, which JSON holds."""
    is_conversation = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    return with_text_for_pictures(value) if is_conversation else value


def _first(file: Path) -> Path:
    """The first of the files that a pattern matches."""
    if "*" not in file.name:
        return file
    return min(file.parent.glob(file.name), default=file)


def _csv_options(path: Path) -> dict[str, object]:
    """Options of the CSV reader: commas, semicolons or tabs, and every cell as text.

    As a number, "06" would be 6, and "None" would be missing. An empty cell is an empty text in the
    columns of a prompt or a completion, and missing in others.

    Raises:
        DataError: if two columns have one name, or if the first row has more cells than the header.
    """
    with fsspec.open(
        str(path), "rt", compression="infer", newline="", encoding="utf-8-sig", errors="replace"
    ) as file:
        first = file.readline()
        likely = "\t,;" if ".tsv" in path.suffixes else ",;\t"
        separators = [each for each in likely if each in first]
        separator = separators[0] if separators else ","
        file.seek(0)  # a header may have line breaks in quotes
        rows = csv.reader(file, delimiter=separator)
        header: list[str] = next(rows, [])
        cells: list[str] = next(rows, [])
    repeated = [name for name in header if name and header.count(name) > 1]
    if repeated:
        raise DataError(f"{path.name}: two columns are called {repeated[0]!r}; rename one of them")
    if len(cells) > len(header):  # the reader would take the first cell of each row for its number
        counts = f"row 1 has {len(cells)} cells and the header has {len(header)}"
        fix = f"quote cells that hold a {separator!r}, or remove it from line ends"
        raise DataError(f"{path.name}: {counts}; {fix}")
    # as the reader calls them
    names = [name or f"Unnamed: {number}" for number, name in enumerate(header)]
    return {
        "sep": separator,
        "features": Features({name: Value("string") for name in names}),
        "keep_default_na": False,
        "na_values": {name: [""] for name in names if name not in TEXT_COLUMNS},
    }


def _diagnose(path: Path, reader: str, error: Exception) -> str:
    """Describe the mistake in a file that its reader refused; for JSON, with its line."""
    if "zstd not supported" in _root(error):
        return f"{path.name}: it takes the package zstandard to read; install that"
    try:
        with _open(path) as file:  # a few compressed kilobytes may be gigabytes
            content = file.read(_DIAGNOSED)
            is_whole = not file.read(1)
    except (OSError, EOFError) as broken:
        return f"{path.name}: can't be read: {broken}"
    if not content.strip() or "no data" in _root(error):
        return f"{path.name}: no rows"
    problem = ""
    if reader == "json" and content.lstrip()[:1] == b"[":
        problem = _problem_of_list(content, is_whole)
    elif reader == "json":
        problem = _problem_of_lines(content, is_whole)
    if problem:
        return f"{path.name}{problem}"
    cache_advice = "; set HF_HOME to a directory with room that can be written"
    fix = cache_advice if "[Errno" in _root(error) else ""
    return f"{path.name}: the {reader} reader failed: {_root(error)}{fix}"


def _problem_of_list(content: bytes, is_whole: bool) -> str:
    """The mistake in a file that is one JSON list; empty if there is none, or it was read in part."""
    try:
        json.loads(content)
    except ValueError as wrong:
        return f": not JSON: {wrong}" if is_whole else ""
    except RecursionError:
        return ": not JSON of rows: nested too deeply"
    return ""


def _problem_of_lines(content: bytes, is_whole: bool) -> str:
    """The first mistake in a file of JSON lines, with its line's number; empty if there is none."""
    lines = content.split(b"\n")
    complete = lines if is_whole else lines[:-1]
    for number, line in enumerate(complete, 1):
        problem = _problem_of_line(line) if line.strip() else None
        if problem:
            return f" line {number}: {problem}; fix or remove the line"
    return ""


def _problem_of_line(line: bytes) -> str | None:
    """Say why a line is no row."""
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # half a pair of surrogates is no text
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    except RecursionError:
        return "not JSON of a row: nested too deeply"
    except UnicodeError:
        return "not UTF-8 text"
    if isinstance(value, dict):
        return None
    return f"wanted a JSON object with named columns, got {type(value).__name__}"


def _root(error: BaseException) -> str:
    """The first line of the error that others were raised from: `datasets` wraps most of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CastError):  # the rows of a file are looked at by chunks
        return f"columns of a later file or row differ: {error.details()}; give all the same, or files of their own"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Context without progress bars, and without the log of errors that readers also raise."""
    level = datasets.logging.get_verbosity()
    hidden = datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not hidden:
            datasets.enable_progress_bars()
