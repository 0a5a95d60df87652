"""Who computes: torch alone, torch with Triton kernels between its matrix products, or the definition."""

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "fused", "tiled", "reference"]
Chosen = Literal["auto", "triton", "fused", "torch", "reference"]

_TRITON = importlib.util.find_spec("triton") is not None


def choose(who: str, backend: Backend, like: Tensor) -> Chosen:
    """What does the work on this tensor's device and in its precision; "auto" is one of the two of Triton.

    Raises:
        ValueError: if there is no such backend, or it can't run here.
    """
    match backend:
        case "tiled":
            return "torch"
        case "reference":
            return "reference"
        case "auto":
            return "auto" if like.device.type == "cuda" and like.dtype != torch.float64 and _TRITON else "torch"
        case "triton" | "fused":
            if like.dtype == torch.float64:
                raise ValueError(f"{who}: backend={backend!r} has no float64; use 'tiled' or 'reference'")
            if not _TRITON:
                raise ValueError(f"{who}: backend={backend!r} needs the package triton, which is not installed")
            if like.device.type != "cuda" and not _interpreted():
                raise ValueError(
                    f"{who}: backend={backend!r} runs on a GPU, and the tensors are on {like.device}; use 'tiled', or "
                    "Triton's interpreter: TRITON_INTERPRET=1 in the environment before anything imports triton"
                )
            return backend
    raise ValueError(f"{who}: backend must be 'auto', 'triton', 'fused', 'tiled' or 'reference', got {backend!r}")


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
