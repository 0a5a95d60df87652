"""Log-probability, entropy and log-normalizer of one target per token, straight from hidden states.

    c = hidden·Wᵀ + bias + scaling·(hidden·Aᵀ)·Bᵀ        s = cap(scale·c)        z = s/temperature

    logsumexp = log Σ_v e^{z_v}        logprob = z_target − logsumexp        entropy = −Σ_v p_v log p_v

with p = e^{z − logsumexp} and cap(s) = softcap·tanh(s/softcap). These three numbers are all that an objective needs of
a language-model head. Their gradient for upstream g_p, g_H, g_L, from which the rest follows by the chain rule:

    dz_v = p_v·(g_L − g_p − g_H·(log p_v + entropy)) + 1[v = target]·g_p

``reference.py`` is the definition, ``tiled.py`` the same without ``[N, V]`` in memory.

Precision, in every backend and with gradients or without: h, W, A, B and u = scaling·(hidden·Aᵀ) are rounded to one
dtype, ``compute_dtype``, and their products are summed in float32. Logits are never rounded.
"""

from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from . import reference, tiled
from .backend import Backend, choose
from .checks import check_keep, check_main_grad, check_outputs, check_rows, check_top_k, checked_vocab
from .head import Adapter, Head, Shard, autocast_dtype, check_compute_dtype, check_head
from .reference import EXTRAS, Extra, Logprobs, MoreLogprobs


