"""The two elementwise passes of softmax.py over a tile of logits ``[n, columns]``, each one launch
of Triton.

    z = cap(scale·c)/T        x = z − m        cap(s) = softcap·tanh(s/softcap)

    fold_:  m, S = Σ eˣ, M = Σ x·eˣ and, if asked for, X = Σ x, n and Q = Σ e²ˣ, brought up to date, and the targets' z
    backward_tile_:  dz = eˣ·(level + slope·x + bend·eˣ) + flat,  dc = dz·cap′(scale·c) + Σ_j 1[column_j = v]·gain_j

Moved, for a tile in b bytes per logit: fold_ reads b·n·columns; what backward keeps is written from
the registers of a row that one block holds, else from a second reading of it. backward_tile_ reads
b·n·columns and writes its output. All else is per row. So a caller's own logits ``[N, V]`` are one
tile: one reading forward, one reading and one writing backward.

What is kept is z − (largest z of this row in this tile), in 16 bits: absolute errors are then
smallest where the probability is largest, whereas c itself in 16 bits is wrong by its last digit
just where it matters.

x is a difference of float32 numbers before it is multiplied by log₂e: in powers of two from the
start it would be one instruction less, and logits of ±1000 would cost four digits.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import softmax
from .softmax import Coefficients, LogitTransform, SoftmaxState

NEVER = tl.constexpr(softmax.NEVER)
IMPOSSIBLE = tl.constexpr(softmax.IMPOSSIBLE)
LOG2E = tl.constexpr(1.4426950408889634)
MOST_KEPT = 8192  # columns of a row that are kept from the registers of 16 warps


@triton.jit
def tanh(x):
    """Four digits more around 0 than 2σ(2x) − 1 has; libdevice's is missing from the
    interpreter.
    """
    is_near = tl.abs(x) < 0.55
    short = tl.where(is_near, x, 0.0)
    square = short * short
    near = 0.13320643 + square * (-0.05266803 + square * 0.01643201)
    near = short + short * square * (-0.33332941 + square * near)
    decay = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - decay) / (1 + decay)
    return tl.where(is_near, near, tl.where(x < 0, -far, far))


@triton.jit
def finite(c):
    """Float32 with −inf as ``softmax.NEVER``; NaN stays NaN."""
    return tl.maximum(c.to(tl.float32), NEVER, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def transform_factors(temperature_ptr, row, scale, softcap):
    """The factors of ``tempered``: scale/T to twice float32's digits; or scale/softcap and
    softcap/T.
    """
    inner = scale
    outer = 0.0
    if softcap is not None:
        inner = scale / softcap
        outer = softcap
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        if softcap is not None:
            outer = softcap / temperature
        else:
            inner = scale / temperature
            outer = (scale - inner.to(tl.float64) * temperature.to(tl.float64)).to(
                tl.float32
            ) / temperature
    return inner, outer


@triton.jit
def tempered(c, inner, outer, temperature_ptr, softcap):
    """z; every pass must get the same one, bit by bit, or the most likely token would not be at x =
    0.
    """
    c = finite(c)
    if softcap is not None:
        z = tanh(c * inner) * outer
    elif temperature_ptr is not None:
        z = tl.fma(c, inner, c * outer)  # as exact as a division, at a tenth of its price
    else:
        z = c * inner
    return z


@triton.jit
def _fold_kernel(
    shift_ptr, total_ptr, moment_ptr,  # [n], as all others without a stride
    chosen_ptr,  # [n, targets]
    linear_ptr,  # [n, 2] or None
    squares_ptr,  # [n] or None
    kept_ptr,  # [n, columns] or None
    top_ptr,
    tile_ptr,  # [n, columns]
    column_ptr,  # [n, targets]
    temperature_ptr, scale, softcap, columns, targets, kept_stride: tl.int64, tile_stride: tl.int64,
    WHOLE: tl.constexpr,  # a row is one block
    BLOCK: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile_ptr += row * tile_stride
    inner, outer = transform_factors(temperature_ptr, row, scale, softcap)
    shift, total, moment = (
        tl.load(shift_ptr + row),
        tl.load(total_ptr + row),
        tl.load(moment_ptr + row),
    )
    if linear_ptr is not None:
        linear, possible = tl.load(linear_ptr + 2 * row), tl.load(linear_ptr + 2 * row + 1)
    if squares_ptr is not None:
        squares = tl.load(squares_ptr + row)
    if kept_ptr is not None:
        top = tl.full((), float("-inf"), tl.float32)

    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = column < columns
        z = tempered(
            tl.load(tile_ptr + column, inside, float("-inf")),
            inner,
            outer,
            temperature_ptr,
            softcap,
        )  # [BLOCK]
        if softcap is not None:
            z = tl.where(inside, z, NEVER)  # the cap has made the padding possible
        highest = tl.max(z, 0)
        if kept_ptr is not None:
            top = tl.maximum(top, highest)
            if WHOLE:
                # NEVER is not in float16
                below = tl.where(z > IMPOSSIBLE, z - highest, float("-inf"))
                tl.store(
                    kept_ptr + row * kept_stride + column,
                    below.to(kept_ptr.dtype.element_ty),
                    inside,
                )
        drop = tl.minimum(shift - highest, 0.0)
        shift = tl.maximum(shift, highest)
        decay = tl.exp2(drop * LOG2E)
        x = z - shift
        weight = tl.exp2(x * LOG2E)
        moment = (moment + total * drop) * decay + tl.sum(weight * x, 0)
        total = total * decay + tl.sum(weight, 0)
        if linear_ptr is not None:
            added = z > IMPOSSIBLE
            linear += possible * drop + tl.sum(tl.where(added, x, 0.0), 0)
            possible += tl.sum(added.to(tl.float32), 0)
        if squares_ptr is not None:
            squares = squares * decay * decay + tl.sum(weight * weight, 0)

    tl.store(shift_ptr + row, shift)
    tl.store(total_ptr + row, total)
    tl.store(moment_ptr + row, moment)
    if linear_ptr is not None:
        tl.store(linear_ptr + 2 * row, linear)
        tl.store(linear_ptr + 2 * row + 1, possible)
    if squares_ptr is not None:
        tl.store(squares_ptr + row, squares)
    for start in range(0, targets, TARGETS):
        target = start + tl.arange(0, TARGETS)  # [TARGETS]
        place = tl.load(column_ptr + row * targets + target, target < targets, -1)
        here = (place >= 0) & (place < columns)
        z = tempered(tl.load(tile_ptr + place, here, 0.0), inner, outer, temperature_ptr, softcap)
        tl.store(chosen_ptr + row * targets + target, z, here)
    if kept_ptr is not None:
        tl.store(top_ptr + row, top)
    if kept_ptr is not None and not WHOLE:
        kept_ptr += row * kept_stride
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            z = tempered(
                tl.load(tile_ptr + column, inside, float("-inf")),
                inner,
                outer,
                temperature_ptr,
                softcap,
            )
            x = tl.where(z > IMPOSSIBLE, z - top, float("-inf"))
            tl.store(kept_ptr + column, x.to(kept_ptr.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    out_ptr,  # [n, columns]
    moments_ptr,  # [n], as all others without a stride; or None
    tile_ptr,  # [n, columns]
    column_ptr,  # [n, targets]
    top_ptr, shift_ptr, level_ptr, slope_ptr, bend_ptr, flat_ptr,
    gain_ptr,  # [n, targets] or None
    temperature_ptr, scale, softcap, columns, targets, out_stride: tl.int64, tile_stride: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * out_stride
    tile_ptr += row * tile_stride
    inner, outer = transform_factors(temperature_ptr, row, scale, softcap)
    shift, level = tl.load(shift_ptr + row), tl.load(level_ptr + row)
    if top_ptr is not None:
        top = tl.load(top_ptr + row)
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + row)
    if bend_ptr is not None:
        bend = tl.load(bend_ptr + row)
    if flat_ptr is not None:
        flat = tl.load(flat_ptr + row)
    if softcap is not None:
        steepness = 1 / outer
    if moments_ptr is not None:
        moments = tl.zeros((BLOCK,), tl.float32)

    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = column < columns
        logit = tl.load(tile_ptr + column, inside, float("-inf"))
        if top_ptr is not None:
            kept = finite(logit)
            z = kept + top
            x = kept + (top - shift)
        else:
            z = tempered(logit, inner, outer, temperature_ptr, softcap)  # [BLOCK]
            x = z - shift
        weight = tl.exp2(x * LOG2E)
        factor = level
        if slope_ptr is not None:
            factor += slope * x
        if bend_ptr is not None:
            factor += bend * weight
        dc = weight * factor
        if flat_ptr is not None:
            dc += tl.where(x > IMPOSSIBLE, flat, 0.0)
        if moments_ptr is not None:
            moments += tl.where(inside, dc * x, 0.0)
        if softcap is not None:
            # what is kept is rounded, and the padding far below
            curve = tl.maximum(z * steepness, -1.0)
            dc *= 1 - curve * curve
        if gain_ptr is not None:
            for target in range(0, targets):
                place = tl.load(column_ptr + row * targets + target)
                if (place >= start) & (place < start + BLOCK):
                    gain = tl.load(gain_ptr + row * targets + target)
                    dc += tl.where(column == place.to(tl.int32), gain, 0.0)
        tl.store(out_ptr + column, dc.to(out_ptr.dtype.element_ty), inside)

    if moments_ptr is not None:
        tl.store(moments_ptr + row, tl.load(moments_ptr + row) + tl.sum(moments, 0))


def launch(columns: int, most: int = 4096) -> tuple[int, int]:
    """The logits of a row that a program takes at a time, and its warps: 16 logits per thread.

    They arrive in two to four of a thread's widest loads and leave the usual passes at 32 to 48
    registers, so that some 50 (16 bits) to 100 kB (float32) are under way in a multiprocessor,
    twice what memory needs to be busy; 32 of them took up to 226 registers.
    """
    # short rows: no idle warps; long ones: 8 warps
    block = min(max(triton.next_power_of_2(columns), 128), most)
    return block, max(1, block // 512)


def fold_(
    tile: Tensor,
    column: Tensor,
    state: SoftmaxState,
    transform: LogitTransform,
    kept: tuple[Tensor, Tensor] | None = None,
) -> None:
    """``softmax.fold``, in place.

    ``tile`` ``[n, columns]`` is c in float32, float16 or bfloat16, of any row stride. ``kept``
    takes z − (largest z of the row in this tile) ``[n, columns]``, and that largest z ``[n]``.
    """
    n, columns = tile.shape
    if n == 0:
        return
    shifted, top = kept or (None, None)
    assert all(sums is None or sums.is_contiguous() for sums in (*state, top))
    targets, (block, warps) = (
        column.shape[1],
        launch(columns, 4096 if shifted is None else MOST_KEPT),
    )
    with torch.cuda.device_of(tile):
        _fold_kernel[(n,)](
            *state, shifted, top, tile, column.contiguous(),
            _dense(transform.temperature), transform.scale, transform.softcap, columns, targets,
            0 if shifted is None else shifted.stride(0), tile.stride(0),
            WHOLE=columns <= block, BLOCK=block, TARGETS=min(triton.next_power_of_2(max(targets, 1)), 128),
            num_warps=warps,
        )  # fmt: skip


def backward_tile_(
    tile: Tensor, column: Tensor, shift: Tensor, arriving: Coefficients, transform: LogitTransform, out: Tensor, *,
    top: Tensor | None = None, moments: Tensor | None = None,
) -> None:  # fmt: skip
    """``softmax.backward_tile`` with the targets' share, written into ``out``, which may be
    ``tile``.

    ``tile`` is c, or what ``fold_`` kept, if ``top`` is given. ``moments`` ``[n]`` += Σ_v dz_v·x_v,
    without that share.
    """
    n, columns = tile.shape
    if n == 0:
        return
    block, warps = launch(columns)
    with torch.cuda.device_of(tile):
        _backward_kernel[(n,)](
            out, moments, tile, column.contiguous(), top, _dense(shift), *map(_dense, arriving),
            _dense(transform.temperature), transform.scale, transform.softcap, columns, column.shape[1],
            out.stride(0), tile.stride(0), BLOCK=block, num_warps=warps,
        )  # fmt: skip


def _dense(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.contiguous()
