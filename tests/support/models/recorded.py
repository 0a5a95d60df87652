"""A CUDA graph without a GPU: the operators of a piece of code, recorded with the tensors that they
read and wrote, and run again on the same ones. The code itself does not run again.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# CUDA refuses to record them: the host would wait
REFUSED = (aten._local_scalar_dense, aten.equal, aten.masked_select, aten.nonzero)


def storages(value):
    leaves = tree_leaves(value)
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}


class Recorded(TorchDispatchMode):
    """``with graph.recording(state): ...``, then ``graph.replay()`` any number of times."""

    def __init__(self):
        super().__init__()
        self.steps = []
        self.replays = 0

    @contextmanager
    def recording(self, state):
        """Record, and leave the tensors of ``state`` as they are: CUDA computes nothing, either."""
        before = [tensor.clone() for tensor in state]
        with self:
            yield
        for tensor, kept in zip(state, before, strict=True):
            tensor.copy_(kept)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op._overloadpacket in REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {op}")
        out = op(*args, **kwargs)
        view = not op._schema.is_mutable and storages(out) & storages((args, kwargs))
        if not view:
            self.steps.append((op, args, kwargs, out))
        return out

    def replay(self):
        self.replays += 1
        for op, args, kwargs, out in self.steps:
            again = op(*args, **kwargs)
            if not op._schema.is_mutable:
                for tensor, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(tensor, torch.Tensor):
                        tensor.copy_(new)
