"""An unfinished sequence, the forward passes of the policy's module that continue it, and the draw
of its tokens.

One number in [0, 1) per row decides its token, so that a row's token does not depend on the other
rows.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ....data.images import ImageRef
from ...models.images import has_axes
from ...models.policy import Policy
from ..sample import Request, SamplingParams, VersionSpan
from ..stop_words import StopWords
from .packed import PackedWeights

# Of the argument and the output; transformers before 5.24 and code of its time know the latter two,
# Mamba the last.
_CACHES = ("cache", "past_key_values", "cache_params")
_ELEMENTS = 1 << 24  # logits that are turned into probabilities at once
_ELEMENTS_CPU = 1 << 19  # beyond which memory is mapped, and given back, for every token anew


class DecodeSequence:
    """An unfinished completion.

    Attributes:
        uniform: the numbers in [0, 1) that decide its tokens.
        max_length: of prompt and completion together.
        place: in the queue of those that arrive together, whichever request was first.
        words: end it, too.
    """

    def __init__(self, request: Request, index: int, words: StopWords | None = None) -> None:
        self.request = request
        self.index = index
        self.sampling = request.sampling
        self.words = words
        generator = torch.Generator().manual_seed(request.seed(index))
        numbers = torch.rand(self.sampling.max_tokens, generator=generator, dtype=torch.float64)
        self.uniform: list[float] = numbers.tolist()
        self.max_length = len(request.prompt) + self.sampling.max_tokens
        self.place = (request.task, request.turn, sorted(request.indices), index)
        self.seen = set(request.prompt)  # of the prompt, and of the completion as it grows
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.finish: Literal["stop", "length", "aborted"] | None = None

    def _completes_word(self) -> bool:
        return self.words is not None and self.words.ended(self.tokens)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Add a token that weights of this version gave, with its log-prob."""
        end = len(self.tokens)
        start = end
        if self.spans and self.spans[-1].version == version:  # the last span grows
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, end + 1))
        self.seen.add(token)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.sampling.stop or self._completes_word():
            self.finish = "stop"
        elif len(self.tokens) == self.sampling.max_tokens:
            self.finish = "length"


