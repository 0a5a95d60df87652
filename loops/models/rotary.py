"""Rotary frequencies that depend on the length of a sequence, for each sequence by itself.

`transformers` chooses them by the highest position in the batch (``rope_type`` longrope, dynamic),
and dynamic ones also by those of earlier batches. Here each sequence of a row gets those that it
would get alone, in a fresh model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .activations import sequence_lengths
from .patches import replace_forward


def rotate_by_sequence(model: nn.Module) -> int | None:
    """Let the rotary embeddings of a model compute each sequence by itself.

    Returns:
        The length up to which all sequences have the same frequencies; None if all of any length
        have.
    """
    limits: list[int] = []
    for module in model.modules():
        varying = [layer for layer, kind in _rope_types(module).items() if _varies(kind)]
        if varying:
            limits += [_limit(module, layer) for layer in varying]
            replace_forward(module, _forward)
    return min(limits, default=None)


def _rope_types(module: object) -> dict[str | None, str]:
    """The kind of frequencies of a rotary embedding, by the type of layer.

    None where all layers have one kind.
    """
    if not hasattr(module, "original_max_seq_len"):
        return {}
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {None: kinds}
    return dict(kinds) if isinstance(kinds, dict) else {}


def _varies(kind: str) -> bool:
    """True if the frequencies depend on the length of the sequence."""
    return kind == "longrope" or "dynamic" in kind


def _limit(module: Any, layer: str | None) -> int:
    """The length from which on frequencies are others."""
    if _rope_types(module)[layer] != "longrope":
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    if layer is not None:
        parameters = parameters[layer]
    return int(parameters["original_max_position_embeddings"])


def _forward(
    module: object,
    original: Callable[..., object],
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> Any:
    """In place of the module's own ``forward``, which it calls once for each length of a
    sequence.
    """
    kind = _rope_types(module)[layer_type]
    of_layer = {} if layer_type is None else {"layer_type": layer_type}
    if not _varies(kind):
        return original(x, position_ids, **of_layer)
    limit = _limit(module, layer_type)
    lengths = sequence_lengths(position_ids).clamp(min=limit)
    if kind == "longrope":  # one set of frequencies up to the limit, and one beyond
        lengths = lengths.clamp(max=limit + 1)
    result: Any = None
    for length in torch.unique(lengths):
        if kind != "longrope":
            _forget_last_batch(module, layer_type, limit, x.device)
        here = lengths == length
        turned = original(x, torch.where(here, position_ids, 0), **of_layer)
        if result is not None:
            turned = tree_map(partial(torch.where, here[..., None]), turned, result)
        result = turned
    return result


def _forget_last_batch(
    module: object, layer_type: str | None, limit: int, device: torch.device
) -> None:
    """Reset what a dynamic embedding keeps of the longest sequence that it has seen."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    fresh = getattr(module, f"{prefix}original_inv_freq")
    setattr(module, f"{prefix}inv_freq", fresh.to(device))
    setattr(module, f"{prefix}max_seq_len_cached", limit)
