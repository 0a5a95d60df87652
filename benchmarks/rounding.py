"""Products in 16 bits at the speed of float32, for CPUs that have no units for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


class _Rounded(torch.autograd.Function):
    """a·b summed in float32 and rounded once, as units for 16 bits do it, and so its gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (a, b), grad = ctx.saved_tensors, gradients[0].float()
        return (grad @ b.float().t()).to(a.dtype), (a.float().t() @ grad).to(b.dtype)


class _Products(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and all(x.dtype == self.dtype and x.ndim == 2 for x in args):
            return _Rounded.apply(*args)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


@contextmanager
def rounded_products(dtype: torch.dtype | None) -> Iterator[None]:
    """In this context matrix products of ``dtype`` are computed in float32 and rounded; with None nothing changes."""
    if dtype is None:
        yield
        return
    with _Products(dtype):
        yield
