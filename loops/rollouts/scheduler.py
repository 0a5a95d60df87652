"""Groups of completions for every step, sampled at most ``max_staleness`` steps ahead of training.

    version v       the weights after v optimizer steps; step v trains on completions with them, and makes version v + 1
    age             v minus the oldest version that a completion was sampled from, at the step v that trains on it
    admission       with B tasks per step, (max_staleness + 1)·B are under way or ready when a version is published

Tasks are trained on in their order, B per step, so that what is begun at version v is trained on by
step v + max_staleness: no age can exceed max_staleness, and nothing is ever discarded. At
max_staleness 0 nothing is sampled during training.

With `in_flight`, a window takes the place of that order: so many groups are under way or ready when
a version is published, and a step takes

    1. groups that must not wait any longer, as later steps could not take all of them in time
    2. groups that are ready, the oldest first

so that the trainer waits for a slow group only when it is due. Whatever the order, the mean age is
in_flight / B - 1. At most (max_staleness + 1)·B may be in flight: then there is a step in time for
each, whichever come late.

Where groups that are not worth training on are passed over (`keep`), more are asked for at once
than are needed, as many as the share of useful ones among the latest says, and the first useful
ones in the order of tasks are taken. At max_staleness 0 this is what a step would have taken if it
had asked for one after the other; the others' tasks are begun anew at the next step, which has
other weights. Above, the others are for the next steps, and dropped where they get too old.

Seeds are hashes of the request, so pending requests need not be saved: they are made again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch import nn

from ...data import Example, encode_prompts, example, permutation
from ...data.columns import IMAGE_COLUMNS
from ...data.images import ImageRef
from ..models.end_tokens import end_tokens
from ..models.io import named_weights
from .arrays import packed
from .event_loops import EventLoop, gather_or_cancel
from .ledger import Ledger, UsefulShare
from .retries import Attempts, retrying
from .sample import Request, Row, Sample, SamplingParams, from_record, to_record
from .source import NamedWeights, RolloutSource, SourceLost, check_completions

log = logging.getLogger(__name__)

T = TypeVar("T")

_SLOW_SCORE = 300.0  # seconds after which a score is said to take long, and again after as many


def prompt_order(count: int, *, seed: int, shuffle: bool) -> Callable[[int], int]:
    """The prompt of each task, as its index: one pass over all of them after another, each permuted
    by the seed.
    """
    if count < 1 or seed < 0:
        raise ValueError(
            f"scheduler: wanted at least one prompt and a seed >= 0, got {count} and {seed}"
        )
    # tasks at hand may be of two passes
    permuted = lru_cache(maxsize=2)(partial(permutation, count, seed))
    return lambda task: int(permuted(task // count)[task % count]) if shuffle else task % count


Prompt = Sequence[int] | Example  # an example shows images, too


def _read_prompts(
    prompts: Sequence[Sequence[int] | str | Row], source: object
) -> tuple[list[Prompt], list[Row]]:
    """All prompts, and the rows that they come from."""
    rows: list[Row] = [
        prompt if isinstance(prompt, Mapping) else {"prompt": prompt} for prompt in prompts
    ]
    for i, row in enumerate(rows):
        if "prompt" not in row:
            raise ValueError(
                f"scheduler: row {i} has no column 'prompt', only {', '.join(row)}; rename one to it"
            )
    texts: list[Any] = [row["prompt"] for row in rows]
    if all(isinstance(token, int) for text in texts for token in text):
        return texts, rows
    policy: Any = getattr(source, "policy", None)
    images = getattr(policy, "images", None)
    encoder: Any = getattr(source, "tokenizer", None) if images is None else images.reader
    if encoder is None:
        raise ValueError(
            "scheduler: prompts of text need a source with a tokenizer; give it one, or token ids"
        )
    read = ("prompt", *IMAGE_COLUMNS)
    shown = [{name: row[name] for name in read if name in row} for row in rows]
    data, _ = encode_prompts(shown, encoder)
    return [example(data, i) for i in range(len(data))], rows


class Selection(NamedTuple):
    """What a step takes.

    Attributes:
        kept: the groups that it trains on.
        passed_over: groups that are not worth it.
        wasted: how many further groups were begun in vain: surplus that later steps can't use.
    """

    kept: list[list[Sample]]
    passed_over: list[list[Sample]]
    wasted: int


class RolloutScheduler(AbstractContextManager["RolloutScheduler"]):
    """See the top of the file. All of its methods are called from one thread, the trainer's.

    Args:
        source: samples the completions.
        prompts: token ids, texts, or rows with a prompt and columns that rewards read; or
            ``prompts(i)``, the prompt of task i, the same at every call: its token ids, or an
            `Example` with the images that it shows. Tasks go through a list again and again.
        group_size: completions per prompt.
        max_staleness: number of versions that a completion may be behind the weights of its step;
            above 0, completions are sampled in a thread during training.
        groups_per_step: B, prompts per step; at max_staleness 0 it may be left to `take`.
        in_flight: groups of the window, from B to (max_staleness + 1)·B; None takes tasks in their
            order.
        sampling: 256 tokens at temperature 1 unless given; without stop tokens it gets those of
            source and tokenizer.
        seed: seed of the run; each completion has its own, a hash of this one and its place.
        shuffle: permute every pass over the list of prompts.
        weights: ``weights()`` are the trainer's now, as `RolloutSource.publish` wants them;
            `publish` may name others.
        score: ``await score(group)`` is called as groups finish, to reward them while others are
            under way.
        greedy: also complete each prompt at temperature 0, for ReMax. That completion is scored
            with its group, but is none of it: ``info["greedy"]`` of the others has its finish and
            its rewards.
        keep: ``keep(group)``, of a group that is scored, says whether it is worth training on;
            others are passed over. By default every group is.
        attempts: how often a completion, or a publication, is tried before the run ends with the
            source's error, where it is worth retrying; what the source refuses for good ends the
            run at once. See `RetryingSource`.
        backoff: seconds until the second attempt; twice as long before each further one, up to half
            a minute.

    Raises:
        ValueError: if completions would be sampled from the very weights that are being trained.
    """

    def __init__(
        self,
        source: RolloutSource,
        prompts: Callable[[int], Prompt] | Sequence[Sequence[int] | str | Row],
        *,
        group_size: int,
        max_staleness: int = 0,
        groups_per_step: int | None = None,
        in_flight: int | None = None,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        shuffle: bool = False,
        weights: Callable[[], NamedWeights] = tuple,
        score: Callable[[list[Sample]], Awaitable[None]] | None = None,
        greedy: bool = False,
        keep: Callable[[list[Sample]], bool] | None = None,
        attempts: int = 8,
        backoff: float = 1.0,
    ) -> None:
        if groups_per_step is None and max_staleness:
            raise ValueError(
                "scheduler: at max_staleness > 0 it samples ahead of `take`; give groups_per_step"
            )
        for name, value, least in (
            ("groups_per_step", 1 if groups_per_step is None else groups_per_step, 1),
            ("group_size", group_size, 1),
            ("max_staleness", max_staleness, 0),
            ("attempts", attempts, 1),
        ):
            if value < least:
                raise ValueError(f"scheduler: {name} must be >= {least}, got {value}")
        most_in_flight = (max_staleness + 1) * (groups_per_step or 0)
        if in_flight is not None and not (groups_per_step or 1) <= in_flight <= most_in_flight:
            raise ValueError(
                f"scheduler: in_flight must be from groups_per_step, {groups_per_step}, to (max_staleness + 1) times "
                f"as many, {most_in_flight}, got {in_flight}"
            )
        if max_staleness and not source.overlaps:
            raise ValueError(
                f"scheduler: at max_staleness {max_staleness} completions are sampled while the trainer trains, but "
                f"{type(source).__name__} samples from the weights that are being trained; set max_staleness to 0, or "
                "use a DetachedSource or a server"
            )
        self.sampling = sampling or SamplingParams(256)
        if not self.sampling.stop:
            sampler: Any = getattr(source, "source", source)  # that of conversations
            policy: Any = getattr(sampler, "policy", None)
            config = (
                getattr(sampler, "config", None)
                if policy is None
                else policy.plain.generation_config
            )
            self.sampling = replace(
                self.sampling, stop=end_tokens(config, getattr(sampler, "tokenizer", None))
            )
        self._row: Callable[[int], Row] | None = None
        if not callable(prompts):
            read, rows = _read_prompts(prompts, source)
            order = prompt_order(len(rows), seed=seed, shuffle=shuffle)
            prompts, self._row = lambda task: read[order(task)], lambda task: rows[order(task)]
        self.source, self.prompts, self.weights = source, prompts, weights
        self.score, self.greedy, self.keep = score, greedy, keep
        self.groups_per_step, self.group_size = groups_per_step, group_size
        self.seed, self.max_staleness, self.in_flight = seed, max_staleness, in_flight
        self.attempts, self.backoff = attempts, backoff
        self._settings = {
            "groups_per_step": groups_per_step,
            "group_size": group_size,
            "seed": seed,
        }
        self.version: int | None = None
        self.ledger = Ledger()
        self.useful = UsefulShare()
        self.waited = 0.0  # seconds that the trainer spent in `take`
        self._newest = -1  # the last version whose publication has started
        # The pool: the first tasks that are not taken. Their groups are under way or ready.
        self._groups: dict[int, asyncio.Task[list[Sample]]] = {}
        self._begun: dict[int, int] = {}  # no token of a group is of an older version than this
        self._kept: dict[int, bool] = {}  # whether a finished group is worth training on
        self._stored: dict[int, list[Sample]] = {}  # groups from a checkpoint
        self.loop = EventLoop(background=max_staleness > 0)  # where the source and the score run
        self._changed = asyncio.Condition()  # a version was published, or the source has lost it
        self._lost = False  # the source was seen to sample from other weights than the trainer's
        # when it was last seen to sample from the trainer's, after a failure
        self._seen = -math.inf
        self._asked, self._repeated = retrying(
            source,
            attempts=attempts,
            backoff=backoff,
            published=lambda: (self.version, self._newest),
            restored=self._restored,
        )

    @property
    def retries(self) -> int:
        """How many requests and publications were repeated."""
        return self._repeated.retries

    @property
    def tasks(self) -> int:
        """How many have been trained on or passed over."""
        return len(self.ledger)

    def publish(self, weights: nn.Module | Callable[[], NamedWeights] | None = None) -> None:
        """Sample from these weights from now on: their version is the number of the next step.

        Args:
            weights: a policy, or ``weights()`` as `RolloutSource.publish` wants them, also for
                later publications.

        Raises:
            SourceError: if the source can't be reached.
        """
        if isinstance(weights, nn.Module):
            # of the wrapper that distributes it over ranks
            policy: Any = getattr(weights, "module", weights)
            self.weights = lambda: named_weights(policy)
        elif weights is not None:
            self.weights = weights
        self.loop.run(self._publish(len(self.ledger.ends)))

    def take(self, groups: int | None = None, *, step: int | None = None) -> list[list[Sample]]:
        """The groups that a step trains on, B of them or as many as asked for; see `select`."""
        return self.select(groups, step=step).kept

    def select(
        self, groups: int | None = None, *, step: int | None = None, most: int | None = None
    ) -> Selection:
        """The next groups in the order of tasks, or those of the window; waits until they are there.

        A step may call it more than once.

        Args:
            groups: that are worth training on; B unless given.
            step: the step that trains on them; by default that of the published version.
            most: groups to look at; there may be none left that is worth it. Without a limit unless
                given.

        Raises:
            ValueError: if other weights than those of this step are published.
            SourceError: if the source is down for good.
        """
        if self.version is None and step is None:
            self.publish()
        elif step not in (None, self.version):
            raise ValueError(
                f"scheduler: step {step} trains version {step}, published is {self.version}; publish first"
            )
        count = self.groups_per_step if groups is None else groups
        if count is None:
            raise ValueError("scheduler: how many groups? Give take(groups), or groups_per_step")
        began = time.perf_counter()
        assert self.version is not None
        selection = self.loop.run(
            self._take(self.version, count, math.inf if most is None else most)
        )
        self.waited += time.perf_counter() - began
        return selection

    def beside(self, sample: Callable[[RolloutSource], Coroutine[Any, Any, T]]) -> T:
        """The result of ``await sample(source)``, whose source samples from the published weights
        beside the run's own groups, and repeats failed requests as theirs are.

        Raises:
            SourceError: if the source is down for good.
        """
        return self.loop.run(self._beside(sample))

    def close(self) -> None:
        """Cancel requests under way, and close the source."""
        if not self.loop.closed:
            try:
                self.loop.run(self._close())
            finally:
                self.loop.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The tasks that were trained on, and the groups that are ready for later steps."""
        return {
            **self.ledger.state_dict(),
            "useful": [self.useful.useful, self.useful.seen],
            "ready": self.loop.run(self._ready()),
            "settings": dict(self._settings),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, before anything is published or taken.

        Raises:
            ValueError: if it is of a run with other groups or seeds.
        """
        for name, value in self._settings.items():
            if state["settings"][name] != value:
                raise ValueError(
                    f"scheduler: the run to resume had {name}={state['settings'][name]}, not {value}"
                )
        self.ledger = Ledger.of_state(state)
        # checkpoints of earlier versions have no such entry
        self.useful = UsefulShare(*state.get("useful", ()))
        self._stored = {
            int(task): [packed(from_record(record)) for record in group]
            for task, group in state["ready"].items()
        }

    # The methods below run in the event loop.

    async def _publish(self, version: int, *, only_if_lost: bool = False) -> None:
        """Publish the trainer's weights, perhaps only if the source, restarted since, does not
        sample from them.
        """
        async with self._changed:
            self._newest = version
            attempts = Attempts(
                f"version {version} could not be published", self.attempts, self.backoff
            )
            while True:
                try:
                    # a request for its version brings it back
                    asked = attempts.failed or only_if_lost
                    if asked and await self.source.version() == version and only_if_lost:
                        break
                    await self.source.publish(self.weights(), version)
                    if (taken := await self.source.version()) == version:
                        break
                    name = type(self.source).__name__
                    raise SourceLost(
                        f"{name} was given the weights, and samples from version {taken}"
                    )
                except (SourceLost, OSError) as error:
                    await attempts.after(error)
                    self._repeated.retries += 1
            self.version, self._lost = version, False
            self._changed.notify_all()
        if self.max_staleness and not only_if_lost:
            self._fill_pool()

    def _fill_pool(self) -> None:
        """Begin as many groups as make up, with those at hand, the useful ones of the window, or of
        max_staleness + 1 steps.
        """
        assert self.groups_per_step is not None
        wanted = self.in_flight or (self.max_staleness + 1) * self.groups_per_step
        ended = [task for task, group in self._groups.items() if _succeeded(group)]
        useful = sum(map(self._worth, ended))
        missing = wanted - useful
        under_way = missing if self.keep is None else math.ceil(missing / self.useful.share)
        self._begin(len(ended) + max(0, under_way))

    async def _take(self, step: int, count: int, most: float) -> Selection:
        """Wait for the groups of a step.

        If the source loses its weights meanwhile, publish them again.
        """
        await self._publish(step, only_if_lost=True)
        dropped = self._drop_too_old(step)
        republishing = asyncio.create_task(self._republish_if_lost(step))  # ends only by an error
        try:
            kept, passed_over = await self._wait(step, count, most, republishing)
            groups = {task: self._groups[task].result() for task in [*kept, *passed_over]}
            begun = len(self._groups)
        finally:
            republishing.cancel()
            await asyncio.gather(republishing, return_exceptions=True)
            if self.max_staleness == 0:  # the weights are trained next
                await self._cancel_under_way()
            # what failed, or was cancelled just now, is sampled anew when it is taken again
            for task, group in list(self._groups.items()):
                if group.done() and not _succeeded(group):
                    self._forget(task)
        self._check_ages(step, [groups[task] for task in kept])
        self.ledger.take(groups, step)
        self.useful.observe(len(kept), len(passed_over))
        for task in groups:
            self._forget(task)
        wasted = dropped
        if self.max_staleness == 0:
            wasted += begun - len(groups)
            for task in list(self._groups):
                self._forget(task)
        return Selection(
            [groups[task] for task in kept], [groups[task] for task in passed_over], wasted
        )

    async def _beside(self, sample: Callable[[RolloutSource], Coroutine[Any, Any, T]]) -> T:
        assert self.version is not None
        await self._publish(self.version, only_if_lost=True)
        republishing = asyncio.create_task(self._republish_if_lost(self.version))
        sampling = asyncio.create_task(sample(self._repeated))
        either: list[asyncio.Task[Any]] = [sampling, republishing]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return sampling.result() if sampling.done() else republishing.result()
        finally:
            for each in either:
                each.cancel()
            await asyncio.gather(*either, return_exceptions=True)

    async def _wait(
        self, step: int, count: int, most: float, republishing: asyncio.Task[NoReturn]
    ) -> tuple[list[int], list[int]]:
        """The tasks that a step trains on and those that it passes over, once their groups are
        there.

        Which groups are asked for does not depend on which of them is there first: at max_staleness
        0 a resumed run asks for the same ones at once, so that they make up the same batches.
        """
        asked = int(min(most, self._needed_for(count)))
        if self.in_flight is not None:
            asked = max(asked, len(self._groups))
        while True:
            self._begin(asked)
            if self.in_flight is None:
                choice = self._choose_in_order(count, most)
            else:
                choice = self._choose_ready(step, count, most)
            if choice is not None:
                return choice
            in_question = [self._groups[task] for task in islice(self.ledger.untaken(), asked)]
            under_way = [group for group in in_question if not group.done()]
            if not under_way:
                useful = sum(map(self._worth, islice(self.ledger.untaken(), asked)))
                asked = int(min(most, asked + self._needed_for(count - useful)))
                continue
            either: list[asyncio.Task[Any]] = [*under_way, republishing]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for each in [*in_question, republishing]:
                if each.done():
                    each.result()  # raises what ended it

    def _needed_for(self, needed: int) -> int:
        return needed if self.keep is None else self.useful.asked(needed)

    def _choose_in_order(self, count: int, most: float) -> tuple[list[int], list[int]] | None:
        """The first useful tasks and those before them that are passed over.

        None while one is under way.
        """
        kept: list[int] = []
        passed_over: list[int] = []
        for task in self.ledger.untaken():
            if len(kept) == count or len(kept) + len(passed_over) == most:
                break
            if task not in self._groups or not self._groups[task].done():
                return None
            (kept if self._worth(task) else passed_over).append(task)
        return kept, passed_over

    def _choose_ready(
        self, step: int, count: int, most: float
    ) -> tuple[list[int], list[int]] | None:
        """The useful groups that this step must take, then others that are ready; None while there
        are too few.
        """
        assert self.groups_per_step is not None
        oldest_first = sorted(self._groups, key=lambda task: (self._begun[task], task))
        ready: list[int] = []
        under_way: list[int] = []
        passed_over: list[int] = []
        for task in oldest_first:
            if not self._groups[task].done():
                under_way.append(task)
            else:
                (ready if self._worth(task) else passed_over).append(task)
        # A group under way may turn out to be one that is passed over.
        share = 1.0 if self.keep is None else self.useful.share
        kept: list[int] = []
        for version in sorted({self._begun[task] for task in [*ready, *under_way]}):
            # What was begun by then, at this version or before, and what later steps can take of it
            of_ready = [task for task in ready if self._begun[task] <= version]
            of_under_way = [task for task in under_way if self._begun[task] <= version]
            later = (version + self.max_staleness - step) * self.groups_per_step
            must = math.ceil(len(of_ready) + share * len(of_under_way) - later)
            lacking = min(must, count) - len(kept)
            if lacking > 0:
                available = [task for task in of_ready if task not in kept]
                if len(available) < lacking:
                    return None
                kept += available[:lacking]
        others = [task for task in ready if task not in kept]
        kept += others[: count - len(kept)]
        if len(kept) < count and len(kept) + len(passed_over) < most:
            return None
        return kept, passed_over

    def _worth(self, task: int) -> bool:
        """Whether the group of a task, which is there, is worth training on.

        Raises what ended it.
        """
        if task not in self._kept:
            group = self._groups[task].result()
            self._kept[task] = self.keep is None or self.keep(group)
        return self._kept[task]

    def _drop_too_old(self, step: int) -> int:
        """Give up the groups that this step may not train on any more, of which there are some where
        more were useful than expected; returns how many.
        """
        old = []
        if self.keep is not None:  # without, there is a step for each
            old = [task for task in self._groups if step - self._begun[task] > self.max_staleness]
        for task in old:
            self._groups[task].cancel()
            self._forget(task)
        self.ledger.pass_over(old)
        return len(old)

    def _check_ages(self, step: int, groups: list[list[Sample]]) -> None:
        versions = [_oldest(group, default=step) for group in groups]
        age = step - min(versions, default=step)
        if age > self.max_staleness and not self.source.stored:
            raise AssertionError(
                f"scheduler: step {step} would train on samples of age {age} > {self.max_staleness}"
            )

    def _forget(self, task: int) -> None:
        del self._groups[task], self._begun[task]
        self._kept.pop(task, None)

    async def _cancel_under_way(self) -> None:
        under_way = [group for group in self._groups.values() if not group.done()]
        for group in under_way:
            group.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _republish_if_lost(self, version: int) -> NoReturn:
        """Only while groups are awaited: nothing trains then, so the weights are those of this
        version.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._lost)
            await self._publish(version, only_if_lost=True)

    def _begin(self, count: int) -> None:
        """Have the groups of the first ``count`` tasks that are not taken under way, or ready."""
        assert self.version is not None
        for task in islice(self.ledger.untaken(), count):
            if task not in self._groups:
                prompt, images = self._prompt(task)  # fixed now, where it depends on rewards so far
                self._begun[task] = _oldest(self._stored.get(task, []), default=self.version)
                self._groups[task] = asyncio.create_task(self._complete(task, prompt, images))

    async def _complete(
        self, task: int, prompt: tuple[int, ...], images: tuple[ImageRef, ...]
    ) -> list[Sample]:
        """The group of a task, sampled and scored, or from a checkpoint."""
        stored = self._stored.pop(task, [])
        group = stored or await self._sample(task, prompt, images)
        for sample in group:
            sample.images = images
            if self._row is not None:
                sample.row = self._row(task)
        if self.score is not None and not stored:
            await self._scored(self.score(group), task)
        if self.greedy and not stored:
            group = _without_greedy(group)
        return group

    async def _scored(self, scored: Awaitable[None], task: int) -> None:
        """Wait for a score, which may have no time-outs of its own, and say so where it takes
        long.
        """
        scoring = asyncio.ensure_future(scored)
        began = time.monotonic()
        try:
            while not scoring.done():
                await asyncio.wait({scoring}, timeout=_SLOW_SCORE)
                if not scoring.done():
                    log.warning(
                        "scheduler: the score of task %d has not returned for %d s, and its step waits for it; give it "
                        "a time limit, such as asyncio.timeout, or score by RewardFunction, which has one",
                        task,
                        time.monotonic() - began,
                    )
            scoring.result()
        finally:
            scoring.cancel()

    def _prompt(self, task: int) -> tuple[tuple[int, ...], tuple[ImageRef, ...]]:
        """The token ids of a task's prompt, and the images that it shows."""
        prompt = self.prompts(task)
        if isinstance(prompt, Example):
            return tuple(prompt.prompt), tuple(prompt.images)
        return tuple(prompt), ()

    async def _sample(
        self, task: int, prompt: tuple[int, ...], images: tuple[ImageRef, ...]
    ) -> list[Sample]:
        """The completions of a task, from weights that the trainer has published; the last one is
        the greedy one, if that is wanted.
        """
        indices = range(self.group_size)
        request = Request(task, prompt, indices, self.sampling, self.seed, images=images)
        requests = [request]
        if self.greedy:
            at_zero = replace(self.sampling, temperature=0.0)
            requests.append(replace(request, indices=(self.group_size,), sampling=at_zero))
        parts = await gather_or_cancel(map(self._requested, requests))
        return list(chain.from_iterable(parts))

    async def _requested(self, request: Request) -> list[Sample]:
        samples: list[Sample] = await self._asked.sample(request)
        check_completions(samples, request, type(self.source).__name__, conversations=True)
        return [packed(sample) for sample in samples]

    async def _restored(self, failed: float) -> None:
        """Wait until the source samples from the trainer's weights, seen later than a request has
        failed.

        `_republish_if_lost` gives it these.
        """
        async with self._changed:
            while self._seen <= failed:
                if await self.source.version() == self.version:
                    self._seen = time.monotonic()
                else:
                    self._lost = True
                    self._changed.notify_all()
                    await self._changed.wait()

    async def _ready(self) -> dict[int, list[dict[str, Any]]]:
        done = {task: group.result() for task, group in self._groups.items() if _succeeded(group)}
        return {
            task: [to_record(sample) for sample in group]
            for task, group in {**self._stored, **done}.items()
        }

    async def _close(self) -> None:
        for group in self._groups.values():
            group.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        await self._asked.close()


def _without_greedy(group: list[Sample]) -> list[Sample]:
    """A group without its last completion, the greedy one; the others are told what it was
    worth.
    """
    *sampled, greedy = group
    for sample in sampled:
        sample.info["greedy"] = {"finish": greedy.finish, "rewards": greedy.rewards}
    return sampled


def _succeeded(group: asyncio.Task[list[Sample]]) -> bool:
    return group.done() and not group.cancelled() and group.exception() is None


def _oldest(group: Sequence[Sample], *, default: int) -> int:
    """The oldest version that a group was drawn from, where it has a token."""
    return min(set().union(*(sample.versions for sample in group)), default=default)
