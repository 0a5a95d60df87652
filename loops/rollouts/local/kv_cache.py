"""Keys and values of the sequences under way, so that every token is read once.

ContinuousBatch    every sequence has a row of one `KVCache`; sequences join and leave between two tokens
StaticBatch        sequences of one prompt at a time, with the cache that the model makes itself, or none: for
                   recurrences and windows, which count what they have seen in ways of their own

A prompt is read once for all of its completions.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils

from ....kernels.backend import autocast_dtype
from .runner import DecodeSequence, ModelRunner

_STEP = 64  # columns that are added at once
_untyped: Any = cache_utils  # its attributes are optional tensors of several kinds of layers
_READ = 8192  # tokens of context that are read at once


class DecodeBatch(Protocol):
    """The sequences under way and what has been read of them; all methods but `admit` want `ModelRunner.inference`."""

    sequences: list[DecodeSequence]

    def admit(self, waiting: Sequence[DecodeSequence]) -> int:
        """Count those at the front that may join now."""
        ...

    def join(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        """Read their prompts; returns the states [sequences, ...] that their first tokens are drawn from."""
        ...

    def read_again(self) -> None:
        """Forget what was read with other weights, and read all but the last token of every sequence."""
        ...

    def step(self) -> Tensor:
        """Read the last token of every sequence; returns the states [sequences, ...] for the next."""
        ...

    def drop_finished(self) -> None: ...


class ContinuousBatch:
    """A row of one batch for every sequence.

    Args:
        fit: how many sequences may be cached at once, by the longest of them; one sequence is always admitted.
        window: the longest sequence that may join.
    """

    def __init__(self, runner: ModelRunner, fit: Callable[[int], int], window: int | None = None) -> None:
        self.runner = runner
        self.fit = fit
        self.window = window
        self.sequences: list[DecodeSequence] = []
        self.cache = KVCache(runner.policy.device)

    def admit(self, waiting: Sequence[DecodeSequence]) -> int:
        longest = max((sequence.max_length for sequence in self.sequences), default=0)
        for count, sequence in enumerate(waiting):
            longest = max(longest, sequence.max_length)
            if self.window is not None and longest > self.window:
                return count
            if len(self.sequences) + count + 1 > self.fit(longest):
                return count if self.sequences else max(count, 1)
        return len(waiting)

    def join(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        self.sequences += sequences
        return self._read([list(sequence.request.prompt) for sequence in sequences])

    def read_again(self) -> None:
        self.cache = KVCache(self.runner.policy.device)
        self._read([[*sequence.request.prompt, *sequence.tokens[:-1]] for sequence in self.sequences])

    def step(self) -> Tensor:
        last = torch.tensor([sequence.tokens[-1] for sequence in self.sequences], device=self.runner.policy.device)
        positions, mask = self.cache.before_step()
        states, _ = self.runner.states(
            input_ids=last[:, None],
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache.after_step()
        return states

    def drop_finished(self) -> None:
        keep = [i for i, sequence in enumerate(self.sequences) if sequence.finish is None]
        if len(keep) < len(self.sequences):
            self.sequences = [self.sequences[i] for i in self.cache.drop(keep)]

    def _read(self, texts: list[list[int]]) -> Tensor:
        """Read the texts; neighbors with the same text share a row until they are stored."""
        self.cache.longest = max(sequence.max_length for sequence in self.sequences)
        shared = [(text, len(list(same))) for text, same in groupby(texts)]
        states = []
        while shared:
            count = max(1, _READ // max(len(text) for text, _ in shared))
            part, shared = shared[:count], shared[count:]
            lengths, copies = [len(text) for text, _ in part], [number for _, number in part]
            ids = self.runner.ids([text for text, _ in part])
            at = torch.tensor(lengths, device=ids.device) - 1
            cache = DynamicCache()
            last, _ = self.runner.states(at, input_ids=ids, past_key_values=cache, use_cache=True)
            self.cache.extend(cache, lengths, copies)
            states.append(last.repeat_interleave(torch.tensor(copies, device=ids.device), dim=0))
        return torch.cat(states)


class StaticBatch:
    """Sequences of one prompt at a time.

    Args:
        fit: how many sequences may be cached at once, by the longest of them; one sequence is always admitted.
        cached: use the model's own cache; otherwise all is read anew for every token.
    """

    def __init__(self, runner: ModelRunner, fit: Callable[[int], int], *, cached: bool) -> None:
        self.runner = runner
        self.fit = fit
        self.cached = cached
        self.sequences: list[DecodeSequence] = []
        self.caches: dict[str, Any] = {}

    def admit(self, waiting: Sequence[DecodeSequence]) -> int:
        if self.sequences:
            return 0
        alike = next(groupby(waiting, key=lambda sequence: list(sequence.request.prompt)))[1]
        return max(1, min(len(list(alike)), self.fit(waiting[0].max_length)))

    def join(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        self.sequences = list(sequences)
        return self._read([list(sequence.request.prompt) for sequence in sequences])

    def read_again(self) -> None:
        if self.cached:
            self._read([[*sequence.request.prompt, *sequence.tokens[:-1]] for sequence in self.sequences])

    def step(self) -> Tensor:
        if not self.cached:
            return self._read([[*sequence.request.prompt, *sequence.tokens] for sequence in self.sequences])
        last = self.runner.ids([sequence.tokens[-1:] for sequence in self.sequences])
        states, self.caches = self.runner.states(input_ids=last, **self.caches, use_cache=True)
        return states

    def drop_finished(self) -> None:
        keep = [i for i, sequence in enumerate(self.sequences) if sequence.finish is None]
        if len(keep) < len(self.sequences):
            self.sequences = [self.sequences[i] for i in keep]
            for cache in self.caches.values() if keep else ():
                cache.reorder_cache(torch.tensor(keep, device=self.runner.policy.device))

    def _read(self, texts: list[list[int]]) -> Tensor:
        states, self.caches = self.runner.states(input_ids=self.runner.ids(texts), use_cache=self.cached)
        return states


def continuous_fit(runner: ModelRunner, cache_bytes: int) -> Callable[[int], int]:
    """The ``fit`` of a `ContinuousBatch`, by the bytes of this model's keys and values."""
    cache, filled = KVCache(runner.policy.device), DynamicCache()
    with runner.inference():
        runner.states(input_ids=runner.ids([[1]]), past_key_values=filled, use_cache=True)
        cache.extend(filled, [1], [1])
    token = cache.bytes_per_token
    return lambda longest: cache_bytes // (token * longest)


