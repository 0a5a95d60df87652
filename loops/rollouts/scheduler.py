"""Groups of answers for every step, drawn ahead of training by no more than may be.

    version v       the weights after v optimizer steps; step v trains on answers with them, and makes version v + 1
    age             v minus the oldest version that an answer was drawn from, at the step v that trains on it
    admission       with B tasks per step, at version v only the first (v + 1 + max_staleness)·B may have been begun

Tasks are trained on in their order, B per step, so that what is begun at version v is trained on by step
v + max_staleness: no age can exceed max_staleness, and nothing is ever discarded. At max_staleness 0 nothing is
drawn while the
trainer trains.

Seeds are hashes of what is asked for, so what is under way need not be saved: it is asked for again.
"""

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from .event_loops import Beside, Here, Loop, in_a_loop
from .sample import Request, Sample, SamplingParams, check_sample, from_record, to_record
from .source import RolloutSource, SourceError, SourceLost

log = logging.getLogger(__name__)

Group = list[Sample]
Tasks = Callable[[int], Sequence[int]]  # the prompt of the i-th task of the run
Play = Callable[[RolloutSource, Request], Awaitable[Group]]
Judge = Callable[[Group], Awaitable[None]]
Weights = Callable[[], Iterable[tuple[str, Tensor]]]
T = TypeVar("T")

_LONGEST = 30.0  # seconds between two attempts
_PASSING = (SourceLost, OSError)  # what may be over when one asks again


class Ledger:
    """Which step trained on which task: every task once, in order."""

    def __init__(self) -> None:
        self.ends: list[int] = []  # of step k: the number of tasks that steps 0..k trained on

    @property
    def tasks(self) -> int:
        """How many have been trained on."""
        return self.ends[-1] if self.ends else 0

    def enter(self, step: int, tasks: Sequence[int]) -> None:
        if list(tasks) != list(range(self.tasks, self.tasks + len(tasks))):
            raise AssertionError(f"ledger: step {step} would train on tasks {list(tasks)}, task {self.tasks} is next")
        if not len(self.ends) - 1 <= step <= len(self.ends):
            raise AssertionError(f"ledger: step {step} after step {len(self.ends) - 1}")
        if step == len(self.ends):
            self.ends.append(self.tasks)
        self.ends[step] += len(tasks)

    def step_of(self, task: int) -> int | None:
        """The step that trained on a task, if any did."""
        return bisect_right(self.ends, task) if task < self.tasks else None


async def ask_once(source: RolloutSource, request: Request) -> Group:
    return await source.sample(request)


async def leave_unjudged(group: Group) -> None:
    pass


