"""Divergence of two language-model heads, per token, straight from their hidden states.

    p_S = softmax(z_S/T) of the student, p_T = softmax(z_T/T) of the teacher, over the vocabulary
    that both have;
    KL(P‖Q) = Σ_v p_v (log p_v − log q_v)        M = (1−β)·p_S + β·p_T

    D = β·KL(p_T‖M) + (1−β)·KL(p_S‖M)        for 0 < β < 1, of which D/β tends to KL(p_T‖p_S) for β → 0
    D = KL(p_T‖p_S) for β = 0                 D = KL(p_S‖p_T) for β = 1

``reference.py`` is the definition. Here ``[N, V]`` is never in memory, only tiles of both heads,
side by side.

Let s = log p_S and t = log p_T. A Kullback-Leibler divergence takes one pass over the vocabulary,
because its normalizers leave the sum: with x = z_P − m_P and y = z_Q − m_Q, relative to the largest
logits so far,

    S = Σ eˣ        R = Σ eʸ        G = Σ eˣ·(x − y)        KL(P‖Q) = G/S − log S + log R

and when m_P and m_Q grow by δ and ε:  G ← (G − (δ − ε)·S)·e^(−δ),  S ← S·e^(−δ),  R ← R·e^(−ε). The mixture
M = (1−β)S + βT has both normalizers inside its logarithm, so 0 < β < 1 takes a second pass, with s
and t known:

    D = β·Σ eᵗ·(t − log M) + (1−β)·K        K = KL(S‖M) = Σ eˢ·(s − log M)

Backward, for the gradient g of D. With d_v = ∂D/∂p_S(v) the softmax gives dz_v = g·eˢ·(d_v − Σ_u
p_S(u)·d_u), and d is −e^(t−s) for KL(T‖S), s − t + 1 for KL(S‖T), and else (1−β)·(s − log M): the
derivatives of s and log M cancel.

    β = 0    KL(T‖S)    dz = g·(eˢ − eᵗ)
    β = 1    KL(S‖T)    dz = g·eˢ·(s − t − D)
    else                dz = g·(1−β)·eˢ·(s − log M − K)

and from dz to the factors as in linear_logprob.py. Floating-point operations in units of N·V: 2(D_S
+ D_T) a pass, as much again in backward, and 4·D_S for its products; logits that are kept are
computed only once, and rows that no gradient arrives at are left out of backward. The passes are in
divergence_passes.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import divergence_passes, passes, reference
from .backend import (
    Backend,
    accumulation_dtype,
    check_tensors,
    check_values,
    checked_dtype,
    checked_vocab,
    choose_backend,
    factor_dtype,
)
from .divergence_passes import LEVEL, HeadPair, first_pass, second_pass, student_gradients
from .head import Head, HeadFactors, checked_head
from .passes import WAITS, TileStore, operator_schema, scatter_rows
from .softmax import LogitTransform, per_row


def linear_divergence(
    student_hidden: Tensor,
    student: Tensor | Head,
    teacher_hidden: Tensor,
    teacher: Tensor | Head,
    *,
    beta: float,
    temperature: float | Tensor = 1.0,
    vocab: int | None = None,
    keep_bytes: int | None = None,
    compute_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Generalized Jensen-Shannon divergence ``[N]`` of a student from its teacher, see the top of
    this file.

    Differentiable once with respect to the student's hidden states, weight, bias and adapter, for
    any upstream gradient; the teacher and the temperature are constants. Computed and returned in
    float32, in float64 for a student in float64; every gradient has the dtype of its own input.

    Args:
        student_hidden: ``[N, D_S]``, only the rows that are trained. N = 0 gives an empty output on
            the graph.
        student: its head, W ``[V_S, D_S]`` alone or
            ``Head(weight, bias, scale, softcap, adapter)``.
        teacher_hidden: ``[N, D_T]``, of the same tokens.
        teacher: its head.
        beta: β in [0, 1]; 0 is forward KL (covers the teacher's modes), 1 reverse KL (seeks one of
            them).
        temperature: T > 0 of both sides, one number or ``[N]``, one per token.
        vocab: rows of either weight from here on are padding and have probability 0. Without it,
            those beyond the smaller of the two vocabularies.
        keep_bytes: how many bytes of logits, of both heads together, a pass may leave for the next,
            which computes the others again. Default 64 MB, on a GPU a thirty-second of its memory
            and at most 4 GiB.
        compute_dtype: as in ``linear_logprob``, for both heads; without it and without autocast the
            hidden states of each head decide for theirs.
        backend: as in ``linear_logprob``; "fused" is "triton".

    Raises:
        ValueError: if shapes or devices disagree, or a hyper-parameter is out of range.

    Paper: Agarwal et al. 2023, arXiv:2306.13649, "generalized JSD". There D(β) is written for P‖Q
    with P the teacher: β·KL(P‖βP + (1−β)Q) + (1−β)·KL(Q‖βP + (1−β)Q).
    """
    who = "linear_divergence"
    student = checked_head(who, student_hidden, student, "student ")
    teacher = checked_head(who, teacher_hidden, teacher, "teacher ")
    hidden = {"student hidden": student_hidden, "teacher hidden": teacher_hidden}
    shapes = {
        name: (states, [len(student_hidden), states.shape[1]]) for name, states in hidden.items()
    }
    check_tensors(who, shapes, {"temperature": temperature})
    if not 0 <= beta <= 1:
        raise ValueError(f"{who}: beta must be in [0, 1], got {beta}")
    # Rows beyond the smaller vocabulary are padding of one of the two.
    vocab = checked_vocab(who, vocab, min(len(student.weight), len(teacher.weight)))
    compute = checked_dtype(who, compute_dtype, student_hidden, keep_bytes)
    if student.shard is not None or teacher.shard is not None:
        raise ValueError(
            f"{who}: both heads must hold their whole vocabulary, got a shard; gather its weight before"
        )
    backend = choose_backend(who, backend, student_hidden)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach()
    exact = accumulation_dtype(student_hidden.dtype)  # the student's, for both
    if accumulation_dtype(teacher_hidden.dtype) != exact:
        teacher_hidden = teacher_hidden.to(exact)
    teacher_hidden = teacher_hidden.detach()
    teacher = teacher.detach()
    # it would round logits to 16 bits
    with torch.autocast(student_hidden.device.type, enabled=False):
        if backend == "reference":
            return reference.linear_divergence(
                student_hidden,
                student,
                teacher_hidden,
                teacher,
                beta=beta,
                temperature=temperature,
                vocab=vocab,
                compute_dtype=compute,
            )
        trained = HeadFactors.of(student_hidden, student, compute)
        fixed = HeadFactors.of(teacher_hidden, teacher, compute)
        # Without another pass after the first, nothing is kept for it.
        several_passes = _wants_gradients(trained) or 0 < beta < 1
        on_gpu = student_hidden.device.type == "cuda"
        arguments = DivergenceArguments(
            *trained[:5],
            *fixed[:5],
            per_row(temperature, student_hidden),
            scale=student.scale,
            softcap=student.softcap,
            teacher_scale=teacher.scale,
            teacher_softcap=teacher.softcap,
            beta=beta,
            vocab=vocab,
            rows=divergence_passes.GPU_ROWS if on_gpu else divergence_passes.ROWS,
            columns=divergence_passes.GPU_COLUMNS if on_gpu else divergence_passes.COLUMNS,
            keep_bytes=keep_bytes if several_passes else 0,
            backend="torch" if backend == "torch" else "triton",
            compute=trained.compute,
            teacher_compute=fixed.compute,
        )
        divergence: Tensor = _forward(*arguments)[0]
        return divergence


