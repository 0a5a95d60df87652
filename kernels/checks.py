"""Checks of arguments, and their error messages."""

from collections.abc import Collection

import torch
from torch import Tensor, float32, float64, int64


def check_tensors(
    who: str, expected: dict[str, tuple[Tensor, list[int]]], positive: dict[str, float | None] | None = None
) -> None:
    """Raise unless every tensor has its shape, and the device of the first one, and every number is positive."""
    device = next(tensor.device for tensor, _ in expected.values())
    for name, (tensor, shape) in expected.items():
        if list(tensor.shape) != shape:
            raise ValueError(f"{who}: {name} must be {shape}, got {list(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"{who}: {name} must be on {device} like {next(iter(expected))}, got {tensor.device}")
        if name == "target" and tensor.dtype != int64:
            raise ValueError(f"{who}: target must be int64, got {tensor.dtype}")
        if name != "target" and not tensor.is_floating_point():
            raise ValueError(f"{who}: {name} must be floating-point, got {tensor.dtype}")
    for name, value in (positive or {}).items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{who}: {name} must be positive and finite, got {value}")


def check_rows(who: str, tensors: dict[str, Tensor], temperature: float | Tensor, target: Tensor | None = None) -> None:
    """Raise unless everything has as many rows as the first of ``tensors``. Operators check the values."""
    n = len(next(iter(tensors.values())))
    expected = {name: (tensor, [n, *tensor.shape[1:]]) for name, tensor in tensors.items()}
    if target is not None:
        expected["target"] = target, [n, *target.shape[1:2]]
    if isinstance(temperature, Tensor):
        check_tensors(who, expected | {"temperature": (temperature, [n])})
    else:
        check_tensors(who, expected, {"temperature": temperature})


def checked_vocab(who: str, vocab: int | None, size: int) -> int:
    """The number of columns that are not padding."""
    if vocab is not None and not 1 <= vocab <= size:
        raise ValueError(f"{who}: vocab must be in [1, {size}], got {vocab}")
    return size if vocab is None else vocab


def check_values(who: str, target: Tensor | None, vocab: int, temperature: float | Tensor | None) -> None:
    """Raise unless every target is in the vocabulary (such a row would train on noise) and every temperature positive.

    Waits for the GPU once. A temperature that is a number is checked by ``check_rows``, targets of a split vocabulary
    by ``combine``.
    """
    outside = None if target is None else (target < 0) | (target >= vocab)
    cold = ~(temperature > 0) if isinstance(temperature, Tensor) else None
    wrong = [bad.any() for bad in (outside, cold) if bad is not None]
    if not wrong or not torch.stack(wrong).any():
        return
    if target is not None and outside is not None and outside.any():
        raise IndexError(
            f"{who}: every target must be in [0, {vocab}), got {target[outside][0].item()} ({int(outside.sum())} of "
            f"{target.numel()} are outside); select the rows that carry a target before the call"
        )
    assert isinstance(temperature, Tensor)
    raise ValueError(f"{who}: every temperature must be > 0, got {temperature.min().item()}")


def check_outputs(
    who: str, outputs: Collection[str], known: Collection[str], target: Tensor, top_k: int | None, vocab: int | None
) -> None:
    """Raise unless the requested outputs can be computed; without ``vocab``, for a shard, any ``top_k`` can."""
    unknown = set(outputs) - set(known)
    if unknown:
        raise ValueError(f"{who}: outputs are some of {', '.join(known)}, got {min(unknown)!r}")
    if "rank" in outputs and target.ndim != 1:
        raise ValueError(f"{who}: a rank is that of one target per row, [N], got {list(target.shape)}")
    if top_k is not None and vocab is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"{who}: top_k must be in [1, {vocab}], got {top_k}")


def check_computation(who: str, compute_dtype: torch.dtype | None, keep_bytes: int | None = None) -> None:
    if keep_bytes is not None and keep_bytes < 0:
        raise ValueError(f"{who}: keep_bytes must be >= 0, where 0 keeps nothing, got {keep_bytes}")
    if compute_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{who}: compute_dtype must be float32, bfloat16, float16 or None, got {compute_dtype}")


def check_main_grad(who: str, main_grad: Tensor, weight: Tensor) -> None:
    """Raise unless gradients of the weight can be added to the buffer in float32, float64 for a weight in float64."""
    expected = float64 if weight.dtype == float64 else float32
    if main_grad.dtype != expected or main_grad.shape != weight.shape or main_grad.device != weight.device:
        got = f"{main_grad.dtype} {list(main_grad.shape)} on {main_grad.device}"
        raise ValueError(
            f"{who}: main_grad must be {expected} {list(weight.shape)} on {weight.device} like weight, got {got}"
        )
    if main_grad.requires_grad:
        raise ValueError(f"{who}: main_grad must not require a gradient itself; it is added to in backward")
