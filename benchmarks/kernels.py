"""Time, memory and error of the language-model head, provider by provider:
``burnish bench kernels``.

For each shape every provider is first held to float64, in values and gradients; one that fails is
shown with the error and not timed. The others take turns, and so do the matrix products alone,
which are the floor: 2NDV forward; 6NDV forward and backward if all logits are kept, 8NDV if they
are computed again; 4NDV and 6NDV without the gradient of the head. ``measure.py`` has the rules,
``operation.py`` says how to add your own provider.
"""

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import linear_logprob, logits_logprob
from ..kernels.backend import Backend
from .operation import Compute, Inputs, Operation, Products, Provider, needs, with_triton
from .real_model import smollm2

OUTPUTS = ("loss", "logprob", "entropy", "logsumexp")
PASSES = {"forward": (), "train": ("hidden", "weight"), "frozen": ("hidden",)}
SPREAD = 3.0  # standard deviation of the random logits, in nats
# Modules of the standard library whose source is the text behind real hidden states: prose, code,
# on every machine.
TEXT = (
    "argparse",
    "statistics",
    "difflib",
    "textwrap",
    "optparse",
    "inspect",
    "typing",
    "tarfile",
    "_pydecimal",
)
CONTEXT = 512


SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "tiny": ((64, 32, 257),),
    "small": ((512, 576, 49152),),
    "smollm2": ((2048, 576, 49152),),
    "large": ((8192, 4096, 151936),),
    "grid": tuple(product((8192, 16384), (2048, 4096), (128256, 151936, 262144))),
}


def random_tensors(
    shape: Sequence[int], dtype: torch.dtype, random: torch.Generator
) -> dict[str, Tensor]:
    """One target is in the last column."""
    tokens, width, vocab = shape
    hidden, weight = random_head(tokens, width, vocab, dtype, random)
    target = torch.randint(vocab, (tokens,), generator=random, device=random.device)
    target[-1] = vocab - 1
    return {"hidden": hidden, "weight": weight, "target": target}


def random_head(
    tokens: int, width: int, vocab: int, dtype: torch.dtype, random: torch.Generator
) -> tuple[Tensor, ...]:
    """Hidden states and weights whose logits have the spread of a language model's."""
    hidden = torch.randn(tokens, width, generator=random, device=random.device)
    weight = torch.randn(vocab, width, generator=random, device=random.device).mul_(
        SPREAD / math.sqrt(width)
    )
    return hidden.to(dtype), weight.to(dtype)


