"""What is measured: shapes, and the hidden states, head, targets and upstream gradients of one."""

import importlib
import inspect
import math
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .real_model import smollm2

SPREAD = 3.0  # standard deviation of the random logits, in nats
# Modules of the standard library whose source is the text behind real hidden states: prose, code, on every machine.
TEXT = ("argparse", "statistics", "difflib", "textwrap", "optparse", "inspect", "typing", "tarfile", "_pydecimal")
CONTEXT = 512


class Shape(NamedTuple):
    """N tokens, width D, vocabulary V."""

    tokens: int
    width: int
    vocab: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def flops(self) -> int:
        """NDV, the unit of cost; a matrix product is 2 of them."""
        return self.tokens * self.width * self.vocab


NAMED: dict[str, tuple[Shape, ...]] = {
    "tiny": (Shape(64, 32, 257),),
    "small": (Shape(512, 576, 49152),),
    "smollm2": (Shape(2048, 576, 49152),),
    "large": (Shape(8192, 4096, 151936),),
    "grid": tuple(Shape(n, d, v) for n in (8192, 16384) for d in (2048, 4096) for v in (128256, 151936, 262144)),
}


def parse_shapes(names: list[str]) -> list[Shape]:
    """Names, or sizes such as 2048x576x49152, tokens × width × vocabulary.

    Raises:
        ValueError: if one is neither.
    """
    return [shape for name in names for shape in NAMED.get(name) or (_sizes(name),)]


def _sizes(name: str) -> Shape:
    parts = name.replace(",", "x").split("x")
    if len(parts) == 3 and all(part.isdecimal() and int(part) > 0 for part in parts):
        return Shape(*map(int, parts))
    nearest = get_close_matches(name, NAMED, n=1, cutoff=0.5)
    hint = f", did you mean {nearest[0]!r}?" if nearest else ";"
    wanted = f"tokens x width x vocabulary as in 2048x576x49152, or one of {', '.join(NAMED)}"
    raise ValueError(f"no shape {name!r}{hint} wanted {wanted}")


class Inputs(NamedTuple):
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N]
    upstream: dict[str, Tensor]  # of each output, [N]; of the loss, a number

    @property
    def shape(self) -> Shape:
        tokens, width = self.hidden.shape
        return Shape(tokens, width, len(self.weight))


def random_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, dead_rows: float = 0.0) -> Inputs:
    """The same at every call, on the same kind of device. One target is in the last column."""
    random = torch.Generator(device).manual_seed(0)
    tokens, width, vocab = shape
    hidden = torch.randn(tokens, width, generator=random, device=device).to(dtype)
    weight = torch.randn(vocab, width, generator=random, device=device).mul_(SPREAD / math.sqrt(width)).to(dtype)
    target = torch.randint(vocab, (tokens,), generator=random, device=device)
    target[-1] = vocab - 1
    return Inputs(hidden, weight, target, _upstream(tokens, dead_rows, device))


def smollm2_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, dead_rows: float = 0.0) -> Inputs:
    """SmolLM2-135M-Instruct reads source text: its last hidden states, its head, and the tokens that follow.

    Raises:
        ValueError: if the shape is not that of the model.
        Unavailable: if the model is not to be had.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = smollm2()
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.to(device)
    weight: Tensor = model.get_output_embeddings().weight.detach()
    if shape[1:] != (weight.shape[1], len(weight)):
        raise ValueError(f"smollm2 has width and vocabulary {weight.shape[1]}x{len(weight)}, got the shape {shape}")
    text = "\n".join(inspect.getsource(importlib.import_module(name)) for name in TEXT)
    text = text[: 16 * shape.tokens]  # a token has fewer letters
    ids = torch.tensor(tokenizer(text)["input_ids"][: shape.tokens + 1], device=device)
    if len(ids) <= shape.tokens:
        raise ValueError(f"the text has {len(ids) - 1} targets, got the shape {shape}")
    with torch.no_grad():
        hidden = torch.cat([model.model(row[None]).last_hidden_state[0] for row in torch.split(ids[:-1], CONTEXT)])
    return Inputs(hidden.to(dtype), weight.to(dtype), ids[1:], _upstream(shape.tokens, dead_rows, device))


INPUTS = {"random": random_inputs, "smollm2": smollm2_inputs}


def _upstream(tokens: int, dead_rows: float, device: torch.device) -> dict[str, Tensor]:
    """Gradients as of a mean over tokens. Of a dead row, such as one with advantage 0, they are all 0."""
    random = torch.Generator(device).manual_seed(1)
    alive = torch.randperm(tokens, generator=random, device=device) >= round(dead_rows * tokens)
    outputs = ("logprob", "entropy", "logsumexp")
    per_token = {o: torch.randn(tokens, generator=random, device=device) * alive / tokens for o in outputs}
    return {"loss": torch.ones((), device=device), **per_token}
