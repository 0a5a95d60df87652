"""Models sharded over the ranks of a mesh: FSDP2, HSDP if the mesh has a dimension of copies as well, and tensor
parallelism if it has one named "tp". Ranks of a dimension named "cp" hold shards, too; see `split_columns`.

Each transformer layer is a unit, and the rest is one more: embeddings, last norm and heads, which may share a weight.
The parameters of a unit are whole on a rank only while it computes, forward or backward; in between, every rank holds
its shard of each of them, of its gradient, and of the optimizer's state.

Under tensor parallelism the ranks of a group compute the same rows together. The matrices of a layer that the plan of
`transformers` names are never whole: each rank multiplies by its slice. Everything else is replicated in the group.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

log = logging.getLogger(__name__)

# Styles of the plans of transformers.
_SPLIT: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
}
_OF_LOCAL_HEADS = "replicated_with_grad_allreduce"


def shard(
    model: nn.Module, mesh: DeviceMesh, methods: Sequence[str] = (), *, param_dtype: torch.dtype | None = None
) -> None:
    """Shard all parameters of a model, in place and on the devices of the mesh; they become DTensors.

    Gradients are summed, not averaged, over all ranks of the mesh, after every backward pass: no rank ever holds the
    whole gradient of more than a unit.

    Args:
        mesh: the ranks that hold one copy; in two dimensions, copies and the shards of each. A last dimension named
            "tp" or "cp" is of ranks that compute together.
        methods: names of methods, besides forward, during which parameters are unsharded. None may call another one.
        param_dtype: dtype that the parameters of layers are gathered in, that of autocast, which takes half of the
            memory and messages; gradients are summed in float32. Without it, and in the outermost unit, their own.

    Raises:
        ValueError: for tensor parallelism, if `transformers` has no plan for the model, or one whose styles, layers
            or sizes are not supported.
    """
    names = mesh.mesh_dim_names or ()
    tp_mesh = mesh["tp"] if "tp" in names else None
    mesh = mesh if tp_mesh is None else mesh[names[:-1]]
    if "cp" in names:  # each gradient is of some columns, and summed as those of other rows are
        parts = [mesh[name] for name in names[:-2]] + [mesh[names[-2:]]._flatten("shards")]
        mesh = DeviceMesh._concatenate(parts)
    # transformers names the classes of its layers; those of a critic or an encoder are among them.
    kinds = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        log.warning("%s: its layers have no known class, so all of it is gathered at once", type(model).__name__)
    plan: Mapping[nn.Module, str] = {}
    if tp_mesh is not None:
        plan = _plan(model, layers, tp_mesh.size())
        # It advises to reduce single numbers over both dimensions of the mesh at once.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for module in (*reversed(layers), model):  # nested units are sharded first
        _read_shards(module, mesh, all_rows=tp_mesh is not None)
        if tp_mesh is not None:
            _split(module, tp_mesh, plan)
        # The outermost unit, too: optimizers and checkpoints always see shards.
        precision = MixedPrecisionPolicy()
        if param_dtype is not None and module is not model:
            precision = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        unit: Any = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
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


def _read_shards(unit: nn.Module, mesh: DeviceMesh, *, all_rows: bool) -> None:
    """Allocate the matrices of a unit that are still in files, and read the rows of this rank's shards, or all rows.

    The other rows stay unset: `fully_shard` drops them.
    """
    shards, rank = (1, 0) if all_rows else (mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))
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


def ranks_together(policy: nn.Module) -> int:
    """The number of ranks that compute the same rows together."""
    mesh: Any = getattr(policy, "mesh", None)
    return math.prod(mesh[name].size() for name in ("tp", "cp") if mesh and name in (mesh.mesh_dim_names or ()))


def _plan(model: nn.Module, layers: Sequence[nn.Module], size: int) -> dict[nn.Module, str]:
    """The style of each module of these layers that the plans of `transformers` name."""
    plan: dict[Any, str] = {}
    in_layers = {part for layer in layers for part in (*layer.modules(), *layer.parameters())}
    for root in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        who, config = f"parallel.tp_size: {type(root).__name__}", root.config.get_text_config()
        instead = "shard it by --parallel.dp_shard_size instead"
        for field in ("num_attention_heads", "num_key_value_heads"):
            if isinstance(heads := getattr(config, field, None), int) and heads % size:
                raise ValueError(f"{who} has {field}={heads}, no multiple of {size}; lower it")
        styles: Mapping[str, str] = getattr(root, "_tp_plan", None) or {}
        for path, part in (*root.named_modules(), *root.named_parameters()):
            style = styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
            if style is None or part not in in_layers:
                continue
            if style not in (*_SPLIT, _OF_LOCAL_HEADS) or isinstance(part, nn.Parameter):
                raise ValueError(f"{who} is split by {style!r} ({path}), which is not supported; {instead}")
            if style in _SPLIT:
                if (kind := type(part)) is not nn.Linear:
                    raise ValueError(f"{who}: {path} is no linear layer of torch, but {kind.__module__}; {instead}")
                if (features := part.out_features if style.startswith("colwise") else part.in_features) % size:
                    raise ValueError(f"{who}: {features} features of {path} are no multiple of {size}; lower it")
            plan[part] = style
        if not any(module in plan for module in root.modules()):
            raise ValueError(f"{who}: transformers has no plan to split its layers; {instead}")
    return plan


def _split(unit: nn.Module, mesh: DeviceMesh, plan: Mapping[nn.Module, str]) -> None:
    """Make DTensors of the parameters of a unit that are none yet: slices by the plan, and replicas of the others."""
    copies: dict[Tensor, nn.Parameter] = {}  # of tied ones
    for module in list(unit.modules()):
        own, style = {name: each for name, each in module._parameters.items() if each is not None}, plan.get(module)
        if not own or all(isinstance(each, DTensor) for each in own.values()):
            continue
        if style in _SPLIT:
            parallelize_module(module, mesh, _SPLIT[style](), src_data_rank=None)
            continue
        for name, each in own.items():
            if each not in copies:
                copy = distribute_tensor(each.detach(), mesh, [Replicate()], src_data_rank=None)
                copies[each] = nn.Parameter(copy, requires_grad=each.requires_grad)
            module._parameters[name] = copies[each]
        # Each rank computes the whole gradient, or the part from its own attention heads.
        _compute_locally(module, Partial() if style == _OF_LOCAL_HEADS else Replicate())


def _compute_locally(module: Any, gradient: Placement) -> None:
    """Let a module whose parameters are replicated compute with plain tensors."""
    forward = module.forward

    @wraps(forward)
    def locally(*args: Any, **kwargs: Any) -> Any:
        held = {name: each for name, each in module._parameters.items() if each is not None}
        if any(each.placements != (Replicate(),) for each in held.values()):
            raise RuntimeError(f"{type(module).__name__}: FSDP gathers weights for what `shard` was given; call that")
        module._parameters |= {name: each.to_local(grad_placements=[gradient]) for name, each in held.items()}
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters |= held

    module.forward = locally


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered if it is sharded: then all ranks of its mesh must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
