"""How it is measured: the gate against float64, then rounds in which everyone runs once, then memory.

A pass is "forward", without gradients, or one with the gradients of some of the inputs. Its floor is the time of what
it can't do without, such as the matrix products alone.
"""

import ctypes
import gc
import math
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operation import Inputs, Mark, Operation, Outputs, Products, Provider, Settings, Step, named
from .rounding import rounded_products

Given = tuple[tuple[int, ...], torch.dtype, float, Settings]


def no_mark() -> None:
    pass


class Outcome(NamedTuple):
    """What a pass gives; gradients are named after their inputs, ``d_hidden``."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        return self.outputs | self.gradients


def run(
    operation: Operation, provider: Provider, inputs: Inputs, outputs: Outputs, kind: str, mark: Mark = no_mark
) -> Outcome:
    """One pass; ``mark`` is set between forward and backward."""
    wanted = operation.passes[kind]
    tensors = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.tensors.items()}
    with torch.set_grad_enabled(bool(wanted)):
        results = operation.compute(provider, tensors, outputs, inputs)
    mark()
    if wanted:
        upstream = [inputs.upstream[o].to(r.dtype) for o, r in zip(outputs, results, strict=True)]
        torch.autograd.backward(results, upstream)
    gradients = {f"d_{name}": grad for name in wanted if (grad := tensors[name].grad) is not None}
    return Outcome({o: r.detach() for o, r in zip(outputs, results, strict=True)}, gradients)


def step(operation: Operation, provider: Provider, inputs: Inputs, outputs: Outputs, kind: str, mark: Mark) -> None:
    """``run`` as it is timed: what it gives is freed before the last mark."""
    run(operation, provider, inputs, outputs, kind, mark)


def plain(operation: Operation, inputs: Inputs, outputs: Outputs, dtype: torch.dtype, numbers_at_once: int) -> Outcome:
    """The definition in ``dtype`` with the gradients of the "train" pass, a few rows at a time."""
    name, sign = operation.mean
    loss = outputs == ("loss",)
    parts, upstream = outputs, inputs.upstream
    count = len(inputs.tensors[inputs.per_row[0]]) if inputs.per_row else 1
    if loss:
        parts, upstream = (name,), {name: torch.full((count,), sign / count, dtype=torch.float64, device=inputs.device)}
    wanted = operation.passes["train"]
    whole = {
        name: _cast(x, dtype).requires_grad_(name in wanted)
        for name, x in inputs.tensors.items()
        if name not in inputs.per_row
    }
    sums = {x: torch.zeros_like(whole[x], dtype=_at_least_32(dtype)) for x in wanted if x in whole}
    values: dict[str, list[Tensor]] = {output: [] for output in parts}
    pieces: dict[str, list[Tensor]] = {x: [] for x in wanted if x not in whole}
    for start in range(0, count, rows_at_once := max(1, numbers_at_once // inputs.shape[-1])):
        rows = slice(start, start + rows_at_once)
        tensors = {
            name: whole[name] if name in whole else _cast(x[rows], dtype).requires_grad_(name in wanted)
            for name, x in inputs.tensors.items()
        }
        results = operation.definition(*tensors.values(), parts, **inputs.settings)
        above = []
        for output, result in zip(parts, results, strict=True):
            values[output].append(result.detach())
            above.append((upstream[output][rows] if inputs.per_row else upstream[output]).to(result.dtype))
        leaves = [tensors[name] for name in wanted]
        for name, grad in zip(wanted, torch.autograd.grad(results, leaves, above, allow_unused=True), strict=True):
            if grad is None:
                continue
            if name in sums:
                sums[name] += grad
            else:
                pieces[name].append(grad)
    gradients = {name: total.to(dtype) for name, total in sums.items()}
    gradients |= {name: torch.cat(grads) for name, grads in pieces.items() if grads}
    found = {output: torch.cat(x) if inputs.per_row else x[0] for output, x in values.items()}
    if loss:
        found = {"loss": sign * found[operation.mean[0]].mean()}
    return Outcome(found, operation.collect(inputs, {f"d_{name}": grad for name, grad in gradients.items()}))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype) if x.is_floating_point() else x.detach()


def _at_least_32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def exact(operation: Operation, inputs: Inputs, outputs: Outputs) -> Outcome:
    """What everyone is held to."""
    return plain(operation, inputs, outputs, torch.float64, 2**26)


def limits(operation: Operation, inputs: Inputs, outputs: Outputs, truth: Outcome) -> dict[str, float]:
    """2 × the error of the definition in the dtype of the inputs, its results rounded to that dtype, + 1e-6.

    On a CPU, products in 16 bits are computed in float32 and rounded: the same digits, and not a hundred times slower.
    """
    dtype = inputs.dtype
    with rounded_products(dtype if inputs.device.type == "cpu" and dtype.itemsize == 2 else None):
        found = plain(operation, inputs, outputs, dtype, 2**29)
    rounded = found._replace(outputs={name: value.to(dtype) for name, value in found.outputs.items()})
    return {name: 2 * error + 1e-6 for name, error in errors(rounded, truth).items()}


def errors(found: Outcome, truth: Outcome) -> dict[str, float]:
    """The largest error: of outputs in nats, of gradients as a share of the largest entry."""
    expected = truth.tensors()
    return {name: _error(name, tensor, expected[name]) for name, tensor in found.tensors().items()}


def _error(name: str, found: Tensor, truth: Tensor) -> float:
    """Some rows at a time: of a head with its gradient in float64 there is to be no second copy."""
    rows = max(1, 2**26 // max(1, truth[:1].numel())) if truth.ndim else 1
    pairs = zip(torch.split(found, rows), torch.split(truth, rows), strict=True) if truth.ndim else ((found, truth),)
    error = torch.stack([(f.double() - t).abs().max() for f, t in pairs]).max()
    return float(error / truth.abs().max() if name.startswith("d_") else error)


def gate(found: dict[str, float], limits: dict[str, float], gradients: set[str]) -> str | None:
    """Why a provider is not timed; None if it gives the outputs and the gradients of the pass within the limits."""
    for name in limits:
        if name not in found and (name in gradients or not name.startswith("d_")):
            return f"{name} is missing"
    shares = {name: math.inf if math.isnan(error) else error / limits[name] for name, error in found.items()}
    name = max(shares, key=shares.__getitem__)
    if shares[name] > 1:
        return f"{name} is off by {found[name]:.1e}, allowed is {limits[name]:.1e}"
    return None


def timed(step: Step, device: torch.device, seconds: float = 0.0, count: int = 1) -> list[float]:
    """Seconds from one mark of a step to the next; the first is set before it, the last after it.

    Of ``count`` steps back to back, or as many as take ``seconds``, the medians: a GPU that is never idle runs at the
    clock that its power allows, which a single step after a pause does not show.
    """
    if seconds:
        _, warm = _spans(step, device, 2)
        count = min(2000, math.ceil(seconds / max(sum(warm), 1e-6)))
    return [median(spans) for spans in zip(*_spans(step, device, count), strict=True)]


def _spans(step: Step, device: torch.device, count: int) -> list[list[float]]:
    """Of each step its spans; it begins where the one before it has ended."""
    on_gpu = device.type == "cuda"
    marks: list[Any] = []

    def mark() -> None:
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            marks.append(event)
        else:
            marks.append(time.perf_counter())

    if on_gpu:
        torch.cuda.synchronize(device)
    mark()
    for _ in range(count):
        step(mark)
        mark()
    if on_gpu:
        torch.cuda.synchronize(device)
    gaps = [a.elapsed_time(b) / 1000 if on_gpu else b - a for a, b in pairwise(marks)]
    each = len(gaps) // count
    return [gaps[i : i + each] for i in range(0, len(gaps), each)]


def turns(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The order in each round. Every other one is backwards, so nobody always comes after the same neighbor."""
    for i in range(rounds):
        yield names[::-1] if i % 2 else names


