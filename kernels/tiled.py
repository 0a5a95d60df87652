"""``linear_logprob`` without ``[N, V]`` in memory: tiles of tokens × vocabulary, one after the other.

    c = h·Wᵀ + b + u·Bᵀ        z = cap(scale·c)/T        cap(s) = softcap·tanh(s/softcap)

Forward folds each tile into a running softmax. Backward takes the tile that forward kept, or computes it again, turns
it into dc, and multiplies it out: dh = dc·W, dW = dcᵀ·h, db = Σ dc, du = dc·B, dB = dcᵀ·u, and, because Σ_v dz_v = g_L,

    dT = −(Σ_v dz_v·z_v)/T = −(Σ_v dz_v·x_v + g_L·m)/T

(8 − 2f)·NDV floating-point operations, where f is the part of the logits that is kept: all but the last tile when N is
small. Backward costs in proportion to the rows that a gradient arrives at: the others, clipped or of advantage 0, are
left out. Moved: W and dW once, h and dh once per vocabulary tile.

The loops are in sweeps.py; with passes "fused" a Triton kernel is all of forward (triton_forward.py), and nothing is
kept. Here they become operators of torch.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .checks import check_target, check_temperature
from .head import Head, accumulation_dtype
from .operands import Operands, Tiles, factors, operands, room
from .ranking import Ranking
from .reference import Extra, MoreLogprobs, TopK
from .shard import combine
from .sweeps import Call, fold_all, gradients
from .tiles import (
    IMPOSSIBLE,
    OUTPUTS,
    SAVED,
    Softmax,
    State,
    Transform,
    finish,
    no_second_derivative,
    per_row,
)

Passes = Literal["auto", "torch", "triton", "fused"]

ROWS, COLUMNS = 1024, 2048  # 8 MB of float32: a tile and its temporaries fit into 32 MB of cache
KEEP = 3 * 2**25  # bytes of logits that forward leaves for backward: an eighth of naive memory in all, see README.md
# On a GPU: 128 MB of float32, and dc of half of that. Products this large run at the rate of the tensor cores.
GPU_ROWS, GPU_COLUMNS, GPU_KEEP = 4096, 8192, 2**30


class Plan(NamedTuple):
    """How a call is cut into tiles, and how many bytes of them forward keeps."""

    rows: int
    columns: int
    keep: int
    passes: str


def plan(hidden: Tensor, passes: Passes, keep_bytes: int | None, *, graph: bool, ranked: bool) -> Plan:
    """By devices and arguments only, never by a measurement: the same call always takes the same road."""
    if passes == "auto":
        passes = "triton" if graph or ranked else "fused"
    on_gpu = hidden.device.type == "cuda"
    rows, columns, keep = (GPU_ROWS, GPU_COLUMNS, GPU_KEEP) if on_gpu else (ROWS, COLUMNS, KEEP)
    keep = keep if keep_bytes is None else keep_bytes
    return Plan(rows, columns, keep if graph and passes != "fused" else 0, passes)


def linear_logprob(
    hidden: Tensor,
    head: Head,
    target: Tensor,
    *,
    temperature: float | Tensor,
    vocab: int,
    outputs: Collection[Extra],
    top_k: int | None = None,
    keep_bytes: int | None = None,
    main_grad: Tensor | None = None,
    passes: Passes = "torch",
) -> MoreLogprobs:
    """The contract of ``kernels.linear_logprob``.

    Args:
        vocab: how many of these rows of W are not padding.
        passes: "auto" is "triton", or "fused" where neither gradients nor a ranking are wanted.
    """
    hidden, weight, *others = operands(hidden, head, accumulation_dtype(hidden.dtype))
    columns = target if target.ndim == 2 else target[:, None]
    inputs = (hidden, weight, columns, *others, per_row(temperature, hidden))
    graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    extras = "mean_logprob" in outputs, "log_sum_squares" in outputs
    ranked = "rank" in outputs, max(top_k or 0, int("top1" in outputs))
    start, group = (0, None) if head.shard is None else (head.shard.start, head.shard.group.group_name)
    how = plan(hidden, passes, keep_bytes, graph=graph, ranked=any(ranked))
    constants = head.scale, head.softcap, vocab, start, group
    results = _forward(*inputs, main_grad, *constants, *extras, *ranked, *how)
    logprob, entropy, logsumexp, mean, squares, *_, rank, ids, likeliest = results
    return MoreLogprobs(
        logprob.reshape(target.shape),
        entropy,
        logsumexp,
        mean_logprob=mean if extras[0] else None,
        log_sum_squares=squares if extras[1] else None,
        top1=ids[:, 0] if "top1" in outputs else None,
        rank=rank if ranked[0] else None,
        top_k=None if top_k is None else TopK(ids, likeliest),
    )


@torch.library.custom_op("burnish::tiled_linear_logprob", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    temperature: Tensor | None,
    main_grad: Tensor | None,
    scale: float,
    softcap: float | None,
    vocab: int,
    start: int,
    group: str | None,
    mean: bool,
    squares: bool,
    rank: bool,
    top_k: int,
    rows: int,
    columns: int,
    keep: int,
    passes: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:
    """The fields of ``Softmax``, what is kept for backward and its tops (``Tiles``), and what a ``Ranking`` gives."""
    check_temperature("linear_logprob", temperature)
    if group is None:
        check_target("linear_logprob", target, vocab)
    target = _from(start, target)
    transform = Transform.of(scale, softcap, temperature, hidden)
    head = Operands(factors(hidden), weight, bias, low, up)
    kept, tops = _space(hidden, vocab, columns, keep, passes)
    ranking = Ranking(head, top_k, target[:, 0] if rank else None, vocab, group)
    if passes == "fused":
        from . import triton_forward

        asked: Any = {"transform": transform, "vocab": vocab, "mean": mean, "squares": squares}
        state = triton_forward.accumulate(*head[:2], target, bias=bias, low=low, up=up, **asked)
    else:
        state = State.start(target, tops, mean, squares)
        place = Tiles(kept, rows, vocab, tops if passes == "triton" else None)
        fold_all(head, target, Call(transform, vocab, rows, columns, passes, group), state, place, ranking)
    if group is not None:
        state = combine(state, target, vocab, group)
    softmax = finish(state)
    if softcap is None:
        softmax.logprob.masked_fill_(softmax.chosen < IMPOSSIBLE, -torch.inf)
    return *softmax, kept, tops, *ranking.finish(softmax, transform, start)


@_forward.register_fake
def _(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, vocab, _, _, mean, squares, rank, top_k, _, columns, keep, passes = rest
    n = target.shape[0]
    softmax = Softmax.empty(target, hidden, mean, squares)
    ranks, ids, likeliest = target.new_empty(n if rank else 0), target.new_empty(n, top_k), (n, top_k)
    return *softmax, *_space(hidden, vocab, columns, keep, passes), ranks, ids, softmax.entropy.new_empty(likeliest)


def _space(hidden: Tensor, vocab: int, columns: int, keep: int, passes: str) -> tuple[Tensor, Tensor]:
    """Room for the tiles that are kept, and for their tops: none where c itself is kept."""
    exact = accumulation_dtype(hidden.dtype)
    kept = room(hidden, vocab, columns, keep, factors(hidden[:0]).dtype if passes == "triton" else exact)
    return kept, hidden.new_empty(kept.shape[0] if passes == "triton" else 0, hidden.shape[0], dtype=exact)


@torch.library.custom_op("burnish::tiled_linear_logprob_backward", mutates_args=())
def _backward(
    upstream: list[Tensor | None],
    softmax: list[Tensor],
    kept: list[Tensor],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
    vocab: int,
    start: int,
    group: str | None,
    rows: int,
    columns: int,
    passes: str,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of hidden, weight, bias, low, up and temperature, those of them that are needed."""
    call = Call(Transform.of(scale, softcap, temperature, hidden), vocab, rows, columns, passes, group)
    head = Operands(hidden, weight, bias, low, up)
    return _needed(
        gradients(upstream, Softmax(*softmax), kept, head, _from(start, target), call, needed), head, temperature
    )


