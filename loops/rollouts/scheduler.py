"""Groups of completions for every step, sampled at most ``max_staleness`` steps ahead of training.

    version v       the weights after v optimizer steps; step v trains on completions with them, and makes version v + 1
    age             v minus the oldest version that a completion was sampled from, at the step v that trains on it
    admission       with B tasks per step, at version v only the first (v + 1 + max_staleness)·B may have been begun

Tasks are trained on in their order, B per step, so that what is begun at version v is trained on by
step v + max_staleness: no age can exceed max_staleness, and nothing is ever discarded. At
max_staleness 0 nothing is sampled during training.

Seeds are hashes of the request, so pending requests need not be saved: they are made again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedTokenizerBase

from ...data import encode_prompts, permutation
from ..models.end_tokens import end_tokens
from ..models.io import named_weights
from .event_loops import EventLoop
from .retries import Attempts, retrying
from .sample import Request, Row, Sample, SamplingParams, from_record, to_record
from .source import NamedWeights, RolloutSource, SourceLost, check_completions

log = logging.getLogger(__name__)

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


def _read_prompts(
    prompts: Sequence[Sequence[int] | str | Row], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[list[Sequence[int]], list[Row]]:
    """The token ids of all prompts, and the rows that they come from."""
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
    if tokenizer is None:
        raise ValueError(
            "scheduler: prompts of text need a source with a tokenizer; give it one, or token ids"
        )
    return list(encode_prompts([{"prompt": text} for text in texts], tokenizer)[0]["prompt"]), rows


class RolloutScheduler(AbstractContextManager["RolloutScheduler"]):
    """See the top of the file. All of its methods are called from one thread, the trainer's.

    Args:
        source: samples the completions.
        prompts: token ids, texts, or rows with a prompt and columns that rewards read; or
            ``prompts(i)``, the token ids of the prompt of task i, the same at every call. Tasks go
            through a list again and again.
        group_size: completions per prompt.
        max_staleness: number of versions that a completion may be behind the weights of its step;
            above 0, completions are sampled in a thread during training.
        groups_per_step: B, prompts per step; at max_staleness 0 it may be left to `take`.
        sampling: 256 tokens at temperature 1 unless given; without stop tokens it gets those of
            source and tokenizer.
        seed: seed of the run; each completion has its own, a hash of this one and its place.
        shuffle: permute every pass over the list of prompts.
        weights: ``weights()`` are the trainer's now, as `RolloutSource.publish` wants them;
            `publish` may name others.
        score: ``await score(group)`` is called as groups finish, to reward them while others are
            under way.
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
        prompts: Callable[[int], Sequence[int]] | Sequence[Sequence[int] | str | Row],
        *,
        group_size: int,
        max_staleness: int = 0,
        groups_per_step: int | None = None,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        shuffle: bool = False,
        weights: Callable[[], NamedWeights] = tuple,
        score: Callable[[list[Sample]], Awaitable[None]] | None = None,
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
            ids, rows = _read_prompts(prompts, getattr(source, "tokenizer", None))
            order = prompt_order(len(rows), seed=seed, shuffle=shuffle)
            prompts, self._row = lambda task: ids[order(task)], lambda task: rows[order(task)]
        self.source, self.prompts, self.weights, self.score = source, prompts, weights, score
        self.groups_per_step, self.group_size = groups_per_step, group_size
        self.seed, self.max_staleness = seed, max_staleness
        self.attempts, self.backoff = attempts, backoff
        self._settings = {
            "groups_per_step": groups_per_step,
            "group_size": group_size,
            "seed": seed,
        }
        self.version: int | None = None
        # of step k: the number of tasks that steps 0..k trained on, every task once
        self.ends: list[int] = []
        self.waited = 0.0  # seconds that the trainer spent in `take`
        self._newest = -1  # the last version whose publication has started
        self._limit = 0  # tasks below it are admitted at the published version
        # of admitted tasks, under way or ready to be taken
        self._groups: dict[int, asyncio.Task[list[Sample]]] = {}
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
        """How many have been trained on."""
        return self.ends[-1] if self.ends else 0

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
        self.loop.run(self._publish(len(self.ends)))

    def take(self, groups: int | None = None, *, step: int | None = None) -> list[list[Sample]]:
        """The next groups in the order of tasks, B of them or as many as asked for; waits until
        they are there.

        A step may call it more than once, for example to skip groups without variance.

        Args:
            step: the step that trains on them; by default that of the published version.

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
        taken = self.loop.run(self._take(self.version, count))
        self.waited += time.perf_counter() - began
        return taken

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
        ready = self.loop.run(self._ready())
        return {"ends": list(self.ends), "ready": ready, "settings": dict(self._settings)}

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
        self.ends = list(state["ends"])
        self._stored = {
            int(task): [from_record(record) for record in group]
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
        if not only_if_lost:
            self._limit = self.tasks + (self.max_staleness + 1) * (self.groups_per_step or 0)
            if self.max_staleness:
                self._admit(self._limit)

    async def _take(self, step: int, count: int) -> list[list[Sample]]:
        """Wait for the next groups; if the source loses its weights meanwhile, publish them
        again.
        """
        wanted = range(self.tasks, self.tasks + count)
        await self._publish(step, only_if_lost=True)
        self._admit(max(self._limit, wanted.stop))
        groups = asyncio.gather(*(self._groups[task] for task in wanted))
        republishing = asyncio.create_task(self._republish_if_lost(step))  # ends only by an error
        either: list[asyncio.Future[Any]] = [groups, republishing]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            taken = groups.result() if groups.done() else republishing.result()
        finally:
            under_way = [republishing, *(self._groups[task] for task in wanted)]
            for each in under_way:
                each.cancel()
            await asyncio.gather(groups, *under_way, return_exceptions=True)
            # what failed, or was cancelled just now, is sampled anew when it is taken again
            for task in wanted:
                if (group := self._groups[task]).cancelled() or (
                    group.done() and group.exception()
                ):
                    del self._groups[task]
        age = max(
            (step - span.version for group in taken for sample in group for span in sample.spans),
            default=0,
        )
        if age > self.max_staleness and not self.source.stored:
            raise AssertionError(
                f"scheduler: step {step} would train on samples of age {age} > {self.max_staleness}"
            )
        if [group[0].task for group in taken] != list(wanted) or not len(
            self.ends
        ) - 1 <= step <= len(self.ends):
            raise AssertionError(
                f"scheduler: step {step}, on {wanted}, would come after step {len(self.ends) - 1}"
            )
        self.ends[step:] = [wanted.stop]
        for task in wanted:
            del self._groups[task]
        return taken

    async def _republish_if_lost(self, version: int) -> NoReturn:
        """Only while groups are awaited: nothing trains then, so the weights are those of this
        version.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._lost)
            await self._publish(version, only_if_lost=True)

    def _admit(self, limit: int) -> None:
        for task in range(self.tasks, limit):
            if task not in self._groups:
                self._groups[task] = asyncio.create_task(self._complete(task))

    async def _complete(self, task: int) -> list[Sample]:
        """The group of a task, sampled and scored, or from a checkpoint."""
        stored = self._stored.pop(task, [])
        group = stored or await self._sample(task)
        if self._row is not None:
            for sample in group:
                sample.row = self._row(task)
        if self.score is not None and not stored:
            await self._scored(self.score(group), task)
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

    async def _sample(self, task: int) -> list[Sample]:
        """The completions of a task, from weights that the trainer has published."""
        request = Request(
            task, tuple(self.prompts(task)), range(self.group_size), self.sampling, self.seed
        )
        group: list[Sample] = await self._asked.sample(request)
        check_completions(group, request, type(self.source).__name__, conversations=True)
        return group

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
        ended = {
            task: group
            for task, group in self._groups.items()
            if group.done() and not group.cancelled()
        }
        done = {task: group.result() for task, group in ended.items() if not group.exception()}
        return {
            task: [to_record(sample) for sample in group]
            for task, group in {**self._stored, **done}.items()
        }

    async def _close(self) -> None:
        for group in self._groups.values():
            group.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        await self._asked.close()
