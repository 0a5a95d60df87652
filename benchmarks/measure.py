"""How it is measured: the gate against float64, then rounds in which everyone runs once, then memory.

Three passes: "forward" alone; "train", with the gradients of hidden states and head; "frozen", without the head's.
The floor of each is the time of its matrix products alone, in units of N·D·V floating-point operations:

    forward 2        frozen 4 if the logits are kept, 6 if they are computed again        train 6 and 8
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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Inputs, Shape, random_inputs
from .providers import Outputs, Provider, find, naive

PASSES = ("forward", "train", "frozen")

Mark = Callable[[], None]


def _no_mark() -> None:
    pass


class Outcome(NamedTuple):
    """What a pass gives; gradients it does not have are None."""

    outputs: dict[str, Tensor]
    d_hidden: Tensor | None
    d_weight: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        gradients = {"d_hidden": self.d_hidden, "d_weight": self.d_weight}
        return self.outputs | {name: grad for name, grad in gradients.items() if grad is not None}


def run(provider: Provider, inputs: Inputs, outputs: Outputs, kind: str, mark: Mark = _no_mark) -> Outcome:
    """One pass; ``mark`` is set between forward and backward."""
    hidden = inputs.hidden.detach().requires_grad_(kind != "forward")
    weight = inputs.weight.detach().requires_grad_(kind == "train")
    with torch.set_grad_enabled(kind != "forward"):
        results = provider(hidden, weight, inputs.target, outputs)
    mark()
    if kind != "forward":
        upstream = [inputs.upstream[o].to(r.dtype) for o, r in zip(outputs, results, strict=True)]
        torch.autograd.backward(results, upstream)
    return Outcome({o: r.detach() for o, r in zip(outputs, results, strict=True)}, hidden.grad, weight.grad)


def step(provider: Provider, inputs: Inputs, outputs: Outputs, kind: str, mark: Mark) -> None:
    """``run`` as it is timed: what it gives is freed before the last mark."""
    run(provider, inputs, outputs, kind, mark)


def plain(inputs: Inputs, outputs: Outputs, dtype: torch.dtype, logits_at_once: int) -> Outcome:
    """A "train" pass of the naive formula in ``dtype``, a few rows at a time."""
    per_token = ("logprob",) if outputs == ("loss",) else outputs
    upstream = inputs.upstream
    if outputs == ("loss",):
        upstream = {"logprob": torch.full_like(inputs.target, -1 / len(inputs.target), dtype=torch.float64)}
    weight = inputs.weight.detach().to(dtype).requires_grad_()
    d_weight = torch.zeros_like(weight, dtype=torch.promote_types(dtype, torch.float32))
    found: dict[str, list[Tensor]] = {output: [] for output in per_token}
    d_hidden = []
    for start in range(0, len(inputs.target), rows_at_once := max(1, logits_at_once // len(weight))):
        rows = slice(start, start + rows_at_once)
        hidden = inputs.hidden[rows].detach().to(dtype).requires_grad_()
        results = naive(hidden, weight, inputs.target[rows], per_token)
        gradients = [upstream[o][rows].to(r.dtype) for o, r in zip(per_token, results, strict=True)]
        for output, result in zip(per_token, results, strict=True):
            found[output].append(result.detach())
        dh, dw = torch.autograd.grad(results, (hidden, weight), gradients)
        d_hidden.append(dh)
        d_weight += dw
    values = {output: torch.cat(parts) for output, parts in found.items()}
    if outputs == ("loss",):
        values = {"loss": -values["logprob"].mean()}
    return Outcome(values, torch.cat(d_hidden), d_weight.to(dtype))


def exact(inputs: Inputs, outputs: Outputs) -> Outcome:
    """What everyone is held to."""
    return plain(inputs, outputs, torch.float64, 2**26)


def limits(inputs: Inputs, outputs: Outputs, truth: Outcome) -> dict[str, float]:
    """2 × the error of the naive formula in the dtype of the inputs, its results rounded to that dtype, + 1e-6."""
    dtype = inputs.hidden.dtype
    found = plain(inputs, outputs, dtype, 2**29)
    rounded = found._replace(outputs={name: value.to(dtype) for name, value in found.outputs.items()})
    return {name: 2 * error + 1e-6 for name, error in errors(rounded, truth).items()}


def errors(found: Outcome, truth: Outcome) -> dict[str, float]:
    """The largest error: of outputs in nats, of gradients as a share of the largest entry."""
    return {name: _error(name, tensor, truth.tensors()[name]) for name, tensor in found.tensors().items()}


def _error(name: str, found: Tensor, truth: Tensor) -> float:
    error = (found.double() - truth).abs().max()
    return float(error / truth.abs().max() if name.startswith("d_") else error)


def gate(found: dict[str, float], limits: dict[str, float], kind: str) -> str | None:
    """Why a provider is not timed; None if it gives all that the pass is to give, within the limits."""
    absent = {"forward": {"d_hidden", "d_weight"}, "frozen": {"d_weight"}}.get(kind, set())
    for name in limits.keys() - absent:
        if name not in found:
            return f"{name} is missing"
    shares = {name: math.inf if math.isnan(error) else error / limits[name] for name, error in found.items()}
    name = max(shares, key=shares.__getitem__)
    if shares[name] > 1:
        return f"{name} is off by {found[name]:.1e}, allowed is {limits[name]:.1e}"
    return None


def timed(step: Callable[[Mark], object], device: torch.device) -> list[float]:
    """Seconds from one mark to the next; the first is set before the step, the last after it."""
    if device.type != "cuda":
        times = [time.perf_counter()]
        step(lambda: times.append(time.perf_counter()))
        times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    torch.cuda.synchronize(device)
    mark()
    step(mark)
    mark()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(events)]


def turns(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The order in each round. Every other one is backwards, so nobody always comes after the same neighbor."""
    for i in range(rounds):
        yield names[::-1] if i % 2 else names


