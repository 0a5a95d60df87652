"""Load and save models and tokenizers in the formats of transformers and peft."""

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from ...data import read_chat_template
from ..config import Common
from ..registry import blaming, build
from .activations import add_noise, checkpoint_activations
from .backbone import Backbone
from .sharding import left_in_files, whole

log = logging.getLogger(__name__)

_UNMERGED = {"lora_bias", "layer_replication", "alora_invocation_tokens", "arrow_config", "monteclora_config"}
_FILE = "5GB"  # maximal size of a file of weights


def load_tokenizer(config: Common) -> transformers.PreTrainedTokenizerBase:
    """The configured tokenizer, or the model's, with the configured chat template, if there is one.

    A tokenizer passed as an object is not changed: with another chat template it is copied.

    Raises:
        ValueError: if the tokenizer can't be loaded, most likely because there is no such model.
    """
    field = "model" if config.tokenizer is None else "tokenizer"
    name = getattr(config, field)
    if isinstance(name, nn.Module):  # the name that it was loaded by
        name = getattr(getattr(name, "config", None), "_name_or_path", "")
        if not name:
            raise ValueError("tokenizer: a model made in memory has no name to find one by; give the tokenizer")
    adapter = Path(name, "adapter_config.json") if isinstance(name, str | Path) else Path()
    if adapter.is_file() and not adapter.with_name("config.json").exists():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path")
        raise ValueError(f"model: {name} holds an adapter of {base}; pass --model {base} --lora.path {name}")
    loaded = isinstance(name, str | Path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name) if loaded else name
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            with blaming(f"{field}: {name}"):
                raise
        raise ValueError(
            f"{field}: {name} is neither a directory that holds a model and its tokenizer, nor one on the Hub "
            f"that can be reached; check the name. {error}"
        ) from error
    if config.chat_template is not None:
        tokenizer = tokenizer if loaded else copy.deepcopy(tokenizer)
        tokenizer.chat_template = read_chat_template(config.chat_template)
    return tokenizer


def load_model(config: Common) -> nn.Module:
    """The causal language model to train, see `load`."""
    return load(config, transformers.AutoModelForCausalLM, "CAUSAL_LM")


def load_classifier(config: Common, task: Literal["SEQ_CLS", "TOKEN_CLS"], labels: Mapping[int, str]) -> nn.Module:
    """The classifier to train, with its own head if there is one, or a new one with ``len(labels)`` outputs.

    For an architecture without such a class in `transformers`, one is assembled from parts; once saved, that model can
    only be loaded by `burnish`, and a warning says so.
    """
    kind = "Sequence" if task == "SEQ_CLS" else "Token"
    auto: Any = getattr(transformers, f"AutoModelFor{kind}Classification")
    if isinstance(config.model, nn.Module):
        return load(config, auto, task)
    architecture = blaming(f"model: {config.model}")(transformers.AutoConfig.from_pretrained)(config.model)
    if type(architecture) not in auto._model_mapping:
        auto = _classifier_of(architecture, task)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)  # no warnings that the head is new
    try:
        return load(config, auto, task, num_labels=len(labels), id2label=dict(labels))
    finally:
        transformers.logging.set_verbosity(verbosity)


