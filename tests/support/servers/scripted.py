"""A source whose delays and crashes are drawn from a seed, and a trainer whose weights are one
number."""

import asyncio
import random
import time

import torch
from burnish.loops.rollouts.sample import Sample, SamplingParams, VersionSpan
from burnish.loops.rollouts.scheduler import RolloutScheduler
from burnish.loops.rollouts.source import SourceLost

B, G = 3, 2


class Scripted:
    """A source whose delays and crashes are drawn from a seed; a crash fails what is under way and
    loses the weights.

    The one token of an answer is a hash of its seed and version, so that answers to different
    questions differ.
    """

    overlaps, stored = True, False

    def __init__(self, seed=0, *, delay=0.0, crashes=0.0, down=0, dead=False):
        self.rng = random.Random(seed)
        self.delay, self.crashes, self.down, self.dead = delay, crashes, down, dead
        self.at: int | None = None
        self.publications = 0
        self.under_way = self.most = self.asked = self.crashed = 0
        self.closed = False

    def _reachable(self):
        if self.down > 0:
            self.down -= 1
            raise ConnectionError("nobody listens at the port")
        if self.dead:
            raise SourceLost("the server is gone")

    async def sample(self, request):
        self._reachable()
        self.asked += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            started = self.at
            await asyncio.sleep(self.rng.random() * self.delay)
            if self.rng.random() < self.crashes:
                self.at, self.down, self.crashed = None, self.rng.randrange(3), self.crashed + 1
                raise SourceLost("the connection was lost")
            if started is None or self.at is None:
                raise SourceLost("it draws from weights of nobody's")
            spans = [VersionSpan(started, 0, 1)] + [VersionSpan(self.at, 1, 2)] * (
                self.at != started
            )
            return [self._answer(request, index, spans) for index in request.indices]
        finally:
            self.under_way -= 1

    def _answer(self, request, index, spans):
        tokens = [request.seed(index) % 1000 + span.version for span in spans]
        return Sample(
            request.task,
            index,
            list(request.prompt),
            tokens,
            [True] * len(tokens),
            [-1.0] * len(tokens),
            spans,
            "stop",
        )

    async def publish(self, weights, version):
        self._reachable()
        assert dict(weights)["v"] == version
        self.at, self.publications = version, self.publications + 1

    async def version(self):
        self._reachable()
        return self.at

    async def close(self):
        self.closed = True


class Trainer:
    """As many weights as a version has: one number. Trains by noting what it was given."""

    def __init__(self, source, **options):
        self.version = 0
        self.trained = []  # (step, task, tokens, age)
        options = {
            "groups_per_step": B,
            "group_size": G,
            "seed": 5,
            "max_staleness": 0,
            "backoff": 0.001,
            **options,
        }
        self.scheduler = RolloutScheduler(
            source,
            lambda task: [task + 1, 7],
            weights=lambda: [("v", torch.tensor(self.version))],
            sampling=SamplingParams(max_tokens=2),
            **options,
        )

    def run(self, steps, start=0, pause=0.0):
        self.version = start
        self.scheduler.publish()
        for step in range(start, steps):
            for group in self.scheduler.take(step=step):
                assert [sample.index for sample in group] == list(range(G))
                age = step - min(sample.oldest for sample in group)
                self.trained.append((step, group[0].task, [sample.tokens for sample in group], age))
            time.sleep(pause)
            self.version = step + 1
            self.scheduler.publish()
            yield step

    def all(self, steps, **how):
        with self.scheduler:
            list(self.run(steps, **how))
        return self.trained


def wait_until(condition, seconds=60.0):
    """For what another thread does meanwhile."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
