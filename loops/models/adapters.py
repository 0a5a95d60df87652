"""Inserting, loading and merging the adapters of peft."""

import copy
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from ..config import Common, Lora
from ..registry import build
from .end_tokens import ends_of, extend

log = logging.getLogger(__name__)

# Parts of an adapter, by what their paths hold.
_ADAPTER_PARTS = ("lora_", "original_module", "modules_to_save.reference")
# Options of peft's LoraConfig whose adapters change more than a weight.
UNMERGED = {
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "monteclora_config",
}


# Fields of LoraConfig that a recipe sets, or that say where an adapter came from.
_SET_BY_RECIPE = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
                  "inference_mode"}  # fmt: skip


def settings_of_peft(config: object) -> Lora:
    """A LoraConfig of peft's as settings of ours; fields that ours don't have are its ``kwargs``.

    Raises:
        ValueError: if it configures another kind of adapter.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"lora: wanted a LoraConfig, or a mapping of its fields, got {type(config).__name__}"
        )
    names = [each.name for each in dataclasses.fields(config) if each.name not in _SET_BY_RECIPE]
    given = {name: getattr(config, name) for name in names}
    targets = given.pop("target_modules")
    own = {"alpha": given.pop("lora_alpha"), "dropout": given.pop("lora_dropout")}
    own["target_modules"] = sorted(targets) if isinstance(targets, set | list) else targets
    for each in dataclasses.fields(Lora):
        if each.name in given:
            own[each.name] = given.pop(each.name)
    plain = LoraConfig()
    return Lora(
        **own,
        kwargs={name: value for name, value in given.items() if value != getattr(plain, name)},
    )


def add_adapters(model: PreTrainedModel, config: Common, task: str) -> PeftModel:
    """Add new adapters, or load those of ``lora.path``; in float32, unless ``config.weights_dtype``
    is bfloat16.
    """
    in_float32 = config.weights_dtype == "float32"
    if model.name_or_path and Path(model.name_or_path).is_dir():
        # peft writes it down as the adapter's base, and the adapter may be loaded from elsewhere.
        model.name_or_path = str(Path(model.name_or_path).absolute())
    if config.lora.path is not None:
        _check_stored(config.lora)
        _take_end_tokens(model, Path(config.lora.path))
        return PeftModel.from_pretrained(
            model, config.lora.path, is_trainable=True, autocast_adapter_dtype=in_float32
        )
    fields = _lora_fields(model, config.lora, task)
    _check_new(model, config.lora, fields)
    try:
        lora_config = build("lora.kwargs", LoraConfig, config.lora.kwargs, **fields)
        adapted: PeftModel = get_peft_model(model, lora_config, autocast_adapter_dtype=in_float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_field_of(error, config.lora)}: {error}") from error
    return adapted


def _take_end_tokens(model: PreTrainedModel, adapter: Path) -> None:
    """Have the model end completions as the run did that left the adapter."""
    if model.can_generate() and (adapter / "generation_config.json").exists():
        stored = GenerationConfig.from_pretrained(adapter)
        extend(model.generation_config, ends_of(stored))


def _check_stored(lora: Lora) -> None:
    """Raise ValueError if there is no adapter to load, or it is to have another rank than its
    own.
    """
    if lora.r:
        raise ValueError(f"lora.r: the adapter in {lora.path} has its own rank; leave lora.r out")
    if not Path(str(lora.path), "adapter_config.json").exists():
        raise ValueError(
            f"lora.path: {lora.path} holds no adapter_config.json; give the directory of an adapter"
        )


def _lora_fields(model: PreTrainedModel, lora: Lora, task: str) -> dict[str, Any]:
    """The fields of peft's `LoraConfig` that the settings and the model decide."""
    # Copies: peft adds to the lists it is given.
    fields = {name: copy.copy(value) for name, value in vars(lora).items()}
    del fields["kwargs"], fields["path"]
    fields["lora_alpha"] = fields.pop("alpha")
    fields["lora_dropout"] = fields.pop("dropout")
    fields["task_type"] = task

    # Parts that see images get adapters only where they are named.
    named = str(lora.target_modules)
    excluded = [part for part in non_text_parts(model) if part not in named]
    if task != "CAUSAL_LM":  # the new head trains whole
        excluded = ["score", "classifier", *excluded]
    if lora.target_modules == "all-linear":
        excluded += _not_linear(model)
    if excluded:
        fields["exclude_modules"] = rf"(.*\.)?({'|'.join(excluded)})(\..*)?"
    if _adapts_tied(model, lora) and "ensure_weight_tying" not in lora.kwargs:
        fields["ensure_weight_tying"] = True  # a file holds one weight for both
    return fields


def _adapts_tied(model: PreTrainedModel, lora: Lora) -> bool:
    """True if a module that gets adapters, or trains whole, shares its weight with another."""
    named = (
        lora.target_modules
        if isinstance(lora.target_modules, list)
        else [lora.target_modules or ""]
    )
    adapted = {_last_part(name) for name in (*named, *(lora.modules_to_save or ()))}
    tied_weights = (path for pair in model.all_tied_weights_keys.items() for path in pair)
    tied = {_last_part(path.rpartition(".")[0]) for path in tied_weights}
    return not adapted.isdisjoint(tied)


def _last_part(path: str) -> str:
    """The name of a module, without the modules that it is in."""
    return path.rpartition(".")[2]


