"""Models in shards over the ranks of a mesh: FSDP2, and HSDP where the mesh has a dimension of copies as well.

Each transformer layer is a unit, and all that is left is one more: embeddings, last norm and heads, which may share a
weight. The parameters of a unit are whole on a rank only while it computes, forward or backward; in between, every rank
holds its shard of each of them, of its gradient, and of the optimizer's state.
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

log = logging.getLogger(__name__)


def shard(model: nn.Module, mesh: DeviceMesh, methods: Sequence[str] = ()) -> None:
    """Shard all parameters of a model, in place and on the devices of the mesh; they become DTensors.

    Gradients are summed, not averaged, over all ranks of the mesh, after every backward pass: no rank ever holds the
    whole gradient of more than a unit.

    Args:
        mesh: the ranks that hold one copy; in two dimensions, copies and the shards of each.
        methods: names of those, beside forward, within which parameters are whole too. None may call another one.
    """
    # transformers names the classes of its layers; those of a critic or an encoder are among them.
    kinds = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        log.warning("%s: its layers have no known class, so all of it is gathered at once", type(model).__name__)
    for module in (*reversed(layers), model):  # what a unit contains is sharded before it
        # The outermost one, too: parameters of which an optimizer or a checkpoint asks are always shards.
        unit: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    for method in methods:
        register_fsdp_forward_method(model, method)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be in shards, in which case all ranks of its mesh call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
