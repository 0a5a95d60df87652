"""The contract of every source of completions: the trainer's own module, a server, or a store of old ones."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from .sample import Request, Sample


class SourceError(RuntimeError):
    """The source can't complete the request, now or later; says what is wrong and what to do."""


class SourceLost(SourceError):
    """The source is gone, or has lost its weights: ask for its `version`, publish, and repeat the same requests."""


class RolloutSource(Protocol):
    """Tokens in, tokens out.

    A sample's tokens are those that were drawn and its log-probs those of the distribution that they were drawn from.
    Its seed is a hash of (key, task, index, turn), so that the same request under the same weights gives the same
    tokens, whatever else is under way. ``tests/support/conformance.py`` is this contract as tests.

    `SourceLost` and ``OSError`` are worth retrying; any other error ends the run.
    """

    @property
    def overlaps(self) -> bool:
        """May the trainer train while completions are under way?"""
        ...

    @property
    def stored(self) -> bool:
        """Are the completions from another run, whose versions say nothing of this one's?"""
        ...

    async def sample(self, request: Request) -> list[Sample]:
        """Complete a prompt, in the order of ``request.indices``. Requests may run at the same time."""
        ...

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Draw from these weights from now on. Requests under way go on, and their spans say where they changed.

        ``weights`` are the parameters by the names that transformers gives them, adapters merged; it is read once.
        """
        ...

    async def version(self) -> int | None:
        """The version of the weights that the source draws from; None where it is unknown, as after a restart."""
        ...

    async def close(self) -> None: ...
