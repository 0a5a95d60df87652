"""From encoded data to the micro-batches of a step, on this rank's device."""

from collections.abc import Mapping, Sequence

import torch
from datasets import Dataset
from torch import Tensor

from ..data import Batches, example
from .batch import Batch, collate


class Feed:
    """``feed(step)`` is this rank's micro-batches of that step; nothing but the step number decides what is in them.

    Args:
        dataset: encoded examples.
        batches: the plan: which examples make up which micro-batch of which rank.
        columns: names of numeric columns of the dataset that travel with the batch, [examples] each.
        per_token: further columns by name, each a list with one tensor [tokens] per example of the dataset.
    """

    def __init__(
        self,
        dataset: Dataset,
        batches: Batches,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        columns: Sequence[str] = (),
        per_token: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        self.dataset = dataset
        self.batches = batches
        self.rank = rank
        self.device = device
        self.columns = columns
        self.per_token = dict(per_token or {})

    @property
    def steps(self) -> int:
        return len(self.batches)

    def __call__(self, step: int) -> list[Batch]:
        return [self.batch(indices) for indices in self.plan(step)]

    def plan(self, step: int) -> list[list[int]]:
        """The indices of the examples of each micro-batch."""
        return self.batches.plan(step)[self.rank]

    def batch(self, indices: Sequence[int]) -> Batch:
        columns = {name: torch.tensor([self.dataset[i][name] for i in indices]) for name in self.columns}
        for name, values in self.per_token.items():
            columns[name] = torch.cat([values[i] for i in indices]) if indices else torch.empty(0)
        return collate([example(self.dataset, i) for i in indices], columns, self.device)
