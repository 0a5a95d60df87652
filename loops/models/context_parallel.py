"""Context parallelism: the ranks of a group compute the same rows together, each of them every n-th column.

All but attention looks at one token at a time, and each rank computes that for its columns only. Before attention the
ranks exchange columns for heads: each computes some of the heads over the whole width, by the attention and the mask
that the model has anyway. Columns are dealt out in turn, as trained tokens often are the last ones of their row: so
every rank computes about as many log-probs. A dense mask, of shared prompts, is whole on each: 0.27 GB for 16,384
columns, 7 % of what backward keeps on 4 ranks of a model of 135M, and most of it with gradient checkpointing.

Paper: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509, section 3.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .backbone import Backbone
from .probe import PROBE, REFUSALS, layer_list
from .rows import Rows


class Columns:
    """The columns of rows that this rank of a mesh computes, and their exchange with the other ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def reads(self, rows: Rows) -> Rows:
        """These rows, of which this rank reads the trained tokens in its columns; their width is a multiple of n."""
        mine = rows.position % self.size == self.rank
        return replace(rows, position=rows.position[mine] // self.size, mine=mine)

    def slice(self, tensor: Tensor) -> Tensor:
        """[rows, width, ...] -> [rows, width / n, ...]"""
        return tensor[:, self.rank :: self.size]

    def gather(self, values: Any, rows: Rows) -> Any:
        """Tensors of this rank's trained tokens as those of all of them; the gradient reaches this rank's own."""
        mine: Any = rows.mine

        def gathered(own: Tensor) -> Tensor:
            every = own.new_zeros(len(mine), *own.shape[1:]).index_put((mine,), own.detach())
            dist.all_reduce(every, group=self.group)
            return every.index_put((mine,), own)

        return tree_map_only(Tensor, gathered, values)

    def attend(
        self, attention: Any, module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention of states [rows, heads, width / n, D], [rows, width / n, heads, D]."""
        copies = self.size // math.gcd(key.shape[1], self.size)  # every rank needs a key for each of its queries
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = (states.repeat_interleave(copies, 1) if copies > 1 else states for states in (key, value))
        query, key, value = (
            self._exchange(each.unflatten(1, (self.size, -1)).movedim(1, 0)).movedim(0, 3).flatten(2, 3)
            for each in (query, key, value)
        )  # [rows, heads / n, width, D]
        module.num_key_value_groups = groups // copies  # by which attention functions repeat keys
        try:
            output, _ = attention(module, query, key, value, *args, **kwargs)
        finally:  # activations that are recomputed end by an exception
            module.num_key_value_groups = groups
        return self._exchange(output.unflatten(1, (-1, self.size)).movedim(2, 0)).movedim(0, 2).flatten(2, 3), None

    def _exchange(self, states: Tensor) -> Tensor:
        """Exchange the entries of the first dimension, one per rank."""
        return all_to_all_single_autograd(states.contiguous(), None, None, self.group)


def split_columns(backbone: Backbone, output: Callable[[Rows], Tensor]) -> None:
    """Split the columns of all rows over the ranks of the backbone's mesh in its dimension "cp", if it has one.

    Args:
        output: ``output(rows)`` of trained tokens, which must not change: a probe compares the two.

    Raises:
        ValueError: if the heads of the model's attention can't be shared out, or it looks along the sequence by more
            than the attention functions of `transformers`.
    """
    mesh, plain = backbone.mesh, backbone.plain
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        return
    if getattr(backbone, "critic", None) is not None:
        raise ValueError("parallel.cp_size: the rows of a critic are not split; shard it by --parallel.dp_shard_size")
    columns, who = Columns(mesh["cp"]), f"parallel.cp_size: {type(plain).__name__}"
    heads = getattr(plain.config.get_text_config(), "num_attention_heads", None)
    if isinstance(heads, int) and heads % columns.size:
        raise ValueError(f"{who} has num_attention_heads={heads}, no multiple of {columns.size}; lower it")
    reason = _split(backbone, columns, output)
    if reason is not None:
        raise ValueError(f"{who} can't be split along the sequence ({reason}); shard it by --parallel.dp_shard_size")


@torch.no_grad()
def _split(backbone: Any, columns: Columns, output: Callable[[Rows], Tensor]) -> str | None:
    """Split the columns; returns the reason if the output is another one."""
    if (path := layer_list(backbone.plain)) is None:
        return "its layers are not known"
    layers = backbone.plain.get_submodule(path)
    examples = [PROBE[0], PROBE[1]._replace(completions=PROBE[1].completions[:1], trained=PROBE[1].trained[:1])]
    rows = partial(backbone.arranged, examples, backbone.layout, one_row=True)  # or three: an odd number
    with backbone.probing() as exact:
        expected = output(rows()).double()
        backbone.columns = columns
        for module in layers.modules():
            module.columns = columns
        layers[0].register_forward_pre_hook(lambda layer, args: (columns.slice(args[0]), *args[1:]))
        for module in backbone.plain.modules():
            if "RotaryEmbedding" in type(module).__name__:  # of whole rows
                module.register_forward_hook(lambda rotary, args, angles: tree_map_only(Tensor, columns.slice, angles))
        attentions: Any = ALL_ATTENTION_FUNCTIONS
        if not isinstance(attentions.get_interface, partial):
            attentions.get_interface = partial(_choose, attentions.get_interface)
        try:
            found = columns.gather(output(split := rows()), split).double()
        except REFUSALS as error:
            return f"{type(error).__name__}: " + str(error).partition("\n")[0]
    tolerance = 1e-3 if exact and torch.finfo(backbone.plain.dtype).eps < 1e-5 else 0.05
    return None if (found - expected).norm() <= tolerance * expected.norm() else "it computes something else"


def _choose(choose: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of how `transformers` chooses an attention function, whose name stays: masks are made by it."""
    return partial(_attend, choose(*args, **kwargs))


def _attend(attention: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    columns: Columns | None = getattr(module, "columns", None)
    return (partial(columns.attend, attention) if columns else attention)(module, *args, **kwargs)
