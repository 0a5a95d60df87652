"""What the Triton kernels cost on GPUs that are not here:
``python tests/support/tools/aot.py [--update]``.

Compiles every kernel of ``burnish.kernels`` as it would be launched on each architecture, and
compares its registers, spills and shared memory with a committed budget. The functions that launch
the kernels are called as always, with tensors that have no memory and a driver that only says which
GPU it would be, so tiles and specialization are real.

Each version of Triton has a budget of its own in the one file: run ``--update`` once in an
environment with each.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.10 has another default

import torch
import triton
from burnish.kernels import launch_table, triton_divergence, triton_forward, triton_softmax
from burnish.kernels.head import HeadFactors
from burnish.kernels.softmax import Coefficients, LogitTransform, SoftmaxState
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

BUDGET = Path(__file__).parents[2] / "kernels" / "aot_budget.json"
MODULES: tuple[ModuleType, ...] = (triton_softmax, triton_divergence, triton_forward)


class Architecture(NamedTuple):
    target: GPUTarget
    shared: int  # bytes that one program may have


ARCHITECTURES = {
    "sm_75": Architecture(GPUTarget("cuda", 75, 32), 65_536),
    "sm_80": Architecture(GPUTarget("cuda", 80, 32), 166_912),
    "sm_86": Architecture(GPUTarget("cuda", 86, 32), 101_376),
    "sm_89": Architecture(GPUTarget("cuda", 89, 32), 101_376),
    "sm_90": Architecture(GPUTarget("cuda", 90, 32), 232_448),
    "sm_100": Architecture(GPUTarget("cuda", 100, 32), 232_448),
    "sm_120": Architecture(GPUTarget("cuda", 120, 32), 101_376),
    "gfx942": Architecture(GPUTarget("hip", "gfx942", 64), 65_536),
    "gfx950": Architecture(GPUTarget("hip", "gfx950", 64), 163_840),
}
Figures = dict[str, int]
launched: set[Any] = set()


class AbsentGPU:
    """A driver, as far as compiling needs one."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def absent(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows(n: int, wanted: bool) -> Tensor | None:
    return absent(n) if wanted else None


def forward(dtype: torch.dtype, width: int, full: bool, targets: int = 1) -> None:
    n, size, rank = 8192, 151936, 16
    triton_forward.accumulate(
        HeadFactors(
            absent(n, width, dtype=dtype),
            absent(size, width, dtype=dtype),
            absent(size) if full else None,
            absent(n, rank, dtype=dtype) if full else None,
            absent(size, rank, dtype=dtype) if full else None,
            dtype,
        ),
        absent(n, targets, dtype=torch.int64),
        transform=transform(n, full),
        vocab=size - 100 if full else size,
        mean=full,
        squares=full,
    )


def transform(n: int, full: bool) -> LogitTransform:
    return LogitTransform(0.5, 30.0, absent(n)) if full else LogitTransform(1.0, None, None)


def fold(dtype: torch.dtype, full: bool, kept: bool = False) -> None:
    n, columns = 2048, 8192 if kept else 4096
    target = absent(n, 7 if full else 1, dtype=torch.int64)
    state = SoftmaxState.start(target, absent(0), full, full)
    space = (absent(n, columns, dtype=torch.bfloat16), absent(n)) if kept else None
    triton_softmax.fold_(absent(n, columns, dtype=dtype), target, state, transform(n, full), space)


def backward(dtype: torch.dtype, full: bool) -> None:
    n, columns, k = 2048, 4096, 7 if full else 1
    upstream = Coefficients(absent(n), *(rows(n, full) for _ in range(3)), absent(n, k))
    triton_softmax.backward_tile_(
        absent(n, columns, dtype=dtype), absent(n, k, dtype=torch.int64), absent(n), upstream, transform(n, full),
        absent(n, columns, dtype=torch.bfloat16), top=rows(n, full), moments=rows(n, full),
    )  # fmt: skip


