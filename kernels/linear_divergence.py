"""Divergence of two language-model heads, per token, straight from their hidden states.

    p_S = softmax(z_S/T) of the student, p_T = softmax(z_T/T) of the teacher, over the vocabulary that both have;
    KL(P‖Q) = Σ_v p_v (log p_v − log q_v)        M = (1−β)·p_S + β·p_T

    D = β·KL(p_T‖M) + (1−β)·KL(p_S‖M)        for 0 < β < 1, of which D/β tends to KL(p_T‖p_S) for β → 0
    D = KL(p_T‖p_S) for β = 0                 D = KL(p_S‖p_T) for β = 1

``reference.py`` is the definition, ``tiled_divergence.py`` the same without ``[N, V]`` in memory, with the gradient.
"""

from typing import Any

import torch
from torch import Tensor

from . import reference, tiled_divergence
from .backend import Backend, choose
from .checks import check_keep, check_rows, checked_vocab
from .head import Head, accumulation_dtype, autocast_dtype, check_compute_dtype, check_head


def linear_divergence(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    *,
    beta: float,
    temperature: float | Tensor = 1.0,
    vocab: int | None = None,
    keep_bytes: int | None = None,
    compute_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Generalized Jensen-Shannon divergence ``[N]`` of a student from its teacher, see the top of this file.

    Differentiable once with respect to the student's hidden states, weight, bias and adapter, for any upstream
    gradient; the teacher and the temperature are constants. Computed and returned in float32, in float64 for a student
    in float64; every gradient has the dtype of its own input.

    Args:
        student_hidden: ``[N, D_S]``, only the rows that are trained. N = 0 gives an empty output on the graph.
        student: its head, ``Head(weight, bias, scale, softcap, adapter)``.
        teacher_hidden: ``[N, D_T]``, of the same tokens.
        teacher: its head.
        beta: β in [0, 1]; 0 is forward KL (covers the teacher's modes), 1 reverse KL (seeks one of them).
        temperature: T > 0 of both sides, one number or ``[N]``, one per token.
        vocab: rows of either weight from here on are padding and have probability 0. Without it, those beyond the
            smaller of the two vocabularies.
        keep_bytes: how many bytes of logits, of both heads together, a pass may leave for the next, which computes the
            others again. Default 64 MB, on a GPU a thirty-second of its memory and at most 4 GiB.
        compute_dtype: what the factors of products are rounded to, of both heads, as in ``linear_logprob``; without it
            and without autocast the hidden states of each head decide for theirs.
        backend: "auto" is the fastest that runs on the device. "tiled" is torch alone; "triton" has Triton kernels
            between the matrix products, and needs a GPU, or its interpreter (TRITON_INTERPRET=1), and no float64;
            "reference" is differentiable any number of times and materializes ``[N, V]``.

    Raises:
        ValueError: if shapes or devices disagree, or a hyper-parameter is out of range.

    Paper: Agarwal et al. 2023, arXiv:2306.13649, "generalized JSD". There D(β) is written for P‖Q with P the teacher:
    β·KL(P‖βP + (1−β)Q) + (1−β)·KL(Q‖βP + (1−β)Q).
    """
    who = "linear_divergence"
    check_head(who, student_hidden, student, "student ")
    check_head(who, teacher_hidden, teacher, "teacher ")
    rows = {"student hidden": student_hidden, "teacher hidden": teacher_hidden}
    check_rows(who, rows, temperature)
    if not 0 <= beta <= 1:
        raise ValueError(f"{who}: beta must be in [0, 1], got {beta}")
    vocab = checked_vocab(who, vocab, min(len(student.weight), len(teacher.weight)))
    check_keep(who, keep_bytes)
    if student.shard is not None or teacher.shard is not None:
        raise ValueError(f"{who}: both heads must hold their whole vocabulary, got a shard; gather its weight before")
    check_compute_dtype(who, compute_dtype)
    chosen = choose(who, backend, student_hidden)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach()
    exact = accumulation_dtype(student_hidden.dtype)  # the student's, for both
    if accumulation_dtype(teacher_hidden.dtype) != exact:
        teacher_hidden = teacher_hidden.to(exact)
    given = student_hidden, student, teacher_hidden.detach(), teacher.detach()
    asked: Any = {"beta": beta, "temperature": temperature, "vocab": vocab}
    asked["compute_dtype"] = compute_dtype or autocast_dtype(student_hidden)
    with torch.autocast(student_hidden.device.type, enabled=False):  # it would round logits to 16 bits
        if chosen == "reference":
            return reference.linear_divergence(*given, **asked)
        passes: tiled_divergence.Passes = "torch" if chosen == "torch" else "triton"
        return tiled_divergence.linear_divergence(*given, keep_bytes=keep_bytes, passes=passes, **asked)
