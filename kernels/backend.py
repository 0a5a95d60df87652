"""Choose the backend and the precision of a call, and check its arguments.

The backends are torch alone, torch with Triton kernels between its matrix products, and the
definition. The precision policy is that of README.md: the dtypes that factors are rounded to and
that products are summed in.
"""

import importlib.util
import os
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, float64, int64, nn
from torch.autograd import forward_ad

Backend = Literal["auto", "triton", "fused", "torch", "reference"]

# devices on which products of 16-bit factors are summed, and returned, in float32
TENSOR_CORES = ("cuda",)
_TRITON = importlib.util.find_spec("triton") is not None


def choose_backend(who: str, backend: Backend, like: Tensor) -> Backend:
    """The backend for this tensor's device and precision; "auto" remains where it means one of the
    two of Triton.

    Raises:
        ValueError: if there is no such backend, or it can't run here.
        NotImplementedError: under forward-mode differentiation, which an operator of torch answers
            with zeros.
    """
    if backend != "reference" and forward_ad.unpack_dual(like).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            f"{who}: this backend has no forward-mode derivative, use backend='reference'"
        )
    match backend:
        case "torch" | "reference":
            return backend
        case "auto":
            on_gpu = like.device.type == "cuda"
            return "auto" if on_gpu and like.dtype != float64 and _TRITON else "torch"
        case "triton" | "fused":
            if like.dtype == float64:
                raise ValueError(
                    f"{who}: backend={backend!r} has no float64; use 'torch' or 'reference'"
                )
            if not _TRITON:
                raise ValueError(
                    f"{who}: backend={backend!r} needs the package triton, which is not installed"
                )
            if like.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
                raise ValueError(
                    f"{who}: backend={backend!r} runs on a GPU, and the tensors are on {like.device}; use 'torch', or "
                    "Triton's interpreter: TRITON_INTERPRET=1 in the environment before anything imports triton"
                )
            return backend
    raise ValueError(
        f"{who}: backend must be 'auto', 'triton', 'fused', 'torch' or 'reference', got {backend!r}"
    )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 stays float64.

    Everything else is computed in float32: logits are never rounded to 16 bits.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """Autocast's dtype on the device of ``like``.

    None where it is off, and for float64, which it leaves alone.
    """
    kind = like.device.type
    on = like.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def factor_dtype(like: Tensor, compute: torch.dtype) -> torch.dtype:
    """The dtype that rounded factors are multiplied in: 16 bits on tensor cores; elsewhere that of
    the sums, in which products of 16-bit numbers are exact, so that nothing is rounded once
    more.
    """
    exact = accumulation_dtype(like.dtype)
    sixteen_bits = (
        like.device.type in TENSOR_CORES and compute.itemsize == 2 and exact == torch.float32
    )
    return compute if sixteen_bits else exact


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` with the digits of another dtype; on the autograd graph it is ``t`` itself: gradients
    are not rounded.
    """
    if torch.promote_types(t.dtype, dtype) == dtype:
        return t  # it has no more digits than that
    return t + (t.to(dtype).to(t.dtype) - t).detach()


def check_types(who: str, **tensors: object) -> None:
    """Raise ValueError for what is no tensor, with what to pass in its place."""
    for name, given in tensors.items():
        if isinstance(given, Tensor):
            continue
        advice = ""
        if isinstance(given, nn.Linear):
            advice = "; pass its weight, or Head(linear.weight, linear.bias)"
        elif isinstance(given, list | tuple):
            advice = "; make it one, torch.tensor"
        raise ValueError(f"{who}: {name} must be a tensor, got {type(given).__name__}{advice}")


def check_tensors(
    who: str,
    expected: Mapping[str, tuple[Tensor, list[int]]],
    positive: Mapping[str, float | Tensor | None],
) -> None:
    """Raise unless every tensor has its shape, and the device of the first one, and every number is
    positive.

    In place of a number there may be a tensor with one for each row of the first, whose values
    operators check.
    """
    reference, (first, _) = next(iter(expected.items()))
    numbers = {}
    for name, value in positive.items():
        if isinstance(value, Tensor):
            numbers[name] = (value, [len(first)])
    for name, (tensor, shape) in {**expected, **numbers}.items():
        if list(tensor.shape) != shape:
            raise ValueError(f"{who}: {name} must be {shape}, got {list(tensor.shape)}")
        if tensor.device != first.device:
            raise ValueError(
                f"{who}: {name} must be on {first.device} like {reference}, got {tensor.device}"
            )
        if name == "target" and tensor.dtype != int64:
            raise ValueError(f"{who}: target must be int64, got {tensor.dtype}")
        if name != "target" and not tensor.is_floating_point():
            raise ValueError(f"{who}: {name} must be floating-point, got {tensor.dtype}")
    for name, value in positive.items():
        if not (value is None or isinstance(value, Tensor) or 0 < value < float("inf")):
            raise ValueError(f"{who}: {name} must be positive and finite, got {value}")


def checked_vocab(who: str, vocab: int | None, size: int) -> int:
    """The number of columns that are not padding."""
    if vocab is not None and not 1 <= vocab <= size:
        raise ValueError(f"{who}: vocab must be in [1, {size}], got {vocab}")
    return size if vocab is None else vocab


def check_values(
    who: str, target: Tensor | None, vocab: int, temperature: float | Tensor | None
) -> None:
    """Raise unless every target is in the vocabulary (such a row would train on noise) and every
    temperature positive.

    Waits for the GPU once. A temperature that is a number is checked by ``check_tensors``, targets
    of a split vocabulary by ``combine``.
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
    who: str,
    outputs: Collection[str],
    known: Collection[str],
    target: Tensor,
    top_k: int | None,
    vocab: int | None,
) -> None:
    """Raise unless the requested outputs can be computed.

    Without ``vocab``, for a shard, any ``top_k`` can.
    """
    if unknown := set(outputs) - set(known):
        raise ValueError(f"{who}: outputs are some of {', '.join(known)}, got {min(unknown)!r}")
    if "rank" in outputs and target.ndim != 1:
        raise ValueError(
            f"{who}: a rank is that of one target per row, [N], got {list(target.shape)}"
        )
    if top_k is not None and vocab is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"{who}: top_k must be in [1, {vocab}], got {top_k}")


def checked_dtype(
    who: str, dtype: torch.dtype | None, like: Tensor, keep_bytes: int | None
) -> torch.dtype | None:
    """The dtype of factors that a call asks for, or else autocast, if any."""
    if keep_bytes is not None and keep_bytes < 0:
        raise ValueError(f"{who}: keep_bytes must be >= 0, where 0 keeps nothing, got {keep_bytes}")
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{who}: compute_dtype must be float32, bfloat16, float16 or None, got {dtype}"
        )
    return dtype or autocast_dtype(like)


def check_main_grad(who: str, main_grad: Tensor, weight: Tensor) -> None:
    """Raise unless gradients of the weight can be added to the buffer in float32, float64 for a
    weight in float64.
    """
    expected = accumulation_dtype(weight.dtype)
    fits = main_grad.shape == weight.shape and main_grad.device == weight.device
    if main_grad.dtype != expected or not fits:
        got = f"{main_grad.dtype} {list(main_grad.shape)} on {main_grad.device}"
        raise ValueError(
            f"{who}: main_grad must be {expected} {list(weight.shape)} on {weight.device} like weight, got {got}"
        )
    if main_grad.requires_grad:
        raise ValueError(
            f"{who}: main_grad must not require a gradient itself; it is added to in backward"
        )
