"""Load and save models and tokenizers in the formats of transformers and peft."""

import copy
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from ...data import read_chat_template
from ...data.images import ImageReader
from .. import quiet
from ..config import Common
from ..registry import as_setting_error, build, nearest
from .activations import add_noise, checkpoint_activations, without_randomness
from .adapters import add_adapters, may_stay_in_files, merged_weights, non_text_parts
from .backbone import Backbone
from .sharding import left_in_files, reshard, whole

log = logging.getLogger(__name__)

# Names of a classifier's outputs beside its adapter: those of a histogram are its bins.
LABELS_FILE = "labels.json"
_FILE = "5GB"  # maximal size of a file of weights


def load_tokenizer(config: Common) -> transformers.PreTrainedTokenizerBase:
    """The configured tokenizer, or the model's, with the configured chat template and end token, if
    there are any.

    A tokenizer passed as an object is not changed: with another chat template or end token it is
    copied.

    Raises:
        ValueError: if the tokenizer can't be loaded, most likely because there is no such model; or
            if the end token is not in its vocabulary.
    """
    if config.tokenizer is None:
        field, named = "model", config.model
    else:
        field, named = "tokenizer", config.tokenizer
    if isinstance(named, nn.Module):
        named = _name_of(named)
    tokenizer: transformers.PreTrainedTokenizerBase
    if not isinstance(named, str):
        tokenizer = named.tokenizer if _reads_images(named) else named
        if config.chat_template is not None or config.eos_token is not None:
            tokenizer = copy.deepcopy(tokenizer)
    else:
        _refuse_adapter(named)
        revision = config.model_revision if field == "model" else None
        tokenizer = _tokenizer_named(field, named, revision)
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    if config.eos_token is not None:
        _set_eos_token(tokenizer, config.eos_token)
    return tokenizer


class NoProcessorError(ValueError):
    """The processor of a vision-language model can't be loaded: it has text alone."""


def load_images(
    config: Common, tokenizer: transformers.PreTrainedTokenizerBase
) -> ImageReader | None:
    """The processor of a vision-language model, with this tokenizer; None for a model of text.

    Raises:
        NoProcessorError: if there is none in the model's files, or it needs a package that is not
            installed.
        ValueError: if ``config.processor_kwargs`` names what the image processor has not.
    """
    given: Any = config.tokenizer
    if _reads_images(given):
        processor = copy.copy(given)
        _change_image_processor(processor, config.processor_kwargs)
        return _reader_of(processor, tokenizer)
    model = config.model
    if isinstance(model, nn.Module):
        architecture: Any = getattr(model, "config", None)
        name = getattr(architecture, "_name_or_path", "")
    else:
        architecture = _architecture(config)
        name = model
    if not name or not _is_vision_language(architecture):
        if config.processor_kwargs:
            raise ValueError(
                "processor_kwargs: the model reads text alone; leave it out, or train a vision-language model"
            )
        return None
    auto: Any = transformers.AutoProcessor
    try:
        processor = auto.from_pretrained(name, **_of_revision(config.model_revision))
    except ImportError as error:
        package = re.search(r"requires the (\w+) library|Package `(\w+)`", str(error))
        wanted = "a package"
        if package is not None:
            wanted = next(filter(None, package.groups())).lower()
        raise NoProcessorError(
            f"model: the processor of {name} needs {wanted} to read images; pip install {wanted}"
        ) from error
    except (OSError, ValueError) as error:
        raise NoProcessorError(f"model: {name} has no processor to read images: {error}") from error
    if not _reads_images(processor):  # without the files of one, transformers gives the tokenizer
        raise NoProcessorError(f"model: {name} has no processor to read images; copy its files")
    _change_image_processor(processor, config.processor_kwargs)
    return _reader_of(processor, tokenizer)


def _change_image_processor(processor: Any, changes: Mapping[str, Any]) -> None:
    """Give a processor an image processor with other settings, such as another size."""
    if not changes:
        return
    before = processor.image_processor
    kind = type(before)
    known = kind.valid_kwargs.__annotations__
    for name in changes:
        if name not in known:
            raise ValueError(
                nearest(f"processor_kwargs: {kind.__name__} has no", name, sorted(known))
            )
    with as_setting_error("processor_kwargs"):
        processor.image_processor = kind.from_dict(before.to_dict(), **changes)


