"""A product whose epilogue keeps what backward needs: NEVER RUN, only compiled ahead of time.

    z = scale·h·Wᵀ        top = the largest z of a row in 256 columns        x = z − top

    kept: x in float16        sums: top, S = Σ eˣ, M = Σ x·eˣ of each row and 256 columns        chosen: z of the target

The library writes each tile of logits in float32 (cuBLAS), reads it to fold it, and writes x
(triton_softmax.py). Here no float32 logit leaves the registers. Predicted for an H200 at N = 8192,
D = 4096, V = 151936 in bf16: forward 13.5 ms instead of 15.2, if the product holds 0.96 of the rate
of cuBLAS; at D ≤ 1024 half to two thirds of the time.

One program a multiprocessor walks over tiles of 128 × 256. One warp fetches blocks of 64 columns of
h and W by the tensor memory accelerator, three in advance, also for the next tile while this one is
folded; eight warps multiply them, one product in flight while the next is issued, and fold the tile
in two halves, as the temporaries of a whole one don't fit into the registers. x leaves by way of
shared memory, while the next tile is multiplied.

Compiled for sm_90 by Triton 3.6, 3.8 and 3.9: 168 registers, no spill, 213,164 of 232,448 bytes of
shared memory (tests/benchmarks/test_kept_product.py). No backend of the library has it: first
``python -m burnish.benchmarks.experiments.kept_product`` has to be right and faster on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import sys
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.testing import do_bench

from ...kernels import triton_forward, triton_softmax
from ...kernels.softmax import LogitTransform, SoftmaxState

ROWS, COLUMNS, DEPTH, STAGES, WARPS = 128, 256, 64, 3, 8
FETCHING_REGISTERS = 24  # of a thread of the warp that fetches; the others have 240
# Triton 3.6 has them by longer names.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class Kept(NamedTuple):
    """What forward leaves.

    Attributes:
        x: float16 ``[N, V]``, z less the largest of its row and 256 columns.
        sums: ``[V/256, 3, N]``, that largest z, S and M, as ``triton_forward.merge`` takes them.
        chosen: ``[N, 1]``, z of the target.
    """

    x: Tensor
    sums: Tensor
    chosen: Tensor

    def state(self, target: Tensor) -> SoftmaxState:
        """The sums of the whole vocabulary."""
        start = SoftmaxState.start(target[:, None], self.sums.new_empty(0), False, False)
        return triton_forward.merge(self.sums, start._replace(chosen=self.chosen))


@gluon.jit
def _corner(tile, blocks, spans, group, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The first row and column of a tile: down a group of row blocks, then to the next columns."""
    first_block = tile // (group * spans) * group
    within = tile % (group * spans)
    height = gl.minimum(blocks - first_block, group)
    return (first_block + within % height) * ROWS, within // height * COLUMNS


@gluon.jit
def _fetch(hidden, weight, h, w, full, empty, blocks, spans, group, D: gl.constexpr):
    """Fills buffer after buffer as they are emptied."""
    STAGES: gl.constexpr = h.shape[0]
    ROWS: gl.constexpr = h.shape[1]
    COLUMNS: gl.constexpr = w.shape[1]
    DEPTH: gl.constexpr = h.shape[2]
    step = 0
    for tile in range(gl.program_id(0), blocks * spans, gl.num_programs(0)):
        first_row, first = _corner(tile, blocks, spans, group, ROWS, COLUMNS)
        for k in range(0, D, DEPTH):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * (ROWS + COLUMNS) * DEPTH)
            _load(hidden, [first_row, k], full.index(stage), h.index(stage))
            _load(weight, [first, k], full.index(stage), w.index(stage))
            step += 1


