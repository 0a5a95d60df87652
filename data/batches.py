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
from itertools import chain

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
        counts = {"batch_size": batch_size, "micro_tokens": micro_tokens, "ranks": ranks}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"Batches: {name} must be >= 1, got {count}")
        if len(self.lengths) == 0:
            raise ValueError("Batches: wanted at least one example, got none")
        if seed < 0:
            raise ValueError(f"Batches: seed must be >= 0, got {seed}")
        self.batch_size = batch_size
        self.micro_tokens = micro_tokens
        self.ranks = ranks
        self.seed = seed
        self.shuffle = shuffle
        # the length of the stream, in examples
        if steps is not None and epochs is None:
            self.end = steps * batch_size
        elif epochs is not None and steps is None:
            self.end = epochs * len(self.lengths)
        else:
            wanted = "wanted epochs or steps, one of them"
            raise ValueError(f"Batches: {wanted}; got epochs={epochs}, steps={steps}")
        # A step may lie across two epochs, so two permutations are kept.
        self._order = lru_cache(maxsize=2)(self._order_of)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """All examples in the order of an epoch."""
        size = len(self.lengths)
        return permutation(size, self.seed, epoch) if self.shuffle else np.arange(size)

    def __len__(self) -> int:
        return -(-self.end // self.batch_size)  # rounded up

    def indices(self, step: int) -> list[int]:
        """The examples of a step, in the order of the stream."""
        if not 0 <= step < len(self):
            raise IndexError(f"Batches: wanted a step in [0, {len(self)}), got {step}")
        size = len(self.lengths)
        start = step * self.batch_size
        stop = min(start + self.batch_size, self.end)
        indices: list[int] = []
        # a step has a part of an epoch, or of two, or of many if the data are fewer than it takes
        for epoch in range(start // size, -(-stop // size)):
            begin = epoch * size
            indices += self._order(epoch)[max(0, start - begin) : stop - begin].tolist()
        return indices

    def plan(self, step: int) -> list[list[list[int]]]:
        """The micro-batches of each rank, see `balanced`."""
        indices = self.indices(step)
        plan = balanced(self.lengths[indices].tolist(), self.ranks, self.micro_tokens)
        return [[_taken(indices, micro) for micro in rank] for rank in plan]


def _taken(indices: Sequence[int], positions: Sequence[int]) -> list[int]:
    return [indices[position] for position in positions]


def balanced(cost: Sequence[int], ranks: int, micro_tokens: int | None) -> list[list[list[int]]]:
    """Positions by rank and micro-batch, the same number of micro-batches on every rank.

    ``balanced([9, 3, 3, 3], 2, 6)`` is ``[[[0], []], [[1, 3], [2]]]``: the last ones may be empty.
    Ranks are balanced by cost, and within a rank its micro-batches, as far as ``micro_tokens``
    allows it; both keep the order of the positions.
    """
    shares = _spread(range(len(cost)), cost, ranks)
    packed = [[share] for share in shares]
    if micro_tokens is not None:
        packed = [first_fit(share, cost, micro_tokens) for share in shares]
    # collectives of the ranks must meet, so each has as many micro-batches as the one with the most
    count = max(1, *map(len, packed))
    plan = []
    for parts in packed:
        # the same examples again, spread evenly over micro-batches; unless one is then too long
        even = _spread(list(chain.from_iterable(parts)), cost, count)
        if micro_tokens is not None and any(_exceeds(part, cost, micro_tokens) for part in even):
            even = parts + [[] for _ in range(count - len(parts))]
        plan.append(_in_order(even))
    return plan


def _in_order(parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Positions in their order, and micro-batches in the order of their first; empty ones last."""
    filled = [sorted(part) for part in parts if part]
    empty: list[list[int]] = [[] for part in parts if not part]
    return sorted(filled) + empty


def _exceeds(positions: Sequence[int], cost: Sequence[int], limit: int) -> bool:
    """True if a micro-batch of several examples costs more than it may."""
    return len(positions) > 1 and sum(_taken(cost, positions)) > limit


def first_fit(positions: Sequence[int], cost: Sequence[int], limit: int) -> list[list[int]]:
    """Positions by bin: longest first, each in the first bin where it fits.

    One above ``limit`` has a bin of its own. Costs only fall, so a bin with room for one position
    has room for the next ones until it gets another: O(n log n).
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
    """Tokens of each example: of its completions, and of its prompt.

    Args:
        shared_prompt: count the prompt once, and not once per completion.
    """
    costs: list[npt.NDArray[np.int64]] = []
    tokens = dataset.select_columns(["prompt", "completions"]).with_format("arrow")
    for table in tokens.iter(batch_size=1000):
        prompt = pc.list_value_length(table["prompt"].combine_chunks()).to_numpy()
        completions = table["completions"].combine_chunks()
        # of two examples with 1 and 2 completions: count [1, 2], lengths [9, 4, 5], owner [0, 1, 1]
        count = pc.list_value_length(completions).to_numpy()
        lengths = pc.list_value_length(pc.list_flatten(completions)).to_numpy()
        owner = np.repeat(np.arange(len(count)), count)
        total = np.bincount(owner, weights=lengths, minlength=len(count))
        copies = 1 if shared_prompt else count
        costs.append((prompt * copies + total).astype(np.int64))
    return np.concatenate(costs)


def permutation(size: int, *seed: int) -> npt.NDArray[np.int64]:
    """A permutation of ``range(size)``, the same in every version of numpy."""
    # numpy promises that the raw bits of a bit generator stay the same between versions, not that
    # permutation() does.
    bits = np.random.Philox(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(bits, kind="stable")


def _spread(positions: Sequence[int], cost: Sequence[int], bins: int) -> list[list[int]]:
    """Put positions into bins, longest first, each into the one with the least so far.

    The largest bin costs at most 4/3 of what is possible (Graham 1969).
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
