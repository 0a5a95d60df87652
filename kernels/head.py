"""The language-model head: its weights as a caller gives them, and its factors as they are
multiplied.

    c = h·Wᵀ + b + u·Bᵀ        dh = dc·W        dW = dcᵀ·h        db = Σ dc        du = dc·B        dB = dcᵀ·u

h, W, u = scaling·(h·Aᵀ), B and dc are factors of products. All of them are rounded to one dtype
before they are multiplied, in forward and in backward, with gradients and without: the precision
policy of README.md. Products are summed in float32, in float64 for hidden states in float64; later
only a gradient of a 16-bit input is rounded, once.

The vocabulary is always the outer loop: a W in another dtype is rounded one span at a time, and the
dW of a span is complete before the next one begins.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none

from .backend import accumulation_dtype, check_tensors, check_types, factor_dtype, rounded
from .softmax import NEVER, LogitTransform


class Shard(NamedTuple):
    """One rank's part of a vocabulary that is split over a process group.

    Hidden states and targets, numbered over the whole vocabulary, are the same on all ranks, and so
    are outputs, upstream gradients and the gradients of what is not split.

    Args:
        group: the ranks that hold the vocabulary, each token once.
        start: the token of this rank's first row of W, bias and B.
    """

    group: "ProcessGroup"
    start: int


class Head(NamedTuple):
    """A language-model head, ``c = hidden·Wᵀ + bias + scaling·(hidden·Aᵀ)·Bᵀ`` and
    ``cap(scale·c)``.

    Args:
        weight: W ``[V, D]``, in any floating-point dtype.
        bias: ``[V]``; −inf forbids a token.
        scale: factor on the logits, as in Cohere and Granite (there as a divisor), before the soft
            cap.
        softcap: bound of the logits, ``cap(s) = softcap·tanh(s/softcap)``, as in Gemma 2.
        adapter: LoRA factors, A ``[r, D]``, B ``[V, r]`` and their scaling. They are never merged
            into W.
        shard: set if W, bias and B are only this rank's part of the vocabulary.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    adapter: tuple[Tensor, Tensor, float] | None = None
    shard: Shard | None = None

    def detach(self) -> "Head":
        """The same head as a constant."""
        constant: Head = tree_map_only(Tensor, Tensor.detach, self)
        return constant

    def transform(self) -> LogitTransform:
        """Scale and soft cap, without a temperature."""
        return LogitTransform(self.scale, self.softcap)


def checked_head(who: str, hidden: Tensor, head: Tensor | Head, prefix: str = "") -> Head:
    """The head, without anything else if it is a weight ``[V, D]`` alone.

    Raises:
        ValueError: if it does not fit the hidden states; ``prefix`` names them in messages
            ("student ").
    """
    head = head if isinstance(head, Head) else Head(head)
    check_types(who, **{f"{prefix}hidden": hidden, f"{prefix}weight": head.weight})
    if hidden.ndim != 2 or head.weight.ndim != 2:
        shapes = f"{list(hidden.shape)} and {list(head.weight.shape)}"
        raise ValueError(
            f"{who}: {prefix}hidden must be [N, D] and {prefix}weight [V, D], got {shapes}"
        )
    (n, width), size = hidden.shape, len(head.weight)
    expected = {
        f"{prefix}hidden": (hidden, [n, width]),
        f"{prefix}weight": (head.weight, [size, width]),
    }
    if head.bias is not None:
        expected[f"{prefix}bias"] = head.bias, [size]
    if head.adapter is not None:
        down, up, _ = head.adapter
        expected[f"{prefix}adapter A"] = down, [len(down), width]
        expected[f"{prefix}adapter B"] = up, [size, len(down)]
    check_tensors(who, expected, {f"{prefix}softcap": head.softcap, f"{prefix}scale": head.scale})
    if head.shard is not None and head.shard.start < 0:
        raise ValueError(f"{who}: {prefix}shard must start at >= 0, got {head.shard.start}")
    return head


class HeadFactors(NamedTuple):
    """The factors of the logits; after ``columns``, in the dtype that they are multiplied in."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    low: Tensor | None  # [N, r], u
    up: Tensor | None  # [V, r], B
    compute: torch.dtype

    @classmethod
    def of(
        cls, hidden: Tensor, head: Head, compute_dtype: torch.dtype | None = None
    ) -> "HeadFactors":
        """Factors on the autograd graph, which itself carries u = scaling·h·Aᵀ back to h and A."""
        compute = compute_dtype or hidden.dtype
        low = up = None
        if head.adapter is not None:
            down, up, scaling = head.adapter
            exact = accumulation_dtype(hidden.dtype)
            # cast once, so that its two gradients are added before they are rounded
            hidden = hidden.to(exact)
            if factor_dtype(hidden, compute) == exact:
                h = rounded(hidden, compute).to(exact)
                a = rounded(down, compute).to(exact)
                low = scaling * (h @ a.t())
            else:
                low = _LowRankProduct.apply(hidden, down, scaling, compute)  # type: ignore[no-untyped-call]
        return cls(hidden, head.weight, head.bias, low, up, compute)

    def factor(self, t: Tensor) -> Tensor:
        return t.to(self.compute).to(factor_dtype(self.hidden, self.compute))

    def rounded(self, rows: Tensor | None = None) -> "HeadFactors":
        """The same, or only some ``rows`` of it, with h and u, which all spans of the vocabulary
        share, in the dtype that they are multiplied in."""
        chosen = slice(None) if rows is None else rows
        low = None if self.low is None else self.factor(self.low[chosen])
        return self._replace(hidden=self.factor(self.hidden[chosen]), low=low)

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


class _LowRankProduct(torch.autograd.Function):
    """u = scaling·(h·Aᵀ) in float32, of factors that are rounded to 16 bits.

    ``h @ A.t()`` would round u before it is scaled and once more after, and on the way back the
    gradient of a float32 A.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, down: Tensor, scaling: float, compute: torch.dtype
    ) -> Tensor:
        h, a = hidden.to(compute), down.to(compute)
        ctx.save_for_backward(h, a)
        ctx.scaling = scaling
        ctx.dtypes = hidden.dtype, down.dtype
        return _product(h, a.t(), scaling)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        h, a = ctx.saved_tensors
        (du,) = upstream
        unit = _unit(du, h.dtype)
        du = (du / unit).to(h.dtype)
        dh = da = None
        if ctx.needs_input_grad[0]:
            dh = (_product(du, a, ctx.scaling) * unit).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            da = (_product(du.t(), h, ctx.scaling) * unit).to(ctx.dtypes[1])
        return dh, da, None, None


def _product(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """alpha·a·b in float32."""
    out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
    multiply_(out, a, b, beta=0.0, alpha=alpha)
    return out


def _unit(gradient: Tensor, dtype: torch.dtype) -> Tensor | float:
    """What a gradient is rounded in multiples of: in float16 those of 1/N would vanish. A power of
    2, which is exact."""
    if dtype != torch.float16 or gradient.numel() == 0:
        return 1.0
    largest = gradient.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.exp2(largest.log2().floor())
