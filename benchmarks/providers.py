"""Who is measured: ways from hidden states to the log-probabilities of one target per token, each behind one adapter.

A provider is a name, a function, what the function can be asked for, and whether it runs here. To measure another one,
name an object of your own as ``module:object``: a ``Provider``, or a function ``(hidden, weight, target) -> logprob``.
"""

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import linear_logprob, logits_logprob
from ..kernels.linear_logprob import Backend

Outputs = tuple[str, ...]
OUTPUTS = ("loss", "logprob", "entropy", "logsumexp")


def _nothing(device: torch.device) -> None:
    return None


@dataclass(frozen=True)
class Provider:
    """One row of every table.

    Args:
        name: as on the command line.
        compute: ``compute(hidden [N, D], weight [V, D], target [N], outputs)`` returns the outputs in the order in
            which they are named, differentiable with respect to hidden and weight: "logprob", "entropy" and
            "logsumexp" ``[N]``, or "loss", the mean of −logprob, for those who give nothing per token.
        gives: what it can be asked for. Whoever gives "logprob" also takes part where "loss" is asked for.
        missing: why it can't run on a device here, such as a package that is not installed; None if it can.
    """

    name: str
    compute: Callable[[Tensor, Tensor, Tensor, Outputs], tuple[Tensor, ...]]
    gives: Outputs = ("logprob",)
    missing: Callable[[torch.device], str | None] = _nothing

    def can_give(self, outputs: Outputs) -> bool:
        return set(outputs) <= set(self.gives) or (outputs == ("loss",) and "logprob" in self.gives)

    def __call__(self, hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
        """The outputs, each of its right shape."""
        if outputs == ("loss",) and "loss" not in self.gives:
            (logprob,) = self(hidden, weight, target, ("logprob",))
            return (-logprob.mean(dtype=torch.promote_types(logprob.dtype, torch.float32)),)
        results = self.compute(hidden, weight, target, outputs)
        wanted = torch.Size([]) if outputs == ("loss",) else target.shape
        for name, result in zip(outputs, results, strict=True):
            if result.shape != wanted:
                raise ValueError(f"{self.name}: {name} must be {list(wanted)}, got {list(result.shape)}")
        return results


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


def compiled(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
    # Every shape and pass is a graph of its own, and there are more of them than the compiler's limit.
    with torch._dynamo.config.patch(recompile_limit=1024):
        return _compiled_naive()(hidden, weight, target, outputs)


@functools.cache
def _compiled_naive() -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(naive, dynamic=False)


def ours(name: str, **options: Any) -> Provider:
    """``linear_logprob`` with these keyword arguments."""

    def compute(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
        result = linear_logprob(hidden, weight, target, **options)
        return tuple(getattr(result, output) for output in outputs)

    missing = _on_gpu if options.get("backend") == "triton" else _nothing
    return Provider(name, compute, ("logprob", "entropy", "logsumexp"), missing)


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
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module.LigerFusedLinearScaledCrossEntropyFunction
    if "entropy" not in outputs:
        return (-function.apply(hidden, weight, target),)
    nll, entropy = function.apply(hidden, weight, target, return_entropy=True)
    found = {"logprob": -nll, "entropy": entropy}
    return tuple(found[output] for output in outputs)


def cut_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs, *, impl: str) -> tuple[Tensor]:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    loss = outputs == ("loss",)
    nll: Tensor = function(hidden, weight, target, reduction="mean" if loss else "none", impl=impl)
    return (nll if loss else -nll,)


def quack(hidden: Tensor, weight: Tensor, target: Tensor, outputs: Outputs) -> tuple[Tensor, ...]:
    return (importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy(hidden, weight, target),)


def _on_gpu(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"runs on a GPU only, this is {device.type}"


def needs(module: str, *, gpu: bool) -> Callable[[torch.device], str | None]:
    """For ``Provider.missing``: a package that has to be importable, and maybe a GPU."""
    package = module.partition(".")[0]

    def missing(device: torch.device) -> str | None:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if gpu and (reason := _on_gpu(device)):
            return reason
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a package that does not fit this machine raises
            return f"{module} can't be imported: {first_line(error)}"
        return None

    return missing


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


_FUSED = ("loss", "logprob")
_SCALED = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
_CUT = needs("cut_cross_entropy", gpu=True)

# "auto" is one of the other backends, and measured under its name.
PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("naive", naive, OUTPUTS[1:]),
        Provider("compiled", compiled, OUTPUTS[1:]),
        *(ours(f"burnish-{backend}", backend=backend) for backend in get_args(Backend) if backend != "auto"),
        Provider("burnish-logits", our_logits, OUTPUTS[1:]),
        Provider("torch", torch_fused, _FUSED, _torch_has_it),
        Provider("trl", trl, ("logprob", "entropy"), needs("trl.kernels.chunked_logprob", gpu=False)),
        Provider("liger", liger, _FUSED, needs("liger_kernel.transformers.functional", gpu=True)),
        Provider("liger-scaled", liger_scaled, ("logprob", "entropy"), needs(_SCALED, gpu=True)),
        Provider("cce", functools.partial(cut_cross_entropy, impl="cce"), _FUSED, _CUT),
        Provider("cce-exact", functools.partial(cut_cross_entropy, impl="cce_exact"), _FUSED, _CUT),
        Provider("quack", quack, ("loss",), needs("quack.linear_cross_entropy", gpu=True)),
    )
}


def find(name: str) -> Provider:
    """The provider of that name, or the object at ``module:object``.

    Raises:
        ValueError: if there is none, with the nearest name or with what went wrong.
    """
    if ":" in name:
        return _load(name)
    if name not in PROVIDERS:
        nearest = get_close_matches(name, PROVIDERS, n=1, cutoff=0.0)[0]
        known = ", ".join(PROVIDERS)
        raise ValueError(f"no provider {name!r}, did you mean {nearest!r}? Known are {known}, and your module:object")
    return PROVIDERS[name]


def _load(name: str) -> Provider:
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # a console script does not look where it is called, `python -m` does
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"provider {name!r} can't be loaded: {first_line(error)}") from error
    if isinstance(found, Provider):
        return found
    if not callable(found):
        raise ValueError(f"provider {name!r} must be a Provider or a function, got {type(found).__name__}")
    return Provider(name, lambda hidden, weight, target, outputs: (found(hidden, weight, target),))
