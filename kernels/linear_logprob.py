"""Log-probability, entropy and log-normalizer of one target per token, straight from hidden states.

    c = hidden·Wᵀ + bias + scaling·(hidden·Aᵀ)·Bᵀ        s = cap(scale·c)        z = s/temperature

    logsumexp = log Σ_v e^{z_v}        logprob = z_target − logsumexp        entropy = −Σ_v p_v log p_v

with p = e^{z − logsumexp} and cap(s) = softcap·tanh(s/softcap). These three numbers are all that an objective needs of a
language-model head. Their gradients for upstream g_p, g_H, g_L, from which everything else follows by the chain rule:

    dz_v = p_v·(g_L − g_p − g_H·(log p_v + entropy)) + 1[v = target]·g_p

``reference.py`` is the definition, ``tiled.py`` the same without ``[N, V]`` in memory.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from . import reference, tiled
from .reference import Adapter, Logprobs

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
    vocab = _check(hidden, weight, target, bias, temperature, softcap, scale, adapter, vocab)
    run = _implementation(backend)
    with torch.autocast(hidden.device.type, enabled=False):  # logits are never rounded to 16 bits
        return run(
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


def _implementation(backend: str):
    match backend:
        case "auto" | "tiled":
            return tiled.linear_logprob
        case "reference":
            return reference.linear_logprob
    raise ValueError(f"linear_logprob: backend must be 'auto', 'tiled' or 'reference', got {backend!r}")


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    scale: float,
    adapter: Adapter | None,
    vocab: int | None,
) -> int:
    """The size of the vocabulary, if everything fits together."""
    if hidden.ndim != 2 or weight.ndim != 2:
        raise ValueError(
            f"linear_logprob: hidden must be [N, D] and weight [V, D], got {list(hidden.shape)} and {list(weight.shape)}"
        )
    (n, width), size = hidden.shape, weight.shape[0]
    wanted = {"hidden": (hidden, [n, width]), "weight": (weight, [size, width]), "target": (target, [n])}
    if bias is not None:
        wanted["bias"] = bias, [size]
    if isinstance(temperature, Tensor):
        wanted["temperature"] = temperature, [n]
    if adapter is not None:
        down, up, _ = adapter
        wanted |= {"adapter's A": (down, [down.shape[0], width]), "adapter's B": (up, [size, down.shape[0]])}
    for name, (tensor, shape) in wanted.items():
        if list(tensor.shape) != shape:
            raise ValueError(f"linear_logprob: {name} must be {shape}, got {list(tensor.shape)}")
        if tensor.device != hidden.device:
            raise ValueError(f"linear_logprob: {name} must be on {hidden.device} like hidden, got {tensor.device}")
        if tensor is not target and not tensor.is_floating_point():
            raise ValueError(f"linear_logprob: {name} must be floating-point, got {tensor.dtype}")
    if target.dtype != torch.int64:
        raise ValueError(f"linear_logprob: target must be int64, got {target.dtype}")
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(f"linear_logprob: temperature must be > 0, got {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"linear_logprob: softcap must be > 0, or None for no cap, got {softcap}")
    if not math.isfinite(scale) or scale == 0:
        raise ValueError(f"linear_logprob: scale must be finite and not 0, got {scale}")
    vocab = size if vocab is None else vocab
    if not 1 <= vocab <= size:
        raise ValueError(f"linear_logprob: vocab must be in [1, {size}], got {vocab}")
    return vocab