def find_images(
    config: Common, tokenizer: transformers.PreTrainedTokenizerBase
) -> ImageReader | None:
    """`load_images`; where the processor can't be loaded, a warning says so, and there is none."""
    try:
        return load_images(config, tokenizer)
    except NoProcessorError as error:
        log.warning("%s", error)
        return None


def _reader_of(processor: Any, tokenizer: transformers.PreTrainedTokenizerBase) -> ImageReader:
    """A reader of images whose processor has, and is saved with, this tokenizer and its template.

    Older processors keep the chat template in a file of their own.
    """
    template = getattr(processor, "chat_template", None)
    if tokenizer.chat_template is None and template is not None:
        tokenizer.chat_template = template
    processor.tokenizer = tokenizer
    processor.chat_template = tokenizer.chat_template
    return ImageReader(processor)


def _reads_images(processor: object) -> bool:
    return hasattr(processor, "image_processor")


def _is_vision_language(architecture: Any) -> bool:
    """True if `transformers` has a class for this configuration that sees images and writes text,
    and its files are of that class.
    """
    kind = type(architecture)
    seeing: Any = transformers.AutoModelForImageTextToText._model_mapping
    if kind not in seeing:
        return False
    writing: Any = transformers.AutoModelForCausalLM._model_mapping
    named = list(getattr(architecture, "architectures", None) or [])
    return kind not in writing or named == [seeing[kind].__name__]


def language_model_class(architecture: Any) -> Any:
    """The class of `transformers` that loads a language model with this configuration, and its
    vision tower if it has one.
    """
    if _is_vision_language(architecture):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _name_of(model: nn.Module) -> str:
    """The name that a model passed as an object was loaded by."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "")
    if not name:
        raise ValueError(
            "tokenizer: a model made in memory has no name to find one by; give the tokenizer"
        )
    return str(name)


def _refuse_adapter(name: str) -> None:
    """Raise ValueError for a directory that holds an adapter and no model."""
    adapter = Path(name, "adapter_config.json")
    if adapter.is_file() and not adapter.with_name("config.json").exists():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path")
        raise ValueError(
            f"model: {name} holds an adapter of {base}; pass --model {base} --lora.path {name}"
        )


def _tokenizer_named(field: str, name: str, revision: str | None) -> Any:
    what = name if revision is None else f"{name} at {revision}"
    with as_missing_model(field, what):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **_of_revision(revision))
    return tokenizer


@contextmanager
def as_missing_model(field: str, name: str) -> Iterator[None]:
    """Turn an error by which `transformers` finds no model of this name into a ValueError that
    tells what the name may be.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            with as_setting_error(f"{field}: {name}"):  # says what to do instead
                raise
        raise ValueError(
            f"{field}: {name} is neither a directory that holds a model and its tokenizer, nor one on the Hub "
            f"that can be reached; check the name. {error}"
        ) from error


def _of_revision(revision: str | None) -> dict[str, str]:
    """The argument of ``from_pretrained`` that names a revision.

    For the main branch, no argument.
    """
    return {} if revision is None else {"revision": revision}


def _set_eos_token(tokenizer: transformers.PreTrainedTokenizerBase, token: str) -> None:
    if token not in tokenizer.get_vocab():
        special = [str(each) for each in tokenizer.added_tokens_decoder.values() if each.special]
        examples = ", ".join(special[:8])
        raise ValueError(
            f"eos_token: wanted a token of the vocabulary, such as {examples}, got {token!r}"
        )
    tokenizer.eos_token = token