def _check_new(model: PreTrainedModel, lora: Lora, fields: Mapping[str, Any]) -> None:
    """Raise ValueError for options of peft that don't fit, and for a rank wider than the model."""
    repeated = sorted(fields.keys() & lora.kwargs.keys())
    if repeated:
        raise ValueError(
            f"lora.kwargs: {repeated[0]} is a field of lora or set by the recipe; leave it out"
        )
    unmerged = sorted(UNMERGED & lora.kwargs.keys())
    if unmerged:
        raise ValueError(
            f"lora.kwargs: {unmerged[0]} can't be merged into a plain model; leave it out"
        )
    width = model.config.get_text_config().hidden_size
    if lora.r > width:
        raise ValueError(
            f"lora.r: {lora.r} is no low rank, the model is {width} wide; 8 to 64 is usual"
        )


def _field_of(error: Exception, lora: Lora) -> str:
    """The setting that an error of peft is about, and a hint if a list was written as a string."""
    if "arget modules" not in str(error):
        return "lora"
    named = lora.target_modules
    hint = ""
    if isinstance(named, str) and "," in named:
        hint = f" (a list is written [{', '.join(named.split(','))}])"
    return f"lora.target_modules: {named}{hint}"


@torch.no_grad()
def _not_linear(plain: nn.Module) -> Iterator[str]:
    """The names of linear layers that an adapter would not adapt.

    Some layers of `transformers` are linear by their class and compute something else, such as a
    router its choice of experts; and a Mamba layer's kernel multiplies by the weight of
    ``out_proj`` itself, without an adapter.
    """
    for name, module in plain.named_modules():
        if hasattr(module, "D") and hasattr(module, "out_proj"):
            yield f"{name}.out_proj"
        elif (
            isinstance(module, nn.Linear)
            and _is_of_transformers(module)
            and not _maps_states(module)
        ):
            yield name


def _is_of_transformers(module: nn.Module) -> bool:
    """True for a class that a model of `transformers` defines for itself."""
    return ".models." in type(module).__module__


def _maps_states(layer: nn.Linear) -> bool:
    """True if the layer, tried out, turns states into states as a linear layer does."""
    states = layer.weight.new_ones(1, 3, layer.in_features)
    try:
        output = layer(states)
    except RuntimeError:
        return False
    return getattr(output, "shape", None) == (1, 3, layer.out_features)


def non_text_parts(plain: Any) -> dict[str, nn.Module]:
    """The parts of a model that text does not reach, such as its encoder of images, by name."""
    if plain.config.get_text_config() is plain.config:
        return {}
    text = set(plain.get_decoder().parameters())
    parts = plain.base_model.named_children()
    return {name: part for name, part in parts if text.isdisjoint(part.parameters())}


def may_stay_in_files(config: Common, task: str) -> bool:
    """True if the model can be sharded before its weights are read.

    Creating some adapters reads weights, or copies them: then every rank reads all of them.
    """
    if config.parallel.copy_size <= 1:
        return False
    if _reads_weights(config.lora, task):
        log.warning(
            "lora: these adapters are made of the model's weights, so every rank reads all of them"
        )
        return False
    return True


def _reads_weights(lora: Lora, task: str) -> bool:
    """True if these adapters are made of the model's weights.

    The adapters of a classifier copy its head.
    """
    if not lora.enabled:
        return False
    copies = lora.target_parameters or lora.modules_to_save
    computes = not lora.adds_nothing or lora.use_dora or lora.kwargs
    return bool(copies or computes or task != "CAUSAL_LM")


def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of a plain model's state_dict, with the active adapters merged."""
    plain: Any = model.get_base_model()
    known: set[str] = set()
    for path, module in plain.named_modules():
        name = re.sub(r"\.(base_layer|modules_to_save\.default|token_adapter)", "", path)
        if hasattr(module, "get_delta_weight"):
            tensors = _merged_layer(module)
        elif hasattr(module, "get_merged_weights"):
            tensors = {"weight": module.get_merged_weights(module.active_adapters)}
        elif any(part in path for part in _ADAPTER_PARTS):
            continue
        else:
            tensors = _own_tensors(module, dequantize=f"{name}.weight" not in known)
        for kind, tensor in tensors.items():
            place = f"{name}.{kind}" if name else kind
            # An adapted layer comes before the layer inside it, whose weight is not merged.
            if place not in known:
                known.add(place)
                yield place, tensor


def _own_tensors(module: nn.Module, *, dequantize: bool) -> dict[str, Tensor]:
    """A module's own weights and buffers, of those that a state_dict holds."""
    held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    in_no_file = module._non_persistent_buffers_set
    # Detached: loaded as a parameter, a tensor would come to require gradients again.
    tensors = {kind: tensor.detach() for kind, tensor in held if kind not in in_no_file}
    if isinstance(module, nn.Linear) and dequantize:
        tensors["weight"] = dequantize_module_weight(module).detach()
    return tensors


@torch.no_grad()
def _merged_layer(module: Any) -> dict[str, Tensor]:
    """Weight and bias of a peft layer, with its active adapters merged."""
    kind = getattr(module, "parameter_name", "weight")
    layer = module.get_base_layer()
    weight = dequantize_module_weight(layer) if kind == "weight" else getattr(layer, kind)
    merged: dict[str, Tensor] = {}
    for adapter in module.active_adapters:
        variant = module.lora_variant.get(adapter)
        if variant:  # DoRA and others, which don't only add
            weight = variant.merge_safe(module, adapter, weight)
        else:
            weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
        if adapter in module.lora_B:
            bias = getattr(module.lora_B[adapter], "bias", None)
            if bias is not None:
                merged["bias"] = layer.bias + module.scaling[adapter] * bias
    return {**merged, kind: weight}
