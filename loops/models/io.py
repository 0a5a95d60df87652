"""Load and save models and tokenizers in the formats of transformers and peft."""

import copy
import logging
from collections.abc import Iterator, Mapping
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
from .backbone import Backbone
from .sharding import whole

log = logging.getLogger(__name__)

_FILE = "5GB"  # the most that a file of weights holds


def load_tokenizer(config: Common) -> transformers.PreTrainedTokenizerBase:
    """The model's tokenizer, with the configured chat template, if there is one.

    Raises:
        ValueError: if the tokenizer can't be loaded, most likely because there is no such model.
    """
    try:
        tokenizer: transformers.PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model: {config.model} is neither a directory that holds a model and its tokenizer, nor one on the Hub "
            f"that can be reached; check the name. {error}"
        ) from error
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    return tokenizer


def load_model(config: Common) -> nn.Module:
    """The causal language model to train, see `load`."""
    return load(config, transformers.AutoModelForCausalLM, "CAUSAL_LM")


def load_classifier(config: Common, task: Literal["SEQ_CLS", "TOKEN_CLS"], labels: Mapping[int, str]) -> nn.Module:
    """The model to train, with its own head if it is such a classifier, or a new one with ``len(labels)`` outputs.

    An architecture for which `transformers` has no such class gets one made of its parts. Such a model can only be
    loaded by `burnish` once it is saved, and a warning says so.
    """
    names = dict(labels) if len(labels) > 1 else {0: labels[0]}
    auto: Any = (
        transformers.AutoModelForSequenceClassification
        if task == "SEQ_CLS"
        else transformers.AutoModelForTokenClassification
    )
    architecture = transformers.AutoConfig.from_pretrained(config.model)
    if type(architecture) not in auto._model_mapping:
        auto = _classifier_of(architecture, task)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)  # no warnings that the head is new
    try:
        return load(config, auto, task, num_labels=len(names), id2label=names)
    finally:
        transformers.logging.set_verbosity(verbosity)


def load(config: Common, auto: Any, task: str, **options: Any) -> nn.Module:
    """A model to train, in the configured precision, without dropout; quantized and with adapters if configured.

    Raises:
        ValueError: if a quantized model is to be trained without adapters.
    """
    adapters = config.lora.r > 0
    if config.quantize and not adapters:
        raise ValueError(
            f"quantize={config.quantize}: quantized weights can't be trained; add adapters, such as --lora.r 16"
        )
    stored = transformers.AutoConfig.from_pretrained(config.model).dtype
    # Weights that an optimizer updates stay float32: in bfloat16 a step of 1e-6 rounds to nothing.
    dtype = torch.float32 if config.dtype == "bfloat16" and not adapters else getattr(torch, config.dtype)
    model: Any = auto.from_pretrained(
        config.model,
        **options,
        dtype=dtype,
        attn_implementation=config.attention,
        quantization_config=_quantization(config),
    )
    without_dropout(model)
    if config.dtype != "float64":
        model.stored_dtype = stored
    if config.gradient_checkpointing:
        # transformers renamed it in 5.2x and warns about the old name.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.enable_input_require_grads()  # frozen embeddings under adapters would cut the graph at its start
    if adapters:
        lora = config.lora
        settings: Any = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
        excluded = None if task == "CAUSAL_LM" else ["score", "classifier"]  # a new head trains whole
        targets: Any = {"target_modules": lora.target_modules, "exclude_modules": excluded}
        model = get_peft_model(model, LoraConfig(task_type=task, **settings, **targets))
    return model.train()  # type: ignore[no-any-return]


