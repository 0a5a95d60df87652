"""The forward sums of ``linear_logprob`` straight from hidden states and weight: no logit is ever
written to memory.

    c = h·Wᵀ + b + u·Bᵀ        z = cap(scale·c)/T        x = z − m        S = Σ eˣ        M = Σ x·eˣ

A program owns a block of rows and a span of the vocabulary. It multiplies out one tile of c at a
time, in float32 registers, folds it into its running sums (the equations of softmax.py), and writes
three numbers a row. The spans of a row are then merged in a fixed order: no atomics, so the same
call gives the same bits.

Moved: programs are ordered so that those which run together share a group of row blocks of 16 MB,
which stays in L2, and walk through W side by side. h is read once, W once per group: at N = 8192, D
= 4096, V = 151936 in bf16 that is 67 MB + 4 × 1.24 GB, 1.2 ms of HBM time under 14 ms of products.
From L2 a tile of 128 × 256 takes (128 + 256)·D numbers for 2·128·256·D operations, 85 a byte.
Written: 12 bytes a row and span.

Digits: products of 16-bit numbers are exact and summed in float32; those of float32 are computed in
float32, in TF32 only where ``torch.set_float32_matmul_precision`` has it so, as those of torch. z
is kept in nats, not in units of log 2: at |z| = 1000, rounding z·log₂e would cost 4e-5, and not
rounding it costs one multiplication a logit. The target's z is picked from the tile, so it has the
very bits that went into S.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import softmax
from .head import HeadFactors
from .launch_table import launch
from .softmax import LogitTransform, SoftmaxState
from .triton_softmax import finite, tanh

NEVER = tl.constexpr(softmax.NEVER)
IMPOSSIBLE = tl.constexpr(softmax.IMPOSSIBLE)
L2_SHARE = 2**24  # bytes of hidden states that stay in the cache while W passes by


@triton.jit
def _block(
    source, row, column, rows, row_stride, column_stride,
    D: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """``[ROWS, DEPTH]`` of a matrix ``[rows, D]``: zeros past its last column, past its last row
    anything finite.
    """
    if DESCRIBED:
        block = source.load([row, column])
    else:
        i = tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
        j = column + tl.arange(0, DEPTH)
        at = source + i[:, None] * row_stride + j[None, :].to(tl.int64) * column_stride
        block = tl.load(at) if D % DEPTH == 0 else tl.load(at, mask=j[None, :] < D, other=0.0)
    return block


@triton.jit
def _logits(c, columns, vocab, bias_ptr, scale, softcap, cooling, RAGGED: tl.constexpr):
    """z, ``NEVER`` past the end of the vocabulary."""
    if bias_ptr is not None:
        c += finite(tl.load(bias_ptr + columns, mask=columns < vocab, other=0.0))[None, :]
    if scale is not None:
        c = c * scale
    if softcap is not None:
        c = tanh(c) * softcap
    if cooling is not None:
        c = c * cooling[:, None]
    if RAGGED:
        c = tl.where(columns[None, :] < vocab, c, NEVER)
    return c


@triton.jit
def _fold(z, top, total, moment, linear, count, squares, MEAN: tl.constexpr, SQUARES: tl.constexpr):
    """``softmax.fold`` of z ``[rows, columns]``."""
    grown = tl.maximum(top, tl.max(z, 1))
    drop = top - grown
    decay = tl.exp(drop)
    x = z - grown[:, None]
    weight = tl.exp(x)
    moment = (moment + total * drop) * decay + tl.sum(x * weight, 1)
    total = total * decay + tl.sum(weight, 1)
    if MEAN:
        possible = z > IMPOSSIBLE
        linear += count * drop + tl.sum(tl.where(possible, x, 0.0), 1)
        count += tl.sum(possible.to(tl.float32), 1)
    if SQUARES:
        squares = squares * decay * decay + tl.sum(weight * weight, 1)
    return grown, total, moment, linear, count, squares


@triton.jit
def _halves(c):
    """The left and the right half of a tile, in the registers they are in."""
    return tl.split(tl.permute(tl.reshape(c, [c.shape[0], 2, c.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _choose_one(chosen_ptr, z, column):
    """Stores the z of the target of each row that has it here."""
    hit = tl.arange(0, z.shape[1])[None, :] == column[:, None]
    tl.store(
        chosen_ptr, tl.sum(tl.where(hit, z, 0.0), 1), mask=(column >= 0) & (column < z.shape[1])
    )


@triton.jit
def _choose_many(
    chosen_ptr, target_ptr, z, first, row, rows, vocab, TARGETS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The same for several targets a row."""
    for j in range(0, TARGETS, AT_ONCE):
        k = j + tl.arange(0, AT_ONCE)
        at = row.to(tl.int64)[:, None] * TARGETS + k[None, :]
        target = tl.load(
            target_ptr + at, mask=(row < rows)[:, None] & (k < TARGETS)[None, :], other=-1
        )
        inside = (target >= first) & (target < tl.minimum(first + z.shape[1], vocab))
        column = tl.where(inside, target - first, 0).to(tl.int32)
        tl.store(chosen_ptr + at, tl.gather(z, column, 1), mask=inside)


