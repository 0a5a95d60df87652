"""The backends: torch alone, torch with Triton kernels between its matrix products, or the definition."""

import importlib.util
import os
from typing import Literal

from torch import Tensor, float64

Backend = Literal["auto", "triton", "fused", "torch", "reference"]

_TRITON = importlib.util.find_spec("triton") is not None


def choose_backend(who: str, backend: Backend, like: Tensor) -> Backend:
    """The backend for this tensor's device and precision; "auto" remains where it means one of the two of Triton.

    Raises:
        ValueError: if there is no such backend, or it can't run here.
    """
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