def interleave(
    steps: dict[str, Step],
    rounds: int,
    device: torch.device,
    notice: Callable[[str], None] = lambda name: None,
    stumbled: Callable[[str, Exception], None] | None = None,
    seconds: float = 0.0,
) -> dict[str, list[list[float]]]:
    """For every step the spans between its marks, round by round, after one round to warm up; see ``timed``.

    Before a turn ``notice`` is told who is next. Whoever raises is handed to ``stumbled`` and takes no further part.
    """
    taken: dict[str, list[list[float]]] = {name: [] for name in steps}
    for i, names in enumerate(turns(list(steps), rounds + 1)):
        for name in names:
            if name not in taken:
                continue
            notice(name)
            try:
                taken[name].append(timed(steps[name], device, seconds if i else 0.0))
            except Exception as error:
                if stumbled is None:
                    raise
                stumbled(name, error)
                del taken[name]
    return {name: spans[1:] for name, spans in taken.items()}


def fastest_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which products are fastest: of 16-bit inputs it may be float32, on a CPU without units for 16 bits."""
    if device.type != "cpu" or dtype.itemsize > 2:
        return dtype
    tried: dict[torch.dtype, float] = {}
    for candidate in (dtype, torch.float32):
        a, b = torch.randn(64, 512).to(candidate), torch.randn(512, 512).to(candidate)
        step = partial(_three_products, a, b)
        tried[candidate] = sum(sum(span) for span in interleave({"three": step}, 2, device)["three"])
    return min(tried, key=tried.__getitem__)


def _three_products(a: Tensor, b: Tensor, mark: Mark) -> None:
    """In the layouts of a pass."""
    torch.mm(a, b.t())
    torch.mm(a, b)
    torch.mm(b, a.t())


def floors(products: Products, taken: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """For each way to do the pass its seconds in every round, and its floating-point operations."""
    found = {}
    for name, counts in products.floors.items():
        rounds = zip(*([count * s for s in taken[step]] for step, count in counts.items()), strict=True)
        flops = sum(count * products.flops.get(step, 0) for step, count in counts.items())
        found[name] = {"rounds": [sum(parts) for parts in rounds], "flops": flops}
    return found


def ratio(seconds: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds: whatever else the machine did in a round has hit both."""
    return median(s / o for s, o in zip(seconds, other, strict=True))


