"""Load and save models and tokenizers in the formats of transformers and peft."""

import copy
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from ...data import read_chat_template
from ..config import Common
from ..registry import blaming, build
from .activations import add_noise, checkpoint_activations, without_randomness
from .adapters import add_adapters, may_stay_in_files, merged_weights, unread
from .backbone import Backbone
from .sharding import left_in_files, whole

log = logging.getLogger(__name__)

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
    loaded = isinstance(name, str)
    adapter = Path(name, "adapter_config.json") if loaded else Path()
    if adapter.is_file() and not adapter.with_name("config.json").exists():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path")
        raise ValueError(f"model: {name} holds an adapter of {base}; pass --model {base} --lora.path {name}")
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


def load_classifier(config: Common, task: Literal["SEQ_CLS", "TOKEN_CLS"], labels: Mapping[int, str]) -> nn.Module:
    """The classifier to train, with its own head if there is one, or a new one with ``len(labels)`` outputs.

    For an architecture without such a class in `transformers`, one is assembled from parts; once saved, that model can
    only be loaded by `burnish`, and a warning says so.
    """
    kind = "Sequence" if task == "SEQ_CLS" else "Token"
    auto: Any = getattr(transformers, f"AutoModelFor{kind}Classification")
    if isinstance(config.model, nn.Module):
        return load_model(config, auto, task)
    architecture = blaming(f"model: {config.model}")(transformers.AutoConfig.from_pretrained)(config.model)
    if type(architecture) not in auto._model_mapping:
        auto = _classifier_of(architecture, task)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)  # no warnings that the head is new
    try:
        return load_model(config, auto, task, num_labels=len(labels), id2label=dict(labels))
    finally:
        transformers.logging.set_verbosity(verbosity)


def load_model(
    config: Common, auto: Any = transformers.AutoModelForCausalLM, task: str = "CAUSAL_LM", **options: Any
) -> nn.Module:
    """A model to train, in the configured precision, without randomness; quantized and with adapters if configured.

    A model passed as an object is converted in place to that precision, unless it has adapters or is quantized.

    Raises:
        ValueError: if a quantized model is to be trained without adapters, or FlexAttention on a CPU, or if a model
            passed as an object is to be quantized, or to get adapters in addition to its own.
    """
    in_memory, adapters = isinstance(config.model, nn.Module), config.lora.enabled
    if config.attention == "flex_attention" and not torch.cuda.is_available():
        raise ValueError("attention: FlexAttention has no backward pass on a CPU; leave attention out, which is sdpa")
    if in_memory and config.quantize:
        raise ValueError("quantize: the model is loaded already; load it quantized, or give its name")
    if isinstance(config.model, PeftModel) and adapters:
        raise ValueError("lora.r: the model has adapters already; leave lora out, or give the model without them")
    injected = in_memory and any(hasattr(module, "base_layer") for module in config.model.modules())
    if injected and not isinstance(config.model, PeftModel):
        raise ValueError("model: an earlier run left adapters in it; give that run's model, or load it again")
    described = blaming(f"model: {config.model}")(transformers.AutoConfig.from_pretrained)
    architecture: Any = config.model if in_memory else described(config.model)
    stored = getattr(architecture, "dtype", None)
    quantized = getattr(architecture, "is_quantized", hasattr(architecture, "quantization_config"))
    if (config.quantize or quantized) and not (adapters or isinstance(config.model, PeftModel)):
        raise ValueError("quantize: quantized weights can't be trained; add adapters, such as --lora.r 16")
    # Weights that an optimizer updates are float32: in bfloat16 a step of 1e-6 rounds to nothing without `rounding`.
    precision = config.weights_dtype if config.dtype == "bfloat16" and not adapters else config.dtype
    dtype = getattr(torch, precision)
    model: Any = config.model
    if in_memory:
        if not (quantized or isinstance(model, PeftModel)):
            _convert_and_say(model, dtype)
        if config.attention is not None:
            model.set_attn_implementation(config.attention)
    else:
        options |= {"attn_implementation": config.attention, **_quantization(config)}
        blamed = f"model: {config.model}" + (f" with attention {config.attention}" if config.attention else "")
        with blaming(blamed), left_in_files(may_stay_in_files(config, task)):
            model = read_model(auto, config.model, new_head=task != "CAUSAL_LM", dtype=dtype, **options)
    without_randomness(model)
    if config.dtype != "float64":
        model.stored_dtype = torch.bfloat16 if config.weights_dtype == "bfloat16" else stored
    if config.gradient_checkpointing:
        checkpoint_activations(model, config.gradient_checkpointing)
    if config.neftune_noise_alpha:
        add_noise(model, config.neftune_noise_alpha)
    if adapters:
        model = add_adapters(model, config, task)
        if config.weights_dtype == "float32":  # peft makes copies of modules, and new heads, in the model's precision
            for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    for module in unread(model.get_base_model() if isinstance(model, PeftModel) else model).values():
        module.requires_grad_(False)  # DDP would wait for their gradients
    return model.train()  # type: ignore[no-any-return]


