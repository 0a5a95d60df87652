"""The rates of the machine itself, in the run in which providers are measured, and where the time
of our step goes.

Each function returns one row of a table, numbers by column; products are TFLOP/s unless another
unit is named. On a CPU they run the same lines, at given sizes, in products of float32.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from ...kernels import passes
from .. import measure
from ..kernels import OPERATION, SPREAD
from ..measure import clocks, timed
from ..operation import Inputs, Json
from ..report import shown

ROWS = 512  # whose log-probs are compared


def copy(device: str, size: int, seconds: float) -> Json:
    """A copy of ``size`` bytes, each read and written once."""
    x = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return _rates({"TB/s": (lambda _: y.copy_(x), 2 * size)}, x.device, seconds)


def square(device: str, side: int, seconds: float) -> Json:
    """A product of two square matrices: ten at once, and for so long that power sets the clock."""
    a, b = _random(device, (side, side), (side, side))
    out, flops = torch.empty_like(a), 2 * side**3

    def product(mark: object) -> Tensor:
        return torch.mm(a, b, out=out)

    timed(product, a.device, count=3)
    burst = flops / timed(product, a.device, count=10)[0] / 1e12
    return {"burst of ten": burst, **_rates({"sustained": (product, flops)}, a.device, seconds)}


def products(device: str, rows: int, columns: int, width: int, seconds: float) -> Json:
    """The products of a tile: logits into float32 and bfloat16, sums of gradients, and a gradient
    in one product.
    """
    h, w, dc = _random(device, (rows, width), (columns, width), (rows, columns))
    z, dh, dw = (
        torch.zeros(size, device=device)
        for size in ((rows, columns), (rows, width), (columns, width))
    )
    z16, dw16 = z.to(h.dtype), dw.to(h.dtype)
    steps = {
        "z f32": lambda _: _multiply(h, w.t(), z, 0.0),
        "z bf16": lambda _: torch.mm(h, w.t(), out=z16),
        "dh += f32": lambda _: _multiply(dc, w, dh, 1.0),
        "dW += f32": lambda _: _multiply(dc.t(), h, dw, 1.0),
        "dW bf16": lambda _: torch.mm(dc.t(), h, out=dw16),
    }
    flops = 2 * rows * columns * width
    return _rates({name: (step, flops) for name, step in steps.items()}, h.device, seconds)


def truncation(device: str, width: int, rows: int, columns: int) -> Json:
    """Errors of logits in a product of bfloat16 into float32, whose sums a tensor core may cut off,
    not round.
    """
    h, w = _random(device, (rows, width), (columns, width))
    w *= SPREAD / math.sqrt(width)
    exact = h.double() @ w.double().t()
    error = _float32_product(h, w).double() - exact
    toward_zero = -(error * exact.sign()).mean()
    return {"largest error": _small(error.abs().max()), "toward 0 on average": _small(toward_zero)}


def logprobs(device: str, shape: tuple[int, ...], provider: str) -> Json:
    """Errors of log-probs in nats.

    Those of the provider "cublas" have their logits from one product into float32.
    """
    inputs, exact = _exact(device, shape)
    hidden, weight, target = (
        inputs.tensors["hidden"][:ROWS],
        inputs.tensors["weight"],
        inputs.tensors["target"][:ROWS],
    )
    with torch.no_grad():
        if provider == "cublas":
            logp = _float32_product(hidden, weight).log_softmax(-1).gather(1, target[:, None])[:, 0]
        else:
            (logp,) = OPERATION.find(provider).compute(hidden, weight, target, ("logprob",))
    error = logp.double() - exact
    kinds = {
        "largest": error.abs().max(),
        "root mean square": error.square().mean().sqrt(),
        "mean": error.mean(),
    }
    return {name: _small(value) for name, value in kinds.items()}


@lru_cache(1)
def _exact(device: str, shape: tuple[int, ...]) -> tuple[Inputs, Tensor]:
    """Inputs, and the log-probs of their first rows in float64."""
    inputs = _inputs(device, shape)
    hidden, weight, target = inputs.tensors.values()
    wide, parts = weight.double(), []
    for h, t in zip(*(torch.split(x[:ROWS], 128) for x in (hidden, target)), strict=True):
        parts.append((h.double() @ wide.t()).log_softmax(-1).gather(1, t[:, None])[:, 0])
    return inputs, torch.cat(parts)


def tiles(device: str, shape: tuple[int, ...], rows: int, columns: int, seconds: float) -> Json:
    """Milliseconds of our forward and backward with tiles of that size, for three budgets of kept
    logits.
    """
    inputs = _inputs(device, shape)
    names = ("GPU_ROWS", "GPU_COLUMNS") if inputs.device.type == "cuda" else ("ROWS", "COLUMNS")
    sizes: dict[str, Any] = dict(zip(names, (rows, columns), strict=True))
    with clocks(inputs.device) as state, mock.patch.multiple(passes, **sizes):
        milliseconds = {
            f"ms{budget.replace('-', ' ')}": 1000
            * sum(timed(_ours(inputs, budget), inputs.device, seconds))
            for budget in ("-recompute", "", "-4GiB")
        }
    return milliseconds | _state(state)


def profile(device: str, shape: tuple[int, ...]) -> Json:
    """The kernels of one step of ours, log-prob and entropy, forward and backward, with all logits
    kept.
    """
    inputs = _inputs(device, shape)
    on_gpu = inputs.device.type == "cuda"
    step = _ours(inputs, "-4GiB")
    timed(step, inputs.device, count=3)
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        timed(step, inputs.device)
    by = f"self_{'cuda' if on_gpu else 'cpu'}_time_total"
    return {
        "text": profiler.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=70)
    }


def _ours(inputs: Inputs, budget: str) -> Callable[..., object]:
    provider = OPERATION.find(
        f"burnish-{'triton' if inputs.device.type == 'cuda' else 'torch'}{budget}"
    )
    return partial(measure.run, inputs, provider, ("logprob", "entropy"), "train")


def _inputs(device: str, shape: tuple[int, ...]) -> Inputs:
    return OPERATION.make_inputs(shape, torch.bfloat16, device)


def _random(device: str, *sizes: tuple[int, ...]) -> list[Tensor]:
    random = torch.Generator(device).manual_seed(0)
    return [torch.randn(size, generator=random, device=device).bfloat16() for size in sizes]


def _multiply(a: Tensor, b: Tensor, out: Tensor, beta: float) -> None:
    """out = beta·out + a·b, of 16 bits into float32; where no product does that, of float32."""
    if a.device.type == "cuda":
        torch.addmm(out, a, b, beta=beta, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)


def _float32_product(hidden: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(len(hidden), len(weight), device=hidden.device)
    _multiply(hidden, weight.t(), out, 0.0)
    return out


def _rates(
    steps: dict[str, tuple[Callable[..., object], float]], device: torch.device, seconds: float
) -> Json:
    """The operations, or bytes, of each step in 10¹² a second."""
    with clocks(device) as state:
        rates = {
            name: work / timed(step, device, seconds)[0] / 1e12
            for name, (step, work) in steps.items()
        }
    return rates | _state(state)


def _state(clocks: Json) -> Json:
    return {"MHz / W / °C": shown(clocks)} if clocks else {}


def _small(value: Tensor) -> str:
    return f"{float(value):.1e}"
