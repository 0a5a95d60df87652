"""Who computes the language-model head: ways from hidden states to the log-probabilities of one target per token.

Each is behind one adapter, ``(hidden, weight, target, outputs) -> tuple``; see ``operation.py`` for how to add
yours.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import linear_logprob, logits_logprob
from ..kernels.backend import Backend
from . import ours
from .operation import Outputs, Provider, needs

OUTPUTS = ("loss", "logprob", "entropy", "logsumexp")


def naive(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
    """What one writes without a kernel: the logits in the dtype of the model, the rest in float32."""
    logits = hidden @ weight.t()
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logp = logits.log_softmax(-1, dtype=dtype)
    found = []
    for output in outputs:
        match output:
            case "logprob":
                found.append(logp.gather(1, target[:, None])[:, 0])
            case "entropy":
                found.append(-(logp.exp() * logp).sum(-1))
            case "logsumexp":
                found.append(logits.to(dtype).logsumexp(-1))
    return tuple(found)


def recompiling(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The function compiled: every shape and pass is a graph of its own, and there are more than the usual limit."""

    @functools.cache
    def fast() -> Callable[..., tuple[Tensor, ...]]:
        return torch.compile(function, dynamic=False)

    def compute(*arguments: Any, **settings: Any) -> tuple[Tensor, ...]:
        with torch._dynamo.config.patch(recompile_limit=1024):
            return fast()(*arguments, **settings)

    return compute


compiled = recompiling(naive)


def adapter(options: dict[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """``linear_logprob`` with these keyword arguments."""

    def compute(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
        result = linear_logprob(hidden, weight, target, **options)
        return tuple(getattr(result, output) for output in outputs)

    return compute


def our_logits(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
    """For those who hold the logits anyway."""
    result = logits_logprob(hidden @ weight.t(), target)
    return tuple(getattr(result, output) for output in outputs)


def torch_fused(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
    loss = outputs == ("loss",)
    function, options = F.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    nll: Tensor = function(hidden, weight, target, reduction="mean" if loss else "none", options=options)
    return (nll if loss else -nll,)


def _torch_has_it(device: torch.device) -> str | None:
    if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return f"torch {torch.__version__} has no F.linear_cross_entropy in chunks"


def trl(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    extra = tuple(output for output in outputs if output != "logprob")
    logprob, entropy, *_ = function.apply(hidden, weight, None, target, 1.0, 32768, None, 1.0, extra)
    found = {"logprob": logprob, "entropy": entropy}
    return tuple(found[output] for output in outputs)


def liger(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    loss = outputs == ("loss",)
    nll: Tensor = function(hidden, weight, target, reduction="mean" if loss else "none")
    return (nll if loss else -nll,)


def liger_scaled(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
    # From the package, not from its module: so a backend that the user has selected takes its place.
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    if "entropy" not in outputs:
        return (-function.apply(hidden, weight, target),)
    nll, entropy = function.apply(hidden, weight, target, return_entropy=True)
    found = {"logprob": -nll, "entropy": entropy}
    return tuple(found[output] for output in outputs)


def _liger_scaled_missing(device: torch.device) -> str | None:
    if reason := needs("liger_kernel.ops.fused_linear_scaled_cross_entropy", gpu=True)(device):
        return reason
    if torch.cuda.get_device_capability(device) == (9, 0):  # elsewhere it is a formula in torch, 512 tokens at a time
        return needs("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90", gpu=True)(device)
    return None


def cut_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs, *, exact: bool
) -> tuple[Tensor]:
    """``exact`` skips nothing in backward, and sums gradients in float32 where the release can do so."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    loss = outputs == ("loss",)
    options: dict[str, Any] = {"reduction": "mean" if loss else "none", "impl": "cce"}
    if exact and "accum_e_fp32" in inspect.signature(function).parameters:
        options["impl"] = "cce_exact"
    elif exact:  # up to 25.1
        options["filter_eps"] = None
    nll: Tensor = function(hidden, weight, target, **options)
    return (nll if loss else -nll,)


def quack(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
    return (importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy(hidden, weight, target),)


_FUSED = ("loss", "logprob")
_CUT = needs("cut_cross_entropy", gpu=True)

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("naive", naive, OUTPUTS[1:]),
        Provider("compiled", compiled, OUTPUTS[1:]),
        *ours.providers(linear_logprob, Backend, adapter, OUTPUTS[1:]),
        Provider("burnish-logits", our_logits, OUTPUTS[1:]),
        Provider("torch", torch_fused, _FUSED, _torch_has_it),
        Provider("trl", trl, ("logprob", "entropy"), needs("trl.kernels.chunked_logprob", gpu=False)),
        Provider("liger", liger, _FUSED, needs("liger_kernel.transformers.functional", gpu=True)),
        Provider("liger-scaled", liger_scaled, ("logprob", "entropy"), _liger_scaled_missing),
        Provider("cce", functools.partial(cut_cross_entropy, exact=False), _FUSED, _CUT),
        Provider("cce-exact", functools.partial(cut_cross_entropy, exact=True), _FUSED, _CUT),
        Provider("quack", quack, ("loss",), needs("quack.linear_cross_entropy", gpu=True)),
    )
}


def find_more(name: str) -> Provider | None:
    return ours.with_budget(name, linear_logprob, Backend, adapter, OUTPUTS[1:])