def smollm2_tensors(
    shape: Sequence[int], dtype: torch.dtype, random: torch.Generator
) -> dict[str, Tensor]:
    """SmolLM2-135M-Instruct reads source text: its last hidden states, its head, and the tokens
    that follow.

    Raises:
        ValueError: if the shape is not that of the model.
        Unavailable: if the model can't be had here.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, device = smollm2(), random.device
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.to(device)
    weight: Tensor = model.get_output_embeddings().weight.detach()
    tokens, *head = shape
    if head != [weight.shape[1], len(weight)]:
        wanted, got = f"{weight.shape[1]}x{len(weight)}", "x".join(map(str, shape))
        raise ValueError(f"smollm2 has width and vocabulary {wanted}, got the shape {got}")
    text = "\n".join(inspect.getsource(importlib.import_module(name)) for name in TEXT)
    text = text[: 16 * tokens]  # a token has fewer letters
    ids = torch.tensor(tokenizer(text)["input_ids"][: tokens + 1], device=device)
    if len(ids) <= tokens:
        raise ValueError(f"the text has {len(ids) - 1} targets, got {tokens}")
    with torch.no_grad():
        hidden = torch.cat(
            [model.model(row[None]).last_hidden_state[0] for row in torch.split(ids[:-1], CONTEXT)]
        )
    return {"hidden": hidden.to(dtype), "weight": weight.to(dtype), "target": ids[1:]}


def naive(
    hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """The formula without a kernel: the logits in the dtype of the model, the rest in float32."""
    logits = hidden @ weight.t()
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logp = logits.log_softmax(-1, dtype=dtype)
    formulas: dict[str, Callable[[], Tensor]] = {
        "logprob": lambda: logp.gather(1, target[:, None])[:, 0],
        "entropy": lambda: -(logp.exp() * logp).sum(-1),
        "logsumexp": lambda: logits.to(dtype).logsumexp(-1),
    }
    return tuple(formulas[output]() for output in outputs)


def recompiling(function: Compute) -> Compute:
    """``function`` compiled on first use.

    Each shape and pass is a graph, and there are more than the usual limit.
    """
    compiled: list[Compute] = []

    def compute(*arguments: object, **settings: object) -> tuple[Tensor, ...]:
        if not compiled:
            compiled.append(torch.compile(function, dynamic=False))
        with torch._dynamo.config.patch(recompile_limit=1024):
            return compiled[0](*arguments, **settings)

    return compute


def our_provider(
    name: str, adapter: Callable[..., Compute], gives: tuple[str, ...]
) -> Provider | None:
    """The provider that a name such as ``burnish-triton-64MiB`` stands for.

    None if it is no such name.

    ``burnish-triton-4GiB`` keeps up to 4 GiB of logits for backward and computes the others again,
    ``burnish-triton-recompute`` computes all again, ``burnish-triton`` is the backend with its own
    choice.

    Args:
        adapter: makes the function from keyword arguments ``backend`` and maybe ``keep_bytes``.
    """
    match = re.fullmatch(
        rf"burnish-({'|'.join(get_args(Backend))})(?:-(?:(recompute)|(\d+)(KiB|MiB|GiB)))?", name
    )
    if match is None:
        return None
    backend, recompute, count, unit = match.groups()
    options: dict[str, Any] = {"backend": backend}
    if recompute or count:
        options["keep_bytes"] = (
            0 if recompute else int(count) * 2 ** {"KiB": 10, "MiB": 20, "GiB": 30}[unit]
        )
    if backend in ("triton", "fused"):
        return Provider(name, adapter(**options), gives, with_triton)
    return Provider(name, adapter(**options), gives)


def our_providers(adapter: Callable[..., Compute], gives: tuple[str, ...]) -> Iterator[Provider]:
    """One for each backend but "auto", which is one of the others.

    Two more for the one that keeps logits.
    """
    for backend in get_args(Backend)[1:]:
        for mode in ("", "-recompute", "-4GiB") if backend == "triton" else ("",):
            if provider := our_provider(f"burnish-{backend}{mode}", adapter, gives):
                yield provider


def adapter(**options: Any) -> Compute:
    """``linear_logprob`` with these keyword arguments."""

    def compute(
        hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        result = linear_logprob(hidden, weight, target, **options)
        return tuple(getattr(result, output) for output in outputs)

    return compute


def our_logits(
    hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """For callers that hold the logits anyway."""
    result = logits_logprob(hidden @ weight.t(), target)
    return tuple(getattr(result, output) for output in outputs)


def torch_fused(
    hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]
) -> tuple[Tensor, ...]:
    function, options = F.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    return _from_nll(function, hidden, weight, target, outputs, options=options)


def _torch_missing(device: torch.device) -> str | None:
    if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return f"torch {torch.__version__} has no F.linear_cross_entropy in chunks"


def _from_nll(
    function: Any,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    outputs: tuple[str, ...],
    **options: Any,
) -> tuple[Tensor]:
    """A library's cross-entropy: its mean is the loss, and without a reduction it is −log p."""
    loss = outputs == ("loss",)
    nll: Tensor = function(hidden, weight, target, reduction="mean" if loss else "none", **options)
    return (nll if loss else -nll,)


def trl(
    hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]
) -> tuple[Tensor, ...]:
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    extra = tuple(output for output in outputs if output != "logprob")
    logprob, entropy, *_ = function.apply(
        hidden, weight, None, target, 1.0, 32768, None, 1.0, extra
    )
    return tuple({"logprob": logprob, "entropy": entropy}[output] for output in outputs)


def liger(
    hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]
) -> tuple[Tensor, ...]:
    function = importlib.import_module(
        "liger_kernel.transformers.functional"
    ).liger_fused_linear_cross_entropy
    return _from_nll(function, hidden, weight, target, outputs)