def load(config: Common, auto: Any, task: str, **options: Any) -> nn.Module:
    """A model to train, in the configured precision, without dropout; quantized and with adapters if configured.

    A model passed as an object is converted in place to that precision, unless it has adapters or is quantized.

    Raises:
        ValueError: if a quantized model is to be trained without adapters, or FlexAttention on a CPU, or if a model
            passed as an object is to be quantized, or to get adapters in addition to its own.
    """
    in_memory, adapters = isinstance(config.model, nn.Module), config.lora.enabled
    quantized = getattr(config.model, "is_quantized", False)
    if config.attention == "flex_attention" and not torch.cuda.is_available():
        raise ValueError("attention: FlexAttention has no backward pass on a CPU; leave attention out, which is sdpa")
    if in_memory and config.quantize:
        raise ValueError("quantize: the model is loaded already; load it quantized, or give its name")
    if isinstance(config.model, PeftModel) and adapters:
        raise ValueError("lora.r: the model has adapters already; leave lora out, or give the model without them")
    if (config.quantize or quantized) and not (adapters or isinstance(config.model, PeftModel)):
        raise ValueError(
            f"quantize={config.quantize}: quantized weights can't be trained; add adapters, such as --lora.r 16"
        )
    # Weights that an optimizer updates are float32: in bfloat16 a step of 1e-6 rounds to nothing without `rounding`.
    precision = config.weights_dtype if config.dtype == "bfloat16" and not adapters else config.dtype
    dtype = getattr(torch, precision)
    model: Any = config.model
    if in_memory:
        stored = getattr(model, "dtype", None)
        if not (quantized or isinstance(model, PeftModel)):
            _convert(model, dtype)
        if config.attention is not None:
            model.set_attn_implementation(config.attention)
    else:
        with blaming(f"model: {config.model}"):
            stored = transformers.AutoConfig.from_pretrained(config.model).dtype
        options |= {"attn_implementation": config.attention, "quantization_config": _quantization(config)}
        blamed = f"model: {config.model}" + (f" with attention {config.attention}" if config.attention else "")
        with blaming(blamed), left_in_files(_may_stay_in_files(config, task)):
            model = auto.from_pretrained(config.model, dtype=dtype, **options)
    without_dropout(model)
    if config.dtype != "float64":
        model.stored_dtype = torch.bfloat16 if config.weights_dtype == "bfloat16" else stored
    if config.gradient_checkpointing:
        checkpoint_activations(model, config.gradient_checkpointing)
    if config.neftune_noise_alpha:
        add_noise(model, config.neftune_noise_alpha)
    if adapters:
        model = _with_adapters(model, config, task)
        if config.weights_dtype == "float32":  # peft makes copies of modules, and new heads, in the model's precision
            for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    for module in _unread(model.get_base_model() if isinstance(model, PeftModel) else model).values():
        module.requires_grad_(False)  # DDP would wait for their gradients
    return model.train()  # type: ignore[no-any-return]


def _convert(model: Any, dtype: torch.dtype) -> None:
    """Convert the weights in place, as `transformers` would have loaded them: it computes rotary frequencies and other
    buffers that no file holds in their own precision, and rounding these would turn late positions by other angles."""
    for path, module in model.named_modules():
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is not None and tensor.is_floating_point() and name not in module._non_persistent_buffers_set:
                kept = _stays(model, f"{path}.{name}", dtype)
                tensor.data = tensor.data.to(torch.float32 if kept else dtype)


