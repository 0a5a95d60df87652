"""The backend and the precision of a call.

The backends are torch alone, torch with Triton kernels between its matrix products, and the definition. The precision
policy is that of README.md: the dtypes that factors are rounded to and that products are summed in.
"""

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor, float64
from torch.autograd import forward_ad

Backend = Literal["auto", "triton", "fused", "torch", "reference"]

TENSOR_CORES = ("cuda",)  # devices on which products of 16-bit factors are summed, and returned, in float32
_TRITON = importlib.util.find_spec("triton") is not None


def choose_backend(who: str, backend: Backend, like: Tensor) -> Backend:
    """The backend for this tensor's device and precision; "auto" remains where it means one of the two of Triton.

    Raises:
        ValueError: if there is no such backend, or it can't run here.
        NotImplementedError: under forward-mode differentiation, which an operator of torch answers with zeros.
    """
    if backend != "reference" and forward_ad.unpack_dual(like).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotImplementedError(f"{who}: this backend has no forward-mode derivative, use backend='reference'")
    match backend:
        case "torch" | "reference":
            return backend
        case "auto":
            return "auto" if like.device.type == "cuda" and like.dtype != float64 and _TRITON else "torch"
        case "triton" | "fused":
            if like.dtype == float64:
                raise ValueError(f"{who}: backend={backend!r} has no float64; use 'torch' or 'reference'")
            if not _TRITON:
                raise ValueError(f"{who}: backend={backend!r} needs the package triton, which is not installed")
            if like.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
                raise ValueError(
                    f"{who}: backend={backend!r} runs on a GPU, and the tensors are on {like.device}; use 'torch', or "
                    "Triton's interpreter: TRITON_INTERPRET=1 in the environment before anything imports triton"
                )
            return backend
    raise ValueError(f"{who}: backend must be 'auto', 'triton', 'fused', 'torch' or 'reference', got {backend!r}")


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
    sixteen_bits = like.device.type in TENSOR_CORES and compute.itemsize == 2 and exact == torch.float32
    return compute if sixteen_bits else exact


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` with the digits of another dtype; on the autograd graph it is ``t`` itself: gradients are not rounded."""
    return t if torch.promote_types(t.dtype, dtype) == dtype else t + (t.to(dtype).to(t.dtype) - t).detach()
