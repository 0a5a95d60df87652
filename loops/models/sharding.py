"""Models sharded over the ranks of a mesh: FSDP2, and HSDP if the mesh has a dimension of copies as well.

Each transformer layer is a unit, and the rest is one more: embeddings, last norm and heads, which may share a weight.
The parameters of a unit are whole on a rank only while it computes, forward or backward; in between, every rank holds
its shard of each of them, of its gradient, and of the optimizer's state.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

log = logging.getLogger(__name__)


def shard(model: nn.Module, mesh: DeviceMesh, methods: Sequence[str] = ()) -> None:
    """Shard all parameters of a model, in place and on the devices of the mesh; they become DTensors.

    Gradients are summed, not averaged, over all ranks of the mesh, after every backward pass: no rank ever holds the
    whole gradient of more than a unit.

    Args:
        mesh: the ranks that hold one copy; in two dimensions, copies and the shards of each.
        methods: names of methods, besides forward, during which parameters are unsharded. None may call another one.
    """
    # transformers names the classes of its layers; those of a critic or an encoder are among them.
    kinds = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        log.warning("%s: its layers have no known class, so all of it is gathered at once", type(model).__name__)
    for module in (*reversed(layers), model):  # nested units are sharded first
        _read_shards(module, mesh)
        # The outermost unit, too: optimizers and checkpoints always see shards.
        unit: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    for method in methods:
        register_fsdp_forward_method(model, method)


@contextmanager
def left_in_files(wanted: bool = True) -> Iterator[None]:
    """Context in which `transformers`, if ``wanted``, leaves the matrices of models in their files until `shard` reads
    them.

    Each is one NaN, expanded to its shape, and has a ``place``: file and key. Everything else is loaded as usual:
    names, ties, new heads, vectors, buffers. Every rank reads the whole of a model that is quantized, or whose files
    hold no safetensors or its matrices in another form, and a log line says so.
    """
    if not wanted:
        yield
        return
    loader: Any = PreTrainedModel
    load: Any = loader._load_pretrained_model

    def load_places(model: Any, state_dict: Any, files: Any, options: Any, *rest: Any) -> Any:
        loaded = None
        if (
            state_dict is None
            and options.hf_quantizer is None
            and not any(isinstance(entry, WeightConverter) for entry in options.weight_mapping or ())
        ):
            entries, places = _places(model, files or (), options.dtype)
            loaded = load(model, entries, files, options, *rest) if places else None
        if loaded is not None and _stay(model, places, loaded[0].missing_keys):
            return loaded
        log.warning("%s: its files hold weights in another form, so every rank reads all of them", type(model).__name__)
        return load(model, state_dict, files, options, *rest)

    loader._load_pretrained_model = staticmethod(load_places)
    try:
        yield
    finally:
        loader._load_pretrained_model = staticmethod(load)


def _places(model: nn.Module, files: Sequence[str], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[int, Any]]:
    """The contents of the files by key, matrices as one expanded element; and the file and key of each element."""
    known, entries, places = model.state_dict(), dict[str, Tensor](), dict[int, Any]()
    for file in files:
        if not str(file).endswith(".safetensors"):
            return {}, {}
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                stored = opened.get_slice(key)
                if len(stored.get_shape()) < 2 or not stored.get_dtype().startswith(("F", "BF")):
                    entries[key] = opened.get_tensor(key)
                else:
                    element = torch.full((), math.nan, dtype=known[key].dtype if key in known else dtype)
                    entries[key], places[element.data_ptr()] = element.expand(stored.get_shape()), (str(file), key)
    return entries, places


def _stay(model: Any, places: Mapping[int, Any], missing: set[str]) -> bool:
    """Set the place of each matrix; False if one was computed from others, or two tied ones may be unequal."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.ndim > 1 and tensor.is_floating_point() and name not in missing:
            if not (isinstance(tensor, nn.Parameter) and tensor.data_ptr() in places):
                return False
            tensor.place = places[tensor.data_ptr()]  # type: ignore[attr-defined]
    return all(missing.intersection(pair) for pair in model.all_tied_weights_keys.items())


def _read_shards(unit: nn.Module, mesh: DeviceMesh) -> None:
    """Allocate the matrices of a unit that are still in files, and read the rows of this rank's shards.

    The other rows stay unset: `fully_shard` drops them.
    """
    shards, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    read: dict[Tensor, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or (place := getattr(parameter, "place", None)) is None:
                continue
            if parameter not in read:  # not a tied one
                memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=mesh.device_type)
                size = -(-len(memory) // shards)
                with safe_open(place[0], "pt") as opened:
                    rows = opened.get_slice(place[1])[rank * size : (rank + 1) * size]
                memory[rank * size : (rank + 1) * size] = rows
                read[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            module._parameters[name] = read[parameter]


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; then all ranks of its mesh must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