def _stays(model: Any, name: str, dtype: torch.dtype | None) -> bool:
    """True for a weight that `transformers` keeps in float32 in a model of this precision."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return dtype == torch.bfloat16 and any(re.search(part.replace("*", ".*"), name) for part in parts)


def _unread(plain: Any) -> dict[str, nn.Module]:
    """The parts of a model that text does not reach, such as its encoder of images, by name."""
    if plain.config.get_text_config() is plain.config:
        return {}
    text = set(plain.get_decoder().parameters())
    return {name: part for name, part in plain.base_model.named_children() if text.isdisjoint(part.parameters())}


def _may_stay_in_files(config: Common, task: str) -> bool:
    """True if the model can be sharded before its weights are read. Creating some adapters reads weights, or copies
    them."""
    lora, sharded = config.lora, config.parallel.copy_size > 1
    made = not lora.adds_nothing or lora.use_dora or lora.kwargs or lora.target_parameters or lora.modules_to_save
    read = lora.enabled and bool(made or task != "CAUSAL_LM")  # those of a classifier copy its head
    if sharded and read:
        log.warning("lora: these adapters are made of the model's weights, so every rank reads all of them")
    return sharded and not read


def _with_adapters(model: Any, config: Common, task: str) -> Any:
    """Add new adapters, or load those of ``lora.path``; in float32, unless ``config.weights_dtype`` is bfloat16."""
    lora, options = config.lora, dict[str, Any](autocast_adapter_dtype=config.weights_dtype == "float32")
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
    if parts := (*new_head, *_unread(model)):
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


def _classifier_of(architecture: Any, task: str) -> Any:
    """The generic classifier of `transformers` on the backbone of this architecture."""
    backbone: Any = transformers.AutoModel._model_mapping[type(architecture)]
    generic: Any = GenericForSequenceClassification if task == "SEQ_CLS" else GenericForTokenClassification
    name = backbone.__name__.removesuffix("Model") + generic.__name__.removeprefix("Generic")
    log.warning("%s: transformers has no such class; the saved model can be loaded by burnish alone", name)
    pretrained = next(kind for kind in backbone.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    return type(name, (generic, pretrained), {})


def without_dropout(model: nn.Module) -> None:
    """Turn off every dropout of the architecture: policy and reference must differ only in their weights."""
    for module in (module for path, module in model.named_modules() if "lora_dropout" not in path):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _quantization(config: Common) -> Any:
    if config.quantize is None:
        return None
    if find_spec("bitsandbytes") is None:
        raise ValueError("quantize: needs bitsandbytes, which is not installed; pip install bitsandbytes")
    compute = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute}
    fields: dict[str, Any] = four if config.quantize == "4bit" else {"load_in_8bit": True}
    return build("quantize_kwargs", transformers.BitsAndBytesConfig, config.quantize_kwargs, **fields)


def save_model(
    policy: Backbone, tokenizer: transformers.PreTrainedTokenizerBase, directory: Path, *, write: bool = True
) -> None:
    """Write weights (adapters merged) and tokenizer, as transformers and vLLM load them; adapters also on their own.

    Weights are rounded to the dtype in which `load` found them, however they were trained: a bfloat16 model stays one,
    of the same size, and ``weights_dtype: bfloat16`` makes one. After a run in float64 they stay float64, and those of
    a model that `load` did not make are not rounded. No file is larger than 5 GB, unless one weight is. The policy
    itself is not changed.

    Args:
        write: true on one rank. All that hold shards of the policy call this; weights are gathered one by one.
    """
    if not write and not is_sharded(policy):
        return
    model, dtype, target = policy.model, getattr(policy.plain, "stored_dtype", None), directory / "model"
    named = named_weights(policy, dtype, tied=False)
    weights = {name: weight.detach().cpu() for name, weight in named if write}
    if isinstance(model, PeftModel):
        kept = re.compile("lora_|_to_save|token_ad")
        adapters = {name: whole(tensor) for name, tensor in model.state_dict().items() if kept.search(name)}
        if write:
            options: Any = {"selected_adapters": ["default"], "save_embedding_layers": False}  # the reference's not
            model.save_pretrained(str(directory / "adapter"), state_dict=adapters, **options)
    if write:
        # An earlier model goes first, and weights come last: what is left half-way can't be loaded.
        for old in target.glob("*.safetensors*"):
            old.unlink()
        tokenizer.save_pretrained(target)
        _assembled(policy.plain, weights).save_pretrained(target, max_shard_size=_FILE)


def _assembled(like: Any, weights: Mapping[str, Tensor]) -> Any:
    """A plain model of the same architecture with these weights."""
    config = copy.deepcopy(like.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model: Any = type(like)(config)
    tied = model.all_tied_weights_keys
    model.load_state_dict({name: weights[tied.get(name, name)] for name in model.state_dict()}, assign=True)
    model.tie_weights()
    if model.can_generate():
        model.generation_config = like.generation_config
    return model


def _merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
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


def named_weights(policy: Any, dtype: torch.dtype | None = None, *, tied: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy, or of its model, under the names of transformers, adapters merged.

    Weights of a sharded policy are gathered one by one: all ranks take part, and none holds more than one whole weight.

    Args:
        dtype: of the floating-point ones; unless given, that which they have.
        tied: false, of a policy, leaves out those that its model ties to others.
    """
    model = policy.model if isinstance(policy, Backbone) else policy
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the last forward pass may have left it unsharded
    weights = _merged_weights(model) if isinstance(model, PeftModel) else model.state_dict().items()
    left_out = () if tied else policy.plain.all_tied_weights_keys
    plain = policy.plain if isinstance(policy, Backbone) else policy
    for name, weight in weights:
        if name not in left_out:
            yield from _gathered([(name, weight)], None if _stays(plain, name, dtype) else dtype)


def adapter_weights(policy: Backbone, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy's adapter alone, under peft's names; see `named_weights`."""
    yield from _gathered(get_peft_model_state_dict(policy.model).items(), dtype)


def _gathered(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        saved_as = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        yield name, whole(tensor.detach().to(saved_as))


def is_sharded(module: nn.Module) -> bool:
    """True if this rank holds only a part of the weights."""
    return any(isinstance(each, FSDPModule | DTensor) for each in (*module.modules(), *module.parameters()))


@torch.no_grad()
def detached_copy(policy: Backbone) -> nn.Module:
    """A plain copy of the model, adapters merged. All ranks gather the weights of a sharded model."""
    if not is_sharded(policy):
        copied: Any = copy.deepcopy(policy.model)
        return copied.merge_and_unload() if isinstance(copied, PeftModel) else copied  # type: ignore[no-any-return]
    copied = _assembled(policy.plain, {name: tensor.clone() for name, tensor in named_weights(policy)})
    for name, module in policy.plain.named_modules():  # buffers that no state_dict holds, such as rotary frequencies
        for kind, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, Tensor):
                setattr(copied.get_submodule(name.replace(".base_layer", "")), kind, value.clone())
    return copied  # type: ignore[no-any-return]
