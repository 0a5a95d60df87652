"""Log-probability, entropy and log-normalizer of one target per token, straight from hidden states.

    c = hidden·Wᵀ + bias + scaling·(hidden·Aᵀ)·Bᵀ        s = cap(scale·c)        z = s/temperature

    logsumexp = log Σ_v e^{z_v}        logprob = z_target − logsumexp        entropy = −Σ_v p_v log p_v

with p = e^{z − logsumexp} and cap(s) = softcap·tanh(s/softcap). These three numbers are all that an objective needs of
a language-model head. Their gradient for upstream g_p, g_H, g_L, from which the rest follows by the chain rule:

    dz_v = p_v·(g_L − g_p − g_H·(log p_v + entropy)) + 1[v = target]·g_p

Two more, mean_logprob and log_sum_squares, are computed if they are asked for.
``reference.py`` is the definition, ``tiled.py`` the same without ``[N, V]`` in memory.
"""

from collections.abc import Callable
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from . import reference, tiled
from .checks import check_outputs, check_rows, checked_vocab
from .head import Adapter, Head, check_head
from .reference import Extra, Logprobs, MoreLogprobs

Implementation = Callable[..., MoreLogprobs]
Backend = Literal["auto", "tiled", "reference"]


class Options(TypedDict, total=False):
    """The keyword arguments of ``linear_logprob`` that do not change what it returns."""

    bias: Tensor | None
    temperature: float | Tensor
    softcap: float | None
    scale: float
    adapter: Adapter | None
    vocab: int | None
    backend: Backend


@overload
def linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, *, outputs: tuple[()] = (), **options: Unpack[Options]
) -> Logprobs: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    outputs: tuple[Extra, *tuple[Extra, ...]],
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
    vocab: int | None = None,
    outputs: tuple[Extra, ...] = (),
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
        vocab: rows of W from here on are padding and have probability 0.
        outputs: what else to compute, and to return in ``MoreLogprobs``, which has these fields after the three:
            "mean_logprob", (1/n) Σ_v log p_v over the n tokens that are possible (label smoothing), and
            "log_sum_squares", log Σ_v p_v² (the expected probability of a sample, as in WPO).
        backend: "auto" is the fastest that runs on the device of ``hidden``; "reference" is differentiable any number
            of times and materializes ``[N, V]``.

    Raises:
        ValueError: if shapes or devices disagree, or a hyper-parameter is out of range.
        IndexError: if a target is outside ``[0, vocab)``.
    """
    head = Head(weight, bias, scale, softcap, adapter)
    check_head("linear_logprob", hidden, head)
    check_rows("linear_logprob", {"hidden": hidden}, temperature, target)
    check_outputs("linear_logprob", outputs)
    vocab = checked_vocab("linear_logprob", vocab, len(weight))
    compute = _implementation(backend)
    with torch.autocast(hidden.device.type, enabled=False):  # logits are never rounded to 16 bits
        result = compute(hidden, head, target, temperature=temperature, vocab=vocab, outputs=outputs)
    return result if outputs else Logprobs(*result[:3])


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
        vocab=vocab,
        backend=backend,
    ).logprob


def _implementation(backend: Backend) -> Implementation:
    match backend:
        case "auto" | "tiled":
            return tiled.linear_logprob
        case "reference":
            return reference.linear_logprob
    raise ValueError(f"linear_logprob: backend must be 'auto', 'tiled' or 'reference', got {backend!r}")
