"""Read what a server answers. Nothing in it is trusted: it may be another program, or one that
computes wrongly.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..sample import SamplingParams
from ..source import SourceBusy, SourceError

Finish = Literal["stop", "length", "aborted"]

FINISH: dict[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "repetition": "length",
    "abort": "aborted",
}
"""The reasons for which a completion ended, by vLLM's names. One that its own detection of
repetition has cut is not whole either."""
# No sampler draws a token that is less likely: the smallest number above 0 in float32 is e^-103.
_LEAST_LOGPROB = -150.0
_NO_LOGPROB = -9999.0  # vLLM's word for NaN and minus infinity, which JSON can't hold


class Completion(NamedTuple):
    """The parts of a completion, of the right types, but not yet compared with each other or with
    the request.

    Attributes:
        drawn: each token that has a log-prob, with it.
        reason: why it ended, in vLLM's word.
        labels: (label of the weights, start, end) of consecutive tokens.
    """

    tokens: list[int]
    drawn: list[tuple[int, float]]
    reason: str
    labels: list[tuple[str, int, int]]


def read_completion(reply: Any, who: str) -> Completion:
    """The only completion in an answer of ``/inference/v1/generate``.

    Raises:
        LookupError, TypeError, ValueError: if a part is missing, or of another type.
        SourceBusy: if the server failed at this completion, and goes on.
    """
    choice = reply["choices"][0]
    reason = _typed(choice["finish_reason"], str, "finish_reason")
    if reason == "error":
        raise SourceBusy(f"{who}: the server failed at it")
    tokens = [
        _typed(token, int, "token") for token in _typed(choice["token_ids"], list, "token_ids")
    ]
    drawn = []
    for entry in _typed(choice["logprobs"]["content"], list, "content"):
        token = _typed(entry["token_id"], int, "token")
        logprob = entry["logprob"]
        if type(logprob) is not int:  # JSON may have 0.0 as 0
            logprob = _typed(logprob, float, "log-prob")
        drawn.append((token, float(logprob)))
    labels = []
    for label in choice["weight_versions"] or []:
        version = _typed(label["version"], str, "version")
        start = _typed(label["start"], int, "start")
        end = _typed(label["end"], int, "end")
        labels.append((version, start, end))
    if reason not in FINISH:
        raise ValueError(f"finish_reason: wanted one of {', '.join(FINISH)}, got {reason[:40]!r}")
    return Completion(tokens, drawn, reason, labels)


def check_tokens(who: str, tokens: Sequence[int], vocab: int) -> None:
    """Raise SourceError for a token that the model does not have."""
    unknown = [token for token in tokens if not 0 <= token < vocab]
    if unknown:
        raise SourceError(
            f"{who}: completion token {unknown[0]} is outside the vocabulary of {vocab}; is it the same model?"
        )


def check_logprobs(who: str, logprobs: Sequence[float]) -> None:
    """Raise SourceError for a log-prob that no drawn token has."""
    for logprob in logprobs:
        if math.isnan(logprob) or logprob <= _NO_LOGPROB:
            raise SourceError(
                f"{who}: its weights give no log-probs (they are {logprob:g}); look for NaN"
            )
        if not _LEAST_LOGPROB <= logprob <= 1e-3:  # rounding may leave a hair above 0
            raise SourceError(
                f"{who}: the log-prob of a drawn token is between {_LEAST_LOGPROB:g} and 0, got {logprob:g}"
            )


def check_finish(who: str, tokens: Sequence[int], reason: str, sampling: SamplingParams) -> Finish:
    """The reason for which a completion ended, in our word, if its tokens agree with the server's.

    Raises:
        SourceError: if they don't.
    """
    stops = [i for i, token in enumerate(tokens) if token in sampling.stop]
    ends_in_stop = bool(stops) and stops[0] == len(tokens) - 1
    if stops and not ends_in_stop:
        raise SourceError(
            f"{who}: it goes on after stop token {tokens[stops[0]]}; are stop tokens ignored?"
        )
    if reason == "stop" and not ends_in_stop and not sampling.stop_words:
        raise SourceError(
            f"{who}: it is said to have ended with a stop token, but its last one is {tokens[-1]}"
        )
    if reason == "length" and ends_in_stop:
        raise SourceError(
            f"{who}: it ends with stop token {tokens[-1]}, but is said to have been cut off"
        )
    if reason == "length" and len(tokens) < sampling.max_tokens:
        raise SourceError(
            f"{who}: it is said to have been cut off at max_tokens={sampling.max_tokens}, but has {len(tokens)} tokens"
        )
    return FINISH[reason]


def described(config: object, *path: str, kind: type) -> Any:
    """A value of this type in the server's description of itself.

    Raises:
        SourceError: if there is none.
    """
    value = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if type(value) is not kind:
        raise SourceError(
            f"vllm: the server describes itself by {'.'.join(path)}={shown(value)}, wanted {WORDS[kind]}; is it vLLM?"
        )
    return value


WORDS = {
    bool: "true or false",
    int: "a whole number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


def shown(reply: object) -> str:
    """The beginning of an answer, for a message."""
    try:
        return str(reply)[:200]
    except RecursionError:
        return "brackets within brackets, more than can be shown"


def _typed(value: object, kind: type, what: str) -> Any:
    """The value, if it is of exactly this type: True is no token."""
    if type(value) is not kind:
        raise TypeError(f"{what}: wanted {kind.__name__}, got {shown(value)[:40]!r}")
    return value
