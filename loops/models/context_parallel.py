"""Context parallelism: the ranks of a group compute the same rows together, each of them every n-th
column.

All but attention looks at one token at a time, and each rank computes that for its columns only.
Before attention the ranks exchange columns for heads: each computes some of the heads over the
whole width, by the attention and the mask that the model has anyway. Columns are dealt out in turn,
as trained tokens often are the last ones of their row: so every rank computes about as many
log-probs. A dense mask, of shared prompts, is whole on each: 0.27 GB for 16,384 columns, 7 % of
what backward keeps on 4 ranks of a model of 135M, and most of it with gradient checkpointing.

Paper: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509, section 3.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .backbone import Backbone
from .columns import Columns
from .patches import wrap_attention
from .probe import PROBE, REFUSALS, layer_list
from .rows import Rows


def split_columns(backbone: Backbone, output: Callable[[Rows], Tensor]) -> None:
    """Split the columns of all rows over the ranks of the backbone's mesh in its dimension "cp", if
    it has one.

    Args:
        output: ``output(rows)`` of trained tokens, which must not change: a probe compares the two.

    Raises:
        ValueError: if the heads of the model's attention can't be shared out, or it looks along the
            sequence by more than the attention functions of `transformers`.
    """
    mesh = backbone.mesh
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        return
    if getattr(backbone, "critic", None) is not None:
        raise ValueError(
            "parallel.cp_size: the rows of a critic are not split; shard it by --parallel.dp_shard_size"
        )
    columns = Columns(mesh["cp"])
    who = f"parallel.cp_size: {type(backbone.plain).__name__}"
    heads = getattr(backbone.plain.config.get_text_config(), "num_attention_heads", None)
    if isinstance(heads, int) and heads % columns.size:
        raise ValueError(
            f"{who} has num_attention_heads={heads}, no multiple of {columns.size}; lower it"
        )
    reason = _split(backbone, columns, output)
    if reason is not None:
        raise ValueError(
            f"{who} can't be split along the sequence ({reason}); shard it by --parallel.dp_shard_size"
        )


@torch.no_grad()
def _split(backbone: Backbone, columns: Columns, output: Callable[[Rows], Tensor]) -> str | None:
    """Split the columns; returns the reason if the output is another one."""
    path = layer_list(backbone.plain)
    if path is None:
        return "its layers are not known"
    # Laid out in one row, or in three where rows are padded: an odd number.
    examples = [
        PROBE[0],
        PROBE[1]._replace(completions=PROBE[1].completions[:1], trained=PROBE[1].trained[:1]),
    ]

    def rows() -> Rows:
        return backbone.arranged(examples, backbone.layout, one_row=True)

    with backbone.probing() as exact:
        expected = output(rows()).double()
        backbone.columns = columns
        _compute_columns(backbone.plain, path, columns)
        try:
            split = rows()
            found = columns.gather(output(split), split).double()
        except REFUSALS as error:
            return f"{type(error).__name__}: " + str(error).partition("\n")[0]
    # Only products of other shapes round otherwise.
    in_float32 = exact and torch.finfo(backbone.plain.dtype).eps < 1e-5
    tolerance = 1e-3 if in_float32 else 0.05
    if (found - expected).norm() <= tolerance * expected.norm():
        return None
    return "it computes something else"


def _compute_columns(plain: Any, layers_path: str, columns: Columns) -> None:
    """Let the layers of a `transformers` model compute these columns of rows, and their attention
    exchange states.
    """
    layers = plain.get_submodule(layers_path)
    for module in layers.modules():
        module.columns = columns

    def slice_states(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (columns.slice(args[0]), *args[1:])

    def slice_angles(rotary: nn.Module, args: object, angles: object) -> Any:
        return tree_map_only(Tensor, columns.slice, angles)

    layers[0].register_forward_pre_hook(slice_states)
    for module in plain.modules():
        if "RotaryEmbedding" in type(module).__name__:  # it turns whole rows
            module.register_forward_hook(slice_angles)
    wrap_attention(_attend)


def _attend(attention: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call an attention function of `transformers`: in a layer whose columns are split, on all
    ranks together.
    """
    columns: Columns | None = getattr(module, "columns", None)
    if columns is None:
        return attention(module, *args, **kwargs)
    return columns.attend(attention, module, *args, **kwargs)
