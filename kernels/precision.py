"""The precision policy of README.md: the dtypes that factors are rounded to and that products are summed in."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 stays float64; everything else is computed in float32: logits are never rounded to 16 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """Autocast's dtype on the device of ``like``; None where it is off, and for float64, which it leaves alone."""
    kind = like.device.type
    on = like.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def factor_dtype(like: Tensor, compute: torch.dtype) -> torch.dtype:
    """The dtype that rounded factors are multiplied in: 16 bits on tensor cores; elsewhere that of the sums, in which
    products of 16-bit numbers are exact, so that nothing is rounded once more."""
    exact = accumulation_dtype(like.dtype)
    return compute if has_tensor_cores(like.device) and compute.itemsize == 2 and exact == torch.float32 else exact


def has_tensor_cores(device: torch.device) -> bool:
    """True if products of 16-bit factors are summed, and returned, in float32 on this device."""
    return device.type == "cuda"


def check_compute_dtype(who: str, dtype: torch.dtype | None) -> None:
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{who}: compute_dtype must be float32, bfloat16, float16 or None, got {dtype}")


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` with the digits of another dtype; on the autograd graph it is ``t`` itself: gradients are not rounded."""
    return t if torch.promote_types(t.dtype, dtype) == dtype else t + (t.to(dtype).to(t.dtype) - t).detach()
