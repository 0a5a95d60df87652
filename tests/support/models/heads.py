"""Language-model heads to try the kernels on, and what they are held to: float64."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from burnish.kernels import Head, Logprobs, linear_logprob, reference
from burnish.kernels.backend import rounded
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

OUTPUTS = ("logprob", "entropy", "logsumexp")
EXTRAS = ("mean_logprob", "log_sum_squares")


def recorded(
    function: Callable[..., Any], *arguments: Any, **options: Any
) -> tuple[Any, list[Any]]:
    """What it returns, and what torch's profiler, with these options, saw.

    That is the profiler's own record: the tree that it makes of it takes longer than all that it
    watched.
    """
    with profile(activities=[ProfilerActivity.CPU], **options) as record:
        result = function(*arguments)
    assert record.profiler is not None
    return result, record.profiler.kineto_results.events()


def allocations(function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[int]]:
    """What it returns, and the bytes of each tensor that was made on the way, in order."""
    result, events = recorded(function, *arguments, profile_memory=True)
    made = [event for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return result, [event.nbytes() for event in sorted(made, key=lambda event: event.start_ns())]


def ids(tokens: int, k: int, size: int) -> Tensor:
    """Several tokens a row, one of them twice."""
    random = torch.randint(size, (tokens, k - 1), generator=torch.Generator().manual_seed(2))
    return torch.cat((random, random[:, :1]), 1)


def head(tokens: int, width: int, size: int, /, **changes: Any) -> dict[str, Any]:
    """The arguments of ``linear_logprob`` in float64: random, logits of about ±4, with these
    changes.
    """
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    arguments = {
        "hidden": normal(tokens, width),
        "weight": normal(size, width) * 4 / width**0.5,
        "target": torch.randint(size, (tokens,), generator=random),
    }
    for name, change in changes.items():
        arguments[name] = change(normal) if callable(change) else change
    return arguments


def lora(width: int, size: int, rank: int = 3) -> Any:
    return lambda normal: (normal(rank, width), normal(size, rank), 0.7)


CASES = {
    "plain": head(63, 20, 100),
    "one_token": head(1, 20, 100),
    "one_column": head(5, 20, 1),
    "exact_tiles": head(48, 20, 96),
    "peaked": head(63, 20, 100, hidden=lambda normal: normal(63, 20) * 30),
    "flat": head(63, 20, 100, hidden=torch.zeros(63, 20, dtype=torch.float64)),
    "all_logits_negative": head(63, 20, 100, bias=lambda normal: normal(100) - 1000),
    "all_logits_large": head(63, 20, 100, bias=lambda normal: normal(100) + 1000),
    "rising_over_the_vocabulary": head(63, 20, 100, bias=torch.arange(100, dtype=torch.float64) * 3),
    "target_in_the_last_column": head(63, 20, 100, target=torch.full((63,), 99)),
    "bias": head(63, 20, 100, bias=lambda normal: normal(100)),
    "temperature": head(63, 20, 100, temperature=2.0),
    "temperature_per_token": head(63, 20, 100, temperature=lambda normal: normal(63).exp()),
    "softcap": head(63, 20, 100, softcap=3.0),
    "scale": head(63, 20, 100, scale=2.0),
    "adapter": head(63, 20, 100, adapter=lora(20, 100)),
    "padded_vocabulary": head(63, 20, 107, vocab=100, target=torch.arange(63)),
    "everything": head(
        63, 20, 107, vocab=100, target=torch.arange(37, 100), bias=lambda normal: normal(107), softcap=4.0, scale=1.5,
        temperature=lambda normal: normal(63).exp(), adapter=lora(20, 107),
    ),
    "several_targets": head(63, 20, 100, target=ids(63, 7, 100)),
    "more_outputs": head(63, 20, 100, outputs=EXTRAS),
    "one_more_output": head(63, 20, 100, outputs=EXTRAS[:1]),
}  # fmt: skip
CASES["more_of_everything"] = CASES["everything"] | {"target": ids(63, 7, 100), "outputs": EXTRAS}


def in_dtype(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Fresh leaves, rounded to ``dtype``, that require gradients."""

    def leaf(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(leaf(item) for item in value)
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().to(dtype).clone().requires_grad_() if floating else value

    return {name: leaf(value) for name, value in arguments.items()}


def leaves(arguments: dict[str, Any]) -> dict[str, Tensor]:
    flat = arguments | dict(
        zip(("A", "B", "scaling"), arguments.get("adapter") or (), strict=False)
    )
    return {name: t for name, t in flat.items() if isinstance(t, Tensor) and t.is_floating_point()}


def logprobs(arguments: dict[str, Any], **options: Any) -> Logprobs:
    """``linear_logprob``, with the arguments that belong to a head put into one."""
    rest = arguments | options
    parts = {name: rest.pop(name) for name in Head._fields if name in rest}
    return linear_logprob(rest.pop("hidden"), Head(**parts), rest.pop("target"), **rest)


def total(result: Logprobs) -> Tensor:
    """The sum of all outputs that are differentiable."""
    return sum(output.sum() for output in result[:5] if output is not None)


def measure(
    arguments: dict[str, Any], backend: str, outputs: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """``gradients`` of ``linear_logprob``."""
    return gradients(arguments, logprobs(arguments, backend=backend), outputs)


def gradients(
    arguments: dict[str, Any], result: Any, outputs: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """The outputs, and the gradients for fixed random upstream gradients of some or all of them,
    all in float64.
    """
    found = {
        n: output
        for n, output in result._asdict().items()
        if isinstance(output, Tensor) and output.requires_grad
    }
    random = torch.Generator().manual_seed(1)
    tokens = max(len(result.logprob), 1)
    upstream = {
        name: torch.randn(output.shape, generator=random) / tokens for name, output in found.items()
    }
    used = {name: found[name] for name in outputs or found}
    torch.autograd.backward(
        list(used.values()), [upstream[name].to(output) for name, output in used.items()]
    )
    grads = {
        f"d_{name}": leaf.grad for name, leaf in leaves(arguments).items() if leaf.grad is not None
    }
    return {name: t.detach().double() for name, t in (found | grads).items()}


def of_16_bit_factors(arguments: dict[str, Any]) -> Logprobs:
    """The definition in float32, but for what has to be rounded where products have factors of 16
    bits.

    A product of tensor cores has both factors in the precision of its inputs, so dc, which autograd
    has in float32, is rounded to it once before dh = dc·W, dW = dcᵀ·h, du = dc·B and dB = dcᵀ·u. u
    is rounded when it is computed, and so is du. With an adapter, the two gradients that reach h,
    through W and through u, are added before they are rounded.
    """
    hidden, weight, adapter = arguments["hidden"], arguments["weight"], arguments.get("adapter")
    vocab, dtype = arguments.get("vocab") or len(weight), hidden.dtype
    hidden = hidden.float() if adapter is not None else hidden
    c = reference.head_logits(hidden, Head(weight, arguments.get("bias")), vocab, torch.float32)
    if adapter is not None:
        down, up, scaling = adapter
        low = scaling * (hidden @ down.float().t())
        if low.requires_grad:
            low.register_hook(lambda du: _rounded(du, dtype))
        c = c + rounded(low, dtype) @ up[:vocab].float().t()
    if c.requires_grad:
        c.register_hook(lambda dc: _rounded(dc, dtype))
    z = arguments.get("scale", 1.0) * c
    if (softcap := arguments.get("softcap")) is not None:
        z = softcap * torch.tanh(z / softcap)
    rest = {
        "temperature": arguments.get("temperature", 1.0),
        "outputs": arguments.get("outputs", ()),
    }
    return reference.logits_logprob(z, arguments["target"], vocab=vocab, **rest)


def _rounded(dc: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded as a multiple of a power of 2, since 1/N would be lost in float16."""
    unit = 2.0 ** dc.abs().max().clamp(min=1e-30).log2().floor()
    return (dc / unit).to(dtype).to(dc.dtype) * unit


def assert_as_good_as_the_reference(
    arguments: dict[str, Any],
    dtype: torch.dtype,
    backend: str = "torch",
    products: str = "exact",
    **options: Any,
) -> None:
    """Error against float64 at most twice the definition's own in the same precision, plus 1e-6;
    on a GPU the last digit of the result, too: Triton's exp2 and log2 are approximations there.

    ``products`` "of 16 bits", as on a GPU: the measure is then ``of_16_bit_factors``, by the
    largest error and, because in 8 bits the largest of two roundings may hide a factor of 1.01, by
    the root of the mean square, too. Its float32 is as exact as ours, so that one may be lucky
    where the other is not: the last digit of the result is allowed.

    The fused backend multiplies the logits out in one order forward and in another one backward, so
    that its probabilities may be as far from a sum of 1 as the logits are from the truth, and its
    gradients by that share.
    """
    given = {
        n: v.detach() if isinstance(v, Tensor) else v for n, v in in_dtype(arguments, dtype).items()
    }
    exact = measure(in_dtype(given, torch.float64), "reference", **options)
    theirs = in_dtype(given, dtype)
    if products == "exact":
        definition = measure(theirs, "reference", **options)
    else:
        definition = gradients(theirs, of_16_bit_factors(theirs), **options)
    ours = measure(in_dtype(given, dtype), backend, **options)
    assert ours.keys() == exact.keys()
    norms = [_largest] if products == "exact" else [_largest, _root_mean_square]
    for (name, truth), norm in itertools.product(exact.items(), norms):
        allowed = 2 * norm(definition[name] - truth) + 1e-6
        last_digit = torch.finfo(torch.float32).eps * truth.abs().max()
        if products == "of 16 bits" or truth.is_cuda:
            allowed += last_digit
        if truth.is_cuda and name.startswith("d_"):
            # z is known to its last digit, and so is p·z relative to itself
            allowed += last_digit * exact["logprob"].abs().max()
        if backend == "fused" and name.startswith("d_"):
            allowed += (
                definition["logsumexp"] - exact["logsumexp"]
            ).abs().max() * truth.abs().max()
        error = norm(ours[name] - truth)
        assert error <= allowed, f"{name}: {error:.3g} > {allowed:.3g}"


def _largest(error: Tensor) -> Tensor:
    return error.abs().max()


def _root_mean_square(error: Tensor) -> Tensor:
    return error.square().mean().sqrt()
