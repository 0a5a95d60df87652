"""The operands of a language-model head, and what their tiles are multiplied out to.

    c = h·Wᵀ + b + u·Bᵀ        dh = dc·W        dW = dcᵀ·h        db = Σ dc        du = dc·B        dB = dcᵀ·u

The vocabulary is always the outer loop, so a tile of dW is complete before it is rounded to the precision of W, and of
a W in another precision only one tile is ever converted.

On a GPU, factors of 16 bits are multiplied as they are and summed in float32: a product of two has 16 significant bits
(22 of float16) and loses nothing. A W in float32 is rounded to the 16 bits of the hidden states, as autocast would do.
Anywhere else the factors themselves are float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .head import Head, accumulation_dtype
from .tiles import NEVER


class Operands(NamedTuple):
    """The operands of the logits; after ``columns``, in the precision that they are multiplied in."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    low: Tensor | None  # [N, r], u
    up: Tensor | None  # [V, r], B

    def columns(self, columns: slice) -> "Operands":
        """The operands for a span of the vocabulary. A bias of −inf becomes finite, see ``NEVER``."""
        dtype = accumulation_dtype(self.hidden.dtype)
        bias = None if self.bias is None else self.bias[columns].to(dtype).clamp(min=NEVER)
        up = None if self.up is None else self.up[columns].to(dtype)
        return Operands(self.hidden, self.weight[columns].to(self.hidden.dtype), bias, self.low, up)

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """c for a span of rows, written into ``out``."""
        if self.bias is not None and self.hidden.dtype == out.dtype:
            torch.addmm(self.bias, self.hidden[rows], self.weight.t(), out=out)
        else:
            multiply_(out, self.hidden[rows], self.weight.t(), beta=0.0)
            if self.bias is not None:
                out += self.bias
        return out if self.low is None or self.up is None else out.addmm_(self.low[rows], self.up.t())


def operands(hidden: Tensor, head: Head, dtype: torch.dtype) -> Operands:
    """On the autograd graph, which itself carries u = scaling·h·Aᵀ back to h and A."""
    low = up = None
    if head.adapter is not None:
        down, up, scaling = head.adapter
        if factors(hidden).dtype == dtype:
            hidden = hidden.to(dtype)  # cast once, so that its two gradients are added before they are rounded
        low = scaling * (hidden.to(dtype) @ down.to(dtype).t())
    return Operands(hidden, head.weight, head.bias, low, up)


def factors(hidden: Tensor) -> Tensor:
    """The hidden states in the precision that they are multiplied in."""
    as_they_are = hidden.device.type == "cuda" and hidden.dtype in (torch.bfloat16, torch.float16)
    return hidden if as_they_are else hidden.to(accumulation_dtype(hidden.dtype))


def multiply_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
    """out = beta·out + alpha·a·b, summed in the precision of ``out``."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)


class Gradients(NamedTuple):
    """Sums over the tiles, field by field those of ``Operands``; None where no gradient is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None

    @classmethod
    def zeros(cls, head: Operands, needed: Sequence[bool]) -> "Gradients":
        """What is summed over the vocabulary is summed in the accumulation precision, the rest is kept as rounded."""
        hidden, *others = (
            t.new_zeros(t.shape, dtype=None if i else accumulation_dtype(t.dtype)) if n and t is not None else None
            for i, (t, n) in enumerate(zip(head, needed, strict=True))
        )
        return cls(hidden, *others)

    def columns(self, columns: slice, dtype: torch.dtype) -> "Gradients":
        """The sums for a span of the vocabulary: a view where the precision is right, else zeros to be stored later."""
        weight, bias, up = (
            None if t is None else t[columns] if t.dtype == dtype else torch.zeros_like(t[columns], dtype=dtype)
            for t in (self.weight, self.bias, self.up)
        )
        return self._replace(weight=weight, bias=bias, up=up)

    def add_(self, dc: Tensor, head: Operands, rows: slice, unit: float = 1.0) -> None:
        """Adds a tile's share; ``dc`` is in multiples of ``unit``."""
        if self.hidden is not None:
            multiply_(self.hidden[rows], dc, head.weight, alpha=unit)
        if self.weight is not None:
            multiply_(self.weight, dc.t(), head.hidden[rows], alpha=unit)
        if self.bias is not None:
            self.bias.add_(dc.sum(0, dtype=self.bias.dtype), alpha=unit)
        if self.low is not None and head.up is not None:
            multiply_(self.low[rows], dc, head.up.to(dc.dtype), alpha=unit)
        if self.up is not None and head.low is not None:
            multiply_(self.up, dc.t(), head.low[rows].to(dc.dtype), alpha=unit)

    def store_(self, columns: slice, part: "Gradients") -> None:
        """Rounds what ``columns`` had to keep in another precision."""
        for whole, sums in ((self.weight, part.weight), (self.bias, part.bias), (self.up, part.up)):
            if whole is not None and sums is not None and whole.dtype != sums.dtype:
                whole[columns] = sums


class Tiles:
    """Where tiles of logits are: in turn in one buffer, and the first of the vocabulary kept for backward.

    Torch passes keep c itself, in the place where it was computed. Triton passes keep z less the largest z of its row
    in the tile, in 16 bits, and ``tops``, those largest: near the top, where the probability is, hardly a digit is
    lost, while of plain logits rounded to 16 bits hardly one would be left.
    """

    def __init__(
        self, kept: Tensor, rows: int, vocab: int, tops: Tensor | None = None, only: Tensor | None = None
    ) -> None:
        self.kept = kept  # [tiles, N, columns]
        self.tops = tops  # [tiles, N]; None where c itself is kept
        self.only = only  # [live], the rows of N that are worked on, if not all
        self.columns = kept.shape[2]
        dtype = kept.dtype if tops is None else tops.dtype
        self.buffer = kept.new_empty(min(kept.shape[1], rows) * min(vocab, self.columns), dtype=dtype)

    def keeps(self, columns: slice) -> bool:
        return int(columns.start) < len(self.kept) * self.columns

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        """Where the tile is to be computed, or already is."""
        if self.tops is None and self.keeps(columns):
            return self._rows(self.kept[columns.start // self.columns], rows)
        n, k = rows.stop - rows.start, columns.stop - columns.start
        return self.buffer[: n * k].view(n, k)

    def shifted(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """What a Triton pass keeps of this tile, or has kept."""
        if self.tops is None or not self.keeps(columns):
            return None
        i = columns.start // self.columns
        return self._rows(self.kept[i], rows), self._rows(self.tops[i], rows)

    def _rows(self, t: Tensor, rows: slice) -> Tensor:
        return t[rows] if self.only is None else t[self.only[rows]]


def room(hidden: Tensor, vocab: int, columns: int, keep: int, dtype: torch.dtype | None = None) -> Tensor:
    """``[tiles, N, columns]``: as many tiles as fit into ``keep`` bytes, but never all of them."""
    dtype = dtype or accumulation_dtype(hidden.dtype)
    bytes_per_tile = torch.sym_max(hidden.shape[0], 1) * columns * dtype.itemsize  # type: ignore[no-untyped-call]
    tiles = torch.sym_min(  # type: ignore[no-untyped-call]
        max(vocab - 1, 0) // columns, keep // bytes_per_tile
    )
    return hidden.new_empty(tiles, hidden.shape[0], columns, dtype=dtype)
