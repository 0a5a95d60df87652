"""The rules of measuring: the gate against float64, rounds in which every provider runs once, then
memory.

A pass is "forward", without gradients, or one with the gradients of some of the inputs. Its floor
is the time of what it can't do without, such as the matrix products alone. An outcome holds tensors
by name: outputs, and gradients named after their inputs, ``d_hidden``. A step takes a function
``mark`` that it may call to split its time in spans.
"""

import ctypes
import gc
import math
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .operation import Inputs, Json, Products, Provider, named
from .worker import Lost, Worker

_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_QUERY = [
    "nvidia-smi",
    "--query-gpu=clocks.sm,power.draw,temperature.gpu",
    "--format=csv,noheader,nounits",
]


def run(
    inputs: Inputs,
    provider: Provider,
    outputs: tuple[str, ...],
    kind: str,
    mark: Callable[[], object] = lambda: None,
) -> dict[str, Tensor]:
    """The outcome of one pass; ``mark`` is called between forward and backward."""
    wanted = inputs.operation.passes[kind]
    tensors = {
        name: x.detach().requires_grad_(name in wanted) for name, x in inputs.tensors.items()
    }
    with torch.set_grad_enabled(bool(wanted)):
        results = compute(inputs, provider, tensors, outputs)
    mark()
    if wanted:
        upstream = [inputs.upstream[o].to(r.dtype) for o, r in zip(outputs, results, strict=True)]
        torch.autograd.backward(results, upstream)
    gradients = {f"d_{name}": grad for name in wanted if (grad := tensors[name].grad) is not None}
    return {o: r.detach() for o, r in zip(outputs, results, strict=True)} | gradients


def compute(
    inputs: Inputs, provider: Provider, tensors: dict[str, Tensor], outputs: tuple[str, ...]
) -> Sequence[Tensor]:
    """The outputs, shapes checked.

    A loss that the provider does not give is the mean of what it gives.
    """
    output, sign = inputs.operation.mean
    if outputs == ("loss",) and "loss" not in provider.gives:
        (value,) = compute(inputs, provider, tensors, (output,))
        return [sign * value.mean(dtype=torch.promote_types(value.dtype, torch.float32))]
    results = provider.compute(*tensors.values(), outputs, **inputs.settings)
    for output, result in zip(outputs, results, strict=True):
        wanted = inputs.upstream[output].shape
        if result.shape != wanted:
            raise ValueError(
                f"{provider.name}: {output} must be {list(wanted)}, got {list(result.shape)}"
            )
    return results


