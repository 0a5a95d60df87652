"""Streamed data: rows are read, drawn and encoded when their step comes, and the step says which
they are.

    draw t of a mixture   part p with a probability in proportion to its weight, by a generator seeded with t // 8192
    its n-th draw         row n of the part, whose rows come in blocks; each block is permuted, by epoch and number
    step k                draws k·B to (k+1)·B, of which bad rows are left out

So a run that was killed reads forward to the step that it resumes from, without encoding anything,
and every rank has the same examples. A part starts over when it ends. Reading is cheap: the rows of
a block are in memory, of all parts together `BLOCK`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from .accounting import Accounting, combine
from .batches import balanced, permutation, token_cost
from .mixture import Part, named_parts
from .records import DataError, Records, quiet, table

BLOCK = 16_384  # rows
CHUNK = 8_192  # draws


class Stream:
    """The examples of one step at a time; `StreamBatches` opens the step.

    Args:
        data: parts, as `load_data` takes them.
        encode: one of the ``encode_*`` functions, with its tokenizer and options.
        batch_size: rows per step.
    """

    def __init__(
        self,
        data: Any,
        encode: Callable[..., tuple[Dataset, Accounting]],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.parts = named_parts(data)
        self.encode, self.batch_size, self.seed = encode, batch_size, seed
        weights = np.array(
            [part.weight if part.fraction is None else part.fraction for part in self.parts]
        )
        self.shares = np.cumsum(weights / weights.sum())
        self._choices = lru_cache(maxsize=2)(self._draw)
        size = max(1, BLOCK // len(self.parts))
        self.readers = [
            _Reader(part, size, (seed, n) if shuffle else None) for n, part in enumerate(self.parts)
        ]
        self.drawn = [np.zeros(len(self.parts), dtype=np.int64)]  # of each part, before each chunk
        self.accounts: dict[str, Accounting] = {}
        self.number, self.examples = -1, Dataset.from_dict({})

    def __getitem__(self, index: Any) -> Any:
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
                counted = [self.accounts[part.source]] if part.source in self.accounts else []
                self.accounts[part.source] = combine([*counted, part], part.source)
            self.number, self.examples = step, encoded
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
            while len(self.drawn) <= chunk:
                counts = np.bincount(self._choices(len(self.drawn) - 1), minlength=len(self.parts))
                self.drawn.append(self.drawn[-1] + counts)
            part = choices[at]
            numbers[part].append(
                int(self.drawn[chunk][part] + np.count_nonzero(choices[:at] == part))
            )
        return [self.readers[part].records(taken) for part, taken in enumerate(numbers) if taken]

    def _draw(self, chunk: int) -> npt.NDArray[np.int64]:
        bits = np.random.Philox(np.random.SeedSequence([self.seed, chunk, 2])).random_raw(CHUNK)
        return np.minimum(
            np.searchsorted(self.shares, bits / 2.0**64, side="right"), len(self.parts) - 1
        )


@dataclass(frozen=True)
class StreamBatches:
    """The plan of each step of a stream, as `Batches` gives that of a dataset, for indices into the
    open step.
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
        self.part, self.size, self.seed = part, size, seed
        self.stored = part.read(streaming=True)
        self.length: int | None = None  # known once the part has been read to its end
        self.position, self.iterator = 0, iter(self.stored.dataset)
        self.at, self.rows = (-1, -1), list[tuple[int, dict[str, Any]]]()

    def records(self, numbers: Sequence[int]) -> Records:
        picked = [self._row(number) for number in numbers]
        rows = np.array([number for number, _ in picked])
        return self.part.reshaped(
            replace(self.stored, dataset=table([row for _, row in picked]), lines=None, picked=rows)
        )

    def _row(self, number: int) -> tuple[int, dict[str, Any]]:
        """The number of a row in the part, and the row."""
        epoch, within = (0, number) if self.length is None else divmod(number, self.length)
        block, at = divmod(within, self.size)
        if self.at != (epoch, block):
            self._read(epoch, block)
        # now that the length is known
        return self.rows[at] if at < len(self.rows) else self._row(number)

    def _read(self, epoch: int, block: int) -> None:
        start = block * self.size
        if self.position > start or self.position == self.length:
            self.position, self.iterator = 0, iter(self.stored.dataset)
        self.position += sum(1 for _ in islice(self.iterator, start - self.position))
        rows = list(enumerate(islice(self.iterator, self.size), start))
        self.position += len(rows)
        if len(rows) < self.size:
            self.length = self.position
        if self.length == 0:
            raise DataError(f"{self.stored.source}: no rows")
        order = (
            range(len(rows))
            if self.seed is None
            else permutation(len(rows), *self.seed, epoch, block)
        )
        self.at, self.rows = (epoch, block), [rows[i] for i in order]
