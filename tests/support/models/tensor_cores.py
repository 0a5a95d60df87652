"""The products of a GPU on a CPU: factors in 16 bits, sums in float32, and no rounding that is not
there too.
"""

import pytest
import torch
from burnish.kernels import backend, head, passes
from torch import Tensor


def multiply_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
    """What cuBLAS gives for ``addmm(out, a, b, out_dtype=...)``: exact products, one rounding of
    their sum.
    """
    assert a.dtype == b.dtype
    exact = torch.promote_types(torch.promote_types(a.dtype, out.dtype), torch.float32)
    with torch.autocast("cpu", enabled=False):
        out.copy_(alpha * (a.to(exact) @ b.to(exact)) + (beta * out if beta else 0))


def emulate(
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[torch.dtype, torch.dtype, torch.dtype, int]]:
    """From now on the CPU has tensor cores. Returns the products made since: dtypes of out and
    factors, operations.
    """
    made: list[tuple[torch.dtype, torch.dtype, torch.dtype, int]] = []

    def multiply(
        out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0
    ) -> None:
        made.append((out.dtype, a.dtype, b.dtype, 2 * out.numel() * a.shape[1]))
        multiply_(out, a, b, beta=beta, alpha=alpha)

    monkeypatch.setattr(backend, "TENSOR_CORES", ("cpu", "cuda"))
    for module in (head, passes):
        monkeypatch.setattr(module, "multiply_", multiply)
    return made
