"""Tokens rated by the model of a vLLM server: their log-probs, and the likeliest tokens in their
places.

The server reads a completion as part of a prompt, whose log-probs it answers beside one token that
nobody reads: ``prompt_logprobs`` of OpenAI's /v1/completions, at temperature 1 whatever the sampling
is. It needs no flags but ``--max-logprobs``, where more than 20 are asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..event_loops import gather_or_cancel
from ..retries import Attempts
from ..source import SourceError, SourceLost
from .answers import shown
from .client import Rejected, VLLMClient
from .preflight import check_tokenizer

_AT_ONCE = 16  # prompts that the server works on: each fills a batch of it by itself
_NO_LOGPROB = -9999.0  # vLLM's word for NaN and minus infinity, which JSON can't hold
_ROUNDING = 1e-2  # of probabilities that add up to 1: vLLM rounds logits to bfloat16


class Passage(NamedTuple):
    """A prompt and its completion, and the places of the tokens in it that are to be rated."""

    tokens: list[int]
    places: list[int]


class Rating(NamedTuple):
    """Of each token that was to be rated.

    Attributes:
        logp: its log-prob, [tokens].
        ids, logprobs: the likeliest tokens in its place and their log-probs, [tokens, k].
    """

    logp: list[float]
    ids: list[list[int]]
    logprobs: list[list[float]]


@dataclass
class RatingServer:
    """The model of a vLLM server, which rates tokens; `meet` comes first.

    Args:
        client: its requests.
        attempts: how often a passage is sent.
        backoff: seconds until the second attempt; twice as long before each further one.

    Attributes:
        model: the name of the server's model.
        context: tokens that it reads at most; None if it does not say.
    """

    client: VLLMClient
    attempts: int
    backoff: float = 1.0
    model: str = ""
    context: int | None = None

    async def meet(self, tokenizer: PreTrainedTokenizerBase, k: int, vocab: int) -> None:
        """Find the server's model, and check that it knows the student's tokens and rates them.

        Args:
            k, vocab: as `rate` takes them.

        Raises:
            SourceError: says what is wrong with the server.
        """
        attempts = self._attempts(f"no teacher was found at {self.client.url}")
        while True:
            try:
                models = await self.client.get("/v1/models", "data", list)
                break
            except SourceError as error:
                await self._wait(attempts, error)
        first = models[0] if models and isinstance(models[0], dict) else {}
        if not isinstance(first.get("id"), str):
            raise SourceError(
                f"vllm: {self.client.url}/v1/models: wanted models with their id, got {shown(models)}"
            )
        self.model = first["id"]
        context = first.get("max_model_len")
        self.context = context if type(context) is int else None
        await check_tokenizer(self.client, self.model, tokenizer)
        last = len(tokenizer) - 1
        await self.rate([Passage([0, last], [1])], k, vocab)

    async def rate(self, passages: Sequence[Passage], k: int, vocab: int) -> list[Rating]:
        """The ratings of all passages, in their order.

        Args:
            k: how many of the likeliest tokens; 0 rates the tokens alone.
            vocab: of the student, exclusive upper limit of token ids.

        Raises:
            SourceError: if the server refuses, is lost for longer than all attempts take, or gives
                other than what was asked for.
        """
        return await gather_or_cancel(self._rate(passage, k, vocab) for passage in passages)

    async def _rate(self, passage: Passage, k: int, vocab: int) -> Rating:
        if not passage.places:
            return Rating([], [], [])
        attempts = self._attempts(f"the teacher at {self.client.url} could not be asked")
        while True:
            try:
                reply = await self.client.prompt_logprobs(self.model, passage.tokens, k)
            except SourceError as error:
                await self._wait(attempts, _explained(error, self.client.url, k))
            else:
                return read_rating(reply, passage, k, vocab, f"teacher.server: {self.client.url}")

    def _attempts(self, what: str) -> Attempts:
        return Attempts(what, self.attempts, self.backoff, who="teacher.server")

    async def _wait(self, attempts: Attempts, error: SourceError) -> None:
        """Wait until the next attempt, or raise the error if no other one would help."""
        may_pass = isinstance(error, SourceLost) or (isinstance(error, Rejected) and error.busy)
        if not may_pass:
            raise error
        await attempts.after(error)


def open_client(url: str, *, timeout: float, key: str | None) -> VLLMClient:
    """The client of a server that rates tokens.

    Args:
        timeout: seconds that one passage may take.
    """
    return VLLMClient(
        url,
        concurrency=_AT_ONCE,
        timeout=timeout,
        patience=timeout,
        key=key,
        key_setting="teacher.api_key",
    )


def _explained(error: SourceError, url: str, k: int) -> SourceError:
    """The error with what to do about it, where vLLM refuses for a reason that is known."""
    text = str(error)
    if not isinstance(error, Rejected) or error.status != 400:
        return error
    if "greater than max allowed" in text:
        return SourceError(
            f"teacher.top_k: the server at {url} gives fewer than {k} log-probs of a token; restart it with "
            f"--max-logprobs {k}, or lower teacher.top_k ({text})"
        )
    if "vocab" in text:
        return SourceError(
            f"teacher.server: the model at {url} lacks tokens of the student; serve one with the same vocabulary "
            f"({text})"
        )
    return error


def read_rating(reply: Any, passage: Passage, k: int, vocab: int, who: str) -> Rating:
    """The rating in an answer of /v1/completions.

    Raises:
        SourceError: if it is no rating of these tokens.
    """
    try:
        given = reply["choices"][0]["prompt_logprobs"]
        if len(given) != len(passage.tokens):
            raise SourceError(
                f"{who}: it was sent {len(passage.tokens)} tokens, and gives log-probs of {len(given)}; is it vLLM?"
            )
        rating = Rating([], [], [])
        for place in passage.places:
            of_place = {int(token): float(at["logprob"]) for token, at in given[place].items()}
            token = passage.tokens[place]
            if token not in of_place:
                raise SourceError(
                    f"{who}: it gives no log-prob of token {token}, which it was sent; is it vLLM?"
                )
            likeliest = sorted(of_place.items(), key=lambda entry: -entry[1])[:k]
            _check_likeliest(likeliest, k, vocab, who)
            rating.logp.append(of_place[token])
            rating.ids.append([token for token, _ in likeliest])
            rating.logprobs.append([logprob for _, logprob in likeliest])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(
            f"{who}: its answer has no prompt_logprobs as vLLM gives them ({error!r}); it says {shown(reply)}"
        ) from error
    _check_logprobs(rating, who)
    return rating


def _check_likeliest(likeliest: list[tuple[int, float]], k: int, vocab: int, who: str) -> None:
    """Raise SourceError if there are fewer than were asked for, or one that the student lacks."""
    if len(likeliest) < k:
        raise SourceError(
            f"{who}: it gives {len(likeliest)} log-probs of a token, and teacher.top_k is {k}; restart it with "
            f"--max-logprobs {k}, or lower teacher.top_k"
        )
    largest = max((token for token, _ in likeliest), default=0)
    if largest >= vocab:
        raise SourceError(
            f"{who}: among its likeliest tokens is {largest}, and the student has {vocab}; serve a teacher with the "
            "same vocabulary"
        )


def _check_logprobs(rating: Rating, who: str) -> None:
    """Raise SourceError for numbers that are no log-probs: NaN, or logits."""
    for logp in rating.logp:
        if math.isnan(logp):
            raise SourceError(
                f"{who}: its weights give no log-probs (they are {logp}); look for NaN"
            )
        if logp > _ROUNDING:
            raise SourceError(
                f"{who}: the log-prob of a token is {logp:g}, above 0; restart it without --logprobs-mode, or with "
                "raw_logprobs"
            )
    for logprobs in rating.logprobs:
        mass = math.fsum(math.exp(min(logprob, 1.0)) for logprob in logprobs)
        if not mass <= 1 + _ROUNDING or max(logprobs, default=0.0) <= _NO_LOGPROB:
            raise SourceError(
                f"{who}: the probabilities of its {len(logprobs)} likeliest tokens add up to {mass:g}, wanted at most "
                "1; restart it without --logprobs-mode, or look for NaN in its weights"
            )
