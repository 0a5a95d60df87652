"""The language-model head: its weights as a caller gives them, its factors as they are multiplied, their gradients.

    c = h·Wᵀ + b + u·Bᵀ        dh = dc·W        dW = dcᵀ·h        db = Σ dc        du = dc·B        dB = dcᵀ·u

h, W, u = scaling·(h·Aᵀ), B and dc are factors of products. All of them are rounded to one dtype before they are
multiplied, in forward and in backward, with gradients and without: the precision policy of README.md. Products are
summed in float32, in float64 for hidden states in float64; later only a gradient of a 16-bit input is rounded, once.

The vocabulary is always the outer loop: a W in another dtype is rounded one span at a time, and the dW of a span is
complete before the next one begins.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none

from .checks import check_positive, check_tensors
from .precision import accumulation_dtype, factor_dtype, rounded
from .softmax import NEVER, LogitTransform

Adapter = tuple[Tensor, Tensor, float]


class Shard(NamedTuple):
    """One rank's part of a vocabulary that is split over a process group.

    Hidden states and targets, numbered over the whole vocabulary, are the same on all ranks, and so are outputs,
    upstream gradients and the gradients of what is not split.

    Args:
        group: the ranks that hold the vocabulary, each token once.
        start: the token of this rank's first row of W, bias and B.
    """

    group: "ProcessGroup"
    start: int


class Head(NamedTuple):
    """A language-model head, ``c = hidden·Wᵀ + bias + scaling·(hidden·Aᵀ)·Bᵀ`` and ``cap(scale·c)``.

    Args:
        weight: W ``[V, D]``, in any floating-point dtype.
        bias: ``[V]``; −inf forbids a token.
        scale: factor on the logits, as in Cohere and Granite (there as a divisor), before the soft cap.
        softcap: bound of the logits, ``cap(s) = softcap·tanh(s/softcap)``, as in Gemma 2.
        adapter: LoRA factors, A ``[r, D]``, B ``[V, r]`` and their scaling. They are never merged into W.
        shard: set if W, bias and B are only this rank's part of the vocabulary.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    adapter: Adapter | None = None
    shard: Shard | None = None

    def detach(self) -> "Head":
        """The same head as a constant."""
        bias, adapter = self.bias, self.adapter
        return self._replace(
            weight=self.weight.detach(),
            bias=None if bias is None else bias.detach(),
            adapter=None if adapter is None else (adapter[0].detach(), adapter[1].detach(), adapter[2]),
        )

    def transform(self) -> LogitTransform:
        """Scale and soft cap, without a temperature."""
        return LogitTransform(self.scale, self.softcap)


def as_head(weight: Tensor | Head) -> Head:
    """A weight ``[V, D]`` alone is a head without anything else."""
    return weight if isinstance(weight, Head) else Head(weight)


def check_head(who: str, hidden: Tensor, head: Head, prefix: str = "") -> None:
    """Raise unless the head fits the hidden states; ``prefix`` names them in messages ("student ")."""
    if hidden.ndim != 2 or head.weight.ndim != 2:
        shapes = f"{list(hidden.shape)} and {list(head.weight.shape)}"
        raise ValueError(f"{who}: {prefix}hidden must be [N, D] and {prefix}weight [V, D], got {shapes}")
    (n, width), size = hidden.shape, len(head.weight)
    expected = {"hidden": (hidden, [n, width]), "weight": (head.weight, [size, width])}
    if head.bias is not None:
        expected["bias"] = head.bias, [size]
    if head.adapter is not None:
        down, up, _ = head.adapter
        expected |= {"adapter A": (down, [len(down), width]), "adapter B": (up, [size, len(down)])}
    check_tensors(who, {prefix + name: shape for name, shape in expected.items()})
    if head.softcap is not None:
        check_positive(who, f"{prefix}softcap", head.softcap)
    check_positive(who, f"{prefix}scale", head.scale)
    if head.shard is not None and head.shard.start < 0:
        raise ValueError(f"{who}: {prefix}shard must start at >= 0, got {head.shard.start}")


