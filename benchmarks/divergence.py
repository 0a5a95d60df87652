"""Time, memory and error of the divergence of two language-model heads:
``burnish bench divergence``.

From student's and teacher's hidden states, with the gradients of the student: forward KL
(``--beta 0``), reverse KL (1) and the mixture between. The gate and the rules are those of
``burnish bench kernels``; the floor is the matrix products alone, with the logits of both heads
computed once, and as often as without keeping any. In its name D is the mean of the two widths.
"""

import importlib
import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..kernels import Head, linear_divergence
from .kernels import our_provider, our_providers, random_head, recompiling
from .operation import Compute, Inputs, Operation, Products, Provider, needs

OUTPUTS = ("loss", "divergence")
PASSES = {
    "forward": (),
    "train": ("student_hidden", "student_weight"),
    "frozen": ("student_hidden",),
}


SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "tiny": ((64, 24, 32, 257),),
    "small": ((512, 576, 576, 49152),),
    "smollm2": ((2048, 576, 576, 49152),),
    "large": ((8192, 4096, 4096, 151936),),
    "grid": tuple(product((8192,), (2048, 4096), (4096,), (128256, 151936))),
}


def random_tensors(
    shape: Sequence[int], dtype: torch.dtype, random: torch.Generator
) -> dict[str, Tensor]:
    tokens, student, teacher, vocab = shape
    heads = (random_head(tokens, width, vocab, dtype, random) for width in (student, teacher))
    names = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
    return dict(zip(names, (x for head in heads for x in head), strict=True))


def naive(
    hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor, outputs: object, *, beta: float
) -> tuple[Tensor, ...]:
    """Two log_softmax of student and teacher: the logits in the dtype of the model, the rest in
    float32.
    """
    logits = [hs @ ws.t(), ht @ wt.t()]
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    s, t = (x.log_softmax(-1, dtype=dtype) for x in logits)
    if beta == 0:
        return (_kl(t, s),)
    if beta == 1:
        return (_kl(s, t),)
    m = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    return (beta * _kl(t, m) + (1 - beta) * _kl(s, m),)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def adapter(**options: Any) -> Compute:
    """``linear_divergence`` with these keyword arguments."""

    def compute(
        hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor, outputs: object, *, beta: float
    ) -> tuple[Tensor]:
        return (linear_divergence(hs, Head(ws), ht, Head(wt), beta=beta, **options),)

    return compute


def trl(
    hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor, outputs: object, *, beta: float
) -> tuple[Tensor]:
    function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    divergence, _ = function.apply(hs, ws, None, ht, wt, None, beta)
    return (divergence,)


def liger(*tensors: object, beta: float, accumulate: torch.dtype | None) -> tuple[Tensor]:
    """Only the mean over tokens; by default it adds up the gradient of the head in the dtype of the
    head.
    """
    function = importlib.import_module(
        "liger_kernel.transformers.functional"
    ).liger_fused_linear_jsd
    return (function(*tensors[:-1], jsd_beta=beta, accum_dtype=accumulate),)


_LIGER = needs("liger_kernel.ops.fused_linear_jsd", gpu=True)

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("naive", naive, OUTPUTS[1:]),
        Provider("compiled", recompiling(naive), OUTPUTS[1:]),
        *our_providers(adapter, OUTPUTS[1:]),
        Provider("trl", trl, OUTPUTS[1:], needs("trl.kernels.chunked_divergence", gpu=False)),
        Provider("liger", partial(liger, accumulate=None), ("loss",), _LIGER),
        Provider("liger-float32", partial(liger, accumulate=torch.float32), ("loss",), _LIGER),
    )
}


def products(inputs: Inputs, kind: str, dtype: torch.dtype) -> Products:
    """The matrix products of a pass, into memory that is there already."""
    tokens, s, t, vocab = inputs.shape
    s_hidden, s_weight, t_hidden, t_weight = (x.to(dtype) for x in inputs.tensors.values())
    logits = torch.empty(tokens, vocab, dtype=dtype, device=inputs.device)
    torch.mm(s_hidden, s_weight.t(), out=logits)
    d_hidden, d_weight = torch.empty_like(s_hidden), torch.empty_like(s_weight)
    steps = {
        "student": lambda _: torch.mm(s_hidden, s_weight.t(), out=logits),
        "teacher": lambda _: torch.mm(t_hidden, t_weight.t(), out=logits),
        "d_student_hidden": lambda _: torch.mm(logits, s_weight, out=d_hidden),
        "d_student_weight": lambda _: torch.mm(logits.t(), s_hidden, out=d_weight),
    }
    wanted = ["student", "teacher", *(f"d_{name}" for name in PASSES[kind])]
    flops = {name: 2 * tokens * vocab * (t if name == "teacher" else s) for name in wanted}
    once = dict.fromkeys(wanted, 1)
    # The normalizers of a mixture stand inside a logarithm: without kept logits they need a pass of
    # their own.
    passes = (kind != "forward") + (2 if 0 < inputs.settings["beta"] < 1 else 1)
    ways = [once, once | {"student": passes, "teacher": passes}]
    unit = tokens * vocab * (s + t) / 2
    floors = {
        f"{sum(flops[name] * count for name, count in way.items()) / unit:.3g}NDV": way
        for way in ways
    }
    return Products({name: steps[name] for name in wanted}, flops, floors)


OPERATION = Operation(
    name="divergence",
    providers=PROVIDERS,
    parse_provider=lambda name: our_provider(name, adapter, OUTPUTS[1:]),
    baseline="naive",
    outputs=OUTPUTS,
    alone=("loss",),
    default_outputs=("divergence",),
    mean=("divergence", 1),
    passes=PASSES,
    shapes=SHAPES,
    sizes="tokens x width x vocabulary, or tokens x student's x teacher's width x vocabulary",
    shape=lambda n, s, t, v=0: (n, s, t, v) if v else (n, s, s, t),
    inputs={"random": random_tensors},
    per_row=("student_hidden", "teacher_hidden"),
    products=products,
    settings={"beta": (0.0, 0.5)},
)