def load_classifier(
    config: Common,
    task: Literal["SEQ_CLS", "TOKEN_CLS"],
    labels: Mapping[int, str],
    *,
    images: bool = False,
) -> nn.Module:
    """The classifier to train, with its own head if there is one, or a new one with ``len(labels)``
    outputs.

    For an architecture without such a class in `transformers`, one is assembled from parts; once
    saved, that model can only be loaded by `burnish`, and a warning says so.

    Args:
        images: see `load_model`.
    """
    kind = "Sequence" if task == "SEQ_CLS" else "Token"
    auto: Any = getattr(transformers, f"AutoModelFor{kind}Classification")
    if isinstance(config.model, nn.Module):
        return load_model(config, auto, task, images=images)
    architecture = _architecture(config)
    if type(architecture) not in auto._model_mapping:
        auto = _classifier_of(architecture, task)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)  # no warnings that the head is new
    try:
        named = dict(labels)
        return load_model(config, auto, task, images=images, num_labels=len(named), id2label=named)
    finally:
        transformers.logging.set_verbosity(verbosity)


def load_model(
    config: Common,
    auto: object = None,
    task: str = "CAUSAL_LM",
    *,
    images: bool = False,
    **options: object,
) -> nn.Module:
    """A model to train, in the configured precision, without randomness; quantized and with
    adapters if configured.

    A model passed as an object is converted in place to that precision, unless it has adapters or
    is quantized.

    Args:
        auto: the class of `transformers`, or one assembled from its parts, that loads a model by
            its name; without it, the one that `language_model_class` finds.
        task: the kind of model, as peft calls it.
        images: whether the model will see images: if so, and ``config.train_vision`` says so, the
            parts that text does not reach are trained, too.
        options: passed on to ``from_pretrained``.

    Raises:
        ValueError: if a quantized model is to be trained without adapters, or FlexAttention on a
            CPU, or if a model passed as an object is to be quantized, or to get adapters in
            addition to its own.
    """
    _check_attention(config)
    model: Any = config.model
    if isinstance(model, nn.Module):
        _check_loaded(config, model)
        architecture: Any = model
    else:
        architecture = _architecture(config)
    # Read before anything is converted: what the files, or the caller's model, hold.
    stored_dtype = getattr(architecture, "dtype", None)
    quantized = _is_quantized(architecture)
    if config.quantize or quantized:
        _check_has_adapters(config, model)

    if isinstance(model, nn.Module):
        _prepare_loaded(config, model, quantized=quantized)
    else:
        auto = auto or language_model_class(architecture)
        model = _read_from_files(config, auto, task, options)
    without_randomness(model)
    _check_overflow(model)
    if config.dtype == "float64":
        _compute_each_expert(model)
    elif config.weights_dtype == "bfloat16":
        model.stored_dtype = torch.bfloat16  # `save_model` rounds to it
    else:
        model.stored_dtype = stored_dtype
    if config.gradient_checkpointing:
        checkpoint_activations(model, config.gradient_checkpointing)
    if config.neftune_noise_alpha:
        add_noise(model, config.neftune_noise_alpha)
    if config.lora.enabled:
        model = add_adapters(model, config, task)
        if config.weights_dtype == "float32":
            _train_in_float32(model)
    if not (images and config.train_vision):
        freeze_unread(model)
    model.train()
    return model  # type: ignore[no-any-return]


def _architecture(config: Common) -> transformers.PretrainedConfig:
    """The model's own configuration, read by its name."""
    with as_setting_error(f"model: {config.model}"):
        found: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(
            config.model, **_of_revision(config.model_revision)
        )
        return found


def _is_quantized(architecture: object) -> bool:
    """True if a model says so, or if its configuration holds how its files are quantized."""
    described = hasattr(architecture, "quantization_config")
    return bool(getattr(architecture, "is_quantized", described))


def _check_attention(config: Common) -> None:
    if config.attention == "flex_attention" and not torch.cuda.is_available():
        raise ValueError(
            "attention: FlexAttention has no backward pass on a CPU; leave attention out, which is sdpa"
        )


def _check_has_adapters(config: Common, model: str | nn.Module) -> None:
    """Raise ValueError if a quantized model neither has adapters nor gets some."""
    if not (config.lora.enabled or isinstance(model, PeftModel)):
        raise ValueError(
            "quantize: quantized weights can't be trained; add adapters, such as --lora.r 16"
        )