class Options(TypedDict, total=False):
    """The keyword arguments of ``linear_logprob`` that do not change what it returns."""

    bias: Tensor | None
    temperature: float | Tensor
    softcap: float | None
    scale: float
    adapter: Adapter | None
    shard: Shard | None
    vocab: int | None
    keep_bytes: int | None
    main_grad: Tensor | None
    compute_dtype: torch.dtype | None
    backend: Backend


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    outputs: tuple[()] = (),
    top_k: None = None,
    **options: Unpack[Options],
) -> Logprobs: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    outputs: tuple[Extra, *tuple[Extra, ...]],
    top_k: int | None = None,
    **options: Unpack[Options],
) -> MoreLogprobs: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    outputs: tuple[Extra, ...] = (),
    top_k: int,
    **options: Unpack[Options],
) -> MoreLogprobs: ...
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    adapter: Adapter | None = None,
    shard: Shard | None = None,
    vocab: int | None = None,
    outputs: tuple[Extra, ...] = (),
    top_k: int | None = None,
    keep_bytes: int | None = None,
    main_grad: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Logprobs | MoreLogprobs:
    """``Logprobs(logprob, entropy, logsumexp)`` of the language-model head, see the top of this file.

    Differentiable once, in each output, with respect to every floating-point tensor given; what needs no gradient
    costs nothing, nor does an output that nobody uses. Computed and returned in float32, in float64 for float64 hidden
    states; every gradient has the dtype of its own input.

    Args:
        hidden: ``[N, D]``, only the rows that carry a target. N = 0 gives empty outputs on the graph.
        weight: W ``[V, D]``, in any floating-point dtype.
        target: int64 ``[N]``, or ``[N, k]`` for k tokens of each row, such as a teacher's most probable ones; then
            ``logprob`` is ``[N, k]`` too, and nothing larger is made of it.
        bias: ``[V]``; −inf forbids a token.
        temperature: T > 0, one number or ``[N]``, one per token.
        softcap: bound of the logits, as in Gemma 2.
        scale: factor on the logits, as in Cohere and Granite (there as a divisor), before the soft cap.
        adapter: LoRA factors on the head, A ``[r, D]``, B ``[V, r]`` and their scaling. They are never merged into W.
        shard: where W, bias and B are this rank's part of a vocabulary that is split over a process group.
        vocab: tokens from here on are padding and have probability 0; counted over the whole vocabulary.
        outputs: what else to compute, and to return in ``MoreLogprobs``, which has these fields after the three:
            "mean_logprob", (1/n) Σ_v log p_v over the n tokens that are possible (label smoothing);
            "log_sum_squares", log Σ_v p_v² (the expected probability of a sample, as in WPO);
            "top1", int64, the likeliest token; "rank", int64, how many tokens are likelier than the target.
        top_k: return the ids and log-probs ``[N, top_k]`` of the likeliest tokens, in ``MoreLogprobs.top_k``.
        keep_bytes: how many bytes of logits forward may leave for backward, which computes the others again: with a
            share f of them, (8 − 2f)·NDV operations instead of 8. Default 96 MB, on a GPU a thirty-second of its
            memory and at most 4 GiB.
        main_grad: float32 ``[V, D]``, as optimizers of 16-bit models keep it: the gradient of W is added to it, without
            rounding, and W gets none.
        compute_dtype: float32, bfloat16 or float16, what the factors of products are rounded to. Default: autocast's
            dtype where autocast is on, for float32 inputs too, so that tensor cores are used; else the dtype of
            ``hidden``, to which W is rounded. float32 asks for float32 products under autocast.
        backend: "auto" is the fastest that runs on the device of ``hidden``. "tiled" is torch alone; "triton" has
            Triton kernels between the matrix products; "fused" one Triton kernel that writes no logits at all in
            forward, and backward as "triton"; "reference" is differentiable any number of times and materializes
            ``[N, V]``. Triton needs a GPU, or its interpreter (TRITON_INTERPRET=1), and no float64.

    Raises:
        ValueError: if shapes or devices disagree, or a hyper-parameter is out of range.
        IndexError: if a target is outside ``[0, vocab)``.
    """
    who = "linear_logprob"
    head = Head(weight, bias, scale, softcap, adapter, shard)
    check_head(who, hidden, head)
    check_rows(who, {"hidden": hidden}, temperature, target)
    check_outputs(who, outputs, EXTRAS, target)
    check_keep(who, keep_bytes)
    check_main_grad(who, main_grad, weight)
    check_compute_dtype(who, compute_dtype)
    columns = _columns(head, vocab)
    if shard is None:
        check_top_k(who, top_k, columns)
    asked: Any = {"temperature": temperature, "vocab": columns, "outputs": outputs, "top_k": top_k}
    asked["compute_dtype"] = compute_dtype or autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # it would round logits to 16 bits
        passes = choose(who, backend, hidden)
        if passes == "reference":
            if shard is not None or main_grad is not None:
                raise ValueError(f"{who}: backend='reference' knows neither shards nor main_grad; use another")
            result = reference.linear_logprob(hidden, head, target, **asked)
        else:
            if passes == "fused" and ("rank" in outputs or "top1" in outputs or top_k is not None):
                raise ValueError(f"{who}: backend='fused' sees no tile of logits to rank; use 'triton' or 'auto'")
            result = tiled.linear_logprob(
                hidden, head, target, keep_bytes=keep_bytes, main_grad=main_grad, passes=passes, **asked
            )
    return result if outputs or top_k is not None else Logprobs(*result[:3])


def linear_gather_logprob(
    hidden: Tensor,
    head: Head,
    ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``linear_logprob(...).logprob`` of k tokens in each row, ``ids`` ``[N, k]``, in their shape.

    With a teacher's most probable tokens it is the student's side of their divergence: what is missing to 1 in a row
    is the probability of all the others.
    """
    return linear_logprob(
        hidden,
        head.weight,
        ids,
        bias=head.bias,
        temperature=temperature,
        softcap=head.softcap,
        scale=head.scale,
        adapter=head.adapter,
        shard=head.shard,
        vocab=vocab,
        backend=backend,
    ).logprob


def _columns(head: Head, vocab: int | None) -> int:
    """How many rows of W are not padding; of a shard, of this rank's."""
    if head.shard is None:
        return checked_vocab("linear_logprob", vocab, len(head.weight))
    return len(head.weight) if vocab is None else min(max(vocab - head.shard.start, 0), len(head.weight))
