"""Our own providers of an operation: one for each backend, and for each budget of logits kept for the backward pass.

``burnish-triton-4GiB`` keeps up to 4 GiB of them and computes the others again, ``burnish-triton-recompute`` computes
all again, ``burnish-triton`` is the backend with its own choice. Every budget of that form can be named.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

from torch import Tensor

from .operation import Outputs, Provider, with_triton

MODES = {"recompute": 0, "4GiB": 2**32}
_TRITON = ("triton", "fused")
_KEEPS = "triton"
Adapter = Callable[[dict[str, Any]], Callable[..., tuple[Tensor, ...]]]


def providers(function: Callable[..., Any], backends: Any, adapter: Adapter, gives: Outputs) -> Iterator[Provider]:
    """One for each backend but "auto", which is one of the others, and one for each mode of the one that keeps logits.

    Args:
        function: the public function, whose keyword arguments say what there is.
        backends: a ``Literal`` of their names.
        adapter: ``adapter(keyword arguments)`` is the function of a provider.
        gives: its outputs.
    """
    for backend in get_args(backends):
        if backend == "auto":
            continue
        yield provider(f"burnish-{backend}", {"backend": backend}, adapter, gives)
        if backend == _KEEPS and keeps(function):
            for mode, size in MODES.items():
                options = {"backend": backend, "keep_bytes": size}
                yield provider(f"burnish-{backend}-{mode}", options, adapter, gives)


def keeps(function: Callable[..., Any]) -> bool:
    return "keep_bytes" in inspect.signature(function).parameters


def provider(name: str, options: dict[str, Any], adapter: Adapter, gives: Outputs) -> Provider:
    if options["backend"] in _TRITON:
        return Provider(name, adapter(options), gives, with_triton)
    return Provider(name, adapter(options), gives)


def with_budget(
    name: str, function: Callable[..., Any], backends: Any, adapter: Adapter, gives: Outputs
) -> Provider | None:
    """The provider that a name such as ``burnish-torch-64MiB`` stands for; None if it is no such name."""
    pattern = rf"burnish-({'|'.join(get_args(backends))})-(?:(recompute)|(\d+)(KiB|MiB|GiB))"
    match = re.fullmatch(pattern, name)
    if match is None or not keeps(function):
        return None
    backend, recompute, count, unit = match.groups()
    size = 0 if recompute else int(count) * 2 ** {"KiB": 10, "MiB": 20, "GiB": 30}[unit]
    return provider(name, {"backend": backend, "keep_bytes": size}, adapter, gives)