def liger_scaled(
    hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]
) -> tuple[Tensor, ...]:
    # From the package, not from its module: so a backend that the user has selected takes its
    # place.
    function = importlib.import_module(
        "liger_kernel.ops"
    ).LigerFusedLinearScaledCrossEntropyFunction
    if "entropy" not in outputs:
        return (-function.apply(hidden, weight, target),)
    nll, entropy = function.apply(hidden, weight, target, return_entropy=True)
    return tuple({"logprob": -nll, "entropy": entropy}[output] for output in outputs)


def _liger_scaled_missing(device: torch.device) -> str | None:
    if reason := needs("liger_kernel.ops.fused_linear_scaled_cross_entropy", gpu=True)(device):
        return reason
    # elsewhere it is a formula in torch, 512 tokens at a time
    if torch.cuda.get_device_capability(device) == (9, 0):
        return needs("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90", gpu=True)(
            device
        )
    return None


def cut_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...], *, exact: bool
) -> tuple[Tensor]:
    """``exact`` skips nothing in backward, and sums gradients in float32 where the release can do
    so.
    """
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    options: dict[str, Any] = {"impl": "cce"}
    if exact and "accum_e_fp32" in inspect.signature(function).parameters:
        options["impl"] = "cce_exact"
    elif exact:  # up to 25.1
        options["filter_eps"] = None
    return _from_nll(function, hidden, weight, target, outputs, **options)


def quack(
    hidden: Tensor, weight: Tensor, target: Tensor, outputs: tuple[str, ...]
) -> tuple[Tensor, ...]:
    return (
        importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy(
            hidden, weight, target
        ),
    )


_FUSED = ("loss", "logprob")
_CUT = needs("cut_cross_entropy", gpu=True)

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("naive", naive, OUTPUTS[1:]),
        Provider("compiled", recompiling(naive), OUTPUTS[1:]),
        *our_providers(adapter, OUTPUTS[1:]),
        Provider("burnish-logits", our_logits, OUTPUTS[1:]),
        Provider("torch", torch_fused, _FUSED, _torch_missing),
        Provider(
            "trl", trl, ("logprob", "entropy"), needs("trl.kernels.chunked_logprob", gpu=False)
        ),
        Provider("liger", liger, _FUSED, needs("liger_kernel.transformers.functional", gpu=True)),
        Provider("liger-scaled", liger_scaled, ("logprob", "entropy"), _liger_scaled_missing),
        Provider("cce", partial(cut_cross_entropy, exact=False), _FUSED, _CUT),
        Provider("cce-exact", partial(cut_cross_entropy, exact=True), _FUSED, _CUT),
        Provider("quack", quack, ("loss",), needs("quack.linear_cross_entropy", gpu=True)),
    )
}


def products(inputs: Inputs, kind: str, dtype: torch.dtype) -> Products:
    """The matrix products of a pass, into memory that is there already."""
    hidden, weight = (inputs.tensors[name].to(dtype) for name in ("hidden", "weight"))
    logits = hidden @ weight.t()
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    steps = {
        "logits": lambda _: torch.mm(hidden, weight.t(), out=logits),
        "d_hidden": lambda _: torch.mm(logits, weight, out=d_hidden),
        "d_weight": lambda _: torch.mm(logits.t(), hidden, out=d_weight),
    }
    wanted = ["logits", *(f"d_{name}" for name in PASSES[kind])]
    once = dict.fromkeys(wanted, 1)
    floors = {f"{2 * len(wanted)}NDV": once}
    if kind != "forward":
        floors[f"{2 * len(wanted) + 2}NDV"] = once | {"logits": 2}
    flops = 2 * math.prod(inputs.shape)
    return Products({name: steps[name] for name in wanted}, dict.fromkeys(wanted, flops), floors)


OPERATION = Operation(
    name="kernels",
    providers=PROVIDERS,
    parse_provider=lambda name: our_provider(name, adapter, OUTPUTS[1:]),
    baseline="naive",
    outputs=OUTPUTS,
    alone=("loss",),
    default_outputs=("logprob", "logprob+entropy"),
    mean=("logprob", -1),
    passes=PASSES,
    shapes=SHAPES,
    sizes="tokens x width x vocabulary as in 2048x576x49152",
    shape=lambda tokens, width, vocab: (tokens, width, vocab),
    inputs={"random": random_tensors, "smollm2": smollm2_tensors},
    per_row=("hidden", "target"),
    products=products,
)
