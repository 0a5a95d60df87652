"""Adapters of peft: where they are put, and what they make of a model's weights."""

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from ..config import Common
from ..registry import build

log = logging.getLogger(__name__)

_UNMERGED = {"lora_bias", "layer_replication", "alora_invocation_tokens", "arrow_config", "monteclora_config"}


def add_adapters(model: Any, config: Common, task: str) -> Any:
    """Add new adapters, or load those of ``lora.path``; in float32, unless ``config.weights_dtype`` is bfloat16."""
    lora, options = config.lora, dict[str, Any](autocast_adapter_dtype=config.weights_dtype == "float32")
    if model.name_or_path and Path(model.name_or_path).is_dir():
        model.name_or_path = str(Path(model.name_or_path).absolute())  # the adapter may be loaded from elsewhere
    if lora.path is not None:
        if lora.r:
            raise ValueError(f"lora.r: the adapter in {lora.path} has its own rank; leave lora.r out")
        if not Path(lora.path, "adapter_config.json").exists():
            raise ValueError(f"lora.path: {lora.path} holds no adapter_config.json; give the directory of an adapter")
        return PeftModel.from_pretrained(model, lora.path, is_trainable=True, **options)
    # peft adds to the lists it is given.
    fields: dict[str, Any] = {
        name: copy.copy(value) for name, value in vars(lora).items() if name not in ("kwargs", "path")
    }
    fields |= {"lora_alpha": fields.pop("alpha"), "lora_dropout": fields.pop("dropout"), "task_type": task}
    new_head = () if task == "CAUSAL_LM" else ("score", "classifier")  # trains whole
    unadapted = _not_linear(model) if lora.target_modules == "all-linear" else ()
    if parts := (*new_head, *unread(model), *unadapted):
        fields["exclude_modules"] = rf"(.*\.)?({'|'.join(parts)})(\..*)?"
    targets = lora.target_modules if isinstance(lora.target_modules, list) else [lora.target_modules]
    adapted = {name.rpartition(".")[2] for name in (*targets, *(lora.modules_to_save or ()))}
    tied = {path.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for path in pair}
    if adapted & {path.rpartition(".")[2] for path in tied} and "ensure_weight_tying" not in lora.kwargs:
        fields["ensure_weight_tying"] = True  # a file holds one weight for both
    if repeated := sorted(fields.keys() & lora.kwargs.keys()):
        raise ValueError(f"lora.kwargs: {repeated[0]} is a field of lora or set by the recipe; leave it out")
    if unmerged := sorted(_UNMERGED & lora.kwargs.keys()):
        raise ValueError(f"lora.kwargs: {unmerged[0]} can't be merged into a plain model; leave it out")
    widest = model.config.get_text_config().hidden_size
    if lora.r > widest:
        raise ValueError(f"lora.r: {lora.r} is no low rank, the model is {widest} wide; 8 to 64 is usual")
    try:
        return get_peft_model(model, build("lora.kwargs", LoraConfig, lora.kwargs, **fields), **options)
    except (TypeError, ValueError) as error:
        field, names = "lora", lora.target_modules
        if "arget modules" in str(error):
            several = isinstance(names, str) and "," in names
            listed = f" (a list is written [{', '.join(str(names).split(','))}])" if several else ""
            field = f"lora.target_modules: {names}{listed}"
        raise ValueError(f"{field}: {error}") from error


@torch.no_grad()
def _not_linear(plain: nn.Module) -> Iterator[str]:
    """Linear layers of `transformers` that compute something else, such as a router its choice of experts; and those
    whose weight a Mamba layer's kernel multiplies by, without their adapter."""
    for name, module in plain.named_modules():
        if hasattr(module, "D") and hasattr(module, "out_proj"):
            yield f"{name}.out_proj"
        elif isinstance(module, nn.Linear) and ".models." in type(module).__module__:
            states = module.weight.new_ones(1, 3, module.in_features)
            with suppress(RuntimeError):
                if getattr(module(states), "shape", None) == (1, 3, module.out_features):
                    continue
            yield name


def unread(plain: Any) -> dict[str, nn.Module]:
    """The parts of a model that text does not reach, such as its encoder of images, by name."""
    if plain.config.get_text_config() is plain.config:
        return {}
    text = set(plain.get_decoder().parameters())
    return {name: part for name, part in plain.base_model.named_children() if text.isdisjoint(part.parameters())}


def may_stay_in_files(config: Common, task: str) -> bool:
    """True if the model can be sharded before its weights are read. Creating some adapters reads weights, or copies
    them."""
    lora, sharded = config.lora, config.parallel.copy_size > 1
    made = not lora.adds_nothing or lora.use_dora or lora.kwargs or lora.target_parameters or lora.modules_to_save
    read = lora.enabled and bool(made or task != "CAUSAL_LM")  # those of a classifier copy its head
    if sharded and read:
        log.warning("lora: these adapters are made of the model's weights, so every rank reads all of them")
    return sharded and not read


def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of a plain model's state_dict, with the active adapters merged."""
    wrapped: Any = model
    known: set[str] = set()
    for name, module in wrapped.get_base_model().named_modules():
        path = re.sub(r"\.(base_layer|modules_to_save\.default|token_adapter)", "", name)
        tensors: dict[str, Tensor] = {}
        if hasattr(module, "get_delta_weight"):
            tensors = _merged_layer(module)
        elif hasattr(module, "get_merged_weights"):
            tensors = {"weight": module.get_merged_weights(module.active_adapters)}
        elif not any(part in name for part in ("lora_", "original_module", "modules_to_save.reference")):
            held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            # Loaded as a parameter, it would itself come to require gradients again.
            tensors = {kind: tensor.detach() for kind, tensor in held if kind not in module._non_persistent_buffers_set}
            if isinstance(module, nn.Linear) and f"{path}.weight" not in known:  # quantized, without an adapter
                tensors["weight"] = dequantize_module_weight(module).detach()
        for kind, tensor in tensors.items():
            place = f"{path}.{kind}" if path else kind
            if place not in known:
                known.add(place)
                yield place, tensor


@torch.no_grad()
def _merged_layer(module: Any) -> dict[str, Tensor]:
    """Weight and bias of a peft layer, with its active adapters merged."""
    kind, layer = getattr(module, "parameter_name", "weight"), module.get_base_layer()
    weight = dequantize_module_weight(layer) if kind == "weight" else getattr(layer, kind)
    merged: dict[str, Tensor] = {}
    for adapter in module.active_adapters:
        if variant := module.lora_variant.get(adapter):
            weight = variant.merge_safe(module, adapter, weight)
        else:
            weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
        bias = getattr(module.lora_B[adapter], "bias", None) if adapter in module.lora_B else None
        if bias is not None:
            merged["bias"] = layer.bias + module.scaling[adapter] * bias
    return {**merged, kind: weight}
