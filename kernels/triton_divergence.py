"""The three elementwise passes of divergence_passes.py over two tiles of logits ``[n, columns]``,
each one launch.

    z = cap(scale·c)/T of either head, in float32, with its own scale and soft cap, and the T of the
    row

    fold_:  x = z_P − m_P,  y = z_Q − m_Q:   S = Σ eˣ,  R = Σ eʸ and, if asked for, G = Σ eˣ·(x − y), brought up to date
    mix_:   s = z_S − m_S − log S,  t = z_T − m_T − log R,  M = (1−β)·eˢ + β·eᵗ:   += Σ eᵗ·(t − log M), Σ eˢ·(s − log M)
    backward_tile_:  dz = eˢ − eᵗ,  eˢ·(s − t − D)  or  eˢ·(s − log M − K);   dc = gain·dz·cap′(scale·c)

Moved: 8 bytes a logit are read, and ``backward_tile_`` writes 2 or 4; all else is per row. Nothing
is shared between rows, and the sums of a row have a fixed order: the same call gives the same bits.

Tiles are float32, kept ones too: near the optimum the gradient is made of s − t alone, which is
smaller than the rounding of s and t to 16 bits, however well they are centered.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .softmax import LogitTransform
from .triton_softmax import LOG2E, NEVER, tempered, transform_factors

TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
FIELDS = tl.constexpr(5)  # columns of ``row_stats`` and of the state of a fold


@triton.jit
def _tile(tile_ptr, stride, row, column, inside, inner, outer, temperature_ptr, softcap, padding):
    """``[ROWS, BLOCK]`` of z; what is not inside is ``padding``."""
    at = tile_ptr + row[:, None].to(tl.int64) * stride + column[None, :]
    z = tempered(tl.load(at, inside, 0.0), inner, outer, temperature_ptr, softcap)
    return tl.where(inside, z, padding)


@triton.jit
def _rows(n, temperature_ptr, scale, softcap, scale_w, softcap_w, ROWS: tl.constexpr):
    """This program's rows, which of them there are, and ``transform_factors`` ``[ROWS, 1]`` of both
    heads.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < n
    at = tl.where(there, row, 0)  # what is past the last row may be read, and is never written
    inner, outer = transform_factors(temperature_ptr, at[:, None], scale, softcap)
    inner_w, outer_w = transform_factors(temperature_ptr, at[:, None], scale_w, softcap_w)
    return at, there, inner, outer, inner_w, outer_w


@triton.jit
def _row_stats(row_stats_ptr, row):
    """m_S, log S, m_T, log R and the level, D or K, each ``[ROWS, 1]``."""
    at = row_stats_ptr + row[:, None] * FIELDS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _log_mixture(p, q, beta, rest):
    """log((1−β)p + βq), finite where it underflows: there it is multiplied by zero."""
    return tl.log(tl.maximum(rest * p + beta * q, TINY))