class HeadFactors(NamedTuple):
    """The factors of the logits; after ``columns``, in the dtype that they are multiplied in."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    low: Tensor | None  # [N, r], u
    up: Tensor | None  # [V, r], B
    compute: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor, head: Head, compute_dtype: torch.dtype | None = None) -> "HeadFactors":
        """Factors on the autograd graph, which itself carries u = scaling·h·Aᵀ back to h and A."""
        compute = compute_dtype or hidden.dtype
        low = up = None
        if head.adapter is not None:
            down, up, scaling = head.adapter
            dtype = factor_dtype(hidden, compute)
            if dtype == accumulation_dtype(hidden.dtype):
                hidden = hidden.to(dtype)  # cast once, so that its two gradients are added before they are rounded
            h, a = (t.to(dtype) if dtype == compute else rounded(t, compute).to(dtype) for t in (hidden, down))
            low = scaling * (h @ a.t())
        return cls(hidden, head.weight, head.bias, low, up, compute)

    def factor(self, t: Tensor) -> Tensor:
        return t.to(self.compute).to(factor_dtype(self.hidden, self.compute))

    def rounded(self) -> "HeadFactors":
        """The same with h and u, which all spans of the vocabulary share, in the dtype that they are multiplied in."""
        return self._replace(hidden=self.factor(self.hidden), low=None if self.low is None else self.factor(self.low))

    def rows(self, rows: Tensor | None) -> "HeadFactors":
        """The factors of some tokens; of all of them if ``rows`` is None."""
        if rows is None:
            return self
        return self._replace(hidden=self.hidden[rows], low=None if self.low is None else self.low[rows])

    def columns(self, columns: slice) -> "HeadFactors":
        """The factors of a span of the vocabulary. A bias of −inf becomes finite, see ``NEVER``."""
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


def multiply_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
    """out = beta·out + alpha·a·b, summed in float32 at least. At β = 0 ``out`` is not read."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)


class HeadGradients(NamedTuple):
    """Gradients of ``HeadFactors``, summed over the tiles; None where no gradient is needed.

    Nothing is filled with zeros: the first product for a place does not read it. Sums over the vocabulary have the
    accumulation dtype; what is complete with a span of the vocabulary has the dtype of its input.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None
    main_grad: bool = False  # the weight's is added to what is there

    @classmethod
    def allocate(
        cls, head: HeadFactors, needed: Sequence[bool], vocab: int, main_grad: Tensor | None = None
    ) -> "HeadGradients":
        """Uninitialized memory for the gradients; zeros only where no tile will write."""
        n, exact = len(head.hidden), accumulation_dtype(head.hidden.dtype)
        written = vocab if n else 0

        def per_row(t: Tensor | None, wanted: bool) -> Tensor | None:
            make = torch.empty_like if written else torch.zeros_like
            return make(t, dtype=exact) if wanted and t is not None else None

        def per_column(t: Tensor | None, wanted: bool) -> Tensor | None:
            if not wanted or t is None:
                return None
            sums = t.new_empty(t.shape)
            sums[written:] = 0
            return sums

        hidden, low = per_row(head.hidden, needed[0]), per_row(head.low, needed[3])
        added = main_grad is not None and needed[1]
        weight = main_grad if added else per_column(head.weight, needed[1])
        return cls(hidden, weight, per_column(head.bias, needed[2]), low, per_column(head.up, needed[4]), added)

    def columns(self, columns: slice, head: HeadFactors, *, at_once: bool) -> "HeadGradients":
        """Sums for a span of the vocabulary: views of these, or buffers that ``store_`` rounds into these later.

        Args:
            at_once: all rows come in one product, which may round its sums as it writes them.
        """
        exact, factors = accumulation_dtype(head.hidden.dtype), head.hidden.dtype

        def span(t: Tensor | None, *, product: bool = True) -> Tensor | None:
            if t is None:
                return None
            direct = t.dtype == exact or (at_once and product and t.dtype == factors)
            return t[columns] if direct else torch.empty_like(t[columns], dtype=exact)

        return self._replace(weight=span(self.weight), bias=span(self.bias, product=False), up=span(self.up))

    def add_(self, dc: Tensor, head: HeadFactors, rows: slice, columns: slice, unit: float) -> None:
        """Add the share of ``dc`` ``[rows, columns]``, in multiples of ``unit``; of a span, the first rows first."""
        over_vocabulary, over_rows = float(columns.start > 0), float(rows.start > 0)  # β: 0 for the first product
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

    def store_(self, columns: slice, span: "HeadGradients") -> None:
        """Round the sums of a span that were kept in another dtype."""
        for gradient, sums in ((self.weight, span.weight), (self.bias, span.bias), (self.up, span.up)):
            if gradient is not None and sums is not None and gradient.dtype != sums.dtype:
                gradient[columns] = sums
