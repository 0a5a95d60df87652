"""One completion, its request, the checks of both, and a sample as plain data.

A conversation is one sample. It is one sequence of tokens where each turn continues the one before,
and several *contexts* where it does not: its history was shortened, or it called others, one after
the other or at the same time.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

# Not at run time: settings name rewards, which name samples, and to import the data would cost
# `translate` and `--help` a second.
if TYPE_CHECKING:
    from ...data.images import ImageRef
    from .packed import Packed

Row = Mapping[str, Any]  # of a data set, as reward functions and environments receive it
Record = dict[str, Any]  # of a sample: its fields as JSON and checkpoints hold them


class VersionSpan(NamedTuple):
    """The version of the weights from which tokens ``[start, end)`` of a completion were
    sampled.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that tokens are drawn from.

    Attributes:
        max_tokens: the longest completion.
        temperature: of the softmax, and of the log-probs; compare them with
            ``policy(batch, temperature=...)``; 0 takes the likeliest token, with its log-prob at
            temperature 1.
        top_p, top_k: truncation of the distribution, none at 1 and 0. Log-probs are those after
            truncation.
        stop: token ids that end a completion, as its last token.
        min_p: truncation at this share of the likeliest token's probability, none at 0; it comes
            before top_k and top_p, as in vLLM.
        repetition_penalty: divides the positive logits of tokens that the prompt or the completion
            has already, and multiplies the negative ones, before the temperature; none at 1. Keskar
            et al. 2019, arXiv:1909.05858, section 4.1, for positive logits.
        stop_words: end a completion by the token that completes one, and stay in it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: must be >= 1, got {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature: must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k: must be >= 0, where 0 keeps all, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: must be in [0, 1], where 0 keeps all, got {self.min_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty: must be > 0, where 1 is none, got {self.repetition_penalty}"
            )
        if not _are_words(self.stop_words):
            raise ValueError(
                f"stop_words: wanted texts that are not empty, got {self.stop_words!r}"
            )
        if not all(isinstance(token, Integral) for token in self.stop):
            raise ValueError(
                f"stop: wanted token ids, such as those of tokenizer.encode, got {self.stop!r}"
            )

    @property
    def truncated(self) -> bool:
        """True if some tokens are never drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def altered(self) -> bool:
        """True if tokens are drawn from another distribution than the policy's at this
        temperature.
        """
        return self.truncated or self.repetition_penalty != 1


def _are_words(words: Sequence[object]) -> bool:
    """True for texts that are not empty; one text alone is none of several."""
    if isinstance(words, str):
        return False
    return all(isinstance(word, str) and word for word in words)


@dataclass(frozen=True)
class Request:
    """Completions of one prompt.

    Attributes:
        task: the place of the prompt in the run's order; it names the group.
        prompt: token ids, never text: nothing is tokenized twice.
        indices: which completions of the group to sample, so that a single one can be requested
            again.
        key: of the run, usually its seed.
        turn: of a conversation; its earlier turns are part of the prompt.
        priority: of requests that wait for a place, those of the lowest number go first.
        images: that the prompt shows.
    """

    task: int
    prompt: Sequence[int]
    indices: Sequence[int]
    sampling: SamplingParams
    key: int
    turn: int = 0
    priority: int = 0
    images: "tuple[ImageRef, ...]" = ()

    def seed(self, index: int) -> int:
        """The seed of one completion in [0, 2⁶³): a hash of the request, so that order and
        concurrency don't matter.
        """
        name = ",".join(map(str, (self.key, self.task, index, self.turn)))
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


@dataclass
class Context:
    """One sequence of a conversation: a prompt, and the tokens that follow it.

    Attributes:
        prompt: token ids.
        tokens: token ids of what follows; in a conversation they include the observations after the
            first turn.
        trained: which tokens the policy sampled, to be trained here; the others are given. A token
            that two contexts have in common was drawn once, and is trained in one of them.
        logprobs: of every token under the distribution that it was drawn from, 0 where it was not
            drawn.
        spans: the versions of the weights that tokens were drawn from, in order, without gaps
            between drawn tokens.
    """

    prompt: "list[int] | Packed[int]"
    tokens: "list[int] | Packed[int]"
    trained: "list[bool] | Packed[bool]"
    logprobs: "list[float] | Packed[float]"
    spans: list[VersionSpan]

    def copy(self) -> "Context":
        """The same in lists."""
        return Context(
            list(self.prompt),
            list(self.tokens),
            list(self.trained),
            list(self.logprobs),
            list(self.spans),
        )


@dataclass
class Sample:
    """One completion of a prompt, or one conversation.

    A source makes it of lists. Those that a scheduler hands on are packed, see `Packed`: they read
    like lists, in a tenth of the memory. `copy` has lists.

    Attributes:
        task, index: which prompt of the run, and which completion in its group.
        prompt, tokens, trained, logprobs, spans: of its first context, see `Context`.
        finish: a stop token, the maximal length, or aborted.
        text: the sampled tokens, decoded without special tokens, for rewards.
        rewards: scores by the name of the reward; None if it does not apply, or in a word how it
            failed.
        info: plain data of rewards and environments, stored with the sample.
        further: the other contexts of a conversation, in the order they began.
        row: the row of the data that its prompt comes from, where the scheduler was given rows; it
            is not stored.
        images: that its prompt shows, where the scheduler was given them; not stored either.
    """

    task: int
    index: int
    prompt: "list[int] | Packed[int]"
    tokens: "list[int] | Packed[int]"
    trained: "list[bool] | Packed[bool]"
    logprobs: "list[float] | Packed[float]"
    spans: list[VersionSpan]
    finish: Literal["stop", "length", "aborted"]
    text: str = ""
    rewards: dict[str, float | str | None] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    further: list[Context] = field(default_factory=list)
    row: Row | None = field(default=None, compare=False, repr=False)
    images: "tuple[ImageRef, ...]" = field(default=(), compare=False, repr=False)

    @property
    def contexts(self) -> list[Context]:
        """All of them: one, unless it is a conversation of several."""
        first = Context(self.prompt, self.tokens, self.trained, self.logprobs, self.spans)
        return [first, *self.further]

    @property
    def length(self) -> int:
        """The number of tokens that the policy sampled, over all contexts."""
        return sum(sum(context.trained) for context in self.contexts)

    @property
    def versions(self) -> set[int]:
        """The versions of the weights that it was drawn from."""
        return {span.version for context in self.contexts for span in context.spans}

    @property
    def oldest(self) -> int:
        """The oldest version that it was drawn from; it has a token at least."""
        return min(self.versions)

    def copy(self) -> "Sample":
        """A sample for a user's function, which may change it.

        ``info`` is the same, so that it can leave values.
        """
        first, *further = (context.copy() for context in self.contexts)
        return replace(
            self,
            **vars(first),
            further=further,
            rewards=dict(self.rewards),
            row=copied(self.row),
        )


def copied(value: object) -> Any:
    """The value with copies of its lists and dicts, at every depth; what they hold otherwise is the
    same.
    """
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    if type(value) is list:
        return [copied(entry) for entry in value]
    return value


def check_request(
    request: Request, *, vocab: int | None = None, context: int | None = None
) -> None:
    """Refuse a request that no source can complete, so that repeating it would not help.

    Args:
        vocab: exclusive upper limit of token ids, if it is known.
        context: the longest prompt and completion together, if there is a limit.

    Raises:
        ValueError: names the task, and says what to do.
    """
    who = f"task {request.task}"
    limit = math.inf if vocab is None else vocab
    longest = len(request.prompt) + request.sampling.max_tokens
    if not request.prompt:
        raise ValueError(
            f"{who}: its prompt is empty; begin it with the tokenizer's first token or a chat template"
        )
    if not request.indices or len(set(request.indices)) < len(request.indices):
        raise ValueError(f"{who}: indices must be some, and distinct, got {list(request.indices)}")
    for kind, tokens in (("prompt", request.prompt), ("stop", request.sampling.stop)):
        unknown = [token for token in tokens if not 0 <= token < limit]
        if unknown:
            problem = f"{kind} token {unknown[0]} is outside the vocabulary of {vocab}"
            raise ValueError(f"{who}: {problem}; is its tokenizer that of the model?")
    if context is not None and longest > context:
        raise ValueError(
            f"{who}: a prompt of {len(request.prompt)} tokens and max_tokens={request.sampling.max_tokens} do not fit "
            f"the model's context of {context}; shorten the prompt or set max_tokens <= {context - len(request.prompt)}"
        )


def check_sample(sample: Sample, *, vocab: int | None = None) -> None:
    """Raise unless the parts of a sample agree with each other.

    One that was aborted may have no token, and no prompt either: a conversation that never began.

    Args:
        vocab: exclusive upper limit of token ids, if it is known.

    Raises:
        ValueError: names the task, the completion and the problem.
    """
    never_began = sample.finish == "aborted" and not sample.tokens and not sample.further
    for number, context in enumerate(sample.contexts):
        problem = (
            _problem_of_lengths(context)
            or _problem_of_tokens(context, vocab)
            or ("" if never_began else _problem_of_nothing(context))
            or _problem_of_logprobs(context)
            or _problem_of_versions(context)
        )
        if problem:
            place = f"context {number} of " if number else ""
            raise ValueError(f"{place}sample {sample.index} of task {sample.task}: {problem}")


def _problem_of_lengths(context: Context) -> str:
    length = len(context.tokens)
    for name, values in (("trained", context.trained), ("logprobs", context.logprobs)):
        if len(values) != length:
            return f"{name} must have one entry per token, {length}, got {len(values)}"
    return ""


def _problem_of_tokens(context: Context, vocab: int | None) -> str:
    for name, tokens in (("prompt", context.prompt), ("completion", context.tokens)):
        least = min(tokens, default=0)
        largest = max(tokens, default=0)
        if least < 0:
            limit = "" if vocab is None else f" of {vocab}"
            return f"{name} token {least} is outside the vocabulary{limit}"
        if vocab is not None and largest >= vocab:
            return f"{name} token {largest} is outside the vocabulary of {vocab}"
    return ""  # no problem


def _problem_of_nothing(context: Context) -> str:
    if not any(context.trained):
        return "it has no token of the policy; a completion has one at least, the one that ends it"
    if not context.prompt:
        return "its prompt is empty; the first token is predicted from the last of the prompt"
    return ""


def _problem_of_logprobs(context: Context) -> str:
    for logprob in context.logprobs:
        if not -math.inf < logprob <= 1e-3:  # NaN too; rounding may leave a hair above 0
            return f"log-probs must be finite and <= 0, got {logprob}"
    return ""


def _problem_of_versions(context: Context) -> str:
    covered: set[int] = set()
    for span in context.spans:
        if not isinstance(span.version, int):
            return (
                f"wanted the version of the weights that its tokens are from, got {span.version!r}"
            )
        covered.update(range(span.start, span.end))
    for position, drawn in enumerate(context.trained):
        if drawn and position not in covered:
            return f"no version is known for token {position}, which was sampled"
    return ""


FIELDS = tuple(field.name for field in fields(Sample) if field.name not in ("row", "images"))
CONTEXT_FIELDS = tuple(field.name for field in fields(Context))


def to_record(sample: Sample) -> Record:
    """The fields of a sample as checkpoints and ``samples.jsonl`` hold them: lists of numbers, spans
    as [[version, start, end], ...], and further contexts as mappings of their fields.
    """
    first, *further = map(_plain_context, sample.contexts)
    record = {name: getattr(sample, name) for name in FIELDS}
    return {**record, **first, "further": further}


def from_record(record: Record) -> Sample:
    """The inverse of `to_record`; a record of the time before there were contexts has no further.

    Raises:
        ValueError: if a field is missing or unknown.
    """
    record = {"further": [], **record}
    _refuse_other_fields("sample", record, FIELDS)
    further = []
    for context in record["further"]:
        _refuse_other_fields("context", context, CONTEXT_FIELDS)
        further.append(Context(**{**context, "spans": _spans(context)}))
    return Sample(**{**record, "spans": _spans(record), "further": further})


def _refuse_other_fields(what: str, record: Record, names: Sequence[str]) -> None:
    if set(record) != set(names):
        odd = sorted(set(record) ^ set(names))
        raise ValueError(
            f"{what}: wanted the fields {', '.join(names)}; missing or unknown: {', '.join(odd)}"
        )


def _plain_context(context: Context) -> Record:
    spans = [list(span) for span in context.spans]
    return {**vars(context.copy()), "spans": spans}


def _spans(record: Record) -> list[VersionSpan]:
    return [VersionSpan(*span) for span in record["spans"]]


def plain(value: object, who: str) -> Any:
    """A value as JSON and checkpoints hold it: numbers and arrays of numpy and torch become
    Python's, tuples lists.

    Args:
        who: names the value and its origin in the message.

    Raises:
        ValueError: if it can't be expressed in numbers, text, lists and mappings.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry, f"{who}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{who}[{i}]") for i, entry in enumerate(value)]
    if hasattr(value, "tolist"):
        array = value.tolist()
        if type(array) is not type(value):  # a longdouble's list is a longdouble
            return plain(array, who)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise ValueError(
        f"{who}: wanted numbers, text, lists or mappings, which can be stored with a sample, got "
        f"{type(value).__name__}; convert it, str(...) perhaps"
    )
