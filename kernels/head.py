"""The language-model head, as the kernels are given it."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none

from .checks import check_positive, check_tensors

Adapter = tuple[Tensor, Tensor, float]


class Shard(NamedTuple):
    """One rank's part of a vocabulary that is split over a process group.

    Hidden states and targets, numbered over the whole vocabulary, are the same on all ranks, and so are outputs,
    upstream gradients and the gradients of what is not split.

    Args:
        group: the ranks that hold the vocabulary, each token once.
        start: this rank's rows of W, bias and B are those from here on.
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
        shard: where W, bias and B are only a part of the vocabulary.
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


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 stays float64; everything else is computed in float32: logits are never rounded to 16 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """Autocast's, None where it is off. It leaves float64 alone, as it does everywhere."""
    kind = like.device.type
    on = like.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def factor_dtype(like: Tensor, compute: torch.dtype) -> torch.dtype:
    """What rounded factors are multiplied in: on a GPU 16 bits as they are, by tensor cores; else without rounding
    once more, in the precision of the sums, since products of 16-bit numbers are exact there."""
    exact = accumulation_dtype(like.dtype)
    return compute if has_tensor_cores(like.device) and compute.itemsize == 2 and exact == torch.float32 else exact


def has_tensor_cores(device: torch.device) -> bool:
    """Whether products of 16-bit factors are summed, and given back, in float32 there."""
    return device.type == "cuda"


def check_compute_dtype(who: str, dtype: torch.dtype | None) -> None:
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{who}: compute_dtype must be float32, bfloat16, float16 or None, got {dtype}")


def check_head(who: str, hidden: Tensor, head: Head, prefix: str = "") -> None:
    """Raises unless the head fits the hidden states; ``prefix`` says whose they are."""
    if hidden.ndim != 2 or head.weight.ndim != 2:
        shapes = f"{list(hidden.shape)} and {list(head.weight.shape)}"
        raise ValueError(f"{who}: {prefix}hidden must be [N, D] and {prefix}weight [V, D], got {shapes}")
    (n, width), size = hidden.shape, len(head.weight)
    wanted = {"hidden": (hidden, [n, width]), "weight": (head.weight, [size, width])}
    if head.bias is not None:
        wanted["bias"] = head.bias, [size]
    if head.adapter is not None:
        down, up, _ = head.adapter
        wanted |= {"adapter A": (down, [len(down), width]), "adapter B": (up, [size, len(down)])}
    check_tensors(who, {prefix + name: shape for name, shape in wanted.items()})
    if head.softcap is not None:
        check_positive(who, f"{prefix}softcap", head.softcap)
    check_positive(who, f"{prefix}scale", head.scale)
    if head.shard is not None and head.shard.start < 0:
        raise ValueError(f"{who}: {prefix}shard must start at >= 0, got {head.shard.start}")