@dataclass
class ModelRunner:
    """The policy's module: token ids to the input of its head, and that to logits.

    See `LocalSource`.
    """

    policy: Policy
    vocab: int
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        head = self.policy.head if self.policy.fused else None
        self.packed = PackedWeights(self.policy.model, head)

    @property
    def has_axes(self) -> bool:
        """True if positions are in several axes, because the policy sees images."""
        return self.policy.images is not None and has_axes(self.policy.plain)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Context without gradients and in evaluation mode, left between two tokens, when a
        training step may run.
        """
        training = [vars(module) for module in self.policy.model.modules() if module.training]
        # not by `train()`, which takes as long as a small model's forward pass
        for attributes in training:
            attributes["training"] = False
        try:
            with torch.no_grad(), self.context(), self.packed.in_use():
                yield
        finally:
            for attributes in training:
                attributes["training"] = True

    def ids(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[texts, longest], padded on the right, where no used position attends."""
        # an image token would want an image
        filler = 0 if self.policy.images is None else self.policy.images.word
        return self._filled(texts, filler)

    def _filled(self, rows: Sequence[Sequence[int]], filler: int) -> Tensor:
        longest = max(map(len, rows))
        filled = [[*row, *[filler] * (longest - len(row))] for row in rows]
        return torch.tensor(filled, device=self.policy.device)

    def inputs(
        self, texts: Sequence[Sequence[int]], shown: Sequence[tuple[ImageRef, ...]]
    ) -> tuple[dict[str, Any], list[int]]:
        """The arguments of a forward pass that reads texts from their beginning; and for each text,
        how far the position of the token that follows is beyond its length.

        Positions are given where they are in several axes, in which an image takes fewer of them
        than it has tokens.

        Args:
            shown: the images of each text.
        """
        ids = self.ids(texts)
        inputs: dict[str, Any] = {"input_ids": ids}
        beyond = [0] * len(texts)
        images = self.policy.images
        if images is None:
            return inputs, beyond
        if any(shown):
            inputs |= self.policy.image_input(ids, shown)
        if self.has_axes:
            plain = self.policy.plain
            axes = [
                images.axes(plain, list(text), seen)
                for text, seen in zip(texts, shown, strict=True)
            ]
            inputs["position_ids"] = torch.stack(
                [self._filled(axis, 0) for axis in zip(*axes, strict=True)]
            )
            beyond = [max(map(max, each)) + 1 - len(each[0]) for each in axes]
        return inputs, beyond

    def position_ids(self, positions: Tensor) -> Tensor:
        """Positions [rows, 1] of tokens of text, as a forward pass takes them: the same in every
        axis, if there are several.
        """
        return positions.expand(3, -1, -1) if self.has_axes else positions

    def states(
        self, at: Tensor | None = None, *, cache: object = None, **inputs: object
    ) -> tuple[Tensor, Any]:
        """The input of the head [rows, ...] at these columns, or at the last; and the cache, if the
        model has one.
        """
        fused = self.policy.fused
        body = self.policy.plain.base_model if fused else self.policy.plain
        if cache is not None:
            inputs[_cache_name(type(body))] = cache
        output = body(**inputs)
        # A head that can't be fused is not a known function of the hidden states: keep its logits
        # instead.
        states: Tensor = output.last_hidden_state if fused else output.logits
        cache = next((value for name, value in output.items() if name in _CACHES), None)
        if at is None:
            return states[:, -1], cache
        return states[torch.arange(len(states), device=at.device), at], cache

    def logits(self, states: Tensor) -> Tensor:
        """[rows, V] in float32 where the head is fused, without the rows that only pad the head's
        weight.
        """
        if not self.policy.fused:
            return states[:, : self.vocab]
        products = self.packed.logits(states)
        if products is None:
            logits = self.policy.logits(states)
        else:
            logits = self.policy.transform(products)
        return logits[:, : self.vocab]


def _cache_name(model: type[Any]) -> str:
    """The argument of this model's forward pass that takes its cache."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in _CACHES if name in accepted), "past_key_values")


def penalize(
    logits: Tensor, seen: Sequence[Collection[int]], sampling: Sequence[SamplingParams]
) -> Tensor:
    """The logits [rows, V] with those of tokens that were seen made smaller.

        z_i ← z_i / ρ  if z_i > 0,  z_i ρ  otherwise,   for i in seen, ρ = repetition_penalty

    Args:
        seen: token ids of each row's prompt and completion.
    """
    rows, columns, penalties = [], [], []
    for row, (ids, params) in enumerate(zip(seen, sampling, strict=True)):
        if params.repetition_penalty != 1:
            known = sorted(token for token in ids if token < logits.shape[1])
            rows += [row] * len(known)
            columns += known
            penalties += [params.repetition_penalty] * len(known)
    if not rows:
        return logits
    places = torch.tensor([rows, columns], device=logits.device).unbind()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    penalty = torch.tensor(penalties, dtype=logits.dtype, device=logits.device)
    values = logits[places]
    return logits.index_put(places, torch.where(values > 0, values / penalty, values * penalty))


def penalize_seen(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """`penalize` without a wait for the device.

    Args:
        seen: bool [rows, V], true for the tokens of each row's prompt and completion.
        penalty: [rows], ρ.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ratio = penalty[:, None].to(logits.dtype)
    smaller = torch.where(logits > 0, logits / ratio, logits * ratio)
    return torch.where(seen, smaller, logits)


