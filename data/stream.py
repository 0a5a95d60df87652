"""Streamed data: rows are read, drawn and encoded when their step comes.

    draw t of a mixture   part p with a probability in proportion to its weight, by a generator
                          seeded with t // 8192
    its n-th draw         row n of the part, whose rows come in blocks; each block is permuted, by
                          epoch and number
    step k                draws k·B to (k+1)·B, of which bad rows are left out

So a run that was killed reads forward to the step that it resumes from, without encoding anything,
and every rank has the same examples. A part starts over when it ends. Reading is cheap: the rows of
a block are in memory, of all parts together `BLOCK`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from .accounting import Accounting, combine
from .batches import balanced, permutation, token_cost
from .mixture import Named, Part, named_parts
from .records import DataError, Records, quiet, table

BLOCK = 16_384  # rows in memory, of all parts together
CHUNK = 8_192  # draws of one generator: to find a draw takes the draws of its chunk alone

Numbered: TypeAlias = tuple[int, dict[str, object]]  # the number of a row in its part, and the row


class Stream:
    """The examples of one step at a time; `StreamBatches` opens the step.

    Args:
        data: parts, as `load_data` takes them.
        encode: one of the ``encode_*`` functions, with its tokenizer and options.
        batch_size: rows per step.
    """

    def __init__(
        self,
        data: Named,
        encode: Callable[[list[Records]], tuple[Dataset, Accounting]],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.parts = named_parts(data)
        self.encode = encode
        self.batch_size = batch_size
        self.seed = seed
        self.shares = _cumulative_shares(self.parts)
        # a step may lie across two chunks
        self._choices = lru_cache(maxsize=2)(self._draw)
        size = max(1, BLOCK // len(self.parts))
        self.readers = []
        for number, part in enumerate(self.parts):
            order = (seed, number) if shuffle else None
            self.readers.append(_Reader(part, size, order))
        self.drawn = [np.zeros(len(self.parts), dtype=np.int64)]  # of each part, before each chunk
        self.accounts: dict[str, Accounting] = {}  # by source
        self.number = -1  # of the open step
        self.examples = Dataset.from_dict({})

    def __getitem__(self, index: int | str | Sequence[int]) -> Any:
        """An example of the open step, some of them, or a column, as a `Dataset` gives it."""
        return self.examples[index]

    def open(self, step: int) -> Dataset:
        """The examples of a step.

        Raises:
            DataError: at a row that can't be trained on; or if all rows of the step are left out.
        """
        if step != self.number:
            with quiet():
                encoded, accounting = self.encode(self.records(step))
            for part in accounting.parts or [accounting]:
                counted = [part]
                if part.source in self.accounts:
                    counted = [self.accounts[part.source], part]
                self.accounts[part.source] = combine(counted, part.source)
            self.number = step
            self.examples = encoded
        return self.examples

    @property
    def accounting(self) -> Accounting:
        """The account of the rows that this process has read so far."""
        first, *others = self.accounts.values()
        return combine([first, *others]) if others else first

    def records(self, step: int) -> list[Records]:
        """The rows of a step, by their parts."""
        numbers: list[list[int]] = [[] for _ in self.parts]
        for draw in range(step * self.batch_size, (step + 1) * self.batch_size):
            chunk, at = divmod(draw, CHUNK)
            choices = self._choices(chunk)
            while len(self.drawn) <= chunk:  # after a resume, chunks that no step has asked for
                counts = np.bincount(self._choices(len(self.drawn) - 1), minlength=len(self.parts))
                self.drawn.append(self.drawn[-1] + counts)
            part = choices[at]
            before = self.drawn[chunk][part] + np.count_nonzero(choices[:at] == part)
            numbers[part].append(int(before))
        records = []
        for reader, taken in zip(self.readers, numbers, strict=True):
            if taken:
                records.append(reader.records(taken))
        return records

    def _draw(self, chunk: int) -> npt.NDArray[np.int64]:
        """The part of each draw of a chunk."""
        # raw bits, which numpy promises to keep between versions; 2 tells them from `permutation`'s
        bits = np.random.Philox(np.random.SeedSequence([self.seed, chunk, 2])).random_raw(CHUNK)
        parts = np.searchsorted(self.shares, bits / 2.0**64, side="right")
        # the last share may be rounded to a little less than 1
        return np.minimum(parts, len(self.parts) - 1)


def _cumulative_shares(parts: Sequence[Part]) -> npt.NDArray[np.float64]:
    """The share of each part and all before it: weights 1, 1 and 2 are 0.25, 0.5, 1."""
    weights = [part.weight if part.fraction is None else part.fraction for part in parts]
    shares = np.array(weights) / np.sum(weights)
    return np.cumsum(shares)


@dataclass(frozen=True)
class StreamBatches:
    """The plan of each step of a stream, for indices into the step that is open.

    `Batches` is the plan of a dataset.
    """

    stream: Stream
    steps: int
    micro_tokens: int | None
    shared_prompt: bool
    ranks: int = 1

    def __len__(self) -> int:
        return self.steps

    def indices(self, step: int) -> list[int]:
        return list(range(len(self.stream.open(step))))

    def plan(self, step: int) -> list[list[list[int]]]:
        cost = token_cost(self.stream.open(step), shared_prompt=self.shared_prompt)
        return balanced(cost.tolist(), self.ranks, self.micro_tokens)


class _Reader:
    """Rows of one part by their number, which counts on from epoch to epoch."""

    def __init__(self, part: Part, size: int, seed: tuple[int, ...] | None) -> None:
        self.part = part
        self.size = size  # of a block, in rows
        self.seed = seed
        self.stored = part.read(streaming=True)
        self.length: int | None = None  # known once the part has been read to its end
        self.iterator = iter(self.stored.dataset)
        self.position = 0  # of the iterator
        self.at = (-1, -1)  # epoch and number of the block in memory
        self.rows: list[Numbered] = []  # of that block, in the order in which they are taken

    def records(self, numbers: Sequence[int]) -> Records:
        """Rows by their numbers, under the names of columns that the part gives them."""
        picked = [self._row(number) for number in numbers]
        where = np.array([number for number, _ in picked])
        rows = table([row for _, row in picked])
        # lines would be looked up in a whole file, and the rows are known by their numbers
        return self.part.reshaped(replace(self.stored, dataset=rows, lines=None, picked=where))

    def _row(self, number: int) -> Numbered:
        epoch = 0
        within = number
        if self.length is not None:
            epoch, within = divmod(number, self.length)
        block, at = divmod(within, self.size)
        if self.at != (epoch, block):
            self._read(epoch, block)
        if at < len(self.rows):
            return self.rows[at]
        # The block was shorter: the part has ended, its length is known, and this is a later epoch.
        return self._row(number)

    def _read(self, epoch: int, block: int) -> None:
        """Read a block into memory, and take its rows in the order of this epoch."""
        start = block * self.size
        if self.position > start or self.position == self.length:
            self.position = 0
            self.iterator = iter(self.stored.dataset)
        skipped = sum(1 for _ in islice(self.iterator, start - self.position))
        self.position += skipped
        rows = list(enumerate(islice(self.iterator, self.size), start))
        self.position += len(rows)
        if len(rows) < self.size:
            self.length = self.position
        if self.length == 0:
            raise DataError(f"{self.stored.source}: no rows")
        self.at = (epoch, block)
        self.rows = rows
        if self.seed is not None:
            order = permutation(len(rows), *self.seed, epoch, block)
            self.rows = [rows[position] for position in order]