def _classifier_of(architecture: Any, task: str) -> Any:
    """The generic classifier of `transformers` on the backbone of this architecture."""
    backbone: Any = transformers.AutoModel._model_mapping[type(architecture)]
    generic: Any = GenericForSequenceClassification if task == "SEQ_CLS" else GenericForTokenClassification
    name = backbone.__name__.removesuffix("Model") + generic.__name__.removeprefix("Generic")
    log.warning("%s: transformers has no such class; the saved model can be loaded by burnish alone", name)
    pretrained = next(kind for kind in backbone.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    return type(name, (generic, pretrained), {})


def without_dropout(model: nn.Module) -> None:
    """Turn off every dropout of the architecture: policy and reference must differ by their weights alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _quantization(config: Common) -> Any:
    build: Any = transformers.BitsAndBytesConfig
    if config.quantize == "4bit":
        compute = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        return build(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    return None if config.quantize is None else build(load_in_8bit=True)


def save_model(
    policy: Backbone, tokenizer: transformers.PreTrainedTokenizerBase, directory: Path, *, write: bool = True
) -> None:
    """Write weights (adapters merged) and tokenizer, as transformers and vLLM load them; adapters also on their own.

    Weights are rounded to the dtype in which `load` found them, however they were trained: a bfloat16 model stays one,
    of the same size. After a run in float64 they stay float64, and those of a model that `load` did not make stay as
    they are. No file is larger than 5 GB, unless one weight is. The policy itself is left as it was.

    Args:
        write: true on one rank. All that hold shards of the policy call this; weights are gathered one by one.
    """
    if not write and not is_sharded(policy):
        return
    model, dtype, target = policy.model, getattr(policy.plain, "stored_dtype", None), directory / "model"
    weights = {name: weight.detach().cpu() for name, weight in named_weights(policy, dtype) if write}
    if isinstance(model, PeftModel):
        adapters = {n: whole(t) for n, t in model.state_dict().items() if "lora_" in n or "modules_to_save" in n}
        if write:
            model.save_pretrained(str(directory / "adapter"), state_dict=adapters, save_embedding_layers=False)
    if write:
        _assembled(policy.plain, weights).save_pretrained(target, max_shard_size=_FILE)
        tokenizer.save_pretrained(target)


def _assembled(like: Any, weights: Mapping[str, Tensor]) -> Any:
    """A plain model of the same architecture with these weights."""
    config = copy.deepcopy(like.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model: Any = type(like)(config)
    model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
    model.tie_weights()
    if model.can_generate():
        model.generation_config = like.generation_config
    return model


def _merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """What a plain model's state_dict would hold, one after the other, the active adapters added."""
    wrapped: Any = model
    known: set[str] = set()
    for name, module in wrapped.get_base_model().named_modules():
        path = name.replace(".base_layer", "").replace(".modules_to_save.default", "")
        if hasattr(module, "get_delta_weight"):
            known.add(f"{path}.weight")
            yield f"{path}.weight", _merged_weight(module)
        elif not any(part in name for part in ("lora_", "original_module")):
            for kind, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                place = f"{path}.{kind}" if path else kind
                if place not in known and kind not in module._non_persistent_buffers_set:
                    known.add(place)
                    yield place, tensor


@torch.no_grad()
def _merged_weight(module: Any) -> Tensor:
    weight: Tensor = dequantize_module_weight(module.get_base_layer())
    for adapter in module.active_adapters:
        weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
    return weight


def named_weights(policy: Any, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy, or of its model, under the names of transformers, adapters merged.

    Those of a sharded policy are gathered one after the other, so that all ranks take part, and no rank holds more than
    one of them.

    Args:
        dtype: of the floating-point ones; unless given, that which they have.
    """
    model = policy.model if isinstance(policy, Backbone) else policy
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the last forward pass may have left it whole
    weights = _merged_weights(model) if isinstance(model, PeftModel) else model.state_dict().items()
    for name, tensor in weights:
        yield name, _whole(tensor, dtype)


def adapter_weights(policy: Backbone, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy's adapter alone, under peft's names; see `named_weights`."""
    for name, tensor in get_peft_model_state_dict(policy.model).items():
        yield name, _whole(tensor, dtype)


@torch.no_grad()
def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)  # before it is gathered
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(module: nn.Module) -> bool:
    """Does this rank hold but a part of the weights?"""
    return any(isinstance(each, FSDPModule | DTensor) for each in (*module.modules(), *module.parameters()))