def static_fit(runner: ModelRunner, cache_bytes: int, *, cached: bool) -> Callable[[int], int]:
    """The ``fit`` of the model's own cache, which keeps something of every token, one state, or both."""
    if not cached:
        return lambda longest: _READ // longest
    with runner.inference():
        one, two = (
            sum(map(_bytes_of, runner.states(input_ids=runner.ids([[1] * length]), use_cache=True)[1].values()))
            for length in (1, 2)
        )
    return lambda longest: cache_bytes // (one + (two - one) * (longest - 1))


def _bytes_of(cache: Any) -> int:
    values = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [x for value in values for x in (value.values() if isinstance(value, dict) else [value])]
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


class _Layer(_untyped.DynamicLayer):  # type: ignore[misc]
    """One layer: [rows, heads, columns, d], of which the first rows and columns are in use.

    Keys and values are kept as attention multiplies them, which under autocast is in its precision, whatever they come
    in: a rotary embedding of float32 states leaves float32 keys, beside values that a layer has cast.
    """

    def __init__(self, cache: "KVCache", like: Tensor, values_like: Tensor) -> None:
        super().__init__()
        self.cache = cache
        self.is_initialized = True
        self.keys, self.values = (
            x.new_zeros(0, x.shape[1], 0, x.shape[3], dtype=matmul_dtype(x)) for x in (like, values_like)
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per row where the row ends; returns what has been written so far."""
        rows, end, width = self.cache.row, self.cache.length, self.cache.width
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store[rows, :, end] = states[:, :, 0].to(store.dtype)
        return self.keys[: len(rows), :, :width], self.values[: len(rows), :, :width]

    def get_seq_length(self) -> int:
        return self.cache.width - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.width, 0

    def resize(self, rows: int, columns: int) -> None:
        for name, unwritten in (("keys", 0.0), ("values", self.cache.unwritten)):
            old: Tensor = getattr(self, name)
            new = old.new_full((rows, old.shape[1], columns, old.shape[3]), unwritten)
            new[: len(old), :, : old.shape[2]] = old[:rows, :, :columns]
            setattr(self, name, new)


class KVCache(_untyped.Cache):  # type: ignore[misc]
    """A cache whose rows are of different lengths, join at any time, and leave.

    A row's tokens stand in its first columns, at the positions that they have in its text; what lies beyond is masked.

    Attributes:
        length: int64 [rows], tokens that are cached for each row.
        longest: columns beyond which none are added ahead of need.
        unwritten: the values where no token is written; large ones find out a model that reads them anyway.
    """

    layers: list[Any]  # of `_Layer`, once there is something to hold

    def __init__(self, device: torch.device) -> None:
        super().__init__(layers=[])
        self.length = torch.zeros(0, dtype=torch.int64, device=device)
        self.row = self.length
        self.width = 0  # columns that the next step reads
        self.longest = 0
        self.unwritten = 0.0

    def extend(self, filled: Any, lengths: Sequence[int], copies: Sequence[int]) -> None:
        """Append ``copies[i]`` rows, each with the first ``lengths[i]`` columns of row i of another cache."""
        if not self.layers:
            self.layers = [_Layer(self, layer.keys, layer.values) for layer in filled.layers]
        start = len(self.length)
        added = torch.tensor(lengths).repeat_interleave(torch.tensor(copies)).to(self.length.device)
        self.length = torch.cat([self.length, added])
        self.row = torch.arange(len(self.length), device=self.length.device)
        self._reserve(len(self.length), int(self.length.max()) + 1)
        for layer, source in zip(self.layers, filled.layers, strict=True):
            row = start
            for i, (length, count) in enumerate(zip(lengths, copies, strict=True)):
                layer.keys[row : row + count, :, :length] = source.keys[i, :, :length]
                layer.values[row : row + count, :, :length] = source.values[i, :, :length]
                row += count

    def drop(self, keep: Sequence[int]) -> list[int]:
        """Keep only these rows; the last ones move into the gaps. Returns the former row of every row."""
        kept = set(keep)
        order = list(range(len(kept)))
        gaps = [row for row in order if row not in kept]
        moved = [row for row in keep if row >= len(order)]
        for gap, row in zip(gaps, moved, strict=True):
            order[gap] = row
        if gaps:
            for layer in self.layers:
                layer.keys[gaps] = layer.keys[moved]
                layer.values[gaps] = layer.values[moved]
        self.length = self.length[order]
        self.row = self.row[: len(order)]
        if not order:
            self.layers = []
        return order

    def before_step(self) -> tuple[Tensor, Tensor]:
        """Position ids and mask of one more token per row: [rows, 1] and [rows, 1, 1, width]."""
        self.width = int(self.length.max()) + 1
        self._reserve(len(self.length), self.width)
        columns = torch.arange(self.width, device=self.length.device)
        dtype = self.layers[0].keys.dtype
        hidden = columns > self.length[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask.masked_fill_(hidden, torch.finfo(dtype).min)
        return self.length[:, None], mask[:, None, None]

    def after_step(self) -> None:
        self.length = self.length + 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in one row."""
        stores = [store for layer in self.layers for store in (layer.keys, layer.values)]
        return sum(store.shape[1] * store.shape[3] * store.itemsize for store in stores)

    def _reserve(self, rows: int, columns: int) -> None:
        """Make space for these; what earlier rows and columns took beyond them is given back on the occasion."""
        keys = self.layers[0].keys
        if rows > keys.shape[0] or columns > keys.shape[2]:
            columns = max(columns, min(columns + _STEP, self.longest))
            for layer in self.layers:
                layer.resize(rows, columns)


def matmul_dtype(states: Tensor) -> torch.dtype:
    """The precision of products of such states: autocast's where it is on."""
    return autocast_dtype(states) or states.dtype