def read_model(
    auto: Any, name: str, *, new_head: bool = False, wanted: str = "a causal language model", **options: Any
) -> Any:
    """A model of `transformers` from its files.

    Raises:
        ValueError: if one of its weights is in no file, unless its head is new; says what kind was ``wanted``.
    """
    model, loaded = auto.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(name for name, _ in model.named_parameters() if name in loaded["missing_keys"])
    if missing and not new_head:
        raise ValueError(f"{missing[0]} is in none of its files, and would be random; wanted {wanted}")
    return model


def _convert_and_say(model: Any, dtype: torch.dtype) -> None:
    """Convert a model of the caller's in place, and log a line if its weights had another precision."""
    before = _bytes_by_dtype(model)
    _convert(model, dtype)
    after = _bytes_by_dtype(model)
    if before.keys() == after.keys() or os.environ.get("RANK", "0") != "0":
        return
    was, now = (" and ".join(str(each).removeprefix("torch.") for each in held) for held in (before, after))
    change = (sum(after.values()) - sum(before.values())) / 2**30
    log.warning("model: its weights were %s, and are %s now, in place (%+.2f GiB); load it in that precision, or copy "
                "it, to keep yours", was, now, change)  # fmt: skip


def _bytes_by_dtype(model: nn.Module) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
    return sizes


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


def _classifier_of(architecture: Any, task: str) -> Any:
    """The generic classifier of `transformers` on the backbone of this architecture."""
    backbone: Any = transformers.AutoModel._model_mapping[type(architecture)]
    generic: Any = GenericForSequenceClassification if task == "SEQ_CLS" else GenericForTokenClassification
    name = backbone.__name__.removesuffix("Model") + generic.__name__.removeprefix("Generic")
    log.warning("%s: transformers has no such class; the saved model can be loaded by burnish alone", name)
    pretrained = next(kind for kind in backbone.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    # As a class of transformers: those of others are to fill the buffers that no file holds themselves.
    return type(name, (generic, pretrained), {"config_class": type(architecture), "__module__": pretrained.__module__})


def _quantization(config: Common) -> dict[str, Any]:
    if config.quantize is None:  # with a None transformers takes the weights of quantized files for plain ones
        return {}
    if find_spec("bitsandbytes") is None:
        raise ValueError("quantize: needs bitsandbytes, which is not installed; pip install bitsandbytes")
    compute = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute}
    fields: dict[str, Any] = four if config.quantize == "4bit" else {"load_in_8bit": True}
    built = build("quantize_kwargs", transformers.BitsAndBytesConfig, config.quantize_kwargs, **fields)
    return {"quantization_config": built}


def save_model(
    policy: Backbone, tokenizer: transformers.PreTrainedTokenizerBase, directory: Path, *, write: bool = True
) -> None:
    """Write weights (adapters merged) and tokenizer, as transformers and vLLM load them; adapters also on their own.

    Weights are rounded to the dtype in which `load_model` found them, however they were trained: a bfloat16 model stays
    one, of the same size, and ``weights_dtype: bfloat16`` makes one. After a run in float64 they stay float64; those of
    a model that it did not load are not rounded. No file is larger than 5 GB, unless one weight is. The policy itself
    is not changed.

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
    weights = merged_weights(model) if isinstance(model, PeftModel) else model.state_dict().items()
    left_out = () if tied else policy.plain.all_tied_weights_keys
    plain = policy.plain if isinstance(policy, Backbone) else policy
    for name, weight in weights:
        if name not in left_out:
            yield name, _gathered(weight, None if _stays(plain, name, dtype) else dtype)


def adapter_weights(policy: Backbone, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy's adapter alone, under peft's names; see `named_weights`."""
    for name, weight in get_peft_model_state_dict(policy.model).items():
        yield name, _gathered(weight, dtype)


def _gathered(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return whole(tensor.detach().to(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype))


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
