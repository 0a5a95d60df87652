"""One generated answer, and what was asked for."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Finish = Literal["stop", "length", "aborted"]


class VersionSpan(NamedTuple):
    """Tokens ``[start, end)`` of an answer were sampled from the weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        max_tokens: the longest answer.
        temperature: of the softmax; 0 takes the likeliest token, and its log-probs are those of temperature 1.
        top_p, top_k: what is left of the distribution, 1 and 0 being all of it. Log-probs are those of the
            distribution that is drawn from, so that whatever is left out has none.
        stop: token ids that end an answer; they are its last token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: must be >= 1, got {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature: must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k: must be >= 0, where 0 keeps all, got {self.top_k}")


@dataclass(frozen=True)
class Request:
    """Answers wanted to one prompt.

    Attributes:
        task: the place of the prompt in the run's order of tasks; it names the group.
        prompt: token ids, never text: nothing is tokenized twice.
        indices: which answers of the group, so that one of them can be asked for again.
        key: the run's, usually its seed.
        turn: of a conversation; its earlier turns are part of the prompt.
    """

    task: int
    prompt: Sequence[int]
    indices: Sequence[int]
    sampling: SamplingParams
    key: int
    turn: int = 0

    def seed(self, index: int) -> int:
        """Of one answer, in [0, 2⁶³): a hash of what is asked for, so that neither order nor concurrency matters."""
        named = ",".join(map(str, (self.key, self.task, index, self.turn)))
        return int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") >> 1


@dataclass
class Sample:
    """One answer to a prompt.

    Attributes:
        task, index: which prompt of the run it answers, and which of the prompt's answers it is.
        prompt: token ids.
        tokens: token ids of the answer; in a conversation, what others say after the first turn stands among them.
        trained: which tokens the policy sampled; the others are context.
        logprobs: of every token under the distribution that it was drawn from, 0 where it was not drawn.
        spans: which weights they were drawn from, in order and without gaps where tokens were drawn.
        finish: whether it ended by itself, was cut at its longest, or was given up.
        text: what the policy sampled, decoded without special tokens, for whoever judges it.
        rewards: by the name of the function, its score; None if it does not apply, or in a word how it failed.
        info: whatever rewards and environments leave behind, to be stored with the sample: plain data.
        row: of the data, that its prompt comes from, where the scheduler was given rows; it is not stored.
    """

    task: int
    index: int
    prompt: list[int]
    tokens: list[int]
    trained: list[bool]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish: Finish
    text: str = ""
    rewards: dict[str, float | str | None] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def oldest(self) -> int:
        """The oldest version that it was drawn from."""
        return min(span.version for span in self.spans)


def check_sample(sample: Sample, *, vocab: int | None = None) -> None:
    """Raises unless the parts of a sample agree with each other.

    Raises:
        ValueError: names the task, the answer and what is wrong with it.
    """
    who = f"sample {sample.index} of task {sample.task}"
    length = len(sample.tokens)
    for name, values in (("trained", sample.trained), ("logprobs", sample.logprobs)):
        if len(values) != length:
            raise ValueError(f"{who}: {name} must have one entry per token, {length}, got {len(values)}")
    if not any(sample.trained):
        raise ValueError(f"{who}: it has no token of the policy; an answer has one at least, the one that ends it")
    if not sample.prompt:
        raise ValueError(f"{who}: its prompt is empty; the first token is predicted from the last of the prompt")
    if vocab is not None and any(not 0 <= token < vocab for token in sample.tokens):
        raise ValueError(f"{who}: token ids must be in [0, {vocab}), got {max(sample.tokens)}")
    wrong = [p for p in sample.logprobs if not -math.inf < p <= 1e-3]  # NaN too; rounding may leave a hair above 0
    if wrong:
        raise ValueError(f"{who}: log-probs must be finite and <= 0, got {wrong[0]}")
    covered = {t for span in sample.spans for t in range(span.start, span.end)}
    missing = [t for t, drawn in enumerate(sample.trained) if drawn and t not in covered]
    if missing:
        raise ValueError(f"{who}: no version is known for token {missing[0]}, which was sampled")
