"""Models sharded over the ranks of a mesh: FSDP2, HSDP if the mesh has a dimension of copies as
well, and tensor parallelism if it has one named "tp". Ranks of a dimension named "cp" hold shards,
too; see `split_columns`.

Each transformer layer is a unit, and the rest is one more: embeddings, last norm and heads, which
may share a weight. The parameters of a unit are whole on a rank only while it computes, forward or
backward; in between, every rank holds its shard of each of them, of its gradient, and of the
optimizer's state.

Under tensor parallelism the ranks of a group compute the same rows together. The matrices of a
layer that the plan of `transformers` names are never whole: each rank multiplies by its slice.
Everything else is replicated in the group.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from .patches import compute_locally, load_weights_by

log = logging.getLogger(__name__)

# Styles of the plans of transformers.
_SPLIT: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
}
_OF_LOCAL_HEADS = "replicated_with_grad_allreduce"
_INSTEAD = "shard it by --parallel.dp_shard_size instead"


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    methods: Sequence[str] = (),
    *,
    param_dtype: torch.dtype | None = None,
) -> None:
    """Shard all parameters of a model, in place and on the devices of the mesh.

    They become DTensors.

    Gradients are summed, not averaged, over all ranks of the mesh, after every backward pass: no
    rank ever holds the whole gradient of more than a unit.

    Args:
        mesh: the ranks that hold one copy; in two dimensions, copies and the shards of each. A last
            dimension named "tp" or "cp" is of ranks that compute together.
        methods: names of methods, besides forward, during which parameters are unsharded. None may
            call another one.
        param_dtype: dtype that the parameters of layers are gathered in, that of autocast, which
            takes half of the memory and messages; gradients are summed in float32. Without it, and
            in the outermost unit, their own.

    Raises:
        ValueError: for tensor parallelism, if `transformers` has no plan for the model, or one
            whose styles, layers or sizes are not supported.
    """
    unit_mesh, tp_mesh = _meshes(mesh)
    layers = _layers(model)
    plan: Mapping[nn.Module, str] = {}
    if tp_mesh is not None:
        plan = _plan(model, layers, tp_mesh.size())
        # It advises to reduce single numbers over both dimensions of the mesh at once.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    whole_precision = MixedPrecisionPolicy()
    layer_precision = whole_precision
    if param_dtype is not None:
        layer_precision = MixedPrecisionPolicy(
            param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    # Nested units are sharded first. The outermost unit is one, too: optimizers and checkpoints
    # always see shards.
    for module in (*reversed(layers), model):
        _read_shards(module, unit_mesh, all_rows=tp_mesh is not None)
        if tp_mesh is not None:
            _split(module, tp_mesh, plan)
        precision = whole_precision if module is model else layer_precision
        unit: Any = fully_shard(
            module, mesh=unit_mesh, mp_policy=precision, reshard_after_forward=True
        )
        # A loss is a sum over all ranks already, see `burnish.loops.batch`: no mean of gradients.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    for method in methods:
        register_fsdp_forward_method(model, method)


def _meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh that FSDP shards over, and the one of tensor parallelism, if there is one."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        return mesh[names[:-1]], mesh["tp"]
    if "cp" in names:  # each gradient is of some columns, and summed as those of other rows are
        copies = [mesh[name] for name in names[:-2]]
        shards = mesh[names[-2:]]._flatten("shards")
        return DeviceMesh._concatenate([*copies, shards]), None
    return mesh, None


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of all models in a model, such as those of a critic or an encoder: transformers
    names their class.
    """
    kinds: set[str] = set()
    for module in model.modules():
        kinds.update(getattr(module, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        log.warning(
            "%s: its layers have no known class, so all of it is gathered at once",
            type(model).__name__,
        )
    return layers


@contextmanager
def left_in_files(wanted: bool = True) -> Iterator[None]:
    """Context in which `transformers`, if ``wanted``, leaves the matrices of models in their files
    until `shard` reads them.

    Each is one NaN, expanded to its shape, and has a ``place``: file and key. Everything else is
    loaded as usual: names, ties, new heads, vectors, buffers. Every rank reads the whole of a model
    that is quantized, or whose files hold no safetensors or its matrices in another form, and a log
    line says so.
    """
    if not wanted:
        yield
        return
    with load_weights_by(_load_places):
        yield


def _load_places(
    load: Callable[..., Any],
    model: PreTrainedModel,
    state_dict: dict[str, Tensor] | None,
    files: Sequence[str] | None,
    options: Any,
    *rest: Any,
) -> Any:
    """In place of ``load``, which fills a model of `transformers` with what its files hold."""
    converted = any(isinstance(entry, WeightConverter) for entry in options.weight_mapping or ())
    if state_dict is None and options.hf_quantizer is None and not converted:
        entries, places = _places(model, files or (), options.dtype)
        if places:
            loaded = load(model, entries, files, options, *rest)
            if _stay(model, places, loaded[0].missing_keys):
                return loaded
    log.warning(
        "%s: its files hold weights in another form, so every rank reads all of them",
        type(model).__name__,
    )
    return load(model, state_dict, files, options, *rest)


Place = tuple[str, str]  # the file that holds a matrix, and its key there


def _places(
    model: nn.Module, files: Sequence[str], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[int, Place]]:
    """The contents of the files by key, matrices as one expanded element; and the place of each
    element, by address.
    """
    known = model.state_dict()
    entries: dict[str, Tensor] = {}
    places: dict[int, Place] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            return {}, {}
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                stored = opened.get_slice(key)
                is_float = stored.get_dtype().startswith(("F", "BF"))
                if len(stored.get_shape()) < 2 or not is_float:
                    entries[key] = opened.get_tensor(key)
                    continue
                element = torch.full(
                    (), math.nan, dtype=known[key].dtype if key in known else dtype
                )
                # One number in memory, whatever the shape: transformers moves and ties it as usual.
                entries[key] = element.expand(stored.get_shape())
                places[element.data_ptr()] = (str(file), key)
    return entries, places


def _stay(model: PreTrainedModel, places: Mapping[int, Place], missing: set[str]) -> bool:
    """Record each matrix's place.

    False if a weight is derived at load time, or tied weights may differ.
    """
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.ndim < 2 or not tensor.is_floating_point() or name in missing:
            continue
        if not isinstance(tensor, nn.Parameter) or tensor.data_ptr() not in places:
            return False
        tensor.place = places[tensor.data_ptr()]  # type: ignore[attr-defined]
    return all(missing.intersection(pair) for pair in model.all_tied_weights_keys.items())


def _read_shards(unit: nn.Module, mesh: DeviceMesh, *, all_rows: bool) -> None:
    """Allocate the matrices of a unit that are still in files, and read the rows of this rank's
    shards, or all rows.

    The other rows stay unset: `fully_shard` drops them.
    """
    # FSDP splits the first dimension, in pieces of one size but for the last.
    shards = 1 if all_rows else mesh.size(mesh.ndim - 1)
    rank = 0 if all_rows else mesh.get_local_rank(mesh.ndim - 1)
    read: dict[Tensor, nn.Parameter] = {}
    for module in unit.modules():
        for name, parameter in module._parameters.items():
            place: Place | None = getattr(parameter, "place", None)
            if parameter is None or place is None:
                continue
            if parameter not in read:  # not a tied one
                read[parameter] = _read_rows(parameter, place, shards, rank, mesh.device_type)
            module._parameters[name] = read[parameter]


def _read_rows(
    parameter: Tensor, place: Place, shards: int, rank: int, device: str
) -> nn.Parameter:
    """The whole matrix in memory, of which only the rows of one shard are set."""
    file, key = place
    memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    size = -(-len(memory) // shards)
    rows = slice(rank * size, (rank + 1) * size)
    with safe_open(file, "pt") as opened:
        memory[rows] = opened.get_slice(key)[rows]
    return nn.Parameter(memory, requires_grad=parameter.requires_grad)


def ranks_together(policy: nn.Module) -> int:
    """The number of ranks that compute the same rows together."""
    mesh: DeviceMesh | None = getattr(policy, "mesh", None)
    if mesh is None:
        return 1
    names = mesh.mesh_dim_names or ()
    return math.prod(mesh[name].size() for name in ("tp", "cp") if name in names)


def _plan(model: nn.Module, layers: Sequence[nn.Module], size: int) -> dict[nn.Module, str]:
    """The style of each module of these layers that the plans of `transformers` name.

    Raises:
        ValueError: if a model has no plan, or one whose styles, layers or sizes are not supported.
    """
    plan: dict[nn.Module, str] = {}
    in_layers: set[nn.Module | Tensor] = set()
    for layer in layers:
        in_layers.update(layer.modules(), layer.parameters())
    for root in model.modules():
        if not isinstance(root, PreTrainedModel):
            continue
        who = f"parallel.tp_size: {type(root).__name__}"
        _check_heads(who, root, size)
        styles: Mapping[str, str] = getattr(root, "_tp_plan", None) or {}
        for path, part in (*root.named_modules(), *root.named_parameters()):
            style = styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))  # layers.3.mlp -> layers.*.mlp
            if style is not None and part in in_layers:
                plan[_splittable(who, path, part, style, size)] = style
        if not any(module in plan for module in root.modules()):
            raise ValueError(f"{who}: transformers has no plan to split its layers; {_INSTEAD}")
    return plan


def _check_heads(who: str, model: PreTrainedModel, size: int) -> None:
    """Raise ValueError if attention heads can't be shared out."""
    config = model.config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(f"{who} has {field}={heads}, no multiple of {size}; lower it")


def _splittable(who: str, path: str, part: nn.Module | Tensor, style: str, size: int) -> nn.Module:
    """The module itself; raises ValueError if it can't be split by this style."""
    if style not in (*_SPLIT, _OF_LOCAL_HEADS) or not isinstance(part, nn.Module):
        raise ValueError(
            f"{who} is split by {style!r} ({path}), which is not supported; {_INSTEAD}"
        )
    if style == _OF_LOCAL_HEADS:
        return part
    if type(part) is not nn.Linear:
        raise ValueError(
            f"{who}: {path} is no linear layer of torch, but {type(part).__module__}; {_INSTEAD}"
        )
    features = part.out_features if style.startswith("colwise") else part.in_features
    if features % size:
        raise ValueError(
            f"{who}: {features} features of {path} are no multiple of {size}; lower it"
        )
    return part


def _split(unit: nn.Module, mesh: DeviceMesh, plan: Mapping[nn.Module, str]) -> None:
    """Make DTensors of the parameters of a unit that are none yet: slices by the plan, and replicas
    of the others.
    """
    copies: dict[Tensor, nn.Parameter] = {}  # of tied ones
    for module in list(unit.modules()):
        style = plan.get(module)
        own = {name: each for name, each in module._parameters.items() if each is not None}
        if all(isinstance(each, DTensor) for each in own.values()):
            continue  # it has none, or they are split already
        if style in _SPLIT:
            parallelize_module(module, mesh, _SPLIT[style](), src_data_rank=None)
            continue
        for name, each in own.items():
            if each not in copies:
                copy = distribute_tensor(each.detach(), mesh, [Replicate()], src_data_rank=None)
                copies[each] = nn.Parameter(copy, requires_grad=each.requires_grad)
            module._parameters[name] = copies[each]
        # Each rank computes the whole gradient, or the part from its own attention heads.
        compute_locally(module, Partial() if style == _OF_LOCAL_HEADS else Replicate())


def reshard(model: nn.Module) -> None:
    """Drop what a forward pass without a backward one may have left gathered of a sharded model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered if it is sharded: then all ranks of its mesh must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
