"""The columns of rows that a rank computes, and their exchange with other ranks; see `context_parallel`."""

import math
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

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
        exchanged: Tensor = cast(Any, _Exchange).apply(states, self.group)
        return exchanged


class _Exchange(torch.autograd.Function):
    """All-to-all along the first dimension, one entry per rank; it is its own transpose."""

    @staticmethod
    def forward(context: Any, states: Tensor, group: Any) -> Tensor:
        context.group, states = group, states.contiguous()
        received = torch.empty_like(states)
        dist.all_to_all_single(received, states, group=group)
        return received

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return cast(Any, _Exchange).apply(gradients[0], context.group), None
