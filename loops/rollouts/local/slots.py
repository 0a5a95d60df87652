"""The keys and values of many answers under way, each in a row of its own, whatever its length."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from ....kernels.precision import autocast_dtype

_STEP = 64  # columns that are added at once
_untyped: Any = cache_utils  # its attributes are optional tensors of several kinds of layers


class _Layer(_untyped.DynamicLayer):  # type: ignore[misc]
    """One layer: [rows, heads, columns, d], of which the first rows and columns are in use.

    Keys and values are kept as attention multiplies them, which under autocast is in its precision, whatever they come
    in: a rotary embedding of float32 states leaves float32 keys, beside values that a layer has cast.
    """

    def __init__(self, slots: "KVCache", like: Tensor, values_like: Tensor) -> None:
        super().__init__()
        self.slots = slots
        self.is_initialized = True
        self.keys, self.values = (
            x.new_zeros(0, x.shape[1], 0, x.shape[3], dtype=matmul_dtype(x)) for x in (like, values_like)
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per row where the row ends; returns what has been written so far."""
        rows, where, width = self.slots.row, self.slots.length, self.slots.width
        found = []
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store[rows, :, where] = states[:, :, 0].to(store.dtype)
            found.append(store[: len(rows), :, :width])
        return found[0], found[1]

    def get_seq_length(self) -> int:
        return self.slots.width - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.width, 0

    def resize(self, rows: int, columns: int) -> None:
        for name, unwritten in (("keys", 0.0), ("values", self.slots.unwritten)):
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
        for mine, theirs in zip(self.layers, filled.layers, strict=True):
            row = start
            for i, (length, count) in enumerate(zip(lengths, copies, strict=True)):
                mine.keys[row : row + count, :, :length] = theirs.keys[i, :, :length]
                mine.values[row : row + count, :, :length] = theirs.values[i, :, :length]
                row += count

    def drop(self, keep: Sequence[int]) -> list[int]:
        """Let all rows go but these; the last ones move into the gaps. Returns which row now stands where."""
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
        """Of the keys and values of one token of one row."""
        stores = [store for layer in self.layers for store in (layer.keys, layer.values)]
        return sum(store.shape[1] * store.shape[3] * store.itemsize for store in stores)

    def _reserve(self, rows: int, columns: int) -> None:
        """Room for these; what earlier rows and columns took beyond them is given back on the occasion."""
        held = self.layers[0].keys
        if rows > held.shape[0] or columns > held.shape[2]:
            columns = max(columns, min(columns + _STEP, self.longest))
            for layer in self.layers:
                layer.resize(rows, columns)


def matmul_dtype(states: Tensor) -> torch.dtype:
    """The precision that such states are multiplied in here: autocast's where it is on."""
    return autocast_dtype(states) or states.dtype
