"""The operands of a language-model head, and what their tiles are multiplied out to.

    c = h·Wᵀ + b + u·Bᵀ        dh = dc·W        dW = dcᵀ·h        db = Σ dc        du = dc·B        dB = dcᵀ·u

h, W, u, B and dc are factors of products. All of them are rounded to one dtype before they are multiplied, in forward
and in backward, with gradients and without: the precision policy of README.md. Products are summed in float32, in
float64 for hidden states in float64; what is rounded after that is only a gradient of a 16-bit input, once.

The vocabulary is always the outer loop. Of a W in another precision one span is rounded at a time, and the dW of a span
is complete before the next one begins.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .head import Head, accumulation_dtype, factor_dtype
from .tiles import ALIGNED, NEVER


class Operands(NamedTuple):
    """The operands of the logits; after ``columns``, in the dtype that they are multiplied in."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    low: Tensor | None  # [N, r], u
    up: Tensor | None  # [V, r], B
    compute: torch.dtype

    def factor(self, t: Tensor) -> Tensor:
        return t.to(self.compute).to(factor_dtype(self.hidden, self.compute))

    def rounded(self) -> "Operands":
        """With h and u, which all spans of the vocabulary share, in the dtype that they are multiplied in."""
        return self._replace(hidden=self.factor(self.hidden), low=None if self.low is None else self.factor(self.low))

    def columns(self, columns: slice) -> "Operands":
        """The operands for a span of the vocabulary. A bias of −inf becomes finite, see ``NEVER``."""
        dtype = accumulation_dtype(self.hidden.dtype)
        bias = None if self.bias is None else self.bias[columns].to(dtype).clamp(min=NEVER)
        up = None if self.up is None else self.factor(self.up[columns])
        return self._replace(weight=self.factor(self.weight[columns]), bias=bias, up=up)

    def logits(self, rows: slice, out: Tensor) -> Tensor:
        """c for a span of rows, written into ``out``."""
        if self.bias is not None and self.hidden.dtype == out.dtype:
            torch.addmm(self.bias, self.hidden[rows], self.weight.t(), out=out)
        else:
            multiply_(out, self.hidden[rows], self.weight.t(), beta=0.0)
            if self.bias is not None:
                out += self.bias
        if self.low is not None and self.up is not None:
            multiply_(out, self.low[rows], self.up.t())
        return out


