"""Records: rows of named columns, from a file, a saved dataset, the Hub or memory, that know where
they came from.
"""

import csv
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

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

READERS = dict.fromkeys((".json", ".jsonl", ".ndjson"), "json") | dict.fromkeys(
    (".csv", ".tsv"), "csv"
)
READERS |= {".parquet": "parquet", ".arrow": "arrow"}
_DIAGNOSED = 64 << 20  # bytes of a file that are looked at for a mistake
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")

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
        """Name a row for a message: its line in a JSON Lines file, its number elsewhere; both count
        from 1.
        """
        row = row if self.picked is None else int(self.picked[row])
        if self.lines is not None:
            with _open(self.lines) as file:
                numbers = np.fromiter(
                    (number for number, line in enumerate(file, 1) if line.strip()), dtype=np.int64
                )
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
        options = {"split": split, **options, **parse_name(os.fspath(data))}
        options = {key: value for key, value in options.items() if value is not None}
        records = _from_path(source=os.fspath(data), **options)
    elif isinstance(data, list | tuple):
        records = Records(table(data), "records")
    else:
        raise DataError(
            f"load: wanted a path, a Hub name, a Dataset or a list of dicts, got {type(data).__name__}"
        )
    records = replace(records, untyped=records.dataset.info.builder_name == "csv")
    records = replace(records, dataset=_with_images_as_files(records.dataset))
    if isinstance(records.dataset, IterableDataset):
        return records
    if len(records.dataset) == 0:
        raise DataError(f"{records.source}: no rows")
    if records.dataset.format["type"] == "custom":
        raise DataError(
            f"{records.source}: Dataset.with_transform changes rows as they are read; use Dataset.map instead"
        )
    if records.dataset.info.builder_name == "json":
        _warn_of_changed(records)
    return replace(records, dataset=records.dataset.with_format(None))


def _with_images_as_files(dataset: Any) -> Any:
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
    """The parts of ``path:config@revision#split`` that are there, by the names of
    `datasets.load_dataset`.
    """
    if Path(text).exists():
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


def _from_path(path: str, *, source: str, split: str, **options: Any) -> Records:
    file = Path(path)
    reader = _reader(file)
    streamed = {"streaming": True} if options.pop("streaming", False) else {}
    if file.is_dir() and not options:
        folder = file.resolve()  # "." has no name, and `datasets` takes it for none
        return Records(
            _from_directory(folder, split, **streamed),
            folder.name + source.removeprefix(path),
            folder=str(folder),
        )
    if reader is None and file.is_file():
        raise DataError(
            f"{path}: wanted a file that ends in {', '.join(READERS)}, got {file.suffix or 'no ending'}"
        )
    if reader is None or options:
        return Records(_from_hub(path, source, split, **options, **streamed), source)
    if not file.exists() and "*" not in path:
        raise DataError(f"{path}: no such file")
    return _from_file(path, reader, split, **streamed)


def _from_file(path: str, reader: str, split: str, **streamed: Any) -> Records:
    """The rows of a file, or of all files that a pattern matches."""
    file = Path(path)
    options: dict[str, Any] = {}
    if reader in ("json", "csv"):
        # Otherwise the reader lets broken UTF-8 through, and a mark at the start of a file from
        # Windows makes it fail.
        options["encoding"] = "utf-8-sig"
    if reader == "csv":
        options |= _csv_options(_first(file))
    with quiet():
        try:
            dataset = datasets.load_dataset(
                reader, data_files=path, split=split, **options, **streamed
            )
        except Exception as error:  # the readers raise any error of their parsers
            raise DataError(_diagnose(file, reader, error)) from error
    is_one_json_file = reader == "json" and file.exists()
    if is_one_json_file and not streamed and changed_columns(dataset, of_file=True):
        dataset = _with_texts(file, split)
    # of a part of a file we don't know the first line
    has_known_lines = is_one_json_file and split == "train"
    lines = file if has_known_lines else None
    return Records(dataset, file.name, lines, folder=str(file.parent.absolute()))


def _with_texts(file: Path, split: str) -> Dataset:
    """The split, in which texts that were read as times or numbers are text."""
    with quiet():
        every = datasets.load_dataset(
            "json", data_files=str(file), split="train", encoding="utf-8-sig"
        )
    return _split_of(as_written(every, list(rows_of(file)), of_file=True), split, file.name)


def _reader(file: Path) -> str | None:
    if file.suffix in COMPRESSED:
        file = file.with_suffix("")
    return READERS.get(file.suffix)


def _open(file: Path, mode: str = "rb", **options: Any) -> Any:
    return fsspec.open(str(file), mode, compression="infer", **options)


def _from_directory(path: Path, split: str, **streamed: Any) -> Dataset:
    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    try:
        # where a card may say which files are read
        if not saved and not (path / "README.md").exists():
            found = datasets.load_dataset_builder(str(path)).config.data_files or {}
            read = {Path(file).resolve() for files in found.values() for file in files}
            rows = [
                file
                for file in sorted(path.glob("[!._]*"))
                if _reader(file) and file.suffix != ".json"
            ]
            left = [file.name for file in rows if file.resolve() not in read]
            if left:
                fix = f"name the files that are to be read as parts: data: [{path.name}/{left[0]}, ...]"
                raise ValueError(
                    f"{', '.join(left)} would be left out beside {min(read).name}; {fix}"
                )
        dataset = (
            datasets.load_from_disk(str(path))
            if saved
            else _read(str(path), split=split, **streamed)
        )
    except Exception as error:
        raise DataError(f"{path.name}: not a dataset that can be read: {_root(error)}") from error
    return _split_of(dataset, split, path.name) if saved else dataset