@_backward.register_fake
def _(upstream: list[Tensor | None], softmax: list[Tensor], kept: list[Tensor], *rest: Any) -> list[Tensor]:
    hidden, weight, _, bias, low, up, temperature, *_, needed = rest
    return [
        t.new_empty(t.shape) for t, n in zip((hidden, weight, bias, low, up, temperature), needed, strict=True) if n
    ]


@torch.library.custom_op("burnish::tiled_linear_logprob_backward_into", mutates_args=("main_grad",))
def _backward_into(
    main_grad: Tensor,
    upstream: list[Tensor | None],
    softmax: list[Tensor],
    kept: list[Tensor],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
    vocab: int,
    start: int,
    group: str | None,
    rows: int,
    columns: int,
    passes: str,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``_backward`` of all but the weight, empty where not needed; that of the weight is added to ``main_grad``."""
    call = Call(Transform.of(scale, softcap, temperature, hidden), vocab, rows, columns, passes, group)
    head = Operands(hidden, weight, bias, low, up)
    found = gradients(upstream, Softmax(*softmax), kept, head, _from(start, target), call, needed, main_grad)
    inputs = (hidden, bias, low, up, temperature)
    pairs = zip((found[0], *found[2:]), inputs, strict=True)
    first, second, third, fourth, fifth = (
        hidden.new_empty(0) if grad is None or like is None else grad.to(like.dtype) for grad, like in pairs
    )
    return first, second, third, fourth, fifth


@_backward_into.register_fake
def _(main_grad: Tensor, upstream: list[Tensor | None], softmax: list[Tensor], kept: list[Tensor], *rest: Any) -> Any:
    hidden, _, _, bias, low, up, temperature, *_, needed = rest
    inputs = zip((hidden, bias, low, up, temperature), (needed[0], *needed[2:]), strict=True)
    return tuple(t.new_empty(t.shape) if n and t is not None else hidden.new_empty(0) for t, n in inputs)


def _from(start: int, target: Tensor) -> Tensor:
    """The targets as this rank numbers them."""
    return target - start if start else target


def _needed(grads: list[Tensor | None], head: Operands, temperature: Tensor | None) -> list[Tensor]:
    """Those that there are, each in the dtype of its input."""
    pairs = zip(grads, (*head, temperature), strict=True)
    return [grad.to(like.dtype) for grad, like in pairs if grad is not None and like is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.main_grad = inputs[:8]
    ctx.constants = *inputs[8:13], *inputs[17:19], inputs[20]
    ctx.set_materialize_grads(False)  # None for an output nobody used
    ctx.mark_non_differentiable(*output[OUTPUTS:])
    ctx.save_for_backward(*output[: SAVED + 2], *tensors)


def _apply_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 3, 4, 5, 6)]
    saved = list(upstream[:OUTPUTS]), list(tensors[:SAVED]), list(tensors[SAVED : SAVED + 2]), *tensors[SAVED + 2 :]
    if ctx.main_grad is not None and needed[1]:
        found = _backward_into(ctx.main_grad, *saved, *ctx.constants, needed)
        needed[1] = False
        grads = iter([grad for grad, n in zip(found, (needed[0], *needed[2:]), strict=True) if n])
    else:
        grads = iter(_backward(*saved, *ctx.constants, needed))
    hidden, weight, *others = (next(grads) if n else None for n in needed)
    return hidden, weight, None, *others, *(None,) * 14


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(no_second_derivative)
