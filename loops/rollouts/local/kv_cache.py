"""What has been read of the answers under way, so that every token is read once.

    ContinuousBatch  every answer has a row of one batch; answers join and leave between two tokens
    StaticBatch   answers to one prompt at a time, with the cache that the model makes itself, or none: for
    recurrences and
               windows, which count what they have seen in ways of their own

A prompt is read once for all of its answers.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from .runner import Answer, Reader
from .slots import KVCache

READ = 8192  # tokens of context that are read at once

Fit = Callable[[int], int]  # how many completions of so many tokens, prompts included, may be cached at once


class Memory(Protocol):
    """What is remembered of the answers under way; they stand in the order of `answers`."""

    answers: list[Answer]

    def room(self, waiting: Sequence[Answer]) -> int:
        """How many of the first of these may join now."""
        ...

    def join(self, answers: Sequence[Answer]) -> Tensor:
        """Read their prompts; returns the states [answers, ...] that their first tokens are drawn from."""
        ...

    def read_again(self) -> None:
        """The weights are other ones: forget, and read all but the last token of every answer."""
        ...

    def step(self) -> Tensor:
        """Read the last token of every answer; returns the states [answers, ...] for the next."""
        ...

    def drop_finished(self) -> None: ...


class ContinuousBatch:
    """A row of one batch for every answer.

    Args:
        fit: by the longest of them; one answer is always let in.
        window: the longest answer with its prompt that may join.
    """

    def __init__(self, reader: Reader, fit: Fit, window: int | None = None) -> None:
        self.reader = reader
        self.fit = fit
        self.window = window
        self.answers: list[Answer] = []
        self.slots = KVCache(reader.policy.device)

    def room(self, waiting: Sequence[Answer]) -> int:
        longest = max((answer.longest for answer in self.answers), default=0)
        for count, answer in enumerate(waiting):
            longest = max(longest, answer.longest)
            if self.window is not None and longest > self.window:
                return count
            if len(self.answers) + count + 1 > self.fit(longest):
                return count if self.answers else max(count, 1)
        return len(waiting)

    def join(self, answers: Sequence[Answer]) -> Tensor:
        self.answers += answers
        return self._read([list(answer.request.prompt) for answer in answers])

    def read_again(self) -> None:
        self.slots = KVCache(self.reader.policy.device)
        self._read([[*answer.request.prompt, *answer.tokens[:-1]] for answer in self.answers])

    def step(self) -> Tensor:
        last = torch.tensor([answer.tokens[-1] for answer in self.answers], device=self.reader.policy.device)
        positions, mask = self.slots.before_step()
        states, _ = self.reader.states(
            input_ids=last[:, None],
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.slots,
            use_cache=True,
        )
        self.slots.after_step()
        return states

    def drop_finished(self) -> None:
        keep = [i for i, answer in enumerate(self.answers) if answer.finish is None]
        if len(keep) < len(self.answers):
            self.answers = [self.answers[i] for i in self.slots.drop(keep)]

    def _read(self, texts: list[list[int]]) -> Tensor:
        """Neighbors with the same text share what is read of it."""
        self.slots.longest = max(answer.longest for answer in self.answers)
        shared = [(text, len(list(same))) for text, same in groupby(texts)]
        states = []
        while shared:
            count = max(1, READ // max(len(text) for text, _ in shared))
            part, shared = shared[:count], shared[count:]
            lengths, copies = [len(text) for text, _ in part], [number for _, number in part]
            ids = self.reader.ids([text for text, _ in part])
            at = torch.tensor(lengths, device=ids.device) - 1
            cache = DynamicCache()
            found, _ = self.reader.states(at, input_ids=ids, past_key_values=cache, use_cache=True)
            self.slots.extend(cache, lengths, copies)
            states.append(found.repeat_interleave(torch.tensor(copies, device=ids.device), dim=0))
        return torch.cat(states)


class StaticBatch:
    """Answers to one prompt at a time.

    Args:
        fit: by the longest of them; one answer is always let in.
        cached: whether the model's own cache can be relied on; otherwise all is read anew for every token.
    """

    def __init__(self, reader: Reader, fit: Fit, *, cached: bool) -> None:
        self.reader = reader
        self.fit = fit
        self.cached = cached
        self.answers: list[Answer] = []
        self.caches: dict[str, Any] = {}

    def room(self, waiting: Sequence[Answer]) -> int:
        if self.answers:
            return 0
        alike = next(groupby(waiting, key=lambda answer: list(answer.request.prompt)))[1]
        return max(1, min(len(list(alike)), self.fit(waiting[0].longest)))

    def join(self, answers: Sequence[Answer]) -> Tensor:
        self.answers = list(answers)
        return self._read([list(answer.request.prompt) for answer in answers])

    def read_again(self) -> None:
        if self.cached:
            self._read([[*answer.request.prompt, *answer.tokens[:-1]] for answer in self.answers])

    def step(self) -> Tensor:
        if not self.cached:
            return self._read([[*answer.request.prompt, *answer.tokens] for answer in self.answers])
        last = self.reader.ids([answer.tokens[-1:] for answer in self.answers])
        states, self.caches = self.reader.states(input_ids=last, **self.caches, use_cache=True)
        return states

    def drop_finished(self) -> None:
        keep = [i for i, answer in enumerate(self.answers) if answer.finish is None]
        if len(keep) < len(self.answers):
            self.answers = [self.answers[i] for i in keep]
            for cache in self.caches.values() if keep else ():
                cache.reorder_cache(torch.tensor(keep, device=self.reader.policy.device))

    def _read(self, texts: list[list[int]]) -> Tensor:
        states, self.caches = self.reader.states(input_ids=self.reader.ids(texts), use_cache=self.cached)
        return states


def ragged_fit(reader: Reader, cache_bytes: int) -> Fit:
    """How many answers a batch may cache, by the bytes that this model's keys and values take in it."""
    slots, cache = KVCache(reader.policy.device), DynamicCache()
    with reader.reading():
        reader.states(input_ids=reader.ids([[1]]), past_key_values=cache, use_cache=True)
        slots.extend(cache, [1], [1])
    token = slots.bytes_per_token
    return lambda longest: cache_bytes // (token * longest)


def lockstep_fit(reader: Reader, cache_bytes: int, *, cached: bool) -> Fit:
    """The same of the model's own cache, which may be of one size whatever it has read, or of both kinds."""
    if not cached:
        return lambda longest: READ // longest
    with reader.reading():
        held = [
            sum(map(_bytes_of, reader.states(input_ids=reader.ids([[1] * length]), use_cache=True)[1].values()))
            for length in (1, 2)
        ]
    token = held[1] - held[0]
    return lambda longest: cache_bytes // (held[0] + token * (longest - 1))


def _bytes_of(cache: Any) -> int:
    held = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [x for value in held for x in (value.values() if isinstance(value, dict) else [value])]
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))