def divergence_fold(full: bool) -> None:
    n, tile = 2048, absent(2048, 4096)
    triton_divergence.fold_(absent(n, 5), tile, tile, transform(n, full), transform(n, full), True)


def divergence_mix(full: bool) -> None:
    n, tile = 2048, absent(2048, 4096)
    triton_divergence.mix_(
        absent(n, 2), tile, tile, absent(n, 5), transform(n, full), transform(n, full), 0.5
    )


def divergence_backward(full: bool, beta: float) -> None:
    n, tile, out = 2048, absent(2048, 4096), absent(2048, 4096, dtype=torch.bfloat16)
    both = transform(n, full), transform(n, full)
    triton_divergence.backward_tile_(out, tile, tile, absent(n, 5), absent(n), *both, beta)


CASES: dict[str, Callable[[], None]] = {
    "forward bf16 plain": lambda: forward(torch.bfloat16, 4096, False),
    "forward bf16 several targets": lambda: forward(torch.bfloat16, 4096, False, targets=16),
    "forward bf16 everything": lambda: forward(torch.bfloat16, 2048, True, targets=7),
    "forward bf16 unaligned": lambda: forward(torch.bfloat16, 2047, False),
    "forward fp32 plain": lambda: forward(torch.float32, 2048, False),
    "fold bf16 plain": lambda: fold(torch.bfloat16, False),
    "fold fp32 plain": lambda: fold(torch.float32, False),
    "fold fp32 kept": lambda: fold(torch.float32, False, kept=True),
    "fold fp32 everything": lambda: fold(torch.float32, True, kept=True),
    "backward bf16 plain": lambda: backward(torch.bfloat16, False),
    "backward fp32 plain": lambda: backward(torch.float32, False),
    "backward fp32 everything": lambda: backward(torch.float32, True),
    "divergence fold plain": lambda: divergence_fold(False),
    "divergence fold everything": lambda: divergence_fold(True),
    "divergence mix everything": lambda: divergence_mix(True),
    "divergence backward forward KL plain": lambda: divergence_backward(False, 0.0),
    "divergence backward reverse KL plain": lambda: divergence_backward(False, 1.0),
    "divergence backward mixture everything": lambda: divergence_backward(True, 0.5),
}