def _check_loaded(config: Common, model: nn.Module) -> None:
    """Raise ValueError if the settings ask of a model in memory what only loading it could do."""
    if config.quantize:
        raise ValueError(
            "quantize: the model is loaded already; load it quantized, or give its name"
        )
    if config.model_revision:
        raise ValueError(
            "model_revision: the model is loaded already; load that revision, or give its name"
        )
    if isinstance(model, PeftModel):
        if config.lora.enabled:
            raise ValueError(
                "lora.r: the model has adapters already; leave lora out, or give the model without them"
            )
    elif any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError(
            "model: an earlier run left adapters in it; give that run's model, or load it again"
        )


def _weights_dtype(config: Common) -> torch.dtype:
    """The dtype of the weights in memory.

    Weights that an optimizer updates are float32: in bfloat16 a step of 1e-6 rounds to nothing
    without `rounding`. Frozen ones, under adapters, have the dtype that is computed in.
    """
    trained_whole = not config.lora.enabled
    autocast = config.dtype in ("bfloat16", "float16")
    name = config.weights_dtype if autocast and trained_whole else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _check_overflow(model: nn.Module) -> None:
    """Raise ValueError if a weight that is held in float16 is beyond its largest number."""
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float16 and not bool(weight.isfinite().all()):
            raise ValueError(
                f"dtype: {name} of the model has numbers beyond 65504, the largest float16; set dtype to float32"
            )


def _prepare_loaded(config: Common, model: Any, *, quantized: bool) -> None:
    """Convert a model that was passed as an object, in place."""
    if not (quantized or isinstance(model, PeftModel)):
        _convert_and_say(model, _weights_dtype(config))
    if config.attention is not None:
        model.set_attn_implementation(config.attention)


def _compute_each_expert(model: PreTrainedModel) -> None:
    """Have a mixture of experts compute one expert after the other: torch's grouped product takes
    no float64.
    """
    configured = getattr(model.config, "_experts_implementation", None)
    if configured == "grouped_mm":
        model.set_experts_implementation("eager")


def _read_from_files(config: Common, auto: Any, task: str, options: Mapping[str, Any]) -> Any:
    """The model of this name, in the configured precision, quantized if configured."""
    blamed = f"model: {config.model}"
    if config.attention:
        blamed += f" with attention {config.attention}"
    in_files = may_stay_in_files(config, task)
    # What is wrong with quantize is said as such, not blamed on the model.
    quantization = _quantization(config)
    with as_setting_error(blamed), left_in_files(in_files):
        return read_model(
            auto,
            config.model,
            new_head=task != "CAUSAL_LM",
            dtype=_weights_dtype(config),
            attn_implementation=config.attention,
            **_of_revision(config.model_revision),
            **options,
            **quantization,
        )


def _train_in_float32(model: nn.Module) -> None:
    """Convert what trains: peft makes copies of modules, and new heads, in the model's
    precision.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def freeze_unread(model: nn.Module) -> None:
    """Freeze the parts of a model that text does not reach: DDP would wait for their gradients."""
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    for part in non_text_parts(plain).values():
        part.requires_grad_(False)


def read_model(
    auto: Any,
    name: str,
    *,
    new_head: bool = False,
    wanted: str = "a causal language model",
    **options: Any,
) -> Any:
    """A model of `transformers` from its files, by ``auto.from_pretrained``.

    Raises:
        ValueError: if one of its weights is in no file, unless its head is new; says what kind was
            ``wanted``.
    """
    model, loaded = auto.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(name for name, _ in model.named_parameters() if name in loaded["missing_keys"])
    if missing and not new_head:
        raise ValueError(
            f"{missing[0]} is in none of its files, and would be random; wanted {wanted}"
        )
    return model


def _convert_and_say(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model of the caller's in place, and log a line if its weights had another
    precision.
    """
    before = _bytes_by_dtype(model)
    _convert(model, dtype)
    after = _bytes_by_dtype(model)
    if before.keys() == after.keys() or os.environ.get("RANK", "0") != "0":
        return
    log.warning(
        "model: its weights were %s, and are %s now, in place (%+.2f GiB); load it in that precision, or copy it, to "
        "keep yours",
        _listed(before),
        _listed(after),
        (sum(after.values()) - sum(before.values())) / 2**30,
    )