def interleave(
    steps: dict[str, Callable[[Mark], object]], rounds: int, device: torch.device
) -> dict[str, list[list[float]]]:
    """For every step the spans between its marks, round by round, after one round to warm up."""
    taken: dict[str, list[list[float]]] = {name: [] for name in steps}
    for names in turns(list(steps), rounds + 1):
        for name in names:
            taken[name].append(timed(steps[name], device))
    return {name: spans[1:] for name, spans in taken.items()}


def products(inputs: Inputs, kind: str, dtype: torch.dtype) -> dict[str, Callable[[Mark], object]]:
    """The matrix products of a pass, each on its own, into memory that is there already."""
    hidden, weight = inputs.hidden.to(dtype), inputs.weight.to(dtype)
    logits = hidden @ weight.t()
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    steps: dict[str, Callable[[Mark], object]] = {
        "logits": lambda _: torch.mm(hidden, weight.t(), out=logits),
        "d_hidden": lambda _: torch.mm(logits, weight, out=d_hidden),
        "d_weight": lambda _: torch.mm(logits.t(), hidden, out=d_weight),
    }
    wanted = {"forward": ["logits"], "frozen": ["logits", "d_hidden"], "train": list(steps)}[kind]
    return {name: steps[name] for name in wanted}


def fastest_dtype(inputs: Inputs) -> torch.dtype:
    """In which the products are fastest: of 16-bit inputs it may be float32, on a CPU without units for 16 bits."""
    if inputs.hidden.device.type != "cpu" or inputs.hidden.dtype.itemsize > 2:
        return inputs.hidden.dtype
    small = inputs._replace(hidden=inputs.hidden[:128], weight=inputs.weight[:2048])
    tried: dict[torch.dtype, float] = {}
    for dtype in (inputs.hidden.dtype, torch.float32):
        taken = interleave(products(small, "train", dtype), 2, inputs.hidden.device)
        tried[dtype] = sum(sum(span) for spans in taken.values() for span in spans)
    return min(tried, key=tried.__getitem__)


def floors(taken: dict[str, list[float]]) -> dict[str, list[float]]:
    """Seconds of each round in the products alone, named by cost: the logits kept, and the logits computed twice."""
    kept = [sum(parts) for parts in zip(*taken.values(), strict=True)]
    if len(taken) == 1:
        return {"2NDV": kept}
    twice = [seconds + logits for seconds, logits in zip(kept, taken["logits"], strict=True)]
    return {f"{2 * len(taken)}NDV": kept, f"{2 * len(taken) + 2}NDV": twice}


def ratio(seconds: list[float], other: list[float]) -> float:
    """The median over rounds: whatever else the machine did in a round has hit both."""
    return median(s / o for s, o in zip(seconds, other, strict=True))


def extra_bytes(name: str, inputs: Inputs, outputs: Outputs, passes: Sequence[str]) -> dict[str, int | None]:
    """Peak of each pass beyond its inputs, gradients included, when it is not the first; None where it can't be told.

    On a CPU it is the memory of a process of its own, so that what the allocator keeps from others does not count, with
    random inputs of the same shape.
    """
    if inputs.hidden.device.type == "cuda":
        return {kind: _allocated_bytes(find(name), inputs, outputs, kind) for kind in passes}
    if not passes or not Path("/proc/self/clear_refs").exists():
        return dict.fromkeys(passes)
    dead_rows = float((inputs.upstream["logprob"] == 0).float().mean())
    given = inputs.shape, inputs.hidden.dtype, dead_rows
    arguments = name, given, outputs, passes, torch.get_num_threads()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(_resident_bytes, *arguments).result()
        except BrokenProcessPool:  # the system has ended it, most likely for its memory
            return dict.fromkeys(passes)


def _allocated_bytes(provider: Provider, inputs: Inputs, outputs: Outputs, kind: str) -> int:
    run(provider, inputs, outputs, kind)
    gc.collect()
    torch.cuda.synchronize(inputs.hidden.device)
    before = torch.cuda.memory_allocated(inputs.hidden.device)
    torch.cuda.reset_peak_memory_stats(inputs.hidden.device)
    run(provider, inputs, outputs, kind)
    torch.cuda.synchronize(inputs.hidden.device)
    return torch.cuda.max_memory_allocated(inputs.hidden.device) - before


def _resident_bytes(
    name: str, given: tuple[Shape, torch.dtype, float], outputs: Outputs, passes: Sequence[str], threads: int
) -> dict[str, int | None]:
    torch.set_num_threads(threads)
    provider, (shape, dtype, dead_rows) = find(name), given
    inputs = random_inputs(shape, dtype, torch.device("cpu"), dead_rows)
    found: dict[str, int | None] = {}
    for kind in passes:
        run(provider, inputs, outputs, kind)
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)  # what this pass left to the allocator would be missing from the next
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        run(provider, inputs, outputs, kind)
        found[kind] = _resident("VmHWM") - before
    return found


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
