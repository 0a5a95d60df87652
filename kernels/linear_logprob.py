"""Log-probability, entropy and log-normalizer of one target per token, straight from hidden states.

    c = hidden·Wᵀ + bias + scaling·(hidden·Aᵀ)·Bᵀ        s = cap(scale·c)        z = s/temperature

    logsumexp = log Σ_v e^{z_v}        logprob = z_target − logsumexp        entropy = −Σ_v p_v log p_v

with p = e^{z − logsumexp} and cap(s) = softcap·tanh(s/softcap). These three numbers are all that an objective needs of
a language-model head. Their gradient for upstream g_p, g_H, g_L, from which the rest follows by the chain rule:

    dz_v = p_v·(g_L − g_p − g_H·(log p_v + entropy)) + 1[v = target]·g_p

``reference.py`` is the definition, ``tiled.py`` the same without ``[N, V]`` in memory.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from . import reference, tiled
from .checks import check_positive, check_tensors, checked_vocab
from .reference import Adapter, Logprobs

Implementation = Callable[..., Logprobs]
Backend = Literal["auto", "tiled", "reference"]


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
    backend: Backend = "auto",
) -> Logprobs:
    """``Logprobs(logprob, entropy, logsumexp)`` of the language-model head, see the top of this file.

    Differentiable once, in each output, with respect to every floating-point tensor given; what needs no gradient
    costs nothing, nor does an output that nobody uses. Computed and returned in float32, in float64 for float64 hidden
    states; every gradient has the dtype of its own input.

    Args:
        hidden: ``[N, D]``, only the rows that carry a target. N = 0 gives empty outputs on the graph.
        weight: W ``[V, D]``, in any floating-point dtype.
        target: int64 ``[N]``.
        bias: ``[V]``; −inf forbids a token.
        temperature: T > 0, one number or ``[N]``, one per token.
        softcap: bound of the logits, as in Gemma 2.
        scale: factor on the logits, as in Cohere and Granite (there as a divisor), before the soft cap.
        adapter: LoRA factors on the head, A ``[r, D]``, B ``[V, r]`` and their scaling. They are never merged into W.
        vocab: rows of W from here on are padding and have probability 0.
        backend: "auto" is the fastest that runs on the device of ``hidden``; "reference" is differentiable any number
            of times and materializes ``[N, V]``.

    Raises:
        ValueError: if shapes or devices disagree, or a hyper-parameter is out of range.
        IndexError: if a target is outside ``[0, vocab)``.
    """
    _check_tensors(hidden, weight, target, bias, temperature, adapter)
    if not isinstance(temperature, Tensor):
        check_positive("linear_logprob", "temperature", temperature)
    if softcap is not None:
        check_positive("linear_logprob", "softcap", softcap)
    check_positive("linear_logprob", "scale", scale)
    vocab = checked_vocab("linear_logprob", vocab, len(weight))
    compute = _implementation(backend)
    with torch.autocast(hidden.device.type, enabled=False):  # logits are never rounded to 16 bits
        return compute(
            hidden,
            weight,
            target,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            scale=scale,
            adapter=adapter,
            vocab=vocab,
        )


def _implementation(backend: Backend) -> Implementation:
    match backend:
        case "auto" | "tiled":
            return tiled.linear_logprob
        case "reference":
            return reference.linear_logprob
    raise ValueError(f"linear_logprob: backend must be 'auto', 'tiled' or 'reference', got {backend!r}")


def _check_tensors(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    adapter: Adapter | None,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2:
        shapes = f"{list(hidden.shape)} and {list(weight.shape)}"
        raise ValueError(f"linear_logprob: hidden must be [N, D] and weight [V, D], got {shapes}")
    (n, width), size = hidden.shape, len(weight)
    wanted = {"hidden": (hidden, [n, width]), "weight": (weight, [size, width]), "target": (target, [n])}
    if bias is not None:
        wanted["bias"] = bias, [size]
    if isinstance(temperature, Tensor):
        wanted["temperature"] = temperature, [n]
    if adapter is not None:
        down, up, _ = adapter
        wanted |= {"adapter A": (down, [len(down), width]), "adapter B": (up, [size, len(down)])}
    check_tensors("linear_logprob", wanted)
