"""The operands of a language-model head, and what their tiles are multiplied out to.

    c = h·Wᵀ + b + u·Bᵀ        dh = dc·W        dW = dcᵀ·h        db = Σ dc        du = dc·B        dB = dcᵀ·u

The vocabulary is always the outer loop, so a tile of dW is complete before it is rounded to the precision of W, and of
a 16-bit W only one tile is ever in float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .head import Head, accumulation_dtype
from .tiles import NEVER


class Operands(NamedTuple):
    """The operands of the logits; after ``columns``, in one precision."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    low: Tensor | None  # [N, r], u
    up: Tensor | None  # [V, r], B

    def columns(self, columns: slice) -> "Operands":
        """The operands for a span of the vocabulary. A bias of −inf becomes finite, see ``NEVER``."""
        dtype = self.hidden.dtype
        bias = None if self.bias is None else self.bias[columns].to(dtype).clamp(min=NEVER)
        up = None if self.up is None else self.up[columns].to(dtype)
        return Operands(self.hidden, self.weight[columns].to(dtype), bias, self.low, up)

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """c for a span of rows, written into ``out``."""
        if self.bias is None:
            torch.mm(self.hidden[rows], self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, self.hidden[rows], self.weight.t(), out=out)
        return out if self.low is None or self.up is None else out.addmm_(self.low[rows], self.up.t())


def operands(hidden: Tensor, head: Head, dtype: torch.dtype) -> Operands:
    """On the autograd graph, which itself carries u = scaling·h·Aᵀ back to h and A."""
    low = up = None
    if head.adapter is not None:
        down, up, scaling = head.adapter
        # Cast once, so that its two gradients are added before they are rounded.
        hidden = hidden.to(dtype)
        low = scaling * (hidden @ down.to(dtype).t())
    return Operands(hidden, head.weight, head.bias, low, up)


class Gradients(NamedTuple):
    """Sums over the tiles, field by field those of ``Operands``; None where no gradient is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None

    @classmethod
    def zeros(cls, head: Operands, needed: Sequence[bool]) -> "Gradients":
        return cls(*(t.new_zeros(t.shape) if n and t is not None else None for t, n in zip(head, needed, strict=True)))

    def columns(self, columns: slice, dtype: torch.dtype) -> "Gradients":
        """The sums for a span of the vocabulary: a view where the precision is right, else zeros to be stored later."""
        weight, bias, up = (
            None if t is None else t[columns] if t.dtype == dtype else torch.zeros_like(t[columns], dtype=dtype)
            for t in (self.weight, self.bias, self.up)
        )
        return self._replace(weight=weight, bias=bias, up=up)

    def add_(self, dc: Tensor, head: Operands, rows: slice) -> None:
        if self.hidden is not None:
            self.hidden[rows].addmm_(dc, head.weight)
        if self.weight is not None:
            self.weight.addmm_(dc.t(), head.hidden[rows])
        if self.bias is not None:
            self.bias.add_(dc.sum(0))
        if self.low is not None and head.up is not None:
            self.low[rows].addmm_(dc, head.up)
        if self.up is not None and head.low is not None:
            self.up.addmm_(dc.t(), head.low[rows])

    def store_(self, columns: slice, part: "Gradients") -> None:
        """Rounds what ``columns`` had to keep in another precision."""
        for whole, sums in ((self.weight, part.weight), (self.bias, part.bias), (self.up, part.up)):
            if whole is not None and sums is not None and whole.dtype != sums.dtype:
                whole[columns] = sums


class Tiles:
    """Where the tiles of c are: the first of the vocabulary in ``kept``, all others in turn in one buffer."""

    def __init__(self, kept: Tensor, rows: int, vocab: int) -> None:
        self.kept = kept  # [tiles, N, columns]
        self.columns = kept.shape[2]
        self.buffer = kept.new_empty(min(kept.shape[1], rows) * min(vocab, self.columns))

    def keeps(self, columns: slice) -> bool:
        return int(columns.start) < len(self.kept) * self.columns

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        if self.keeps(columns):
            return self.kept[columns.start // self.columns, rows]
        n, k = rows.stop - rows.start, columns.stop - columns.start
        return self.buffer[: n * k].view(n, k)


def room(hidden: Tensor, vocab: int, columns: int, keep: int) -> Tensor:
    """``[tiles, N, columns]``: as many tiles as fit into ``keep`` bytes, but never all of them."""
    dtype = accumulation_dtype(hidden.dtype)
    bytes_per_tile = hidden.shape[0] * columns * dtype.itemsize + 1
    tiles = torch.sym_min(  # type: ignore[no-untyped-call]
        (vocab - 1) // columns, keep // bytes_per_tile
    )
    return hidden.new_empty(tiles, hidden.shape[0], columns, dtype=dtype)
