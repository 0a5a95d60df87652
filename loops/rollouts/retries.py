"""Completions that a source could not give are asked for again, each by itself.

    SourceBusy              it refuses for now: the same request is repeated after a while
    SourceLost, OSError     it is gone, or draws from other weights: first it must draw from the trainer's again
    anything else           ends the run

Siblings of a completion that failed are kept. Beneath a source of conversations a request is one
turn of one conversation, so that a failure repeats this turn alone.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .event_loops import gather_or_cancel
from .sample import Request, Sample
from .source import (
    RolloutSource,
    SourceBusy,
    SourceError,
    SourceLost,
    SourceOnAnother,
    check_completions,
)

log = logging.getLogger(__name__)

_LONGEST = 30.0  # seconds between two attempts


@dataclass
class Attempts:
    """The attempts at one thing, such as a completion: a failed one is logged, and the last one
    raises.

    Attributes:
        what: could not be done, for messages.
        most: how many there may be.
        backoff: seconds until the second; twice as long before each further one, up to half a
            minute.
        failed: how many have failed.
        who: tries, for the log.
    """

    what: str
    most: int
    backoff: float
    failed: int = 0
    who: str = "scheduler"
    began: float = field(default_factory=time.monotonic)

    async def after(
        self, error: Exception, *, counts: bool = True, level: int = logging.WARNING
    ) -> None:
        """Wait until the next attempt.

        Args:
            counts: false for one that says nothing against the next, see `RetryingSource`.
            level: of the message.

        Raises:
            SourceError: after the last attempt.
        """
        waits = self.backoff * 2**self.failed
        log.log(
            level,
            "%s: %s in attempt %d of %d: %s",
            self.who,
            self.what,
            self.failed + 1,
            self.most,
            error,
        )
        self.failed += counts
        if self.failed == self.most:
            raise SourceError(
                f"{self.what} in {self.failed} attempts over {time.monotonic() - self.began:.0f} s: {error}; check the "
                "source, then continue with --resume true"
            ) from error
        await asyncio.sleep(min(waits, _LONGEST))


def longest_wait(attempts: int, timeout: float) -> float:
    """Seconds that so many attempts may take, each as long as ``timeout``, with the waits between
    them.
    """
    return attempts * (timeout + _LONGEST)


@dataclass(eq=False)
class RetryingSource(SourceOnAnother):
    """A source on top of another, whose requests it repeats; see the top of the file.

    Args:
        source: with ``separate``, each completion is asked for by itself from the start, see
            `RolloutSource`.
        attempts: how often a completion is asked for. A refusal does not count if the source has
            completed others since the one before: it has too much to do, and at a third of refusals
            one of 7,000 completions is refused eight times in a row.
        backoff: see `Attempts`.
        published: ``published()`` are the version of the trainer's weights, and the newest that may
            be drawn from.
        restored: ``await restored(failed)`` returns when the source draws from the trainer's
            weights, checked later than ``failed``, a time of `time.monotonic`.

    Attributes:
        retries: how many requests were repeated.
    """

    source: RolloutSource
    attempts: int
    backoff: float
    published: Callable[[], tuple[int | None, int]]
    restored: Callable[[float], Awaitable[None]]

    def __post_init__(self) -> None:
        self.overlaps = self.source.overlaps
        self.stored = self.source.stored
        self.context: int | None = getattr(self.source, "context", None)
        self.vocab: int | None = getattr(self.source, "vocab", None)
        self.retries = 0
        self._completed = 0
        self._refused = False

    async def sample(self, request: Request) -> list[Sample]:
        attempts = Attempts(
            f"task {request.task} could not be sampled", self.attempts, self.backoff
        )
        lost = None
        if len(request.indices) > 1 and not getattr(self.source, "separate", False):
            try:
                return await self._ask(request)
            except (SourceLost, OSError) as error:
                lost = await self._wait(error, attempts, counts=True)
        parts = [replace(request, indices=[index]) for index in request.indices]
        return await gather_or_cancel(self._repeat(part, replace(attempts), lost) for part in parts)

    async def _repeat(self, request: Request, attempts: Attempts, lost: float | None) -> Sample:
        """One completion, in as many attempts as it takes.

        The source was ``lost`` at that time, if at all.
        """
        turn = f"turn {request.turn + 1} of " if request.turn else ""
        attempts.what = (
            f"{turn}completion {request.indices[0]} of task {request.task} could not be sampled"
        )
        completed = math.inf  # by the source, when it refused before
        while True:
            try:
                if lost is not None:
                    await self.restored(lost)
                (sample,) = await self._ask(request)
                return sample
            except (SourceLost, OSError) as error:
                alive = isinstance(error, SourceBusy) and self._completed > completed
                completed = self._completed
                lost = await self._wait(error, attempts, counts=not alive)

    async def _wait(self, error: Exception, attempts: Attempts, *, counts: bool) -> float | None:
        """Wait until the next attempt.

        Returns when the source was lost, None if it has only refused.
        """
        failed = time.monotonic()
        busy = isinstance(error, SourceBusy)
        if busy and not self._refused:
            self._refused = True
            log.warning(
                "scheduler: %s: %s; it is asked again, and further refusals are counted in sampling/retries",
                attempts.what,
                error,
            )
        stalled = counts and attempts.failed > 0
        level = logging.INFO if busy and not stalled else logging.WARNING
        await attempts.after(error, counts=counts, level=level)
        self.retries += 1
        return None if busy else failed

    async def _ask(self, request: Request) -> list[Sample]:
        """Ask once; what comes is what was asked for, and from known weights."""
        name = type(self.source).__name__
        since, _ = self.published()
        samples = await self.source.sample(request)
        check_completions(samples, request, name, vocab=self.vocab, conversations=True)
        versions = sorted(set().union(*(sample.versions for sample in samples)))
        newest = self.published()[1]
        known = since is not None and all(since <= version <= newest for version in versions)
        if not (known or self.stored):
            raise SourceLost(
                f"{name}: task {request.task}: its completions come from versions {versions}, published are {since} to "
                f"{newest}; does another run publish to the same source?"
            )
        self._completed += len(samples)
        return samples


def retrying(source: Any, **options: Any) -> tuple[Any, RetryingSource]:
    """The source with retries, and what repeats its requests: beneath it, if it is a source on top
    of another.

    Args:
        source: one on top of another has ``on(another)``, such as `MultiTurnSource`.
        options: of `RetryingSource`.
    """
    on = getattr(source, "on", None)
    if on is None:
        repeated = RetryingSource(source, **options)
        return repeated, repeated
    repeated = RetryingSource(source.source, **options)
    return on(repeated), repeated