def draw(
    logits: Tensor, uniform: Sequence[float], sampling: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """One token per row of ``logits`` [rows, V], by inversion of its cumulative distribution.

        i = min { i : Σ_{j≤i} p_j > u Σ_j p_j },   p = softmax(logits / T) over what min_p, top_k and then top_p leave

    Returns int64 tokens [rows], and their log-probs [rows] under the distribution that they were
    drawn from. A row of temperature 0 takes its likeliest token, and its log-prob is that of
    temperature 1. `penalize` comes before it.
    """
    numbers = torch.tensor(
        [(u, *numbers_of(row)) for u, row in zip(uniform, sampling, strict=True)],
        dtype=torch.float64,
        device=logits.device,
    )
    return draw_rows(logits, numbers, DrawKinds.of(sampling))


def numbers_of(sampling: SamplingParams) -> tuple[float, float, float, float]:
    """What `draw_rows` wants of a row beside u."""
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


class DrawKinds(NamedTuple):
    """What some of the rows want.

    It is asked of the settings, not of tensors: a GPU would have to be waited for.

    Attributes:
        scaled: a temperature other than 0 and 1.
        truncated: some tokens can't be drawn.
        greedy: the likeliest token.
    """

    scaled: bool
    truncated: bool
    greedy: bool

    @classmethod
    def of(cls, sampling: Sequence[SamplingParams]) -> "DrawKinds":
        kinds = set(sampling)
        return cls(
            any(kind.temperature not in (0.0, 1.0) for kind in kinds),
            any(kind.temperature != 0 and kind.truncated for kind in kinds),
            any(kind.temperature == 0 for kind in kinds),
        )


def draw_rows(logits: Tensor, numbers: Tensor, kinds: DrawKinds) -> tuple[Tensor, Tensor]:
    """`draw` without a wait for the device.

    Args:
        numbers: float64 [rows, 5]: u and `numbers_of`.
    """
    most = _ELEMENTS_CPU if logits.device.type == "cpu" else _ELEMENTS
    rows = max(1, most // logits.shape[1])
    if len(logits) <= rows:
        return _draw(logits, numbers, kinds)
    tokens, logprobs = [], []
    for first in range(0, len(logits), rows):
        part = slice(first, first + rows)
        drawn, logprob = _draw(logits[part], numbers[part], kinds)
        tokens.append(drawn)
        logprobs.append(logprob)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(logits: Tensor, numbers: Tensor, kinds: DrawKinds) -> tuple[Tensor, Tensor]:
    """`draw_rows`, of all rows at once."""
    number, temperature, top_k, top_p, min_p = numbers[:, :, None].unbind(1)  # [rows, 1]
    greedy = temperature == 0
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if kinds.scaled:
        logits = logits / temperature.masked_fill(greedy, 1.0).to(logits.dtype)
    if kinds.truncated:
        logits = _likeliest(
            logits,
            top_k.masked_fill(greedy, 0.0),
            top_p.masked_fill(greedy, 1.0),
            min_p.masked_fill(greedy, 0.0),
        )
    highest = logits.amax(-1, keepdim=True)
    # In float64: a sum of 150,000 numbers in float32 would shift which token a number falls on.
    cumulative = (logits - highest).exp_().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, number * total, right=True).clamp_(
        max=logits.shape[1] - 1
    )
    if kinds.greedy:
        token = torch.where(greedy, logits.argmax(-1, keepdim=True), token)
    logprob = (logits.gather(1, token) - highest).double() - total.log()
    return token[:, 0], logprob[:, 0].to(logits.dtype)


def _likeliest(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The logits with -inf for what is cut off.

    Kept are tokens of at least min_p times the probability of the likeliest, of these the likeliest
    k, and of these those that make up p.
    """
    # a probability that is min_p of another one is log(min_p) below it; log(0) keeps all
    lowest = logits.amax(-1, keepdim=True).double() + min_p.log()
    logits = logits.masked_fill(logits < lowest, -torch.inf)
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probability = ordered.softmax(-1, dtype=torch.float64)
    before = probability.cumsum(-1) - probability
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ordered)