def extra_bytes(
    operation: Operation, name: str, inputs: Inputs, outputs: Outputs, passes: Sequence[str], dead_rows: float
) -> dict[str, int | None]:
    """Peak of each pass beyond its inputs, gradients included, when it is not the first; None where it can't be told.

    On a CPU it is the memory of a process of its own, so that what the allocator keeps from others does not count, with
    random inputs of the same shape.
    """
    if inputs.device.type == "cuda":
        return {kind: _allocated_bytes(operation, name, inputs, outputs, kind) for kind in passes}
    if not passes or not Path("/proc/self/clear_refs").exists():
        return dict.fromkeys(passes)
    given = inputs.shape, inputs.dtype, dead_rows, inputs.settings
    arguments = operation.name, name, given, outputs, passes, torch.get_num_threads()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(_resident_bytes, *arguments).result()
        except BrokenProcessPool:  # the system has ended it, most likely for its memory
            return dict.fromkeys(passes)


def _allocated_bytes(operation: Operation, name: str, inputs: Inputs, outputs: Outputs, kind: str) -> int | None:
    provider = operation.find(name)
    try:
        run(operation, provider, inputs, outputs, kind)
        gc.collect()
        torch.cuda.synchronize(inputs.device)
        before = torch.cuda.memory_allocated(inputs.device)
        torch.cuda.reset_peak_memory_stats(inputs.device)
        run(operation, provider, inputs, outputs, kind)
        torch.cuda.synchronize(inputs.device)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated(inputs.device) - before


def _resident_bytes(
    operation_name: str, name: str, given: Given, outputs: Outputs, passes: Sequence[str], threads: int
) -> dict[str, int | None]:
    torch.set_num_threads(threads)
    operation = named(operation_name)
    shape, dtype, dead_rows, settings = given
    provider = operation.find(name)
    inputs = next(iter(operation.inputs.values()))(shape, dtype, torch.device("cpu"), dead_rows, settings)
    found: dict[str, int | None] = {}
    for kind in passes:
        run(operation, provider, inputs, outputs, kind)
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)  # what this pass left to the allocator would be missing from the next
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        run(operation, provider, inputs, outputs, kind)
        found[kind] = _resident("VmHWM") - before
    return found


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
