"""Time, memory and error of the language-model head: ``python -m burnish.benchmarks.linear_logprob``.

Every provider turns hidden states into log-probability and entropy and sends a gradient back through both. First its
error against float64 is measured, and ours have to pass; then the providers take turns, so that whatever else runs on
the machine hits all of them; memory is that of a fresh process each, everything beyond the inputs, gradients included.
"""

import argparse
import importlib.util
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels import linear_logprob
from ..kernels.linear_logprob import Backend

Pair = tuple[Tensor, Tensor]
Shape = tuple[int, int, int]
RESULTS = Path(__file__).parent / "results"
GATE_SHAPE = (100, 64, 1031)


def ours(backend: Backend, hidden: Tensor, weight: Tensor, target: Tensor) -> Pair:
    result = linear_logprob(hidden, weight, target, backend=backend)
    return result.logprob, result.entropy


def naive(hidden: Tensor, weight: Tensor, target: Tensor) -> Pair:
    """What one writes without a kernel: the logits in the dtype of the model, the rest in float32."""
    logits = hidden @ weight.t()
    logp = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def trl(hidden: Tensor, weight: Tensor, target: Tensor) -> Pair:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    outputs = ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 32768, None, 1.0, ("entropy",))
    return outputs[0], outputs[1]


PROVIDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Pair]] = {
    "naive": naive,
    "tiled": partial(ours, "tiled"),
    "reference": partial(ours, "reference"),
}
if importlib.util.find_spec("trl"):
    PROVIDERS["trl"] = trl


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Hidden states, weight, targets and upstream gradients; logits of about ±1.2 standard deviations."""
    tokens, width, vocab = shape
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=random).to(dtype)
    weight = torch.randn(vocab, width, generator=random).mul_(0.05).to(dtype)
    target = torch.randint(vocab, (tokens,), generator=random)
    upstream = [torch.randn(tokens, generator=random) / tokens for _ in range(2)]
    return hidden.requires_grad_(), weight.requires_grad_(), target, upstream


def step(name: str, hidden: Tensor, weight: Tensor, target: Tensor, upstream: list[Tensor]) -> list[Tensor]:
    """Forward and backward: the two outputs and the two gradients."""
    hidden.grad = weight.grad = None
    outputs = PROVIDERS[name](hidden, weight, target)
    torch.autograd.backward(outputs, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)])
    assert hidden.grad is not None and weight.grad is not None
    return [*(o.detach() for o in outputs), hidden.grad, weight.grad]


def errors(dtype: torch.dtype) -> dict[str, list[float]]:
    """For logprob, entropy and both gradients the largest error against float64, provider by provider."""
    hidden, weight, target, upstream = inputs(GATE_SHAPE, dtype)
    precise = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = step("reference", *precise, target, upstream)
    found = {}
    for name in PROVIDERS:
        outputs = step(name, hidden, weight, target, upstream)
        found[name] = [(o.double() - e).abs().max().item() for o, e in zip(outputs, exact, strict=True)]
    return found


def gate(found: dict[str, list[float]]) -> None:
    """Stops unless ours is as close to float64 as the reference in the same precision."""
    for error, reference in zip(found["tiled"], found["reference"], strict=True):
        if not error <= 2 * reference + 1e-6:
            sys.exit(f"tiled is wrong, no times are taken: error {error:.1e}, reference {reference:.1e}")


def times(names: list[str], shape: Shape, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round after the first, which warms up; in each round every provider runs once."""
    arguments = inputs(shape, dtype)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name in names:
            begin = time.perf_counter()
            step(name, *arguments)
            taken[name].append(time.perf_counter() - begin)
    return {name: seconds[1:] for name, seconds in taken.items()}


def extra_memory(name: str, shape: Shape, dtype: torch.dtype, threads: int) -> float:
    """Peak MB beyond the inputs, in a fresh process, of a step that is not the first."""
    torch.set_num_threads(threads)
    arguments = inputs(shape, dtype)
    step(name, *inputs(GATE_SHAPE, dtype))
    base = _memory("VmRSS")
    step(name, *arguments)
    for argument in arguments[:2]:
        argument.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    step(name, *arguments)
    return _memory("VmHWM") - base


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def machine() -> dict[str, Any]:
    """The kind of machine and the versions, nothing that tells one machine from another of its kind."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "trl") if importlib.util.find_spec(name)},
        "date": date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="2048,576,49152", help="tokens, width, vocabulary")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; in each every provider runs once")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="which to time")
    options = parser.parse_args()
    tokens, width, vocab = map(int, options.shape.split(","))
    shape, dtype, names = (tokens, width, vocab), getattr(torch, options.dtype), options.providers.split(",")

    wrong = errors(dtype)
    gate(wrong)
    taken = times(names, shape, dtype, options.rounds)
    memory = {}
    for name in names:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            memory[name] = process.submit(extra_memory, name, shape, dtype, torch.get_num_threads()).result()
    report(options.dtype, shape, wrong, taken, memory)


def report(
    dtype: str,
    shape: Shape,
    wrong: dict[str, list[float]],
    taken: dict[str, list[float]],
    memory: dict[str, float],
) -> None:
    """The table on the screen, and everything in ``results/``."""
    rows: dict[str, dict[str, Any]] = {}
    for name, seconds in taken.items():
        ratios = [s / n for s, n in zip(seconds, taken.get("naive", seconds), strict=True)]
        rows[name] = {
            "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
            "ratio_to_naive": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
            "extra_megabytes": memory[name],
            "error": dict(zip(("logprob", "entropy", "d_hidden", "d_weight"), wrong[name], strict=True)),
        }
    shown = "x".join(map(str, shape))
    print(f"{dtype}, tokens x width x vocabulary = {shown}: log-probability and entropy, forward and backward")
    print(f"{'':10} {'seconds':>8} {'(spread)':>13} {'/ naive':>8} {'(spread)':>13} {'MB':>6}  error against float64")
    for name, row in rows.items():
        s, r = row["seconds"], row["ratio_to_naive"]
        spreads = [f"{x['min']:.2f}-{x['max']:.2f}" for x in (s, r)]
        shares = " ".join(f"{error:.0e}" for error in row["error"].values())
        times = f"{s['median']:8.2f} {spreads[0]:>13} {r['median']:8.2f} {spreads[1]:>13}"
        print(f"{name:10} {times} {row['extra_megabytes']:6.0f}  {shares}")
    RESULTS.mkdir(exist_ok=True)
    result = {"dtype": dtype, "shape": shape, "machine": machine(), "providers": rows}
    (RESULTS / f"linear_logprob_{dtype}_{shown}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
