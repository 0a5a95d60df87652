"""Stored samples, written as they come and given back as they were: for debugging offline, and off-policy objectives.

samples.jsonl      one `record` per line
samples.parquet    the same fields as columns, `rewards` and `info` as JSON text
"""

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

import pyarrow
import pyarrow.parquet
from torch import Tensor

from .checks import check_request
from .record import from_record, to_record
from .sample import Request, Sample, check_sample
from .source import SourceError

_AS_TEXT = ("rewards", "info")
_SCHEMA = pyarrow.schema(
    {
        "task": pyarrow.int64(),
        "index": pyarrow.int64(),
        "prompt": pyarrow.list_(pyarrow.int64()),
        "tokens": pyarrow.list_(pyarrow.int64()),
        "trained": pyarrow.list_(pyarrow.bool_()),
        "logprobs": pyarrow.list_(pyarrow.float64()),
        "spans": pyarrow.list_(pyarrow.list_(pyarrow.int64())),
        "finish": pyarrow.string(),
        "text": pyarrow.string(),
        **dict.fromkeys(_AS_TEXT, pyarrow.string()),
    }
)


class _File(Protocol):
    def write(self, records: list[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


class SampleWriter:
    """Appends samples to a file, each call's to disk before it returns; holds none of them.

    Args:
        path: what ends in ``.parquet`` is that, and begun anew, since such a file can't be appended to; anything else
            is JSON lines.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: _File = _Parquet(path) if path.suffix == ".parquet" else _Lines(path)

    def write(self, samples: Iterable[Sample]) -> None:
        self.file.write([to_record(sample) for sample in samples])

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Lines:
    def __init__(self, path: Path) -> None:
        self.file: TextIO = path.open("a")

    def write(self, records: list[dict[str, Any]]) -> None:
        self.file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class _Parquet:
    def __init__(self, path: Path) -> None:
        self.file = pyarrow.parquet.ParquetWriter(path, _SCHEMA)

    def write(self, records: list[dict[str, Any]]) -> None:
        rows = [record | {name: json.dumps(record[name]) for name in _AS_TEXT} for record in records]
        self.file.write_table(pyarrow.Table.from_pylist(rows, schema=_SCHEMA))

    def close(self) -> None:
        self.file.close()


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a file in the order they were written, one at a time. Half a line at the end is left out.

    Raises:
        ValueError: names the sample that is damaged or does not agree with itself.
    """
    for number, record in enumerate(_from_parquet(path) if path.suffix == ".parquet" else _from_lines(path), start=1):
        try:
            sample = from_record(record)
            check_sample(sample)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: sample number {number} can't be read: {error}") from error
        yield sample


def _from_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):  # its writer was killed
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
            yield record


def _from_parquet(path: Path) -> Iterator[dict[str, Any]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            for record in batch.to_pylist():
                yield record | {name: json.loads(record[name]) for name in _AS_TEXT if name in record}


class ReplaySource:
    """Gives back what was stored, by task and index; draws nothing.

    What it gives has the versions and log-probs that it was stored with, whatever version is published: these are
    off-policy samples, and objectives correct for it by them.

    Args:
        samples: such as `read_samples` gives; of two with the same task and index the later one counts, as after a run
            that was resumed.
    """

    overlaps = stored = True

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.samples = {(sample.task, sample.index): sample for sample in samples}
        self._version: int | None = None
        self._closed = False

    async def sample(self, request: Request) -> list[Sample]:
        self._check_open()
        check_request(request)
        return [self._find(request, index) for index in request.indices]

    def _find(self, request: Request, index: int) -> Sample:
        stored = self.samples.get((request.task, index))
        if stored is None:
            tasks = sorted({task for task, _ in self.samples})
            held = f"tasks {tasks[0]} to {tasks[-1]}" if tasks else "nothing"
            raise ValueError(f"replay: answer {index} of task {request.task} is not stored; what is: {held}")
        if list(stored.prompt) != list(request.prompt):
            raise ValueError(
                f"replay: task {request.task} was stored with another prompt: replay the data that it was drawn with"
            )
        if len(stored.tokens) > request.sampling.max_tokens:
            raise ValueError(
                f"replay: answer {index} of task {request.task} has {len(stored.tokens)} tokens; "
                f"set max_tokens >= {len(stored.tokens)}, got {request.sampling.max_tokens}"
            )
        return copy.deepcopy(stored)  # whoever takes it may change it

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._check_open()
        self._version = version

    async def version(self) -> int | None:
        return self._version

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise SourceError("replay: the source is closed; make a new one")