class RolloutScheduler:
    """See the top of the file. All of its methods are called from one thread, the trainer's.

    Args:
        source: where answers come from.
        tasks: ``tasks(i)`` is the prompt of task i, the same whenever it is asked for.
        weights: ``weights()`` are the trainer's at this moment, as `RolloutSource.publish` wants them.
        groups_per_step: B.
        group_size: answers to each prompt.
        key: the run's, usually its seed.
        max_staleness: how many versions behind the weights of its step an answer may be; from 1 on, answers are drawn
            in a thread while the trainer trains.
        play: ``await play(source, request)`` makes the answers of a group; an environment asks more than once.
        judge: ``await judge(group)`` is called as groups finish, to reward them while others are under way.
        attempts: how often a group, or a publication, is tried before the run ends with what the source said, where
            that may be over later; what the source will never do ends the run at once.
        backoff: seconds until the second attempt; twice as long before each further one, up to half a minute.

    Raises:
        ValueError: if answers would be drawn from the very weights that are being trained.
    """

    def __init__(
        self,
        source: RolloutSource,
        tasks: Tasks,
        weights: Weights,
        *,
        groups_per_step: int,
        group_size: int,
        sampling: SamplingParams,
        key: int,
        max_staleness: int,
        play: Play = ask_once,
        judge: Judge = leave_unjudged,
        attempts: int = 8,
        backoff: float = 1.0,
    ) -> None:
        for name, value, least in (
            ("groups_per_step", groups_per_step, 1),
            ("group_size", group_size, 1),
            ("max_staleness", max_staleness, 0),
            ("attempts", attempts, 1),
        ):
            if value < least:
                raise ValueError(f"sampler: {name} must be >= {least}, got {value}")
        if max_staleness and not source.overlaps:
            raise ValueError(
                f"sampler: at max_staleness {max_staleness} answers are drawn while the trainer trains, but "
                f"{type(source).__name__} draws from the weights that are being trained; set max_staleness to 0, or "
                "use a DetachedSource or a server"
            )
        self.source, self.tasks, self.weights, self.play, self.judge = source, tasks, weights, play, judge
        self.groups_per_step, self.group_size = groups_per_step, group_size
        self.sampling, self.key, self.max_staleness = sampling, key, max_staleness
        self.attempts, self.backoff = attempts, backoff
        self.version: int | None = None
        self.ledger = Ledger()
        self.counts = {"retries": 0, "republished": 0}
        self.waited = 0.0  # seconds that the trainer spent in `take`
        self._newest = -1  # the last version whose publication was begun
        self._limit = 0  # tasks below it may be begun
        self._begun: dict[int, asyncio.Task[Group]] = {}  # and not yet taken
        self._stored: dict[int, Group] = {}  # what a checkpoint brought, ready to be taken
        self._loop: Loop = Beside() if max_staleness or in_a_loop() else Here()
        self._changed = asyncio.Condition()
        self._lost = False  # the source was seen to draw from other weights than the trainer's

    def publish(self, version: int) -> None:
        """From now on answers are drawn from ``weights()``, which are of this version.

        Raises:
            SourceError: if the source can't be reached.
        """
        self._loop.run(self._publish(version))

    def take(self, step: int, groups: int | None = None) -> list[Group]:
        """The next groups in the order of tasks, B of them or as many as asked for; waits until they are there.

        A step may take more than once, as one does that passes over groups without variance.

        Raises:
            ValueError: if other weights than those of this step are published.
            SourceError: if the source is down for good.
        """
        if self.version != step:
            raise ValueError(f"sampler: step {step} trains version {step}, published is {self.version}; publish first")
        began = time.perf_counter()
        taken = self._loop.run(self._take(step, self.groups_per_step if groups is None else groups))
        self.waited += time.perf_counter() - began
        return taken

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it gives, in the sampler's event loop; waits for it."""
        return self._loop.run(coroutine)

    def close(self) -> None:
        """Give up what is under way, and close the source."""
        if not self._loop.closed:
            try:
                self._loop.run(self._close())
            finally:
                self._loop.close()

    def __enter__(self) -> "RolloutScheduler":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """What has been trained on, and the groups that are ready for later steps."""
        ready = self._loop.run(self._ready())
        return {"ends": list(self.ledger.ends), "ready": ready, "settings": self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, before anything is published or taken.

        Raises:
            ValueError: if it is of a run whose tasks, answers or seeds were others.
        """
        for name, value in self._settings().items():
            if state["settings"][name] != value:
                raise ValueError(f"sampler: the run to go on with had {name}={state['settings'][name]}, not {value}")
        self.ledger.ends = list(state["ends"])
        self._stored = {int(task): [from_record(record) for record in group] for task, group in state["ready"].items()}

    def _settings(self) -> dict[str, int]:
        return {"groups_per_step": self.groups_per_step, "group_size": self.group_size, "key": self.key}

    # What follows runs in the event loop.

    async def _publish(self, version: int) -> None:
        async with self._changed:
            self._newest = version
            await self._send(version)
            self.version, self._lost = version, False
            self._limit = self.ledger.tasks + (self.max_staleness + 1) * self.groups_per_step
            self._changed.notify_all()
        if self.max_staleness:
            self._admit(self._limit)

    async def _take(self, step: int, count: int) -> list[Group]:
        start = self.ledger.tasks
        wanted = range(start, start + count)
        async with self._changed:
            await self._mend()
        self._admit(max(self._limit, wanted.stop))
        groups = await self._attended(asyncio.gather(*(self._begun[task] for task in wanted)))
        age = max((step - sample.oldest for group in groups for sample in group), default=0)
        if age > self.max_staleness and not self.source.stored:
            raise AssertionError(f"sampler: step {step} would train on answers of age {age} > {self.max_staleness}")
        self.ledger.enter(step, [group[0].task for group in groups])
        for task in wanted:
            del self._begun[task]
        return groups

    async def _attended(self, answers: "asyncio.Future[list[Group]]") -> list[Group]:
        """Wait for answers while nobody trains, so that a source which lost its weights can be given them again."""
        attendant = asyncio.create_task(self._attend())
        try:
            both: list[asyncio.Future[Any]] = [answers, attendant]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                attendant.result()
            return answers.result()
        finally:
            answers.cancel()
            attendant.cancel()
            await asyncio.gather(attendant, answers, return_exceptions=True)

    async def _attend(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._lost)
                await self._mend()

    async def _mend(self) -> None:
        """Publish again if the source, restarted perhaps, does not draw from the trainer's weights."""
        assert self.version is not None
        await self._send(self.version, only_if_lost=True)
        self._lost = False
        self._changed.notify_all()

    async def _send(self, version: int, *, only_if_lost: bool = False) -> None:
        lost = only_if_lost

        async def once() -> None:
            nonlocal lost
            if lost:  # to be asked for its version brings it back
                if await self.source.version() == version and only_if_lost:
                    return
                self.counts["republished"] += 1
            lost = True
            await self.source.publish(self.weights(), version)
            taken = await self.source.version()
            if taken != version:
                raise SourceLost(f"{type(self.source).__name__} was given the weights, and draws from version {taken}")

        await self._again(f"version {version} could not be published", once)

    def _admit(self, limit: int) -> None:
        for task in range(self.ledger.tasks, limit):
            if task not in self._begun:
                self._begun[task] = asyncio.create_task(self._begin(task))

    async def _begin(self, task: int) -> Group:
        if task in self._stored:
            return self._stored.pop(task)
        request = Request(task, tuple(self.tasks(task)), range(self.group_size), self.sampling, self.key)
        attempt = 0

        async def once() -> Group:
            nonlocal attempt
            attempt += 1
            if attempt > 1:
                await self._agreed()
            since = self.version
            group = await self.play(self.source, request)
            self._check(group, request, since)
            return group

        group = await self._again(f"task {task} could not be answered", once)
        await self.judge(group)
        return group

    async def _agreed(self) -> None:
        """Wait until the source draws from the trainer's weights; they are given to it while the trainer waits."""
        async with self._changed:
            while await self.source.version() != self.version:
                self._lost = True
                self._changed.notify_all()
                await self._changed.wait()

    def _check(self, group: Group, request: Request, since: int | None) -> None:
        """Raises unless this is the group that was asked for, drawn from weights that the trainer has published."""
        who = f"the answers of {type(self.source).__name__} to task {request.task}"
        if {sample.task for sample in group} != {request.task}:
            raise SourceError(f"{who} are those of others: {sorted({sample.task for sample in group})}")
        if sorted(sample.index for sample in group) != list(request.indices):
            raise SourceError(f"{who} are not those asked for: {[sample.index for sample in group]}")
        if len({tuple(sample.prompt) for sample in group}) > 1:
            raise SourceError(f"{who} have different prompts, but they are compared with each other")
        for sample in group:
            try:
                check_sample(sample)
            except ValueError as error:
                raise SourceError(f"{who} are damaged: {error}") from error
            if self.source.stored:
                continue
            versions = [span.version for span in sample.spans]
            if since is None or not since <= min(versions) <= max(versions) <= self._newest:
                raise SourceLost(f"{who} come from versions {versions}, published are {since} to {self._newest}")

    async def _again(self, what: str, once: Callable[[], Awaitable[T]]) -> T:
        began = time.monotonic()
        for attempt in range(self.attempts):
            if attempt:
                self.counts["retries"] += 1
                await asyncio.sleep(min(self.backoff * 2 ** (attempt - 1), _LONGEST))
            try:
                return await once()
            except _PASSING as error:
                last = error
                log.warning("sampler: %s in attempt %d of %d: %s", what, attempt + 1, self.attempts, error)
        raise SourceError(
            f"{what} in {self.attempts} attempts over {time.monotonic() - began:.0f} s: {last}; see to the source, "
            "then go on with --resume true"
        ) from last

    async def _ready(self) -> dict[int, list[dict[str, Any]]]:
        done = {task: begun.result() for task, begun in self._begun.items() if begun.done() and not begun.exception()}
        return {task: [to_record(sample) for sample in group] for task, group in {**self._stored, **done}.items()}

    async def _close(self) -> None:
        for begun in self._begun.values():
            begun.cancel()
        await asyncio.gather(*self._begun.values(), return_exceptions=True)
        await self.source.close()
