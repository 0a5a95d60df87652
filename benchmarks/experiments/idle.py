"""How long the trainer waits for completions: the real scheduler against simulated servers.

    python -m burnish.benchmarks.experiments.idle [steps]    writes benchmarks/results/idle.json

Time is simulated: where the event loop would sleep, its clock is set forward, so that ten thousand
steps take minutes. The servers have room for every request, and the seconds of a completion are
log-normal (σ = 1). What is reported:

idle       the share of time in which the trainer waits, by the seconds of a training step, given as a
           share of the mean seconds of a step's slowest completion: with tasks in their order, by
           max_staleness, and in a window
dynamic    where some groups have no variance, seconds until a step has its groups, over the seconds of
           the same groups if they had been asked for at once
"""

import asyncio
import math
import selectors
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import torch

from ...loops.rollouts.event_loops import EventLoop
from ...loops.rollouts.sample import Request, Sample, SamplingParams, VersionSpan
from ...loops.rollouts.scheduler import RolloutScheduler
from ...loops.rollouts.source import NamedWeights
from . import common

RESULTS = common.RESULTS / "idle.json"
STEPS = 10_000
GROUPS, COMPLETIONS = 8, 8  # of a step, and of a group
TRAINING = (0.25, 0.5, 1.0, 2.0)  # seconds of a step over those of its slowest completion
SILENT = (0.25, 0.5, 0.75)  # shares of groups without variance
WINDOW = {"in_flight": 3 * GROUPS, "max_staleness": 6}
RULES: dict[str, dict[str, int]] = {
    **{f"in order, {bound}": {"max_staleness": bound} for bound in (0, 1, 2, 4, 8)},
    "in a window of 3B, 6": WINDOW,
}

T = TypeVar("T")


class _NoWaiting(selectors.DefaultSelector):
    """Instead of waiting for files, sets the clock of its loop forward."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if timeout and not ready:
            self.now += timeout
        return ready


class SimulatedLoop(EventLoop):
    """An event loop of the scheduler in which seconds pass at once."""

    def __init__(self) -> None:
        self.closed = False
        self.thread = None
        self.clock = _NoWaiting()
        self.loop = asyncio.SelectorEventLoop(self.clock)
        self.loop.time = lambda: self.clock.now  # type: ignore[method-assign]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        self.closed = True
        self.loop.close()


@dataclass
class SimulatedServers:
    """A source whose completions take log-normal seconds, drawn from their seeds, and nothing
    else.

    Attributes:
        seconds: of the group of each task that was completed.
    """

    overlaps = True
    stored = False
    seconds: dict[int, float] = field(default_factory=dict)
    published: int | None = None

    async def sample(self, request: Request) -> list[Sample]:
        begun = self.published
        assert begun is not None
        seconds = max(map(duration, map(request.seed, request.indices)))
        await asyncio.sleep(seconds)
        self.seconds[request.task] = seconds
        span = VersionSpan(begun, 0, 1)
        return [
            Sample(request.task, index, list(request.prompt), [1], [True], [-1.0], [span], "stop")
            for index in request.indices
        ]

    async def publish(self, weights: NamedWeights, version: int) -> None:
        self.published = version

    async def version(self) -> int | None:
        return self.published

    async def close(self) -> None:
        pass


def duration(seed: int) -> float:
    """Seconds of the completion with this seed: log-normal, σ = 1, median 1."""
    return math.exp(np.random.Generator(np.random.PCG64(seed)).standard_normal())


def tail(draws: int = 2000) -> float:
    """Mean seconds of the slowest completion of a step."""
    lengths = np.random.Generator(np.random.PCG64(0)).lognormal(size=(draws, GROUPS * COMPLETIONS))
    return float(lengths.max(1).mean())


def simulated(servers: SimulatedServers, **options: Any) -> RolloutScheduler:
    """The scheduler of a run of simulated servers, in simulated time."""
    scheduler = RolloutScheduler(
        servers,
        lambda task: [1],
        group_size=COMPLETIONS,
        groups_per_step=GROUPS,
        sampling=SamplingParams(max_tokens=1, stop=(1,)),
        weights=lambda: [("weight", torch.zeros(()))],
        **options,
    )
    scheduler.loop.close()
    scheduler.loop = SimulatedLoop()
    return scheduler


def idle(training: float, steps: int = STEPS, **options: Any) -> dict[str, float]:
    """The share of time that a trainer waits whose step takes this share of the mean slowest
    completion, and the ages that it trains on.

    Args:
        options: of `RolloutScheduler`.
    """
    seconds = training * tail()
    ages: list[int] = []
    with simulated(SimulatedServers(), **options) as scheduler:
        clock: Any = scheduler.loop
        for step in range(steps):
            scheduler.publish()
            for group in scheduler.take(step=step):
                ages += [step - sample.oldest for sample in group]
            clock.run(asyncio.sleep(seconds))
        assert scheduler.tasks == steps * GROUPS
        total = clock.clock.now
    return {
        "idle": 1 - steps * seconds / total,
        "age/mean": fmean(ages),
        "age/max": float(max(ages)),
    }


def dynamic(silent: float, steps: int, **options: Any) -> dict[str, float]:
    """Seconds until steps have their groups, a share of which is passed over, over the seconds of
    the same groups at once; and the share of groups that was begun in vain.
    """

    def varies(group: list[Sample]) -> bool:
        # another draw than that of its seconds
        draw = np.random.Generator(np.random.PCG64((7, group[0].task))).random()
        return bool(draw >= silent)

    servers = SimulatedServers()
    waited = at_once = 0.0
    begun = wasted = 0
    with simulated(servers, keep=varies, **options) as scheduler:
        clock: Any = scheduler.loop
        for step in range(steps):
            scheduler.publish()
            began = clock.clock.now
            selection = scheduler.select(step=step)
            waited += clock.clock.now - began
            taken = [group[0].task for group in [*selection.kept, *selection.passed_over]]
            at_once += max(servers.seconds[task] for task in taken)
            begun += len(taken) + selection.wasted
            wasted += selection.wasted
    return {"over the same at once": waited / at_once, "begun in vain": wasted / begun}


def main(arguments: Sequence[str]) -> None:
    steps = int(arguments[0]) if arguments else STEPS
    results = common.earlier(RESULTS) | {
        "settings": {"steps": steps, "groups": GROUPS, "completions": COMPLETIONS},
        "idle": {},
        "dynamic": {},
    }
    for rule, options in RULES.items():
        # ages in a window are a matter of chance, so that it is followed for longer
        taken = steps if options is WINDOW else steps // 10
        waits = {str(training): idle(training, taken, **options) for training in TRAINING}
        results["idle"][rule] = waits
        shares = "  ".join(f"{each['idle']:6.1%}" for each in waits.values())
        print(
            f"{rule:22} idle {shares}   oldest {max(each['age/max'] for each in waits.values()):g}"
        )
    for silent in SILENT:
        measured = dynamic(silent, steps // 10)
        results["dynamic"][str(silent)] = measured
        print(f"{silent:.0%} silent:", "  ".join(f"{k} {v:.3f}" for k, v in measured.items()))
    common.write(RESULTS, results)


if __name__ == "__main__":
    main(sys.argv[1:])
