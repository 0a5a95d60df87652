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
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from ...data import read_chat_template
from ..config import Common
from .backbone import Backbone

log = logging.getLogger(__name__)


def load_tokenizer(config: Common) -> transformers.PreTrainedTokenizerBase:
    """The configured tokenizer, or the model's, with the configured chat template, if there is one.

    A tokenizer that was given stays as it is: with another chat template it is a copy.

    Raises:
        ValueError: if the tokenizer can't be loaded, most likely because there is no such model.
    """
    field = "model" if config.tokenizer is None else "tokenizer"
    name = getattr(config, field)
    if isinstance(name, nn.Module):  # the name that it was loaded by
        name = getattr(getattr(name, "config", None), "_name_or_path", "")
        if not name:
            raise ValueError("tokenizer: a model made in memory has no name to find one by; give the tokenizer")
    tokenizer: transformers.PreTrainedTokenizerBase
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name) if isinstance(name, str | Path) else name
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{field}: {name} is neither a directory that holds a model and its tokenizer, nor one on the Hub "
            f"that can be reached; check the name. {error}"
        ) from error
    if config.chat_template is not None:
        tokenizer = tokenizer if isinstance(name, str | Path) else copy.deepcopy(tokenizer)
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
    if isinstance(config.model, nn.Module):
        return load(config, auto, task)
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

    A model that was given is itself converted to that precision, unless it has adapters already, or is quantized.

    Raises:
        ValueError: if a quantized model is to be trained without adapters, or if a model that was given is to be
            quantized, or to get adapters on top of those that it has.
    """
    in_memory, adapters = isinstance(config.model, nn.Module), config.lora.r > 0
    quantized = getattr(config.model, "is_quantized", False)
    if in_memory and config.quantize:
        raise ValueError("quantize: the model is loaded already; load it quantized, or give its name")
    if isinstance(config.model, PeftModel) and adapters:
        raise ValueError("lora.r: the model has adapters already; leave lora out, or give the model without them")
    if (config.quantize or quantized) and not (adapters or isinstance(config.model, PeftModel)):
        raise ValueError(
            f"quantize={config.quantize}: quantized weights can't be trained; add adapters, such as --lora.r 16"
        )
    # Weights that an optimizer updates stay float32: in bfloat16 a step of 1e-6 rounds to nothing.
    dtype = torch.float32 if config.dtype == "bfloat16" and not adapters else getattr(torch, config.dtype)
    model: Any = config.model
    if not in_memory:
        model = auto.from_pretrained(
            config.model,
            **options,
            dtype=dtype,
            attn_implementation=config.attention,
            quantization_config=_quantization(config),
        )
    elif not (quantized or isinstance(model, PeftModel)):
        model.to(dtype)
    if in_memory and config.attention is not None:
        model.set_attn_implementation(config.attention)
    without_dropout(model)
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
    for module in (module for path, module in model.named_modules() if "lora_dropout" not in path):
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


def save_model(policy: Backbone, tokenizer: transformers.PreTrainedTokenizerBase, directory: Path) -> None:
    """Write weights (adapters merged) and tokenizer, as transformers and vLLM load them; adapters also on their own.

    The policy itself stays as it is.
    """
    target = directory / "model"
    if isinstance(policy.model, PeftModel):
        policy.model.save_pretrained(str(directory / "adapter"), save_embedding_layers=False)
        merged(policy.model).save_pretrained(target)
    else:
        policy.plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


@torch.no_grad()
def merged(model: PeftModel) -> Any:
    """A plain model with the weights of ``model``, its active adapters added."""
    wrapped: Any = model
    base = wrapped.get_base_model()
    weights: dict[str, Tensor] = {}
    for name, module in base.named_modules():
        path = name.replace(".base_layer", "").replace(".modules_to_save.default", "")
        if hasattr(module, "get_delta_weight"):
            weight = dequantize_module_weight(module.get_base_layer())
            for adapter in module.active_adapters:
                weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
            weights[f"{path}.weight"] = weight
        elif not any(part in name for part in ("lora_", "original_module")):
            for kind, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                weights.setdefault(f"{path}.{kind}" if path else kind, tensor)
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain: Any = type(base)(config)
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()}, assign=True)
    plain.tie_weights()
    return plain


def named_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy, or of its model, under the names of transformers, adapters merged."""
    model = policy.model if isinstance(policy, Backbone) else policy
    yield from (merged(model) if isinstance(model, PeftModel) else model).state_dict().items()


def adapter_weights(policy: Backbone) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy's adapter alone, under peft's names."""
    yield from get_peft_model_state_dict(policy.model).items()