def _wants_gradients(factors: HeadFactors) -> bool:
    tensors = [t for t in factors[:5] if t is not None]
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class DivergenceArguments(NamedTuple):
    """The arguments of the operators, forward and backward: tensors first."""

    hidden: Tensor  # [N, D_S]
    weight: Tensor  # [V_S, D_S]
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None
    teacher_hidden: Tensor  # [N, D_T]
    teacher_weight: Tensor  # [V_T, D_T]
    teacher_bias: Tensor | None
    teacher_low: Tensor | None
    teacher_up: Tensor | None
    temperature: Tensor | None  # [N]
    scale: float
    softcap: float | None
    teacher_scale: float
    teacher_softcap: float | None
    beta: float
    vocab: int
    rows: int
    columns: int
    keep_bytes: int | None
    backend: str
    compute: torch.dtype
    teacher_compute: torch.dtype

    def pair(self, kept: Sequence[Tensor], only: Tensor | None = None) -> HeadPair:
        """Both heads, ready for the passes.

        ``only`` ``[live]``: the rows that are worked on, if not all.
        """
        temperature = self.temperature
        if temperature is not None and only is not None:
            temperature = temperature[only]
        student = HeadFactors(self.hidden, self.weight, self.bias, self.low, self.up, self.compute)
        teacher = HeadFactors(
            self.teacher_hidden,
            self.teacher_weight,
            self.teacher_bias,
            self.teacher_low,
            self.teacher_up,
            self.teacher_compute,
        )
        student, teacher = student.rounded(only), teacher.rounded(only)
        threads = 1
        if self.backend == "torch":
            logits = len(student.hidden) * self.vocab
            threads = min(
                passes.threads_for(each, logits, self.rows) for each in (student, teacher)
            )
        of_student, of_teacher = (
            TileStore(tiles, self.rows, self.columns, self.vocab, only=only, threads=threads)
            for tiles in kept
        )
        return HeadPair(
            student,
            teacher,
            (of_student, of_teacher),
            (
                LogitTransform(self.scale, self.softcap, temperature),
                LogitTransform(self.teacher_scale, self.teacher_softcap, temperature),
            ),
            self.beta,
            self.backend,
        )

    def allocate_kept(self) -> tuple[Tensor, Tensor]:
        """Memory for the tiles of each head that stay: half of the bytes for either."""
        dtype = accumulation_dtype(self.hidden.dtype)

        def allocate() -> Tensor:
            return passes.allocate_kept(
                self.hidden,
                self.vocab,
                self.columns,
                dtype,
                self.keep_bytes,
                divergence_passes.KEEP,
                2,
            )

        return allocate(), allocate()