@gluon.jit
def _multiply(
    sums_ptr, chosen_ptr, target_ptr, kept, h, w, out, full, empty, scale, rows, blocks, spans, group,
    D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiplies what has arrived, and folds and stores tile after tile."""
    STAGES: gl.constexpr = h.shape[0]
    ROWS: gl.constexpr = h.shape[1]
    COLUMNS: gl.constexpr = w.shape[1]
    DEPTH: gl.constexpr = h.shape[2]
    HALF: gl.constexpr = COLUMNS // 2
    step = 0
    for tile in range(gl.program_id(0), blocks * spans, gl.num_programs(0)):
        first_row, first = _corner(tile, blocks, spans, group, ROWS, COLUMNS)
        c = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
        for k in range(0, D, DEPTH):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            running = warpgroup_mma(
                h.index(stage), w.index(stage).permute((1, 0)), c, is_async=True
            )
            c = warpgroup_mma_wait(1, deps=(running,))  # the product before this one is done
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        c = warpgroup_mma_wait(0, deps=(c,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))

        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        target = gl.load(target_ptr + row, mask=row < rows, other=-1).to(gl.int32)
        here = (target >= first) & (target < first + COLUMNS)
        if gl.max(here.to(gl.int32), 0) > 0:
            column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
            chosen = gl.sum(gl.where(column[None, :] == target[:, None], c, 0.0), 1)
            gl.store(chosen_ptr + row, chosen * scale, mask=here)
        top = gl.max(c * scale, 1)
        total = gl.zeros_like(top)
        moment = gl.zeros_like(top)
        tma.store_wait(0)  # the tile before this one has left ``out``
        left, right = gl.split(gl.permute(gl.reshape(c, [ROWS, 2, HALF]), [0, 2, 1]))
        halves = (left, right)
        for i in gl.static_range(2):
            half = halves[i]
            peak = gl.convert_layout(top, gl.SliceLayout(1, half.type.layout))
            x = half * scale - peak[:, None]
            out.slice(i * HALF, HALF, dim=1).store(x.to(out.dtype))
            e = gl.exp(x)
            total += gl.convert_layout(gl.sum(e, 1), total.type.layout)
            moment += gl.convert_layout(gl.sum(x * e, 1), total.type.layout)
        fence_async_shared()
        _store(kept, [first_row, first], out)
        at = sums_ptr + (first // COLUMNS * 3).to(gl.int64) * rows + row
        gl.store(at, top, mask=row < rows)
        gl.store(at + rows, total, mask=row < rows)
        gl.store(at + 2 * rows, moment, mask=row < rows)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "blocks", "spans", "group"])
def _keep_kernel(
    sums_ptr, chosen_ptr, kept, hidden, weight, target_ptr, scale, rows, blocks, spans, group,
    D: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    h = gl.allocate_shared_memory(hidden.dtype, [STAGES] + hidden.block_type.shape, hidden.layout)  # noqa: RUF005
    w = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    out = gl.allocate_shared_memory(kept.dtype, kept.block_type.shape, kept.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    sums_ptr, chosen_ptr, target_ptr, kept, h, w, out, full, empty,
                    scale, rows, blocks, spans, group, D, LAYOUT,
                ),
            ),
            (_fetch, (hidden, weight, h, w, full, empty, blocks, spans, group, D)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


def keep(hidden: Tensor, weight: Tensor, target: Tensor, scale: float, processors: int) -> Kept:
    """One launch of the kernel.

    Args:
        hidden: ``[N, D]``, bfloat16 or float16; D a multiple of 64.
        weight: ``[V, D]``, the same dtype; V a multiple of 256.
        target: int64 ``[N]``, each in ``[0, V)``.
        processors: of the GPU, each of which has one program.
    """
    n, width = hidden.shape
    size = len(weight)
    if width % DEPTH or size % COLUMNS:
        raise ValueError(
            f"keep: D must be a multiple of {DEPTH} and V of {COLUMNS}, got {width} and {size}"
        )
    x = hidden.new_empty(n, size, dtype=torch.float16)
    sums = hidden.new_empty(size // COLUMNS, 3, n, dtype=torch.float32)
    chosen = hidden.new_empty(n, 1, dtype=torch.float32)
    blocks = triton.cdiv(n, ROWS)
    spans = size // COLUMNS
    # row blocks that stay in the cache while W passes by
    group = max(1, triton_forward.L2_SHARE // (ROWS * width * hidden.element_size()))
    _keep_kernel[(min(processors, blocks * spans),)](
        sums,
        chosen,
        _described(x, ROWS, COLUMNS),
        _described(hidden, ROWS, DEPTH),
        _described(weight, COLUMNS, DEPTH),
        target,
        scale,
        n,
        blocks,
        spans,
        min(blocks, group),
        D=width,
        STAGES=STAGES,
        LAYOUT=gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16]),
        REGISTERS=FETCHING_REGISTERS,
        num_warps=WARPS,
    )
    return Kept(x, sums, chosen)


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


def emulated(hidden: Tensor, weight: Tensor, target: Tensor, scale: float) -> Kept:
    """The same numbers by torch: what the kernel has to be equal to, but for the order of sums."""
    z = hidden.float() @ weight.float().T * scale
    chosen = z.gather(1, target[:, None])
    z = z.unflatten(1, (-1, COLUMNS))  # [N, V/256, 256]
    top = z.amax(2)
    x = z - top[:, :, None]
    e = x.exp()
    sums = torch.stack((top, e.sum(2), (x * e).sum(2)))  # [3, N, V/256]
    return Kept(x.half().flatten(1), sums.permute(2, 0, 1).contiguous(), chosen)


def as_the_library_does(
    hidden: Tensor, weight: Tensor, target: Tensor, scale: float, columns: int
) -> SoftmaxState:
    """Tiles of logits in float32, each folded and kept."""
    state = SoftmaxState.start(target[:, None], hidden.new_empty(0, dtype=torch.float32), False, False)  # fmt: skip
    x = hidden.new_empty(len(hidden), len(weight), dtype=torch.float16)
    top = hidden.new_empty(len(hidden), dtype=torch.float32)
    for first in range(0, len(weight), columns):
        span = weight[first : first + columns]
        tile = torch.mm(hidden, span.T, out_dtype=torch.float32)
        kept = x[:, first : first + columns]
        column = target[:, None] - first
        triton_softmax.fold_(tile, column, state, LogitTransform(scale, None, None), (kept, top))
    return state


def _inputs(n: int, width: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets whose logits are of the order of 1."""
    hidden = torch.randn(n, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(size, width, device="cuda", dtype=torch.bfloat16) / width**0.5
    return hidden, weight, torch.randint(size, (n,), device="cuda")


def _compare(n: int, width: int, size: int, processors: int) -> None:
    hidden, weight, target = _inputs(n, width, size)
    found = keep(hidden, weight, target, 0.5, processors)
    expected = emulated(hidden, weight, target, 0.5)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-4)
    print(f"{n} × {width} × {size}: as its emulation")


def _time(n: int, width: int, size: int, processors: int) -> None:
    hidden, weight, target = _inputs(n, width, size)
    ours = do_bench(lambda: keep(hidden, weight, target, 0.5, processors))
    tiles = do_bench(lambda: as_the_library_does(hidden, weight, target, 0.5, 8192))
    print(f"{n} × {width} × {size}: {ours:.2f} ms, in tiles {tiles:.2f} ms")


def main() -> None:
    """On a GPU: the kernel against its emulation, then its time beside the library's."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("kept_product: needs a GPU of architecture sm_90; it has never run on one")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    _compare(300, 128, 1024, processors)
    for width in (576, 1024, 2048, 4096):
        _time(8192, width, 151_808, processors)


if __name__ == "__main__":
    main()