def _from_hub(path: str, source: str, split: str, **options: Any) -> Dataset:
    name = options.pop("name", None)
    try:
        return _read(path, name, split=split, **options)
    except Exception as error:
        raise DataError(
            f"{source}: no such file, and not read from the Hub: {_root(error)}; "
            f"wanted a path, or name:config@revision#split of a dataset; the split is '{split}' here"
        ) from error


def _read(*where: str | None, **options: Any) -> Dataset:
    """A dataset of files; the cells of CSV files as text, of which `datasets` would make numbers
    and nulls.
    """
    dataset = datasets.load_dataset(*where, **options)
    if dataset.info.builder_name != "csv":
        return dataset
    # the columns of a stream are unknown
    names = dataset.column_names or list(next(iter(dataset), {}))
    text = Features({name: Value("string") for name in names})
    return datasets.load_dataset(
        *where, **options, features=text, keep_default_na=False, na_values=[""]
    )


def _split_of(dataset: Dataset | DatasetDict | IterableDatasetDict, split: str, source: str) -> Any:
    """A split, or a part such as ``train[:100]``, or several with a + between."""
    splits: Any = DatasetDict({"train": dataset}) if isinstance(dataset, Dataset) else dataset
    if split in splits:
        return splits[split]
    try:
        instruction = datasets.ReadInstruction.from_spec(split)
        parts = instruction.to_absolute({name: len(part) for name, part in splits.items()})
    except (ValueError, AssertionError, TypeError) as error:  # a part of a stream has no length
        raise DataError(
            f"{source}: no split '{split}'; there are {', '.join(map(str, splits))}"
        ) from error
    selected = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return datasets.concatenate_datasets(selected)


def is_text(kind: Any) -> bool:
    """True for the feature of a column of text."""
    return isinstance(kind, Value) and kind.dtype.endswith("string")


def table(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"records row {number}: wanted a dict of columns, got {type(row).__name__}"
            )
    # from_list would keep the columns of the first row only.
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        complete = [{name: _storable(row.get(name)) for name in columns} for row in rows]
        return as_written(
            Dataset.from_list(complete, on_mixed_types="use_json"), complete, of_file=False
        )
    except Exception as error:
        raise DataError(f"records: the rows don't fit into one table: {_root(error)}") from error


def _storable(value: Any) -> Any:
    """A value of a row; the pictures in a conversation as base64, which JSON holds."""
    is_conversation = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    return with_text_for_pictures(value) if is_conversation else value


def _first(file: Path) -> Path:
    """The first of the files that a pattern matches."""
    return min(file.parent.glob(file.name), default=file) if "*" in file.name else file


def _csv_options(path: Path) -> dict[str, Any]:
    """Commas, semicolons or tabs. Every cell is text: as a number, "06" would be 6, and "None"
    would be missing. An empty cell is an empty text in the columns of a prompt or a completion, and
    missing in others.

    Raises:
        DataError: if two columns have one name, or if the first row has more cells than the header.
    """
    with _open(path, "rt", newline="", encoding="utf-8-sig", errors="replace") as file:
        first = file.readline()
        likely = "\t,;" if ".tsv" in path.suffixes else ",;\t"
        separator = next((each for each in likely if each in first), ",")
        file.seek(0)
        rows = csv.reader(file, delimiter=separator)
        header, cells = next(rows, []), next(rows, [])
    repeated = [name for name in header if name and header.count(name) > 1]
    if repeated:
        raise DataError(f"{path.name}: two columns are called {repeated[0]!r}; rename one of them")
    if len(cells) > len(header):  # the reader would take the first cell of each row for its number
        counts = f"row 1 has {len(cells)} cells and the header has {len(header)}"
        raise DataError(
            f"{path.name}: {counts}; quote cells that hold a {separator!r}, or remove it from line ends"
        )
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
    """The mistake in a file that is one JSON list; empty if there is none, or only its beginning
    was read.
    """
    try:
        json.loads(content)
    except ValueError as wrong:
        return f": not JSON: {wrong}" if is_whole else ""
    except RecursionError:
        return ": not JSON of rows: nested too deeply"
    return ""


def _problem_of_lines(content: bytes, is_whole: bool) -> str:
    """The first mistake in a file of JSON lines, with the number of its line; empty if there is
    none.
    """
    lines = content.split(b"\n")
    complete = lines if is_whole else lines[:-1]
    for number, line in enumerate(complete, 1):
        problem = _problem_of_line(line) if line.strip() else None
        if problem:
            return f" line {number}: {problem}; fix or remove the line"
    return ""


def _problem_of_line(line: bytes) -> str | None:
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
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CastError):  # the rows of a file are looked at by chunks
        return f"columns of a later file or row differ: {error.details()}; give all the same, or files of their own"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the log of errors that readers also raise and, for rows in memory, without
    progress bars.
    """
    level, hidden = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not hidden:
            datasets.enable_progress_bars()