@triton.jit(do_not_specialize=["rows", "vocab", "splits", "span", "group"])
def _forward_kernel(
    sums_ptr, chosen_ptr, hidden, weight, target_ptr, bias_ptr, low_ptr, up_ptr, temperature_ptr, scale, softcap,
    rows, vocab, splits, span, group,
    hidden_stride, hidden_column_stride, weight_stride, weight_column_stride,
    D: tl.constexpr, RANK: tl.constexpr, TARGETS: tl.constexpr, MEAN: tl.constexpr, SQUARES: tl.constexpr,
    RAGGED: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, AT_ONCE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """One block of rows, one span of the vocabulary: ``sums[split, :, row]`` and the targets that
    are in the span.
    """
    QUARTER: tl.constexpr = COLUMNS // 4
    within = tl.program_id(0) % (group * splits)
    first_block = tl.program_id(0) // (group * splits) * group
    blocks = tl.minimum(tl.cdiv(rows, ROWS) - first_block, group)
    split = within // blocks
    first_row = (first_block + within % blocks) * ROWS
    row = first_row + tl.arange(0, ROWS)

    top = tl.full([ROWS], NEVER, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    moment, linear, count, squares = total, total, total, total
    target = tl.load(target_ptr + row, mask=row < rows, other=-1)
    target = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)
    cooling = None
    if temperature_ptr is not None:
        cooling = 1 / tl.load(temperature_ptr + row, mask=row < rows, other=1.0)

    end = tl.minimum((split + 1) * span * COLUMNS, vocab)
    for first in tl.range(split * span * COLUMNS, end, COLUMNS, flatten=FLAT):
        c = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in tl.range(0, D, DEPTH):
            h = _block(
                hidden,
                first_row,
                k,
                rows,
                hidden_stride,
                hidden_column_stride,
                D,
                ROWS,
                DEPTH,
                DESCRIBED,
            )
            w = _block(
                weight,
                first,
                k,
                vocab,
                weight_stride,
                weight_column_stride,
                D,
                COLUMNS,
                DEPTH,
                DESCRIBED,
            )
            c = tl.dot(h, w.T, c, input_precision=PRECISION)
        if RANK > 0:
            for k in tl.range(0, RANK, 16, num_stages=1):
                u = _block(low_ptr, first_row, k, rows, RANK, 1, RANK, ROWS, 16, False)
                b = _block(up_ptr, first, k, vocab, RANK, 1, RANK, COLUMNS, 16, False)
                c = tl.dot(u, b.T, c, input_precision=PRECISION)
        present = tl.max(((target >= first) & (target < first + COLUMNS)).to(tl.int32), 0) > 0
        # Four quarters, one after the other: the temporaries of a whole tile do not fit into the
        # registers.
        left, right = _halves(c)
        quarters = _halves(left) + _halves(right)
        for i in tl.static_range(4):
            start = first + i * QUARTER
            z = _logits(
                quarters[i],
                start + tl.arange(0, QUARTER),
                vocab,
                bias_ptr,
                scale,
                softcap,
                cooling,
                RAGGED,
            )
            if TARGETS == 1:
                if present:
                    _choose_one(chosen_ptr + row, z, target - start)
            else:
                _choose_many(chosen_ptr, target_ptr, z, start, row, rows, vocab, TARGETS, AT_ONCE)
            top, total, moment, linear, count, squares = _fold(
                z, top, total, moment, linear, count, squares, MEAN, SQUARES
            )

    FIELDS: tl.constexpr = 3 + 2 * MEAN + SQUARES
    at = sums_ptr + (split * FIELDS).to(tl.int64) * rows + row
    here = row < rows
    tl.store(at, top, mask=here)
    tl.store(at + rows, total, mask=here)
    tl.store(at + 2 * rows, moment, mask=here)
    if MEAN:
        tl.store(at + 3 * rows, linear, mask=here)
        tl.store(at + 4 * rows, count, mask=here)
    if SQUARES:
        tl.store(at + (FIELDS - 1) * rows, squares, mask=here)


def accumulate(
    head: HeadFactors,
    target: Tensor,
    *,
    transform: LogitTransform,
    vocab: int,
    mean: bool,
    squares: bool,
) -> SoftmaxState:
    """``softmax.SoftmaxState`` after the whole vocabulary.

    Args:
        head: in the dtype that it is multiplied in, see ``HeadFactors.columns``.
        target: int64 ``[N, k]``; one outside ``[0, vocab)`` is not here, and its z is 0.
        mean, squares: whether X and n, and Q, are summed up too.
    """
    hidden, weight = head.hidden, head.weight
    n, width = hidden.shape
    state = SoftmaxState.start(target, hidden.new_empty(0, dtype=torch.float32), mean, squares)
    if n == 0 or vocab == 0:
        return state
    architecture, processors, described = machine(hidden)
    low = _in_steps_of_16(head.low)
    up = _in_steps_of_16(head.up)
    aligned = _aligned(hidden) and _aligned(weight)
    described = described and aligned
    plain = low is None and target.shape[1] == 1
    rows, columns, depth, warps, stages, flat = launch(
        architecture, hidden.dtype, aligned=aligned, plain=plain
    )
    blocks = triton.cdiv(n, rows)
    splits, span = schedule(blocks, triton.cdiv(vocab, columns), processors)
    sums = hidden.new_empty(splits, 3 + 2 * mean + squares, n, dtype=torch.float32)
    scale = transform.scale / (transform.softcap or 1.0)
    group = max(1, L2_SHARE // (rows * width * hidden.element_size()))  # row blocks that stay in L2
    with torch.cuda.device_of(hidden):
        _forward_kernel[(blocks * splits,)](
            sums,
            state.chosen,
            TensorDescriptor.from_tensor(hidden, [rows, depth]) if described else hidden,
            TensorDescriptor.from_tensor(weight, [columns, depth]) if described else weight,
            target.contiguous(), _contiguous(head.bias), low, up, _contiguous(transform.temperature),
            None if scale == 1.0 else scale, transform.softcap,
            n, vocab, splits, span, min(blocks, group),
            *hidden.stride(), *weight.stride(),
            D=width, RANK=0 if low is None else low.shape[1], TARGETS=target.shape[1], MEAN=mean, SQUARES=squares,
            RAGGED=vocab % columns != 0, DESCRIBED=described,
            PRECISION="tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
            ROWS=rows, COLUMNS=columns, DEPTH=depth, FLAT=flat,
            AT_ONCE=min(16, triton.next_power_of_2(target.shape[1])), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return merge(sums, state)


def _in_steps_of_16(factor: Tensor | None) -> Tensor | None:
    """u or B with a multiple of 16 ranks, one after the other in memory, as the kernel takes
    them.
    """
    return None if factor is None else F.pad(factor, (0, -factor.shape[1] % 16)).contiguous()


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def merge(sums: Tensor, state: SoftmaxState) -> SoftmaxState:
    """``SoftmaxState`` of the whole vocabulary from those of its spans ``[spans, fields, N]``."""
    top, total, moment, *extras = sums.unbind(1)
    shift = top.amax(0)
    drop = top - shift
    decay = drop.exp()
    linear, squares = state.linear, state.squares
    if squares is not None:
        squares = (extras.pop() * decay.square()).sum(0)
    if linear is not None:
        added, count = extras
        linear = torch.stack(((added + count * drop).sum(0), count.sum(0)), 1)
    return SoftmaxState(
        shift,
        (total * decay).sum(0),
        ((moment + total * drop) * decay).sum(0),
        state.chosen,
        linear,
        squares,
    )


@functools.cache
def schedule(blocks: int, tiles: int, slots: int) -> tuple[int, int]:
    """The number of spans that ``tiles`` are cut into, and the tiles in each: what is done first on
    ``slots`` at once.

    Starting a span costs about an eighth of a tile.
    """

    def time(span: int) -> int:
        programs = blocks * -(-tiles // span)
        return -(-programs // slots) * (8 * span + 1)

    span = min(range(tiles, 0, -1), key=time)
    return -(-tiles // span), span


def machine(tensor: Tensor) -> tuple[int | str, int, bool]:
    """Where the kernel is going to run: its architecture, how many processors it has, and whether
    blocks are copied by the tensor memory accelerator."""
    if triton.knobs.runtime.interpret:
        return "interpreter", 4, True
    with torch.cuda.device_of(tensor):  # the current GPU may be another one
        architecture = triton.runtime.driver.active.get_current_target().arch
    if tensor.is_cuda:
        processors = torch.cuda.get_device_properties(tensor.device).multi_processor_count
    else:  # compiling for a machine that is not there
        processors = PROCESSORS[architecture]
    return architecture, processors, isinstance(architecture, int) and architecture >= 90


PROCESSORS = {
    75: 40,
    80: 108,
    86: 82,
    89: 128,
    90: 132,
    100: 148,
    120: 170,
    "gfx942": 304,
    "gfx950": 256,
}


def _aligned(matrix: Tensor) -> bool:
    """True if its rows are consecutive numbers and start at multiples of 16 bytes."""
    row, column = matrix.stride()
    starts = matrix.data_ptr() % 16 == 0 and row * matrix.element_size() % 16 == 0
    return starts and column == 1 and row >= matrix.shape[1]