@triton.jit
def _fold_kernel(
    state_ptr,  # [n, 5]: m_P, S, m_Q, R, G
    p_ptr, q_ptr,  # [n, columns]
    temperature_ptr,  # [n] or None
    scale, softcap, scale_w, softcap_w, n, columns, p_stride: tl.int64, q_stride: tl.int64,
    GAP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, there, inner, outer, inner_w, outer_w = _rows(
        n, temperature_ptr, scale, softcap, scale_w, softcap_w, ROWS
    )
    state_ptr += row * FIELDS
    shift, total = tl.load(state_ptr), tl.load(state_ptr + 1)  # [ROWS]
    other_shift, other_total = tl.load(state_ptr + 2), tl.load(state_ptr + 3)
    if GAP:
        gap = tl.load(state_ptr + 4)

    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = there[:, None] & (column < columns)[None, :]
        z = _tile(
            p_ptr, p_stride, row, column, inside, inner, outer, temperature_ptr, softcap, NEVER
        )
        w = _tile(
            q_ptr,
            q_stride,
            row,
            column,
            inside,
            inner_w,
            outer_w,
            temperature_ptr,
            softcap_w,
            NEVER,
        )
        top, other_top = tl.maximum(shift, tl.max(z, 1)), tl.maximum(other_shift, tl.max(w, 1))
        drop, other_drop = shift - top, other_shift - other_top
        decay, other_decay = tl.exp2(drop * LOG2E), tl.exp2(other_drop * LOG2E)
        x, y = z - top[:, None], w - other_top[:, None]
        weight = tl.exp2(x * LOG2E)
        if GAP:
            gap = (gap + (drop - other_drop) * total) * decay + tl.sum(weight * (x - y), 1)
        total = total * decay + tl.sum(weight, 1)
        other_total = other_total * other_decay + tl.sum(tl.exp2(y * LOG2E), 1)
        shift, other_shift = top, other_top

    tl.store(state_ptr, shift, there)
    tl.store(state_ptr + 1, total, there)
    tl.store(state_ptr + 2, other_shift, there)
    tl.store(state_ptr + 3, other_total, there)
    if GAP:
        tl.store(state_ptr + 4, gap, there)


@triton.jit
def _mix_kernel(
    sums_ptr,  # [n, 2]
    student_ptr, teacher_ptr,  # [n, columns]
    row_stats_ptr,  # [n, 5]
    temperature_ptr,  # [n] or None
    scale, softcap, scale_w, softcap_w,
    beta, rest,  # 1 − β, which float32 would round
    n, columns, student_stride: tl.int64, teacher_stride: tl.int64, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, there, inner, outer, inner_w, outer_w = _rows(
        n, temperature_ptr, scale, softcap, scale_w, softcap_w, ROWS
    )
    shift, log_total, other_shift, other_log_total, _ = _row_stats(row_stats_ptr, row)
    from_teacher = tl.zeros((ROWS, BLOCK), tl.float32)
    from_student = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = there[:, None] & (column < columns)[None, :]
        z = _tile(
            student_ptr,
            student_stride,
            row,
            column,
            inside,
            inner,
            outer,
            temperature_ptr,
            softcap,
            NEVER,
        )
        w = _tile(
            teacher_ptr,
            teacher_stride,
            row,
            column,
            inside,
            inner_w,
            outer_w,
            temperature_ptr,
            softcap_w,
            NEVER,
        )
        s, t = (z - shift) - log_total, (w - other_shift) - other_log_total
        p, q = tl.exp2(s * LOG2E), tl.exp2(t * LOG2E)
        mixture = _log_mixture(p, q, beta, rest)
        from_teacher += q * (t - mixture)
        from_student += p * (s - mixture)

    sums_ptr += row * 2
    tl.store(sums_ptr, tl.load(sums_ptr) + tl.sum(from_teacher, 1), there)
    tl.store(sums_ptr + 1, tl.load(sums_ptr + 1) + tl.sum(from_student, 1), there)


@triton.jit
def _backward_kernel(
    out_ptr, student_ptr, teacher_ptr,  # [n, columns]
    row_stats_ptr,  # [n, 5]
    gain_ptr,  # [n]
    temperature_ptr,  # [n] or None
    scale, softcap, scale_w, softcap_w,
    beta, rest,  # 1 − β, which float32 would round
    n, columns, out_stride: tl.int64, student_stride: tl.int64, teacher_stride: tl.int64,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, there, inner, outer, inner_w, outer_w = _rows(
        n, temperature_ptr, scale, softcap, scale_w, softcap_w, ROWS
    )
    gain = tl.load(gain_ptr + row)[:, None]  # [ROWS, 1]
    shift, log_total, other_shift, other_log_total, level = _row_stats(row_stats_ptr, row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = there[:, None] & (column < columns)[None, :]
        z = _tile(
            student_ptr,
            student_stride,
            row,
            column,
            inside,
            inner,
            outer,
            temperature_ptr,
            softcap,
            shift,
        )
        w = _tile(
            teacher_ptr,
            teacher_stride,
            row,
            column,
            inside,
            inner_w,
            outer_w,
            temperature_ptr,
            softcap_w,
            other_shift,
        )
        s, t = (z - shift) - log_total, (w - other_shift) - other_log_total
        p = tl.exp2(s * LOG2E)
        if KIND == "forward":
            dz = p - tl.exp2(t * LOG2E)
        elif KIND == "reverse":
            dz = p * (s - t - level)
        else:
            dz = p * (s - _log_mixture(p, tl.exp2(t * LOG2E), beta, rest) - level)
        dc = dz * gain
        if softcap is not None:
            curve = z / outer
            dc *= 1 - curve * curve
        offset = row[:, None].to(tl.int64) * out_stride + column[None, :]
        tl.store(out_ptr + offset, dc.to(out_ptr.dtype.element_ty), inside)


def launch(n: int, columns: int, device: torch.device) -> tuple[int, int, int]:
    """How many rows a program has, how many of their logits it takes at once, and its warps.

    On a GPU one row and one warp: its sums then need no shared memory, and 32 logits a thread are
    enough to be on the way. The interpreter runs one program after the other, so there each has
    many rows.
    """
    if device.type == "cpu":
        return min(triton.next_power_of_2(n), 64), min(triton.next_power_of_2(columns), 256), 1
    return 1, min(max(triton.next_power_of_2(columns), 64), 512), 1


def fold_(
    state: Tensor, p: Tensor, q: Tensor, to_z: LogitTransform, to_w: LogitTransform, gap: bool
) -> None:
    """``divergence_passes.fold``, in place: ``state`` is ``[n, 5]``; G only if ``gap``."""
    assert state.is_contiguous()
    _run(_fold_kernel, (state, p, q), to_z, to_w, (), (p, q), GAP=gap)


def mix_(
    sums: Tensor, student: Tensor, teacher: Tensor, row_stats: Tensor, to_z: LogitTransform, to_w: LogitTransform,
    beta: float,
) -> None:  # fmt: skip
    """``divergence_passes.mix``, added to ``sums`` ``[n, 2]``."""
    assert sums.is_contiguous() and row_stats.is_contiguous()
    tensors, strided = (sums, student, teacher, row_stats), (student, teacher)
    _run(_mix_kernel, tensors, to_z, to_w, (beta, 1 - beta), strided)


def backward_tile_(
    out: Tensor, student: Tensor, teacher: Tensor, row_stats: Tensor, gain: Tensor, to_z: LogitTransform,
    to_w: LogitTransform, beta: float,
) -> None:  # fmt: skip
    """``divergence_passes.backward_tile`` in float32 or 16 bits.

    ``out`` may be the tile of the student.
    """
    assert row_stats.is_contiguous() and gain.is_contiguous()
    tensors, strided = (out, student, teacher, row_stats, gain), (out, student, teacher)
    kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "mixture")
    _run(_backward_kernel, tensors, to_z, to_w, (beta, 1 - beta), strided, KIND=kind)


def _run(
    kernel, tensors, to_z: LogitTransform, to_w: LogitTransform, numbers, strided, **constants
) -> None:
    """Launch ``kernel`` over all rows; ``strided`` are the tensors whose row strides it takes."""
    n, columns = strided[0].shape
    rows, block, warps = launch(n, columns, strided[0].device)
    temperature = None if to_z.temperature is None else to_z.temperature.contiguous()
    transforms = temperature, to_z.scale, to_z.softcap, to_w.scale, to_w.softcap
    strides = (t.stride(0) for t in strided)
    with torch.cuda.device_of(strided[0]):
        kernel[(triton.cdiv(n, rows),)](
            *tensors,
            *transforms,
            *numbers,
            n,
            columns,
            *strides,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
            **constants,
        )