@contextmanager
def compiling_only(architecture: Architecture) -> Iterator[list[Any]]:
    """Every launch inside is a compilation for that architecture; they are collected."""
    compiled: list[Any] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launched.add(self)
        compiled.append(launch(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    driver.set_active(AbsentGPU(architecture.target))
    for kernel in kernels():
        kernel.device_caches.clear()
    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = launch


def kernels() -> list[Any]:
    found = itertools.chain.from_iterable(vars(module).values() for module in MODULES)
    return [f for f in found if isinstance(f, JITFunction) and f.__name__.endswith("_kernel")]


def figures(kernel: Any) -> Figures:
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        vector, accumulator, spills = (
            int(re.search(rf"\.{name}: +(\d+)", text)[1])
            for name in ("vgpr_count", "agpr_count", "vgpr_spill_count")
        )
        return {
            "registers": vector + accumulator,
            "spills": spills,
            "shared": kernel.metadata.shared,
        }
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = disassembled("-res-usage", file.name)
        code = disassembled("-sass", file.name)
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": spills,
        "shared": kernel.metadata.shared,
    }


def disassembled(option: str, path: str) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def measured(only: str) -> dict[str, Figures | str]:
    """The figures of each case on each architecture, or why it does not compile; printed as they
    come.
    """
    found: dict[str, Figures | str] = {}
    for (name, architecture), (case, call) in itertools.product(
        ARCHITECTURES.items(), CASES.items()
    ):
        label = f"{name} {case}"
        if name == "sm_75" and case.startswith("forward"):
            continue  # it has no row in the launch table, so that the forward kernel never runs
        if re.search(only, label):
            start = time.process_time()
            try:
                with compiling_only(architecture) as compiled:
                    call()
                (kernel,) = compiled
                found[label] = figures(kernel)
                numbers = " ".join(
                    f"{figure} {number:6}" for figure, number in found[label].items()
                )
            except TritonError as error:
                found[label] = numbers = str(error)
            print(f"{label:42} {numbers} {time.process_time() - start:5.1f} s", flush=True)
    return found


def complaints(found: dict[str, Figures | str], committed: dict[str, Any]) -> Iterator[str]:
    """What is not as it must be, or worse than was committed for this version of Triton."""
    budget = committed.get(triton.__version__)
    if budget is None:
        print(
            f"There is no budget for triton {triton.__version__}, only for {', '.join(committed)}: not compared"
        )
    for label, now in found.items():
        name = label.split()[0]
        if isinstance(now, str):
            yield f"{label}: does not compile: {now}"
            continue
        if now["shared"] > ARCHITECTURES[name].shared:
            yield f"{label}: shared is {now['shared']} bytes, {name} has {ARCHITECTURES[name].shared}"
        least = _two_buffers(name)
        if label.endswith(" forward bf16 plain") and now["shared"] < least:
            yield f"{label}: shared is {now['shared']} bytes, two buffers of blocks are {least}"
        if now["spills"] and _must_not_spill(name, label):
            yield f"{label}: spills are {now['spills']}, a forward kernel must have none on {name}"
        if budget is not None and label not in budget:
            yield f"{label}: has no budget; run with --update"
        for figure, most in (budget or {}).get(label, {}).items():
            if now[figure] > most:
                yield f"{label}: {figure} are {now[figure]}, the budget is {most}; if worth it, run with --update"


def _two_buffers(name: str) -> int:
    """Bytes of the blocks that the plain forward kernel multiplies in 16 bits, twice: those that
    are multiplied, and those that arrive meanwhile.
    """
    architecture = ARCHITECTURES[name].target.arch
    rows, columns, depth, *_ = launch_table.launch(
        architecture, torch.bfloat16, aligned=True, plain=True
    )
    return 2 * (rows + columns) * depth * torch.bfloat16.itemsize


def _must_not_spill(name: str, label: str) -> bool:
    """True for forward kernels on sm_90, and for the plain one on others of NVIDIA.

    Not on sm_120, where Triton 3.6 spills 6 registers and 3.9 none: the budget of each holds.
    """
    if name == "sm_90":
        return "backward" not in label
    may_spill = name == "sm_120" or not name.startswith("sm_")
    return not may_spill and label.endswith("forward bf16 plain")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Registers, spills and shared memory of every Triton kernel."
    )
    parser.add_argument("--update", action="store_true", help="write what is found into the budget")
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="only the cases with this pattern in their name",
    )
    parser.add_argument("--budget", type=Path, default=BUDGET, metavar="FILE")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        raise SystemExit(
            "aot: TRITON_INTERPRET must not be set, interpreted kernels are not compiled"
        )
    found = measured(options.only)
    if options.update:
        budget = json.loads(options.budget.read_text()) if options.budget.exists() else {}
        kept = budget.get(triton.__version__, {}) if options.only else {}
        now = {label: figures for label, figures in found.items() if not isinstance(figures, str)}
        options.budget.write_text(
            json.dumps(budget | {triton.__version__: kept | now}, indent=1) + "\n"
        )
    wrong = list(complaints(found, json.loads(options.budget.read_text())))
    # On sm_75 the forward kernel never runs.
    with_every_kernel = {"", *ARCHITECTURES} - {"sm_75"}
    if options.only.strip() in with_every_kernel:
        wrong += [
            f"{kernel.__module__}.{kernel.__name__}: no case"
            for kernel in kernels()
            if kernel not in launched
        ]
    print(*wrong, sep="\n")
    print(f"{len(found)} compiled, {len(wrong)} complaints")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
