"""What the head is measured on: shapes, and the hidden states, weights, targets and upstream gradients of one."""

import importlib
import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operation import Inputs, Settings
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


def random_inputs(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    dead_rows: float = 0.0,
    settings: Settings | None = None,
) -> Inputs:
    """The same at every call, on the same kind of device. One target is in the last column."""
    tokens, width, vocab = shape
    random = torch.Generator(device).manual_seed(0)
    hidden, weight = random_head(tokens, width, vocab, dtype, random)
    target = torch.randint(vocab, (tokens,), generator=random, device=device)
    target[-1] = vocab - 1
    return _inputs(hidden, weight, target, dead_rows)


def random_head(
    tokens: int, width: int, vocab: int, dtype: torch.dtype, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Hidden states and weights whose logits have the spread of a language model's."""
    hidden = torch.randn(tokens, width, generator=random, device=random.device)
    weight = torch.randn(vocab, width, generator=random, device=random.device).mul_(SPREAD / math.sqrt(width))
    return hidden.to(dtype), weight.to(dtype)


def smollm2_inputs(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    dead_rows: float = 0.0,
    settings: Settings | None = None,
) -> Inputs:
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
    tokens, *head = shape
    if head != [weight.shape[1], len(weight)]:
        wanted, given = f"{weight.shape[1]}x{len(weight)}", "x".join(map(str, shape))
        raise ValueError(f"smollm2 has width and vocabulary {wanted}, got the shape {given}")
    text = "\n".join(inspect.getsource(importlib.import_module(name)) for name in TEXT)
    text = text[: 16 * tokens]  # a token has fewer letters
    ids = torch.tensor(tokenizer(text)["input_ids"][: tokens + 1], device=device)
    if len(ids) <= tokens:
        raise ValueError(f"the text has {len(ids) - 1} targets, got {tokens}")
    with torch.no_grad():
        hidden = torch.cat([model.model(row[None]).last_hidden_state[0] for row in torch.split(ids[:-1], CONTEXT)])
    return _inputs(hidden.to(dtype), weight.to(dtype), ids[1:], dead_rows)


INPUTS = {"random": random_inputs, "smollm2": smollm2_inputs}


def _inputs(hidden: Tensor, weight: Tensor, target: Tensor, dead_rows: float) -> Inputs:
    shape = Shape(len(hidden), hidden.shape[1], len(weight))
    upstream = per_token_upstream(("logprob", "entropy", "logsumexp"), shape.tokens, dead_rows, hidden.device)
    return Inputs(
        shape, {"hidden": hidden, "weight": weight, "target": target}, per_row=("hidden", "target"), upstream=upstream
    )


def per_token_upstream(
    outputs: Sequence[str], tokens: int, dead_rows: float, device: torch.device
) -> dict[str, Tensor]:
    """Gradients as of a mean over tokens. Of a dead row, such as one with advantage 0, they are all 0."""
    random = torch.Generator(device).manual_seed(1)
    alive = torch.randperm(tokens, generator=random, device=device) >= round(dead_rows * tokens)
    per_token = {o: torch.randn(tokens, generator=random, device=device) * alive / tokens for o in outputs}
    return {"loss": torch.ones((), device=device), **per_token}
