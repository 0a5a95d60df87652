"""Batches of unfinished sequences, and their keys and values, so that every token is read once.

RowCache           every sequence has a row of the cache; what the next two have in common
ContinuousBatch    sequences join and leave between two tokens
GraphBatch         the same in tensors of fixed shapes: see `graph_batch`
StaticBatch        sequences of one prompt at a time, with the cache that the model makes itself, or none: for
                   recurrent and sliding-window models, whose caches track positions themselves

    admit           count the sequences that may join now
    join            read all but the last token of these, or their prompts
    step            read the last token of every sequence
    drop_finished   sequences that are finished leave

`join` and `step` return the states [sequences, ...] that the next tokens are drawn from; all but
`admit` want `ModelRunner.inference`. A prompt is read once for all of its completions.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from ....data.images import ImageRef
from ....kernels.backend import autocast_dtype
from .decode import DecodeSequence, ModelRunner

_STEP = 64  # columns added at once
READ = 8192  # tokens of context read at once


class ReadOnce(NamedTuple):
    """A text that is read once.

    Attributes:
        ids: token ids.
        images: that it shows.
        rows: how many sequences begin with it.
    """

    ids: list[int]
    images: tuple[ImageRef, ...]
    rows: int


class RowCache(Cache):
    """A row of one batch for every sequence, and the cache of `transformers` that holds their keys
    and values.

    A row's tokens fill its first columns, at their positions in the text; later columns are masked.
    Keys and values are kept as attention multiplies them, which under autocast is in its precision,
    whatever they come in: a rotary embedding of float32 states leaves float32 keys, beside values
    that a layer has cast.

    Args:
        fit: how many sequences may be cached at once, by the longest of them; one sequence is
            always admitted.
        window: the longest sequence that may join.
        unwritten: the values where no token is written; large ones find out a model that reads them
            anyway.

    Attributes:
        stores: keys and values of the first layer, of the second, ..., each [rows, heads, columns,
            d], of which the first rows and columns are in use; none while there is nothing to hold.
        length: int64 [rows], tokens that are cached for each row.
        beyond: int64 [rows], how far a row's next position is beyond its length, see
            `ModelRunner.inputs`.
        row: int64 [rows], its number.
        longest: columns beyond which none are added ahead of need.
    """

    def __init__(
        self,
        runner: ModelRunner,
        fit: Callable[[int], int],
        window: float = math.inf,
        *,
        unwritten: float = 0.0,
    ) -> None:
        super().__init__(layers=[])
        self.runner = runner
        self.fit = fit
        self.window = window
        self.unwritten = unwritten
        self.sequences: list[DecodeSequence] = []
        self.stores: list[Tensor] = []
        self.length = torch.zeros(0, dtype=torch.int64, device=runner.policy.device)
        self.beyond = self.length
        self.row = self.length
        self.width = 0  # columns that the next step reads
        self.longest = 0

    def admit(self, waiting: Sequence[DecodeSequence]) -> int:
        longest = max((sequence.max_length for sequence in self.sequences), default=0)
        for count, sequence in enumerate(waiting):
            longest = max(longest, sequence.max_length)
            if longest > self.window:
                return count
            if len(self.sequences) + count + 1 > self.fit(longest):
                return count if self.sequences else max(count, 1)
        return len(waiting)

    def join(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        """Read texts that neighbors share once, as many at a time as fit `READ`, and store a row
        for each sequence.
        """
        self.sequences += sequences
        self.longest = max(sequence.max_length for sequence in self.sequences)
        unread = []
        for _, group in groupby(sequences, key=_read_first):
            same = list(group)
            unread.append(ReadOnce(_text_of(same[0]), same[0].request.images, len(same)))
        states = []
        while unread:
            most = max(1, READ // max(len(text.ids) for text in unread))
            states.append(self._read(unread[:most]))
            unread = unread[most:]
        return torch.cat(states)

    def _read(self, texts: Sequence[ReadOnce]) -> Tensor:
        """Read texts and their images, and store their keys and values.

        Returns the last states of the rows.
        """
        inputs, beyond = self.runner.inputs(
            [text.ids for text in texts], [text.images for text in texts]
        )
        lengths = [len(text.ids) for text in texts]
        rows = [text.rows for text in texts]
        # in one tensor: a GPU is waited for once
        length, copies, past = torch.tensor([lengths, rows, beyond], device=self.length.device)
        cache = DynamicCache()
        last, _ = self.runner.states(length - 1, cache=cache, use_cache=True, **inputs)
        new = _keys_and_values(cache)
        if not self.stores:
            self.stores = [self._empty_store(each) for each in new]
        first_row = self._add_rows(
            texts, length.repeat_interleave(copies), past.repeat_interleave(copies)
        )
        row = first_row
        for i, text in enumerate(texts):
            columns = len(text.ids)
            for store, read in zip(self.stores, new, strict=True):
                store[row : row + text.rows, :, :columns] = read[i, :, :columns]
            row += text.rows
        return last.repeat_interleave(copies, dim=0)

    def _add_rows(self, texts: Sequence[ReadOnce], length: Tensor, beyond: Tensor) -> int:
        """Make space for the rows of these texts, with their lengths [rows] and how far positions
        are beyond them; returns the number of the first.
        """
        raise NotImplementedError

    def _empty_store(self, like: Tensor) -> Tensor:
        """[0, heads, 0, d], for keys or values such as these [texts, heads, columns, d]."""
        dtype = autocast_dtype(like) or like.dtype
        return self.length.new_zeros(0, like.shape[1], 0, like.shape[3], dtype=dtype)

    def _states(self, last: Tensor) -> Tensor:
        """Read the last token [rows, 1] of every row; returns the states that follow it."""
        # Rows end at different columns; 0 where a row has a token, the lowest number beyond it.
        hidden = torch.arange(self.width, device=self.length.device) > self.length[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.stores[0].dtype, device=hidden.device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        states, _ = self.runner.states(
            cache=self,
            input_ids=last,
            position_ids=self.runner.position_ids((self.length + self.beyond)[:, None]),
            attention_mask=mask[:, None, None],
            use_cache=True,
        )
        return states

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write one token per row where the row ends; returns what has been written so far."""
        # transformers calls this in every layer, in place of its own cache's method.
        keys = self.stores[2 * layer_idx]
        values = self.stores[2 * layer_idx + 1]
        keys[self.row, :, self.length] = key_states[:, :, 0].to(keys.dtype)
        values[self.row, :, self.length] = value_states[:, :, 0].to(values.dtype)
        rows = len(self.row)
        return keys[:rows, :, : self.width], values[:rows, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.width, 0


class ContinuousBatch(RowCache):
    """Rows and columns are those of the sequences, and grow with them."""

    def _add_rows(self, texts: Sequence[ReadOnce], length: Tensor, beyond: Tensor) -> int:
        first = len(self.length)
        self.length = torch.cat([self.length, length])
        self.beyond = torch.cat([self.beyond, beyond])
        self.row = torch.arange(len(self.length), device=self.length.device)
        self._reserve(int(self.length.max()) + 1)
        return first

    def step(self) -> Tensor:
        last = torch.tensor(
            [sequence.tokens[-1] for sequence in self.sequences], device=self.length.device
        )[:, None]
        self.width = int(self.length.max()) + 1
        self._reserve(self.width)
        states = self._states(last)
        self.length = self.length + 1
        return states

    def drop_finished(self) -> None:
        kept = [row for row, sequence in enumerate(self.sequences) if sequence.finish is None]
        if len(kept) == len(self.sequences):
            return
        order, gaps, moved = filled_gaps(kept)
        if gaps:
            for store in self.stores:
                store[gaps] = store[moved]
        self.sequences = [self.sequences[row] for row in order]
        self.length = self.length[order]
        self.beyond = self.beyond[order]
        self.row = self.row[: len(order)]
        if not order:
            self.stores = []

    def _reserve(self, columns: int) -> None:
        """Make space for these, and free what earlier rows and columns took beyond them."""
        rows = len(self.length)
        if rows <= self.stores[0].shape[0] and columns <= self.stores[0].shape[2]:
            return
        columns = max(columns, min(columns + _STEP, self.longest))
        for i, old in enumerate(self.stores):  # one after the other, so that only one is held twice
            # of values; a large key is masked, and could overflow
            filler = self.unwritten if i % 2 else 0.0
            new = old.new_full((rows, old.shape[1], columns, old.shape[3]), filler)
            new[: len(old), :, : old.shape[2]] = old[:rows, :, :columns]
            self.stores[i] = new


class StaticBatch:
    """Sequences of one prompt at a time.

    Args:
        fit: how many sequences may be cached at once, by the longest of them; one sequence is
            always admitted.
        cached: use the model's own cache; otherwise all is read anew for every token.
    """

    def __init__(self, runner: ModelRunner, fit: Callable[[int], int], *, cached: bool) -> None:
        self.runner = runner
        self.fit = fit
        self.cached = cached
        self.sequences: list[DecodeSequence] = []
        self.cache: Any = None
        self.beyond = 0  # how far the next position is beyond the length, see `ModelRunner.inputs`

    def admit(self, waiting: Sequence[DecodeSequence]) -> int:
        if self.sequences:
            return 0
        _, alike = next(groupby(waiting, key=_prompt_of))
        return max(1, min(len(list(alike)), self.fit(waiting[0].max_length)))

    def join(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        self.sequences = list(sequences)
        self.cache = None
        return self._read([_text_of(sequence) for sequence in sequences])

    def step(self) -> Tensor:
        if not self.cached:
            return self._read(
                [[*sequence.request.prompt, *sequence.tokens] for sequence in self.sequences]
            )
        first = self.sequences[0]
        inputs: dict[str, Any] = {
            "input_ids": self.runner.ids([sequence.tokens[-1:] for sequence in self.sequences])
        }
        if self.runner.has_axes:
            # By itself the model would count on from the length.
            place = len(first.request.prompt) + len(first.tokens) - 1 + self.beyond
            places = torch.full_like(inputs["input_ids"], place)
            inputs["position_ids"] = self.runner.position_ids(places)
        states, self.cache = self.runner.states(cache=self.cache, use_cache=True, **inputs)
        return states

    def _read(self, texts: list[list[int]]) -> Tensor:
        """Read texts of one length, and the images of their prompt, from the beginning."""
        shown = [sequence.request.images for sequence in self.sequences]
        inputs, (self.beyond, *_) = self.runner.inputs(texts, shown)
        states, self.cache = self.runner.states(use_cache=self.cached, **inputs)
        return states

    def drop_finished(self) -> None:
        kept = [row for row, sequence in enumerate(self.sequences) if sequence.finish is None]
        if len(kept) < len(self.sequences):
            self.sequences = [self.sequences[row] for row in kept]
            if kept and self.cache is not None:
                self.cache.reorder_cache(torch.tensor(kept, device=self.runner.policy.device))


def filled_gaps(kept: list[int]) -> tuple[list[int], list[int], list[int]]:
    """How rows fill the gaps that others leave, so that little is copied.

    Of six rows, 0, 2 and 5 are kept: row 5 moves to 1. Returns the rows in their new order, the
    gaps, and the rows that move there.
    """
    order = list(range(len(kept)))
    gaps = sorted(set(order) - set(kept))
    moved = [row for row in kept if row >= len(kept)]
    for gap, row in zip(gaps, moved, strict=True):
        order[gap] = row
    return order, gaps, moved


def _prompt_of(sequence: DecodeSequence) -> tuple[list[int], list[bytes]]:
    """Equal for sequences of one prompt, with its images."""
    request = sequence.request
    return list(request.prompt), [image.key for image in request.images]


def _text_of(sequence: DecodeSequence) -> list[int]:
    """The prompt, and all tokens but the last."""
    return [*sequence.request.prompt, *sequence.tokens[:-1]]


def _read_first(sequence: DecodeSequence) -> tuple[list[int], list[bytes]]:
    """Equal for sequences whose `_text_of` and images are the same, which are read once."""
    _, images = _prompt_of(sequence)
    return _text_of(sequence), images


def _keys_and_values(cache: DynamicCache) -> list[Tensor]:
    """Of the first layer, of the second, ..., each [texts, heads, columns, d]."""
    layers: Any = cache.layers
    held: list[Tensor] = []
    for layer in layers:
        held += [layer.keys, layer.values]
    return held


def cache_fit(runner: ModelRunner, cache_bytes: int, *, continuous: bool) -> Callable[[int], int]:
    """The ``fit`` of a `ContinuousBatch`, or of the model's own cache: of every token something,
    one state, or both.
    """
    one = _cache_size(runner, 1, continuous=continuous)
    # A `ContinuousBatch` keeps as much of every token; other caches hold states of a fixed size as
    # well.
    more = one if continuous else _cache_size(runner, 2, continuous=False) - one
    return lambda longest: cache_bytes // (one + more * (longest - 1))


def _cache_size(runner: ModelRunner, length: int, *, continuous: bool) -> int:
    """Bytes of what a cache holds of one text of this length."""
    word = 1 if runner.policy.images is None else runner.policy.images.word
    ids = runner.ids([[word] * length])
    size = 0
    with runner.inference():
        _, cache = runner.states(
            cache=DynamicCache() if continuous else None, input_ids=ids, use_cache=True
        )
        for tensor in _tensors_of(cache):
            dtype = tensor.dtype
            if continuous:  # it keeps what attention multiplies
                dtype = autocast_dtype(tensor) or dtype
            size += tensor.numel() * dtype.itemsize
    return size


def _tensors_of(cache: Cache) -> list[Tensor]:
    """All tensors of the layers of a cache, also those in a dict of several states."""
    values: list[Any] = []
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, dict):
                values += value.values()
            else:
                values.append(value)
    return [value for value in values if isinstance(value, Tensor)]