def operands(hidden: Tensor, head: Head, compute_dtype: torch.dtype | None = None) -> Operands:
    """On the autograd graph, which itself carries u = scaling·h·Aᵀ back to h and A."""
    compute = compute_dtype or hidden.dtype
    low = up = None
    if head.adapter is not None:
        down, up, scaling = head.adapter
        dtype = factor_dtype(hidden, compute)
        if dtype == accumulation_dtype(hidden.dtype):
            hidden = hidden.to(dtype)  # cast once, so that its two gradients are added before they are rounded
        h, a = (t.to(dtype) if dtype == compute else rounded(t, compute).to(dtype) for t in (hidden, down))
        low = scaling * (h @ a.t())
    return Operands(hidden, head.weight, head.bias, low, up, compute)


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` with the digits of another dtype, on the autograd graph as ``t`` itself: gradients are not rounded."""
    return t if torch.promote_types(t.dtype, dtype) == dtype else t + (t.to(dtype).to(t.dtype) - t).detach()


def multiply_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
    """out = beta·out + alpha·a·b, summed in float32 at least. At β = 0 ``out`` is not read."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)


class Gradients(NamedTuple):
    """Those of the operands, summed over the tiles; None where no gradient is needed.

    Nothing is filled with zeros: the first product that arrives at a place does not read it. What is summed over the
    vocabulary has the accumulation dtype. What is complete with a span of the vocabulary has that of its input.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None
    main_grad: bool = False  # the weight's is added to what is there

    @classmethod
    def room(cls, head: Operands, needed: Sequence[bool], vocab: int, main_grad: Tensor | None = None) -> "Gradients":
        """Where they will be; zeros where no token is ever going to write."""
        n, exact = len(head.hidden), accumulation_dtype(head.hidden.dtype)
        written = vocab if n else 0

        def row(t: Tensor | None, wanted: bool) -> Tensor | None:
            make = torch.empty_like if written else torch.zeros_like
            return make(t, dtype=exact) if wanted and t is not None else None

        def column(t: Tensor | None, wanted: bool) -> Tensor | None:
            if not wanted or t is None:
                return None
            found = t.new_empty(t.shape)
            found[written:] = 0
            return found

        hidden, low = row(head.hidden, needed[0]), row(head.low, needed[3])
        added = main_grad is not None and needed[1]
        weight = main_grad if added else column(head.weight, needed[1])
        return cls(hidden, weight, column(head.bias, needed[2]), low, column(head.up, needed[4]), added)

    def columns(self, columns: slice, head: Operands, *, at_once: bool) -> "Gradients":
        """Where those of a span of the vocabulary are summed; what is not its place is to be stored there later.

        Args:
            at_once: all rows come in one product, which may round its sums as it writes them.
        """
        exact, factors = accumulation_dtype(head.hidden.dtype), head.hidden.dtype

        def place(t: Tensor | None, *, product: bool = True) -> Tensor | None:
            if t is None:
                return None
            direct = t.dtype == exact or (at_once and product and t.dtype == factors)
            return t[columns] if direct else torch.empty_like(t[columns], dtype=exact)

        return self._replace(weight=place(self.weight), bias=place(self.bias, product=False), up=place(self.up))

    def add_(self, dc: Tensor, head: Operands, rows: slice, columns: slice, unit: float = 1.0) -> None:
        """Adds the share of ``dc`` ``[rows, columns]``, in multiples of ``unit``; of a span, the first rows first."""
        over_vocabulary, over_rows = float(columns.start > 0), float(rows.start > 0)  # β: 0 for the first that arrives
        if self.hidden is not None:
            multiply_(self.hidden[rows], dc, head.weight, beta=over_vocabulary, alpha=unit)
        if self.weight is not None:
            beta = 1.0 if self.main_grad else over_rows
            multiply_(self.weight, dc.t(), head.hidden[rows], beta=beta, alpha=unit)
        if self.bias is not None:
            share = dc.sum(0, dtype=self.bias.dtype)
            if rows.start:
                self.bias.add_(share, alpha=unit)
            else:
                torch.mul(share, unit, out=self.bias)
        if self.low is not None and head.up is not None:
            multiply_(self.low[rows], dc, head.up, beta=over_vocabulary, alpha=unit)
        if self.up is not None and head.low is not None:
            multiply_(self.up, dc.t(), head.low[rows], beta=over_rows, alpha=unit)

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
        self.buffer = buffer(kept, min(kept.shape[1], rows), min(vocab, self.columns), dtype)

    def keeps(self, columns: slice) -> bool:
        return int(columns.start) < len(self.kept) * self.columns

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        """Where the tile is to be computed, or already is."""
        if self.tops is None and self.keeps(columns):
            return self._rows(self.kept[columns.start // self.columns], rows)
        return self.buffer[: rows.stop - rows.start, : columns.stop - columns.start]

    def shifted(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """What a Triton pass keeps of this tile, or has kept."""
        if self.tops is None or not self.keeps(columns):
            return None
        i = columns.start // self.columns
        return self._rows(self.kept[i], rows), self._rows(self.tops[i], rows)

    def _rows(self, t: Tensor, rows: slice) -> Tensor:
        return t[rows] if self.only is None else t[self.only[rows]]


def buffer(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """``[rows, columns or a few more]``, of which every row begins where tensor cores like to: at 16 bytes."""
    return like.new_empty(rows, -(-columns // ALIGNED) * ALIGNED, dtype=dtype)


def room(hidden: Tensor, vocab: int, columns: int, keep: int, dtype: torch.dtype) -> Tensor:
    """``[tiles, N, columns]``: as many tiles as fit into ``keep`` bytes, but never all of them."""
    bytes_per_tile = torch.sym_max(hidden.shape[0], 1) * columns * dtype.itemsize  # type: ignore[no-untyped-call]
    tiles = torch.sym_min(  # type: ignore[no-untyped-call]
        max(vocab - 1, 0) // columns, keep // bytes_per_tile
    )
    return hidden.new_empty(tiles, hidden.shape[0], columns, dtype=dtype)


def keep_by_default(device: torch.device, on_cpu: int) -> int:
    """On a GPU a thirty-second of its memory, which a model that fits leaves free, and at most 4 GiB, which are most of
    the logits of 8192 tokens."""
    if device.type != "cuda":
        return on_cpu
    return min(2**32, torch.cuda.get_device_properties(device).total_memory // 32)