def _bytes_by_dtype(model: nn.Module) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
    return sizes


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    """float32 and bfloat16"""
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights in place, as `transformers` would have loaded them.

    It computes rotary frequencies, and other buffers that no file holds, in their own precision: if
    these were rounded, the rotary angles of late positions would shift.
    """
    for path, module in model.named_modules():
        in_no_file = module._non_persistent_buffers_set
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is None or not tensor.is_floating_point() or name in in_no_file:
                continue
            kept = _stays(model, f"{path}.{name}", dtype)
            tensor.data = tensor.data.to(torch.float32 if kept else dtype)


def _stays(model: nn.Module, name: str, dtype: torch.dtype | None) -> bool:
    """True for a weight that `transformers` keeps in float32 in a model of this precision."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    patterns = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns += getattr(model, "_keep_in_fp32_modules", None) or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _classifier_of(architecture: transformers.PretrainedConfig, task: str) -> type[Any]:
    """The generic classifier of `transformers` on the backbone of this architecture."""
    backbone: Any = transformers.AutoModel._model_mapping[type(architecture)]
    generic: Any = (
        GenericForSequenceClassification if task == "SEQ_CLS" else GenericForTokenClassification
    )
    name = backbone.__name__.removesuffix("Model") + generic.__name__.removeprefix("Generic")
    log.warning(
        "%s: transformers has no such class; the saved model can be loaded by burnish alone", name
    )
    pretrained = next(
        kind for kind in backbone.__mro__ if kind.__name__.endswith("PreTrainedModel")
    )
    # As a class of transformers: those of others are to fill the buffers that no file holds
    # themselves.
    members = {"config_class": type(architecture), "__module__": pretrained.__module__}
    return type(name, (generic, pretrained), members)


def _quantization(config: Common) -> dict[str, Any]:
    """The argument of ``from_pretrained`` that quantizes; without quantization, no argument.

    Given a None, transformers takes the weights of quantized files for plain ones.
    """
    if config.quantize is None:
        return {}
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            "quantize: needs bitsandbytes, which is not installed; pip install bitsandbytes"
        )
    fields: dict[str, Any]
    if config.quantize == "4bit":
        quiet.release()
        fields = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": getattr(torch, config.dtype)
            if config.dtype in ("bfloat16", "float16")
            else torch.float32,
        }
    else:
        fields = {"load_in_8bit": True}
    built = build(
        "quantize_kwargs", transformers.BitsAndBytesConfig, config.quantize_kwargs, **fields
    )
    return {"quantization_config": built}


def save_model(
    policy: Backbone,
    tokenizer: transformers.PreTrainedTokenizerBase,
    directory: Path,
    *,
    write: bool = True,
) -> None:
    """Write ``model`` and, of a policy with adapters, ``adapter`` under a run's directory.

    See `write_model`.
    """
    write_model(policy, tokenizer, directory / "model", directory / "adapter", write=write)


def write_model(
    policy: Backbone,
    tokenizer: transformers.PreTrainedTokenizerBase,
    target: Path,
    adapter: Path | None = None,
    *,
    write: bool = True,
) -> None:
    """Write weights (adapters merged), tokenizer and processor, as transformers and vLLM load them;
    adapters also on their own.

    Weights are rounded to the dtype in which `load_model` found them, however they were trained: a
    bfloat16 model stays one, of the same size, and ``weights_dtype: bfloat16`` makes one. After a
    run in float64 they stay float64; those of a model that it did not load are not rounded. No file
    is larger than 5 GB, unless one weight is. The policy itself is not changed.

    Args:
        target: directory of the model.
        adapter: directory of the adapters alone; None leaves them out.
        write: true on one rank. All that hold shards of the policy call this; weights are gathered
            one by one.
    """
    if not write and not is_sharded(policy):
        return
    dtype = getattr(policy.plain, "stored_dtype", None)
    weights: dict[str, Tensor] = {}
    # On every rank, which gathering needs; only the one that writes keeps them, in host memory.
    for name, weight in named_weights(policy, dtype, tied=False):
        if write:
            weights[name] = weight.detach().cpu()
    if isinstance(policy.model, PeftModel) and adapter is not None:
        _save_adapter(policy.model, adapter, write=write)
    if write:
        # An earlier model goes first, and weights come last: what is left half-way can't be loaded.
        for old in target.glob("*.safetensors*"):
            old.unlink()
        if policy.reader is not None:
            policy.reader.processor.save_pretrained(target)
        _save_tokenizer(tokenizer, target)
        _assembled(policy.plain, weights).save_pretrained(target, max_shard_size=_FILE)