TENSORS = DivergenceArguments._fields.index("scale")  # the tensors before it are saved for backward
NEEDED = 5  # the first so many have a gradient


@torch.library.custom_op(
    "burnish::linear_divergence",
    mutates_args=(),
    tags=WAITS,
    schema=operator_schema(DivergenceArguments, 4),
)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The divergence, ``row_stats`` (divergence_passes.py), and the tiles of both heads that
    stay.
    """
    given = DivergenceArguments(*arguments)
    check_values("linear_divergence", None, given.vocab, given.temperature)
    kept = given.allocate_kept()
    pair = given.pair(kept)
    row_stats = first_pass(pair)
    if 0 < given.beta < 1:
        divergence, row_stats[:, LEVEL] = second_pass(pair, row_stats)
        return divergence, row_stats, *kept
    return row_stats[:, LEVEL].clone(), row_stats, *kept


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    given = DivergenceArguments(*arguments)
    n, dtype = given.hidden.shape[0], accumulation_dtype(given.hidden.dtype)
    return (
        given.hidden.new_empty(n, dtype=dtype),
        given.hidden.new_empty(n, 5, dtype=dtype),
        *given.allocate_kept(),
    )


BEFORE: dict[str, Any] = {
    "upstream": Tensor,
    "row_stats": Tensor,
    "kept": list[Tensor],
    "needed": list[bool],
}
BACKWARD = operator_schema(DivergenceArguments, NEEDED, **BEFORE)


@torch.library.custom_op(
    "burnish::linear_divergence_backward", mutates_args=(), tags=WAITS, schema=BACKWARD
)
def _backward(
    upstream: Tensor, row_stats: Tensor, kept: list[Tensor], needed: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    """The gradients of hidden, weight, bias, low and up, empty where not needed."""
    given = DivergenceArguments(*arguments)
    live, unit = passes.live_rows(
        [upstream], factor_dtype(given.hidden, given.compute), given.scale
    )
    pair, n = given.pair(kept, live), len(upstream)
    if live is not None:
        upstream, row_stats = upstream[live], row_stats[live]
    hidden, weight, bias, low, up = student_gradients(pair, upstream, row_stats, unit, needed)
    if live is not None:
        hidden, low = scatter_rows(hidden, live, n), scatter_rows(low, live, n)
    return passes.returned(arguments[:NEEDED], (hidden, weight, bias, low, up))


@_backward.register_fake
def _(
    upstream: Any, row_stats: Any, kept: Any, needed: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    return passes.returned_shapes(arguments[:NEEDED], needed)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.constants = inputs[TENSORS:]
    # else backward would begin with zeros in the size of all that was kept
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], *inputs[:TENSORS])


def _apply_backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * len(DivergenceArguments._fields)
    needed = list(ctx.needs_input_grad[:NEEDED])
    if upstream is not None:
        tensors = ctx.saved_tensors  # read once: a checkpoint recomputes them
        row_stats, *kept = tensors[:-TENSORS]
        found = _backward(upstream, row_stats, kept, needed, *tensors[-TENSORS:], *ctx.constants)
        grads[:NEEDED] = [
            grad if wanted else None for grad, wanted in zip(found, needed, strict=True)
        ]
    return tuple(grads)


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
_backward.register_autograd(passes.no_second_derivative)
