"""From encoded data to the micro-batches of a step, on this rank's device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from ...data import Batches, Example, example
from ..batch import Batch, collate


@dataclass
class Feed:
    """``feed(step)`` gives this rank's micro-batches of that step, which depend on nothing but its number.

    Attributes:
        dataset: encoded examples.
        batches: the plan: which examples make up which micro-batch of which rank.
        columns: names of columns of the dataset that travel with the batch: one number per example, or a list of
            them, one per completion or per trained token.
        per_token: further columns by name, each a list with one tensor [tokens, ...] per example of the dataset.
        mark: changes which tokens of an example are trained.
        prepare: ``prepare(feed, step, micro_batches)`` gives the micro-batches to train on: the place to measure
            something over the whole step before its first forward pass.
    """

    dataset: Dataset
    batches: Batches
    rank: int = 0
    device: torch.device | str = "cpu"
    columns: Sequence[str] = ()
    per_token: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    mark: Callable[[Example], Example] = lambda example: example
    prepare: Callable[["Feed", int, list[Batch]], list[Batch]] = lambda feed, step, micro_batches: micro_batches

    @property
    def steps(self) -> int:
        return len(self.batches)

    def __call__(self, step: int) -> list[Batch]:
        return self.prepare(self, step, [self.batch(indices) for indices in self.plan(step)])

    def plan(self, step: int) -> list[list[int]]:
        """The indices of the examples of each micro-batch."""
        return self.batches.plan(step)[self.rank]

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = self.dataset[list(indices or [0])]  # at once: one by one takes as long as a small model's step
        columns = {name: _column(rows[name], indices) for name in self.columns}
        for name, values in self.per_token.items():
            columns[name] = torch.cat([values[i] for i in indices]) if indices else values[0][:0]
        examples = map(Example, rows["prompt"], rows["completions"], rows["trained"]) if indices else ()
        return collate([self.mark(example) for example in examples], columns, self.device)

    def example(self, index: int) -> Example:
        return self.mark(example(self.dataset, index))


def _column(rows: Sequence[Any], indices: Sequence[int]) -> Tensor:
    column = torch.tensor([number for row in rows for number in (row if isinstance(row, list) else [row])])
    return column if indices else column[:0]  # of the dtype that it has elsewhere
