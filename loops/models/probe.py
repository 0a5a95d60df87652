"""Probe a deep model on its first layers: layers of one kind treat masks, positions and caches alike."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

_SIMPLE = (bool, int, float, str, type(None))

# Raised by a model that does not take an input.
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


def objection(plain: nn.Module, probe: Callable[[], str | None]) -> str | None:
    """The probe's objection to a `transformers` model: None if the first layers pass, else that of the whole model.

    A model may refuse to run without its other layers, so only the whole model's refusal counts.
    """
    with shortened(plain) as cut:
        if cut:
            try:
                if probe() is None:
                    return None
            except REFUSALS:
                pass
    return probe()


@contextmanager
def shortened(plain: Any) -> Iterator[bool]:
    """Within, a `transformers` model ends after its first layers, at least two and one of every kind that it has.

    Nothing is copied: the layers are those of the model. Yields whether any were left out: none are where the list of
    layers is not found, and under FSDP, which notes at the first pass what there is to gather.
    """
    owner = _find_layers(plain)
    if owner is None:
        yield False
        return
    parent, name = owner
    layers: Any = parent._modules[name]
    count = _first_of_each_kind(layers, getattr(plain.config.get_text_config(), "layer_types", None))
    parent._modules[name] = layers[:count]
    try:
        yield count < len(layers)
    finally:
        parent._modules[name] = layers


def _find_layers(plain: Any) -> tuple[nn.Module, str] | None:
    """The module that holds the list of layers, and the list's name there."""
    depth = getattr(plain.config.get_text_config(), "num_hidden_layers", None)
    if any(isinstance(parameter, DTensor) for parameter in plain.parameters()):
        return None
    lists = [
        (path, module)
        for path, module in plain.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    outermost = [path for path, _ in lists if not any(path.startswith(f"{other}.") for other, _ in lists)]
    if len(outermost) != 1:
        return None
    parent, _, name = outermost[0].rpartition(".")
    return plain.get_submodule(parent), name


def _first_of_each_kind(layers: nn.ModuleList, layer_types: Any) -> int:
    """The number of first layers that hold one of every kind."""
    types = layer_types or [None] * len(layers)
    kinds = [(kind, _kind(layer)) for kind, layer in zip(types, layers, strict=True)]
    return min(len(layers), max(2, *(kinds.index(kind) + 1 for kind in set(kinds))))


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that compute the same function of their input, but for the values of their weights."""
    modules = [(path, type(module), _settings(module)) for path, module in layer.named_modules()]
    shapes = [(path, tuple(tensor.shape), tensor.dtype) for path, tensor in layer.named_parameters()]
    return tuple(modules), tuple(shapes)


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    values = {name: value for name, value in vars(module).items() if name != "layer_idx"}
    return tuple((name, value if isinstance(value, _SIMPLE) else type(value)) for name, value in sorted(values.items()))
