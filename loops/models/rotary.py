"""Rotary frequencies that depend on the length of a sequence, for each sequence by itself.

`transformers` chooses them by the highest position in the batch (``rope_type`` longrope, dynamic), and dynamic ones
also by those of earlier batches. Here each sequence of a row gets those that it would get alone, in a fresh model.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .activations import sequence_lengths


def rotate_by_sequence(model: nn.Module) -> int | None:
    """Let the rotary embeddings of a model compute each sequence by itself.

    Returns:
        The length up to which all sequences have the same frequencies; None if all of any length have.
    """
    limits = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None) if hasattr(module, "original_max_seq_len") else None
        layers: dict[Any, str] = {None: kinds} if isinstance(kinds, str) else kinds if isinstance(kinds, dict) else {}
        if limited := [_limit(module, layer, kind) for layer, kind in layers.items() if _varies(kind)]:
            limits += limited
            original: Any = vars(module).get("forward", partial(type(module).forward, module))
            if getattr(original, "func", None) is not _forward:
                module.forward = partial(_forward, module, original)
    return min(limits, default=None)


def _varies(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def _limit(module: Any, layer: str | None, kind: str) -> int:
    if kind != "longrope":
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    return int((parameters if layer is None else parameters[layer])["original_max_position_embeddings"])


def _forward(module: Any, original: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    of_layer = {} if layer_type is None else {"layer_type": layer_type}
    if not _varies(kind):
        return original(x, position_ids, **of_layer)
    limit, prefix = _limit(module, layer_type, kind), "" if layer_type is None else f"{layer_type}_"
    lengths = sequence_lengths(position_ids).clamp(min=limit)
    if kind == "longrope":  # one set of frequencies up to the limit, and one beyond
        lengths = lengths.clamp(max=limit + 1)
    result: Any = None
    for length in torch.unique(lengths):
        if kind != "longrope":  # forget the last batch
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").to(x.device))
            setattr(module, f"{prefix}max_seq_len_cached", limit)
        here = lengths == length
        turned = original(x, torch.where(here, position_ids, 0), **of_layer)
        result = turned if result is None else tree_map(partial(torch.where, here[..., None]), turned, result)
    return result
