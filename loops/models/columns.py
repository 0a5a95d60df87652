"""The columns of rows that one rank computes, and their exchange with other ranks; see
`context_parallel`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from .rows import Rows

T = TypeVar("T")


class Columns:
    """The columns of rows that this rank of a mesh computes, and their exchange with the other
    ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    def reads(self, rows: Rows) -> Rows:
        """These rows, of which this rank reads the trained tokens in its columns.

        Their width is a multiple of n.
        """
        mine = rows.position % self.size == self.rank
        return replace(rows, position=rows.position[mine] // self.size, mine=mine)

    def slice(self, tensor: Tensor) -> Tensor:
        """[rows, width, ...] -> [rows, width / n, ...]"""
        return tensor[:, self.rank :: self.size]

    def gather(self, values: T, rows: Rows) -> T:
        """Tensors of this rank's trained tokens as those of all of them.

        The gradient reaches this rank's own.
        """
        mine = rows.mine
        assert mine is not None

        # Values of the others are constants here: each rank's loss sends gradients to its own.
        def gathered(own: Tensor) -> Tensor:
            every = own.new_zeros(len(mine), *own.shape[1:]).index_put((mine,), own.detach())
            dist.all_reduce(every, group=self.group)
            return every.index_put((mine,), own)

        result: T = tree_map_only(Tensor, gathered, values)
        return result

    def attend(
        self,
        attention: Callable[..., tuple[Tensor, Any]],
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of query, key and value [rows, heads, width / n, D]: [rows, width / n, heads,
        D].
        """
        # every rank needs a key for each of its queries
        copies = self.size // math.gcd(key.shape[1], self.size)
        if copies > 1:
            key = key.repeat_interleave(copies, 1)
            value = value.repeat_interleave(copies, 1)
        query = self._heads_for_columns(query)
        key = self._heads_for_columns(key)
        value = self._heads_for_columns(value)
        groups = getattr(module, "num_key_value_groups", 1)
        module.num_key_value_groups = groups // copies  # by which attention functions repeat keys
        try:
            output, _ = attention(module, query, key, value, *args, **kwargs)
        finally:  # activations that are recomputed end by an exception
            module.num_key_value_groups = groups
        return self._columns_for_heads(output), None

    def _heads_for_columns(self, states: Tensor) -> Tensor:
        """[rows, heads, width / n, D] -> [rows, heads / n, width, D]"""
        of_ranks = torch.unflatten(states, 1, (self.size, -1)).movedim(1, 0)
        return self._exchange(of_ranks).movedim(0, 3).flatten(2, 3)

    def _columns_for_heads(self, states: Tensor) -> Tensor:
        """[rows, width, heads / n, D] -> [rows, width / n, heads, D]"""
        of_ranks = torch.unflatten(states, 1, (-1, self.size)).movedim(2, 0)
        return self._exchange(of_ranks).movedim(0, 2).flatten(2, 3)

    def _exchange(self, states: Tensor) -> Tensor:
        """Exchange the entries of the first dimension, one per rank."""
        return all_to_all_single_autograd(states.contiguous(), None, None, self.group)