def _save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write the tokenizer without how its files were found: on disk or on the Hub, with a network
    or without one.
    """
    plain = copy.copy(tokenizer)
    plain.init_kwargs = dict(tokenizer.init_kwargs)
    for how_found in ("is_local", "local_files_only"):
        plain.init_kwargs.pop(how_found, None)
    plain.save_pretrained(directory)


def _save_adapter(model: PeftModel, directory: Path, *, write: bool) -> None:
    """Write the policy's adapter alone.

    The reference's, which the model may hold too, is left out.
    """
    kept = re.compile("lora_|_to_save|token_ad")
    weights = {
        name: whole(tensor) for name, tensor in model.state_dict().items() if kept.search(name)
    }
    if write:
        model.save_pretrained(
            str(directory),
            state_dict=weights,
            selected_adapters=["default"],
            save_embedding_layers=False,
        )
        plain: Any = model.get_base_model()
        # for a run that goes on with the adapter: its base has other end tokens
        if plain.can_generate():
            plain.generation_config.save_pretrained(directory)
        else:
            (directory / LABELS_FILE).write_text(json.dumps(plain.config.id2label))


def _assembled(like: PreTrainedModel, weights: Mapping[str, Tensor]) -> Any:
    """A plain model of the same architecture with these weights."""
    config = copy.deepcopy(like.config)
    vars(config).pop("quantization_config", None)  # merged weights are plain
    with torch.device("meta"):
        model: Any = type(like)(config)
    tied_to = model.all_tied_weights_keys
    state = {name: weights[tied_to.get(name, name)] for name in model.state_dict()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    if model.can_generate():
        model.generation_config = like.generation_config
    return model


def named_weights(
    policy: nn.Module, dtype: torch.dtype | None = None, *, tied: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy, or of its model, under the names of transformers, adapters merged.

    Weights of a sharded policy are gathered one by one: all ranks take part, and none holds more
    than one whole weight.

    Args:
        dtype: of floating-point weights; without it, they keep theirs.
        tied: false leaves out the weights that the model ties to others.
    """
    model: nn.Module = policy
    plain: Any = policy
    if isinstance(policy, Backbone):
        model = policy.model
        plain = policy.plain
    reshard(policy)
    weights = merged_weights(model) if isinstance(model, PeftModel) else model.state_dict().items()
    left_out = () if tied else plain.all_tied_weights_keys
    for name, weight in weights:
        if name not in left_out:
            kept = _stays(plain, name, dtype)
            yield name, _gathered(weight, None if kept else dtype)


def adapter_weights(
    policy: Backbone, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy's adapter alone, under peft's names; see `named_weights`."""
    for name, weight in get_peft_model_state_dict(policy.model).items():
        yield name, _gathered(weight, dtype)


def _gathered(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The whole tensor, rounded before it is gathered: what is sent is as small as what is kept."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return whole(tensor)


def is_sharded(module: nn.Module) -> bool:
    """True if this rank holds only a part of the weights."""
    parts = (*module.modules(), *module.parameters())
    return any(isinstance(each, FSDPModule | DTensor) for each in parts)


@torch.no_grad()
def detached_copy(policy: Backbone) -> nn.Module:
    """A plain copy of the model, adapters merged.

    All ranks gather the weights of a sharded model.
    """
    copied: Any
    if not is_sharded(policy):
        copied = copy.deepcopy(policy.model)
        return copied.merge_and_unload() if isinstance(copied, PeftModel) else copied  # type: ignore[no-any-return]
    copied = _assembled(
        policy.plain, {name: tensor.clone() for name, tensor in named_weights(policy)}
    )
    # Buffers that no state_dict holds, such as rotary frequencies.
    for path, module in policy.plain.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, Tensor):
                twin = copied.get_submodule(path.replace(".base_layer", ""))
                setattr(twin, name, value.clone())
    return copied  # type: ignore[no-any-return]
