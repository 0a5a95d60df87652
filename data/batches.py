"""Which examples each optimizer step takes, and how ranks and micro-batches share them.

The stream of examples is one permutation of the data after another, epoch after epoch:

    stream[p] = permutation(seed, p // n)[p % n]        step k takes stream[k·B : (k+1)·B]

So the batches of a step are a function of its number: the data cursor of a checkpoint is the step,
an epoch's tail continues into the next epoch, nothing is dropped and nothing comes twice. Every
rank works out the same plan from the lengths alone.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc


class Batches:
    """The plan of every step.

    Args:
        lengths: cost of each example in tokens, such as `token_cost` gives.
        batch_size: examples per step, over all ranks and micro-batches.
        micro_tokens: maximum cost of a micro-batch, unless a single example has more; None makes
            one micro-batch per rank.
        seed: of the permutations; with ``shuffle`` false every epoch is in the order of the data.
        epochs, steps: length of training; one of the two. After ``epochs`` the last step takes the
            remaining examples.
        ranks: how many processes share a step.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[np.int64],
        *,
        batch_size: int,
        micro_tokens: int | None,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        steps: int | None = None,
        ranks: int = 1,
    ) -> None:
        self.lengths: npt.NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
        for name, value in {
            "batch_size": batch_size,
            "micro_tokens": micro_tokens,
            "ranks": ranks,
        }.items():
            if value is not None and value < 1:
                raise ValueError(f"Batches: {name} must be >= 1, got {value}")
        if len(self.lengths) == 0:
            raise ValueError("Batches: wanted at least one example, got none")
        if (epochs is None) == (steps is None):
            raise ValueError(
                f"Batches: wanted epochs or steps, one of them; got epochs={epochs}, steps={steps}"
            )
        if seed < 0:
            raise ValueError(f"Batches: seed must be >= 0, got {seed}")
        self.batch_size = batch_size
        self.micro_tokens = micro_tokens
        self.ranks = ranks
        self.end = steps * batch_size if steps is not None else epochs * len(self.lengths)  # type: ignore[operator]
        # A step may lie across two epochs, so two permutations are kept.
        size = len(self.lengths)
        self._order = lru_cache(maxsize=2)(
            lambda e: permutation(size, seed, e) if shuffle else np.arange(size)
        )

    def __len__(self) -> int:
        return -(-self.end // self.batch_size)

    def indices(self, step: int) -> list[int]:
        """The examples of a step, in the order of the stream."""
        if not 0 <= step < len(self):
            raise IndexError(f"Batches: wanted a step in [0, {len(self)}), got {step}")
        size = len(self.lengths)
        start = step * self.batch_size
        stop = min(start + self.batch_size, self.end)
        indices: list[int] = []
        for epoch in range(start // size, -(-stop // size)):
            begin = epoch * size
            indices += self._order(epoch)[max(0, start - begin) : stop - begin].tolist()
        return indices

    def plan(self, step: int) -> list[list[list[int]]]:
        """The micro-batches of each rank, see `balanced`."""
        indices = self.indices(step)
        plan = balanced(self.lengths[indices].tolist(), self.ranks, self.micro_tokens)
        return [[[indices[position] for position in micro] for micro in rank] for rank in plan]


def balanced(cost: Sequence[int], ranks: int, micro_tokens: int | None) -> list[list[list[int]]]:
    """Positions by rank and micro-batch: the same number of micro-batches on every rank, the last
    ones perhaps empty.

    Ranks are balanced by cost, and within a rank its micro-batches, as far as ``micro_tokens``
    allows it; both keep the order of the positions.
    """
    shares = _spread(range(len(cost)), cost, ranks)
    packed = [
        [share] if micro_tokens is None else first_fit(share, cost, micro_tokens)
        for share in shares
    ]
    count = max(1, *map(len, packed))
    plan = []
    for parts in packed:
        even = _spread([position for part in parts for position in part], cost, count)
        if micro_tokens is not None and any(_exceeds(part, cost, micro_tokens) for part in even):
            even = parts + [[] for _ in range(count - len(parts))]
        in_order = map(sorted, even)
        plan.append(sorted(in_order, key=lambda part: part[0] if part else len(cost)))
    return plan


def _exceeds(positions: Sequence[int], cost: Sequence[int], limit: int) -> bool:
    """True if a micro-batch of several examples costs more than it may."""
    return len(positions) > 1 and sum(cost[position] for position in positions) > limit


def first_fit(positions: Sequence[int], cost: Sequence[int], limit: int) -> list[list[int]]:
    """Positions by bin: longest first, each in the first bin where it fits; one above ``limit`` has
    a bin of its own.

    Costs only fall, so a bin with room for one position has room for the next ones until it gets
    another: O(n log n).
    """
    bins: list[list[int]] = []
    room: list[int] = []
    fitting: list[int] = []  # heap of the bins with room for the position at hand
    waiting: list[tuple[int, int]] = []  # heap of (-room, bin) of the others
    # equal ones in their order
    for position in sorted(positions, key=cost.__getitem__, reverse=True):
        size = cost[position]
        while waiting and -waiting[0][0] >= size:
            heapq.heappush(fitting, heapq.heappop(waiting)[1])
        if not fitting:
            fitting.append(len(bins))
            bins.append([])
            room.append(limit)
        first = fitting[0]
        bins[first].append(position)
        room[first] -= size
        if room[first] < size:
            heapq.heappush(waiting, (-room[first], heapq.heappop(fitting)))
    return bins


def token_cost(dataset: datasets.Dataset, *, shared_prompt: bool) -> npt.NDArray[np.int64]:
    """Tokens of each example: its completions, and its prompt once (``shared_prompt``) or once per
    completion.
    """
    costs: list[npt.NDArray[np.int64]] = []
    for table in (
        dataset.select_columns(["prompt", "completions"]).with_format("arrow").iter(batch_size=1000)
    ):
        prompt = table["prompt"].combine_chunks()
        completions = table["completions"].combine_chunks()
        count = pc.list_value_length(completions).to_numpy()
        lengths = pc.list_value_length(pc.list_flatten(completions)).to_numpy()
        total = np.bincount(
            np.repeat(np.arange(len(count)), count), weights=lengths, minlength=len(count)
        )
        copies = 1 if shared_prompt else count
        costs.append((pc.list_value_length(prompt).to_numpy() * copies + total).astype(np.int64))
    return np.concatenate(costs)


def permutation(size: int, *seed: int) -> npt.NDArray[np.int64]:
    """A permutation of ``range(size)``, the same in every version of numpy."""
    # numpy promises that the raw bits of a bit generator stay the same between versions, not that
    # permutation() does.
    bits = np.random.Philox(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(bits, kind="stable")


def _spread(positions: Sequence[int], cost: Sequence[int], bins: int) -> list[list[int]]:
    """Longest first, each to the bin with the least so far: at most 4/3 of the best possible
    largest bin (Graham).
    """
    if bins == 1:
        return [list(positions)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, 0, number) for number in range(bins)]  # of (load, positions, bin)
    # equal ones in their order
    for position in sorted(positions, key=cost.__getitem__, reverse=True):
        load, count, number = heap[0]
        filled[number].append(position)
        heapq.heapreplace(heap, (load + cost[position], count + 1, number))
    return filled