def plain(
    inputs: Inputs, outputs: tuple[str, ...], dtype: torch.dtype, numbers_at_once: int
) -> dict[str, Tensor]:
    """The outcome of the baseline's formula in ``dtype`` in the "train" pass, a few rows at a time.

    Gradients of tensors that are taken whole are summed in float32 at least.
    """
    operation, parts, upstream = inputs.operation, outputs, inputs.upstream
    (output, sign), per_row = operation.mean, operation.per_row
    count = len(inputs.tensors[per_row[0]]) if per_row else 1
    if loss := outputs == ("loss",):
        parts = (output,)
        upstream = {
            output: torch.full((count,), sign / count, dtype=torch.float64, device=inputs.device)
        }
    wide, wanted = torch.promote_types(dtype, torch.float32), operation.passes["train"]
    leaves = {
        name: _cast(x.detach(), wide).requires_grad_(name in wanted)
        for name, x in inputs.tensors.items()
    }
    values: dict[str, list[Tensor]] = {part: [] for part in parts}
    for start in range(0, count, rows_at_once := max(1, numbers_at_once // inputs.shape[-1])):
        rows = slice(start, start + rows_at_once)
        tensors = (_cast(x[rows] if name in per_row else x, dtype) for name, x in leaves.items())
        results = operation.providers[operation.baseline].compute(
            *tensors, parts, **inputs.settings
        )
        above = (upstream[part][rows] if per_row else upstream[part] for part in parts)
        torch.autograd.backward(
            results, [grad.to(result.dtype) for grad, result in zip(above, results, strict=True)]
        )
        for part, result in zip(parts, results, strict=True):
            values[part].append(result.detach())
    joined = {part: torch.cat(x) if per_row else x[0] for part, x in values.items()}
    if loss:
        joined = {"loss": sign * joined[output].mean()}
    gradients = {f"d_{name}": x.grad.to(dtype) for name, x in leaves.items() if x.grad is not None}
    return operation.collect(inputs, joined | gradients)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def exact(inputs: Inputs, outputs: tuple[str, ...]) -> dict[str, Tensor]:
    """The truth: the formula in float64."""
    return plain(inputs, outputs, torch.float64, 2**26)


def limits(inputs: Inputs, outputs: tuple[str, ...], truth: dict[str, Tensor]) -> dict[str, float]:
    """2 × the error of the formula in the dtype of the inputs, its results rounded to that dtype, +
    1e-6.

    On a CPU, products in 16 bits are computed in float32 and rounded: the same digits, and not a
    hundred times slower.
    """
    dtype = inputs.dtype
    with (
        RoundedProducts(dtype)
        if inputs.device.type == "cpu" and dtype.itemsize == 2
        else nullcontext()
    ):
        outcome = plain(inputs, outputs, dtype, 2**29)
    rounded = {name: value.to(dtype) for name, value in outcome.items()}
    return {name: 2 * error + 1e-6 for name, error in errors(rounded, truth).items()}


class RoundedProducts(TorchFunctionMode):
    """Computes matrix products of ``dtype`` in float32 and rounds them once, as units for 16 bits
    do.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _PRODUCTS and all(x.dtype == self.dtype and x.ndim == 2 for x in args):
            a, b = args
            return (a.float() @ b.float()).to(self.dtype)  # its derivatives are rounded once, too
        return func(*args, **(kwargs or {}))


def errors(outcome: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """The largest error: of outputs in nats, of gradients as a share of the largest entry."""
    return {name: _error(name, tensor, truth[name]) for name, tensor in outcome.items()}


def _error(name: str, tensor: Tensor, truth: Tensor) -> float:
    """A few rows at a time: there is no memory for a second float64 copy of a head's gradient."""
    rows = max(1, 2**26 // max(1, truth[:1].numel())) if truth.ndim else 1
    pairs = (
        zip(torch.split(tensor, rows), torch.split(truth, rows), strict=True)
        if truth.ndim
        else ((tensor, truth),)
    )
    error = torch.stack([(x.double() - t).abs().max() for x, t in pairs]).max()
    return float(error / truth.abs().max() if name.startswith("d_") else error)


def gate(errors: dict[str, float], limits: dict[str, float], gradients: set[str]) -> str | None:
    """Why a provider is not timed.

    None if it gives the outputs and the gradients of the pass within the limits.
    """
    for name in limits:
        if name not in errors and (name in gradients or not name.startswith("d_")):
            return f"{name} is missing"
    shares = {
        name: math.inf if math.isnan(error) else error / limits[name]
        for name, error in errors.items()
    }
    name = max(shares, key=shares.__getitem__)
    if shares[name] > 1:
        return f"{name} is off by {errors[name]:.1e}, allowed is {limits[name]:.1e}"
    return None


def timed(
    step: Callable[..., object], device: torch.device, seconds: float = 0.0, count: int = 1
) -> list[float]:
    """Seconds from one mark of a step to the next; the first is set before it, the last after it.

    Medians over ``count`` steps back to back, or as many as take ``seconds``: a GPU that is never
    idle runs at the clock that its power allows, which a single step after a pause does not show.
    """
    if seconds:
        _, warm = _spans(step, device, 2)
        count = min(2000, math.ceil(seconds / max(sum(warm), 1e-6)))
    return [median(spans) for spans in zip(*_spans(step, device, count), strict=True)]


def _spans(step: Callable[..., object], device: torch.device, count: int) -> list[list[float]]:
    """The spans of each step; a step begins where the one before it has ended."""
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


def interleave(
    steps: dict[str, Callable[..., object]],
    rounds: int,
    device: torch.device,
    on_error: Callable[[str, Exception], None],
    seconds: float = 0.0,
) -> dict[str, list[list[float]]]:
    """For every step the spans between its marks, round by round, after one round to warm up.

    See ``timed``.

    Every other round is backwards, so that no step always follows the same neighbor. A step that
    raises is passed to ``on_error`` and dropped.
    """
    spans: dict[str, list[list[float]]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name in [name for name in list(steps)[:: -1 if i % 2 else 1] if name in spans]:
            try:
                spans[name].append(timed(steps[name], device, seconds if i else 0.0))
            except Exception as error:  # a provider may raise anything
                on_error(name, error)
                del spans[name]
    return {name: each[1:] for name, each in spans.items()}


def fastest_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which products are fastest: of 16-bit inputs it may be float32, on a CPU without units for
    16 bits.
    """
    if device.type != "cpu" or dtype.itemsize > 2:
        return dtype
    seconds: dict[torch.dtype, float] = {}
    for candidate in (dtype, torch.float32):
        a, b = torch.randn(64, 512).to(candidate), torch.randn(512, 512).to(candidate)
        products: Callable[..., object] = lambda _, a=a, b=b: (a @ b.t(), a @ b, b @ a.t())  # noqa: E731
        seconds[candidate] = timed(products, device, count=3)[0]
    return min(seconds, key=seconds.__getitem__)


def floors(products: Products, seconds: dict[str, list[float]]) -> dict[str, Json]:
    """For each way to do the pass its seconds in every round, and its floating-point operations."""
    by_name = {}
    for name, counts in products.floors.items():
        rounds = zip(
            *([count * s for s in seconds[step]] for step, count in counts.items()), strict=True
        )
        flops = sum(count * products.flops.get(step, 0) for step, count in counts.items())
        by_name[name] = {"rounds": [sum(parts) for parts in rounds], "flops": flops}
    return by_name


def ratio(seconds: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds: other work on the machine hits both in a round."""
    return median(s / o for s, o in zip(seconds, other, strict=True))


def extra_bytes(
    inputs: Inputs, name: str, outputs: tuple[str, ...], passes: Sequence[str], dead_rows: float
) -> dict[str, int | None]:
    """Peak of each pass beyond its inputs, gradients included, when it is not the first.

    None where it is unknown.

    On a CPU it is the memory of a process of its own, so that what the allocator keeps from others
    does not count, with random inputs of the same shape.
    """
    if inputs.device.type == "cuda":
        return {kind: _allocated_bytes(inputs, name, outputs, kind) for kind in passes}
    if not passes or not Path("/proc/self/clear_refs").exists():
        return dict.fromkeys(passes)
    setting = inputs.shape, inputs.dtype, "cpu", dead_rows, tuple(inputs.settings.items())
    with closing(Worker()) as worker:
        try:
            arguments = (
                inputs.operation.name,
                name,
                setting,
                outputs,
                passes,
                torch.get_num_threads(),
            )
            peaks: dict[str, int | None] = worker.call(_resident_bytes, *arguments)
        except Lost:  # the system has ended it, most likely for its memory
            return dict.fromkeys(passes)
    return peaks


def _allocated_bytes(inputs: Inputs, name: str, outputs: tuple[str, ...], kind: str) -> int | None:
    provider = inputs.operation.find(name)
    try:
        run(inputs, provider, outputs, kind)
        gc.collect()
        torch.cuda.synchronize(inputs.device)
        before = torch.cuda.memory_allocated(inputs.device)
        torch.cuda.reset_peak_memory_stats(inputs.device)
        run(inputs, provider, outputs, kind)
        torch.cuda.synchronize(inputs.device)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated(inputs.device) - before


def _resident_bytes(
    operation: str,
    name: str,
    setting: Sequence[Any],
    outputs: tuple[str, ...],
    passes: Sequence[str],
    threads: int,
) -> dict[str, int]:
    torch.set_num_threads(threads)
    inputs, peaks = named(operation).make_inputs(*setting), {}
    provider = inputs.operation.find(name)
    for kind in passes:
        run(inputs, provider, outputs, kind)
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            # what this pass left to the allocator would be missing from the next
            ctypes.CDLL(None).malloc_trim(0)
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        run(inputs, provider, outputs, kind)
        peaks[kind] = resident_bytes("VmHWM") - before
    return peaks


def resident_bytes(field: str) -> int:
    """A field of this process' status: "VmRSS" now, "VmHWM" at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


@contextmanager
def clocks(device: torch.device, pause: float = 0.2) -> Iterator[Json]:
    """Clock, power and temperature of the GPU, asked of nvidia-smi in a thread while the context is
    open.

    Yields a dictionary that is filled at the end: "mhz", "watts" and "samples", medians and their
    count, and the highest "celsius"; or "absent", with the reason, if nvidia-smi failed. It stays
    empty where there is no GPU.
    """
    state: Json = {}
    if device.type != "cuda":
        yield state
        return
    over, samples, absent = (
        threading.Event(),
        list[tuple[float, ...]](),
        ["nvidia-smi has not answered in time"],
    )

    def watch() -> None:
        while not over.is_set():
            try:
                command = [*_QUERY, *_which(device)]
                answer = subprocess.run(
                    command, capture_output=True, text=True, timeout=5, check=True
                ).stdout
                sample = tuple(map(float, answer.splitlines()[0].split(",")))
            except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
                absent.append(f"{type(error).__name__}: {error}")
                return
            if not over.is_set():
                samples.append(sample)
            over.wait(pause)

    threading.Thread(target=watch, name="nvidia-smi", daemon=True).start()
    try:
        yield state
    finally:
        over.set()  # an answer that is still under way is not waited for: it may be of an idle GPU
        state |= summarize(list(samples)) if samples else {"absent": absent[-1]}


def summarize(samples: list[tuple[float, ...]]) -> Json:
    mhz, watts, celsius = zip(*samples, strict=True)
    return {
        "mhz": median(mhz),
        "watts": median(watts),
        "celsius": max(celsius),
        "samples": len(samples),
    }


def _which(device: torch.device) -> list[str]:
    """The option that names the device to nvidia-smi.

    Torch may see only some of them, and number them otherwise.
    """
    try:
        return [f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]
    except (RuntimeError, AssertionError, AttributeError):
        return []
