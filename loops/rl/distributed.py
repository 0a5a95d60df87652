"""One source for a run of several ranks: each samples its share, and all take part when weights are
published.

    rank 0     `DistributedSource`, which the scheduler asks; a request goes to a rank by its task
    others     `Follower`, whose thread answers requests from this rank's own source, and sends the samples back

A request that is cancelled is cancelled on its rank, too, and has ended there: what follows may be
a step on the weights that it was sampled from.

Request seeds are hashes of (run, task, index, turn), so that it does not matter which rank samples
which task.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from accelerate import Accelerator

from ..rollouts.event_loops import EventLoop, gather_or_cancel, off_loop
from ..rollouts.sample import Request, Sample, check_request
from ..rollouts.source import NamedWeights, RolloutSource, SourceError, refuse_closed
from ..runs.liveness import RankLost
from ..runs.ranks import Group, broadcast_order, gloo_group, receive, send

_PARTING = 10.0  # seconds in which another rank should stop sampling

# In place of a request: the one of this number is given up.
_CANCELLED: Literal["cancelled"] = "cancelled"

_Order = Request | Literal["cancelled"] | None


def distributed(
    accelerator: Accelerator,
    source: RolloutSource | None,
    weights: Callable[[], NamedWeights] = tuple,
    *,
    purpose: str = "sampling",
    ranks: int | None = None,
    **options: Any,
) -> "tuple[RolloutSource | None, Follower | None]":
    """On rank 0 the source of all ranks; on the others, what follows its publications.

    Every rank calls it.

    Args:
        source, weights: see `Follower`. The source itself is returned in a process alone.
        purpose: names the connections between the ranks; each source has its own.
        ranks: how many sample; all unless given.
        options: of `DistributedSource`.
    """
    if accelerator.num_processes == 1:
        return source, None
    group = gloo_group(purpose)
    if accelerator.is_main_process:
        assert source is not None
        return DistributedSource(source, group, ranks or accelerator.num_processes, **options), None
    return None, Follower(accelerator, source, weights, group)


@dataclass(eq=False)
class DistributedSource:
    """The sources of all ranks as one, on rank 0; see `distributed`.

    `publish` is to be called in a `from_main` with the `Follower` for the others to follow.

    Attributes:
        source: of this rank.
        group: the ranks over gloo.
        ranks: how many sample; 1 where they only take part in gathering weights, for a server that
            rank 0 talks to.
        gathered: whether to read the weights is a collective, which all ranks must take part in to
            the end.
        groups, group_size: prompts requested at once, and completions of each. Where there are
            fewer prompts than ranks, several ranks share a group.
    """

    source: RolloutSource
    group: Group
    ranks: int
    gathered: bool = False
    groups: int = 1
    group_size: int = 1

    def __post_init__(self) -> None:
        self.overlaps, self.stored = self.source.overlaps, self.source.stored
        # the longest prompt and completion together
        self.context: int | None = getattr(self.source, "context", None)
        self.vocab: int | None = getattr(self.source, "vocab", None)
        self.separate: bool = getattr(self.source, "separate", False)
        self.parts = min(self.group_size, -(-self.ranks // self.groups))  # of a group
        self._unsent: list[list[tuple[int, _Order]]] = [[] for _ in range(self.ranks)]
        self._awaited: list[dict[int, asyncio.Future[Any]]] = [{} for _ in range(self.ranks)]
        self._talks: dict[tuple[int, Any], asyncio.Task[None]] = {}  # by rank and direction
        self._numbers, self._closed = count(), False

    async def sample(self, request: Request) -> list[Sample]:
        refuse_closed(self._closed, "distributed")
        check_request(request, vocab=self.vocab, context=self.context)
        shares: dict[int, list[int]] = {}
        for index in request.indices:
            rank = (request.task * self.parts + index * self.parts // self.group_size) % self.ranks
            shares.setdefault(rank, []).append(index)
        requests = [(rank, replace(request, indices=indices)) for rank, indices in shares.items()]
        groups = await gather_or_cancel(self._sample(rank, part) for rank, part in requests)
        samples = {sample.index: sample for group in groups for sample in group}
        return [samples[index] for index in request.indices]

    async def publish(self, weights: NamedWeights, version: int) -> None:
        refuse_closed(self._closed, "distributed")
        weights = iter(weights)
        with broadcast_order(version):
            try:
                await self.source.publish(weights, version)
            finally:
                # the others continue to the end, even if a server refuses the first
                if self.gathered:
                    deque(weights, maxlen=0)

    async def version(self) -> int | None:
        return await self.source.version()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        others = range(1, self.ranks)
        for rank in others:
            self._fail(rank, SourceError("distributed: the source was closed"))
            self._unsent[rank].clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PARTING):
                await asyncio.gather(
                    *(self._outcome(rank, None) for rank in others), return_exceptions=True
                )
        await self.source.close()

    async def _sample(self, rank: int, request: Request) -> list[Sample]:
        if rank == 0:
            return await self.source.sample(request)
        samples: list[Sample]
        samples, problem = await self._outcome(rank, request)
        if problem is not None:
            raise SourceError(f"rank {rank}: {problem}")
        return samples

    async def _outcome(self, rank: int, request: Request | None) -> Any:
        """Send a request and await the reply of the rank.

        None asks the rank to stop, and is its last request.
        """
        number, outcome = next(self._numbers), asyncio.get_running_loop().create_future()
        self._unsent[rank].append((number, request))
        self._awaited[rank][number] = outcome
        self._talk(rank, self._send)
        self._talk(rank, self._receive)
        try:
            return await outcome
        except asyncio.CancelledError:
            await self._cancel(rank, number)
            raise

    async def _cancel(self, rank: int, number: int) -> None:
        """Have a request end on its rank, and wait until it has."""
        if self._awaited[rank].get(number) is None:
            return  # it was answered, or the connection is gone
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited[rank][number] = ended
        self._unsent[rank].append((number, _CANCELLED))
        self._talk(rank, self._send)
        self._talk(rank, self._receive)
        with suppress(Exception):  # the rank is lost, which `_fail` has told those who wait
            await ended

    def _talk(self, rank: int, what: Callable[[int], Awaitable[None]]) -> None:
        """Send to a rank, or receive from it, unless that is under way already."""
        if (talk := self._talks.get((rank, what))) is None or talk.done():
            self._talks[rank, what] = asyncio.create_task(self._while_connected(rank, what))

    async def _while_connected(self, rank: int, what: Callable[[int], Awaitable[None]]) -> None:
        try:
            await what(rank)
        except Exception as error:
            self._fail(rank, error)

    async def _send(self, rank: int) -> None:
        """Requests of the same turn of the event loop go together: the same ones make up the same
        batches there.
        """
        while self._unsent[rank]:
            requests, self._unsent[rank] = self._unsent[rank], []
            await off_loop(partial(send, requests, rank, self.group))

    async def _receive(self, rank: int) -> None:
        while self._awaited[rank]:
            number, outcome = await off_loop(partial(receive, rank, self.group))
            awaited = self._awaited[rank].pop(number, None)
            if awaited is not None and not awaited.done():  # and was not given up
                awaited.set_result(outcome)

    def _fail(self, rank: int, error: Exception) -> None:
        for awaited in self._awaited[rank].values():
            if not awaited.done():
                awaited.set_exception(error)
        self._awaited[rank].clear()


@dataclass(eq=False)
class Follower:
    """Follow the `DistributedSource` of rank 0 on another rank, until that is closed.

    Attributes:
        source: samples this rank's share; None where rank 0 alone samples.
        weights: ``weights()`` are the trainer's at this moment, see `RolloutScheduler`.
    """

    accelerator: Accelerator
    source: RolloutSource | None
    weights: Callable[[], NamedWeights]
    group: Group

    def __post_init__(self) -> None:
        self._replies: asyncio.Queue[tuple[int | None, Any]] = asyncio.Queue()
        if self.source is not None:
            self._loop = EventLoop(background=True)
            self._serving = asyncio.run_coroutine_threadsafe(self._serve(), self._loop.loop)

    def __call__(self, version: int) -> None:
        """Read all of the weights, as rank 0 publishes them at this moment, and sample from
        them.
        """
        if self.source is not None:
            self._loop.run(self.source.publish(self.weights(), version))
        else:
            deque(self.weights(), maxlen=0)

    def close(self) -> None:
        """Wait until rank 0 has closed its source: a thread that waits in gloo when its process
        ends aborts it.
        """
        if self.source is not None and self._loop.thread is not None:
            self._loop.thread.join(_PARTING)

    async def _serve(self) -> None:
        assert self.source is not None
        if self.accelerator.device.type == "cuda":
            torch.cuda.set_device(self.accelerator.device)  # of this thread
        under_way: dict[int, asyncio.Task[Any]] = {}
        replying = asyncio.create_task(self._reply())
        last: int | None = None
        with suppress(RankLost):
            while last is None:
                for number, request in await off_loop(partial(receive, 0, self.group)):
                    if request is None:
                        last = number
                    elif isinstance(request, Request):
                        task = asyncio.create_task(self._complete(request))
                        under_way[number] = task
                        task.add_done_callback(partial(self._ended, number, under_way))
                    elif number in under_way:  # or else its answer is on the way
                        under_way[number].cancel()
        for task in under_way.values():
            task.cancel()
        self._replies.put_nowait((last, None))
        await replying
        await self.source.close()
        self._loop.stopped.set()

    async def _complete(self, request: Request) -> tuple[list[Sample] | None, str | None]:
        assert self.source is not None
        try:
            return await self.source.sample(request), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def _ended(
        self, number: int, under_way: dict[int, asyncio.Task[Any]], task: asyncio.Task[Any]
    ) -> None:
        """Reply to a request; one that was cancelled may never have begun."""
        del under_way[number]
        outcome = (None, _CANCELLED) if task.cancelled() else task.result()
        self._replies.put_nowait((number, outcome))

    async def _reply(self) -> None:
        outcome: Any = ()
        with suppress(RankLost):
            while outcome is not None:
                number, outcome = await self._replies.get()
                await off_loop(partial(send, (number, outcome), 0, self.group))
