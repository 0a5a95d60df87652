"""Language-model heads to try the kernels on, and what they are held to: float64."""

from typing import Any

import torch
from burnish.kernels import linear_logprob
from torch import Tensor

OUTPUTS = ("logprob", "entropy", "logsumexp")
EXTRAS = ("mean_logprob", "log_sum_squares")


def ids(tokens: int, k: int, size: int) -> Tensor:
    """Several tokens a row, one of them twice."""
    random = torch.randint(size, (tokens, k - 1), generator=torch.Generator().manual_seed(2))
    return torch.cat((random, random[:, :1]), 1)


def head(tokens: int, width: int, size: int, /, **changes: Any) -> dict[str, Any]:
    """The arguments of ``linear_logprob`` in float64: random, logits of about ±4, with these changes."""
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
    "temperature": head(63, 20, 100, temperature=0.6),
    "temperature_per_token": head(63, 20, 100, temperature=lambda normal: normal(63).exp()),
    "softcap": head(63, 20, 100, softcap=3.0),
    "scale": head(63, 20, 100, scale=0.25),
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
    flat = arguments | dict(zip(("A", "B", "scaling"), arguments.get("adapter") or (), strict=False))
    return {name: t for name, t in flat.items() if isinstance(t, Tensor) and t.is_floating_point()}


def measure(arguments: dict[str, Any], backend: str, outputs: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The outputs, and the gradients for fixed random upstream gradients of some or all of them, all in float64."""
    result = linear_logprob(**arguments, backend=backend)
    found = {n: output for n, output in result._asdict().items() if isinstance(output, Tensor) and output.requires_grad}
    random = torch.Generator().manual_seed(1)
    tokens = max(len(result.logprob), 1)
    upstream = {name: torch.randn(output.shape, generator=random) / tokens for name, output in found.items()}
    used = {name: found[name] for name in outputs or found}
    torch.autograd.backward(list(used.values()), [upstream[name].to(output.dtype) for name, output in used.items()])
    grads = {f"d_{name}": leaf.grad for name, leaf in leaves(arguments).items() if leaf.grad is not None}
    return {name: t.detach().double() for name, t in (found | grads).items()}


def assert_as_good_as_the_reference(
    arguments: dict[str, Any], dtype: torch.dtype, backend: str = "tiled", **options: Any
) -> None:
    """Error against float64 at most twice the reference's own in the same precision, plus 1e-6.

    The fused backend multiplies the logits out in one order forward and in another one backward, so that its
    probabilities may be as far from a sum of 1 as the logits are from the truth, and its gradients by that share.
    """
    rounded = {n: v.detach() if isinstance(v, Tensor) else v for n, v in in_dtype(arguments, dtype).items()}
    exact = measure(in_dtype(rounded, torch.float64), "reference", **options)
    definition = measure(in_dtype(rounded, dtype), "reference", **options)
    ours = measure(in_dtype(rounded, dtype), backend, **options)
    assert ours.keys() == exact.keys()
    for name, truth in exact.items():
        allowed = 2 * (definition[name] - truth).abs().max() + 1e-6
        if backend == "fused" and name.startswith("d_"):
            allowed += (definition["logsumexp"] - exact["logsumexp"]).abs().max() * truth.abs().max()
        assert (ours[name] - truth).abs().max() <= allowed, name
