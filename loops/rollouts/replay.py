"""Stored samples, written, shown and replayed: for debugging offline, and off-policy objectives.

samples.jsonl      one record per line, see `to_record`
samples.parquet    the same fields as columns, `rewards`, `info` and `further` as JSON text
"""

import copy
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyarrow.parquet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..lines import damaged_of, parse, sift
from .arrays import packed
from .sample import Request, Sample, check_request, check_sample, from_record, to_record
from .source import NamedWeights, refuse_closed

log = logging.getLogger(__name__)

# their entries have types of their own, which columns can't
_AS_TEXT = ("rewards", "info", "further")
_SHOWN = 3  # samples printed per rollout
_LONGEST = 300  # characters printed of one


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Append samples to a file of JSON lines, or replace one that ends in ``.parquet``.

    They are on disk when it returns. A Parquet file can't be appended to, and appears only when it
    is complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    records = map(to_record, samples)
    if path.suffix != ".parquet":
        # half a surrogate as \\ud800
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        return
    rows = [record | {name: json.dumps(record[name]) for name in _AS_TEXT} for record in records]
    partial = path.with_suffix(".partial")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
    partial.replace(path)


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of a file in the order they were written.

    An incomplete last line is skipped.

    Raises:
        ValueError: names the sample that is damaged or does not agree with itself.
    """
    records = _from_parquet(path) if path.suffix == ".parquet" else _from_lines(path)
    for number, record in enumerate(records, start=1):
        try:
            if isinstance(record, str):
                record = json.loads(record)
            sample = from_record(record)
            check_sample(sample)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: sample number {number} can't be read: {error}") from error
        yield sample


def _from_lines(path: Path) -> Iterator[Any]:
    """Lines of JSON, which are parsed one by one, so that a damaged one has a number."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):  # or else its writer was killed
                yield line[:-1]


def _from_parquet(path: Path) -> Iterator[Any]:
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):  # never the whole file in memory
            for record in batch.to_pylist():
                for name in _AS_TEXT:
                    if name in record:
                        record[name] = json.loads(record[name])
                yield record


def open_sample_log(
    path: Path | None,
    show_every: int,
    decode: Callable[[list[int]], object] = str,
    log_table: Callable[..., object] = lambda *table: None,
    taken: Callable[[int], bool] | None = None,
) -> Callable[[Sequence[Sample]], None]:
    """Return ``write(samples)``, which appends a rollout to a file, if any, and prints a few of
    every ``show_every``-th, also by ``log_table(name, step, columns, rows)``.

    The first call drops recorded samples that an earlier process of a resumed run drew after its
    last checkpoint. Lines that can't be read are set aside, and counted by a warning.

    Args:
        taken: ``taken(task)`` says whether the run has taken a task, in these samples or before;
            unless given, tasks are taken in their order.
    """
    numbers = count()

    def write(samples: Sequence[Sample]) -> None:
        number = next(numbers)
        if path is not None and number == 0:
            now = {sample.task for sample in samples}
            first = min(now)

            def recorded(task: int) -> bool:
                before = task < first if taken is None else taken(task)
                return before and task not in now

            _take_back(path, recorded)
        if path is not None:
            write_samples(path, samples)
        if show_every and number % show_every == 0:
            show(samples, number)

    def show(samples: Sequence[Sample], number: int) -> None:
        columns = ("task", "end of the prompt", "completion", "rewards")
        rows = []
        table = Table(*columns, title=f"rollout {number}", title_justify="left")
        for sample in samples[:: max(1, len(samples) // _SHOWN)][:_SHOWN]:
            prompt = str(decode(list(sample.prompt)))[-_LONGEST:]
            rewards = _rewards_in_words(sample)
            # Text: rich would take [brackets] in a completion for markup
            table.add_row(str(sample.task), Text(prompt), Text(sample.text[:_LONGEST]), rewards)
            rows.append((str(sample.task), prompt, sample.text, rewards))
        Console().print(table)
        versions = chain.from_iterable(sample.versions for sample in samples)
        version = max(versions, default=0)
        log_table("completions", version, columns, rows)

    return write


def _rewards_in_words(sample: Sample) -> str:
    """math 1, format 0.2, length none"""
    words = []
    for name, score in sample.rewards.items():
        shown = f"{score:.3g}" if isinstance(score, float) else score or "none"
        words.append(f"{name} {shown}")
    return ", ".join(words)


def _take_back(path: Path, recorded: Callable[[int], bool]) -> None:
    """Remove the samples from a file of whose tasks none should be recorded, and set lines that
    can't be read aside.
    """

    def keep(line: bytes) -> bool:
        try:
            sample = from_record(parse(line))
            check_sample(sample)
        except TypeError as error:
            raise ValueError(f"not a sample: {error}") from error
        return recorded(sample.task)

    damaged = sift(path, keep)
    if damaged:
        log.warning(
            "%s: %d of its lines can't be read and are in %s now; the run goes on without them",
            *(path.name, damaged, damaged_of(path).name),
        )


class ReplaySource:
    """A source of stored samples, by task and index; it draws nothing.

    The samples keep their stored versions and log-probs, whatever version is published: they are
    off-policy, and objectives correct for it.

    Args:
        samples: for instance from `read_samples`; of two with the same task and index the later
            counts, as after a resume.
        conversations: they are conversations, which have prompts and contexts of their own, and may
            be longer than was requested.
    """

    overlaps = stored = True

    def __init__(self, samples: Iterable[Sample], *, conversations: bool = False) -> None:
        self.samples = {(sample.task, sample.index): packed(sample) for sample in samples}
        self.conversations = conversations
        self._version: int | None = None
        self._closed = False

    async def sample(self, request: Request) -> list[Sample]:
        refuse_closed(self._closed, "replay")
        check_request(request)
        return [self._find(request, index) for index in request.indices]

    def _find(self, request: Request, index: int) -> Sample:
        stored = self.samples.get((request.task, index))
        if stored is None:
            tasks = sorted({task for task, _ in self.samples})
            held = f"tasks {tasks[0]} to {tasks[-1]}" if tasks else "nothing"
            raise ValueError(
                f"replay: completion {index} of task {request.task} is not stored; what is: {held}"
            )
        if not self.conversations:
            _refuse_another(stored, request)
        return copy.deepcopy(stored)  # the caller may change it

    async def publish(self, weights: NamedWeights, version: int) -> None:
        refuse_closed(self._closed, "replay")
        self._version = version

    async def version(self) -> int | None:
        return self._version

    async def close(self) -> None:
        self._closed = True


def _refuse_another(stored: Sample, request: Request) -> None:
    """Raise ValueError unless it is a completion of the request's prompt, within its limit."""
    if list(stored.prompt) != list(request.prompt):
        raise ValueError(
            f"replay: task {request.task} was stored with another prompt: replay the data that it was drawn with; "
            "if they are conversations, ReplaySource(samples, conversations=True)"
        )
    if stored.further:
        raise ValueError(
            f"replay: completion {stored.index} of task {request.task} is a conversation of several contexts: "
            "ReplaySource(samples, conversations=True)"
        )
    length = len(stored.tokens)
    if length > request.sampling.max_tokens:
        raise ValueError(
            f"replay: completion {stored.index} of task {request.task} has {length} tokens; "
            f"set max_tokens >= {length}, got {request.sampling.max_tokens}"
        )
