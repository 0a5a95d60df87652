"""A sequence under way, and the forward passes of the policy's module that continue it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...models.policy import Policy
from ..sample import Finish, Request, SamplingParams, VersionSpan

_CACHES = ("past_key_values", "cache_params")  # the latter in Mamba and its kin


@dataclass(eq=False)
class DecodeSequence:
    """A completion under way.

    Attributes:
        uniform: the numbers in [0, 1) that decide its tokens.
    """

    request: Request
    index: int
    uniform: list[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: Finish | None = None

    @classmethod
    def of(cls, request: Request, index: int) -> "DecodeSequence":
        return cls(request, index, uniforms(request.seed(index), request.sampling.max_tokens))

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def max_length(self) -> int:
        return len(self.request.prompt) + self.sampling.max_tokens

    def append(self, token: int, logprob: float, version: int) -> None:
        end = len(self.tokens)
        start = self.spans.pop().start if self.spans and self.spans[-1].version == version else end
        self.spans.append(VersionSpan(version, start, end + 1))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.sampling.stop:
            self.finish = "stop"
        elif len(self.tokens) == self.sampling.max_tokens:
            self.finish = "length"


def uniforms(seed: int, count: int) -> list[float]:
    """The numbers in [0, 1) that decide the tokens of the completion with this seed."""
    generator = torch.Generator().manual_seed(seed)
    numbers: list[float] = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    return numbers


class ModelRunner:
    """The policy's module: token ids to the input of its head, and that to logits."""

    def __init__(
        self, policy: Policy, vocab: int, context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.policy = policy
        self.vocab = vocab
        self.context = context

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Without gradients, and in evaluation mode for just as long: a step between two tokens does train."""
        training = [vars(module) for module in self.policy.model.modules() if module.training]
        for attributes in training:  # not by `train()`: it takes as long as a small model's forward pass
            attributes["training"] = False
        try:
            with torch.no_grad(), self.context():
                yield
        finally:
            for attributes in training:
                attributes["training"] = True

    def states(self, at: Tensor | None = None, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        """The input of the head [rows, ...] at these columns, or at the last; and the caches by their names."""
        plain = self.policy.plain
        if self.policy.fused:
            output = plain.base_model(**inputs)
            states: Tensor = output.last_hidden_state
        else:  # such a head is no known function of the hidden states: keep its logits instead
            output = plain(**inputs)
            states = output.logits
        row = torch.arange(len(states), device=states.device)
        caches = {name: output[name] for name in _CACHES if output.get(name) is not None}
        return states[:, -1] if at is None else states[row, at], caches

    def logits(self, states: Tensor) -> Tensor:
        """[rows, V] in float32 where the head is fused, without the rows that only pad the head's weight."""
        logits = self.policy.logits(states) if self.policy.fused else states
        return logits[:, : self.vocab]

    def ids(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[texts, longest], padded on the right, where nothing that is used looks."""
        longest = max(map(len, texts))
        return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=self.policy.device)
