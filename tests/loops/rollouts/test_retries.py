"""What a source refuses or loses is asked for again, and nothing else is."""

import asyncio
import itertools
import logging
import random
from collections import Counter

import pytest
import torch
from burnish.loops.environments import Limits, MultiTurnSource, Step
from burnish.loops.rollouts.retries import RetryingSource
from burnish.loops.rollouts.sample import Request, Sample, SamplingParams, VersionSpan
from burnish.loops.rollouts.scheduler import RolloutScheduler
from burnish.loops.rollouts.source import SourceBusy, SourceError, SourceLost

GROUPS, SIZE, STEPS = 8, 8, 4


class Refusing:
    """A source that refuses, or loses, some completions; which ones is drawn from a seed.

    Attributes:
        asked: how often each completion was, by (task, index, turn).
        versions: how often its version was asked for.
    """

    overlaps, stored, vocab = True, False, 2000

    def __init__(self, share=0.0, *, error=SourceBusy, separate=True, seed=0, fails=None):
        self.rng, self.share, self.error, self.separate = (
            random.Random(seed),
            share,
            error,
            separate,
        )
        self.fails = fails or (lambda place, attempt: self.rng.random() < self.share)
        self.asked, self.versions, self.at = Counter(), 0, None

    async def sample(self, request):
        places = [(request.task, index, request.turn) for index in request.indices]
        self.asked.update(places)
        await asyncio.sleep(0)
        for place in places:
            if self.fails(place, self.asked[place]):
                raise self.error(f"{place} is refused")
        return [self._answer(request, index) for index in request.indices]

    def _answer(self, request, index):
        tokens = [request.seed(index) % 1000, self.at]
        spans = [VersionSpan(self.at, 0, 2)]
        return Sample(
            request.task,
            index,
            list(request.prompt),
            tokens,
            [True] * 2,
            [-1.0] * 2,
            spans,
            "stop",
            "?",
        )

    async def publish(self, weights, version):
        self.at = version

    async def version(self):
        self.versions += 1
        return self.at

    async def close(self):
        pass


def trained(source, steps=STEPS, **options):
    """The tokens of all completions of so many steps."""
    options = {"groups_per_step": GROUPS, "group_size": SIZE, "backoff": 0.001, **options}
    scheduler = RolloutScheduler(
        source,
        lambda task: [task + 1, 7],
        weights=lambda: [("v", torch.tensor(0))],
        sampling=SamplingParams(max_tokens=2),
        **options,
    )
    found = []
    with scheduler:
        for step in range(steps):
            scheduler.publish()
            for group in scheduler.take(step=step):
                found += [
                    (sample.task, sample.index, sample.tokens, sample.info.get("turns"))
                    for sample in group
                ]
    return found, scheduler.retries


@pytest.mark.parametrize(
    ("error", "separate"), [(SourceBusy, True), (SourceLost, True), (SourceLost, False)]
)
@pytest.mark.parametrize(("share", "factor"), [(0.1, 1.15), (0.3, 1.6)])
def test_one_refused_completion_is_asked_for_again_alone(share, factor, error, separate):
    undisturbed, _ = trained(Refusing())
    source = Refusing(share, error=error, separate=separate)
    assert trained(source)[0] == undisturbed
    if separate:
        assert source.asked.total() <= factor * GROUPS * SIZE * STEPS


def test_siblings_of_a_refused_completion_are_asked_for_once():
    source = Refusing(fails=lambda place, attempt: place == (3, 5, 0) and attempt <= 5)
    _, retries = trained(source, steps=1)
    assert source.asked.pop((3, 5, 0)) == 6 and retries == 5
    assert set(source.asked.values()) == {1}


def test_a_refusal_does_not_count_while_the_source_completes_others():
    async def run():
        source = Refusing(fails=lambda place, attempt: place[0] == 0 and attempt <= 20)
        source.at = 0
        again = retrying(source, attempts=3)

        async def others():
            for task in itertools.count(1):
                await again.sample(request(0, task=task))

        busy = asyncio.ensure_future(others())
        (sample,) = await again.sample(request(0, task=0))
        busy.cancel()
        return sample, source.asked[0, 0, 0]

    sample, asked = asyncio.run(run())
    assert sample.task == 0 and asked == 21


def test_a_source_that_refuses_everything_ends_the_run():
    source = Refusing(1.0)
    with pytest.raises(
        SourceError,
        match=r"completion \d of task \d could not be sampled in 3 attempts .* is refused",
    ):
        trained(source, attempts=3)
    assert max(source.asked.values()) == 3


def test_the_first_refusal_is_a_warning_and_further_ones_are_counted(caplog):
    with caplog.at_level(logging.WARNING):
        _, retries = trained(Refusing(0.3))
    first, *others = [record.getMessage() for record in caplog.records]
    assert (
        "is refused; it is asked again, and further refusals are counted in sampling/retries"
        in first
    )
    assert retries > 20 > len(others)


def request(*indices, task=0):
    return Request(task, [1, 2], indices, SamplingParams(max_tokens=2), key=0)


def retrying(source, attempts=8, backoff=0.001, restored=None):
    async def at_once(failed):
        pass

    return RetryingSource(source, attempts, backoff, lambda: (0, 0), restored or at_once)


@pytest.mark.parametrize(("error", "looks"), [(SourceBusy, 0), (SourceLost, 1), (OSError, 1)])
def test_weights_are_looked_after_where_the_source_was_lost(error, looks):
    looked = []

    async def restored(failed):
        looked.append(failed)

    source = Refusing(error=error, fails=lambda place, attempt: attempt == 1)
    source.at = 0
    again = retrying(source, restored=restored)
    assert len(asyncio.run(again.sample(request(0)))) == 1
    assert len(looked) == looks


def test_completions_that_are_lost_together_look_for_the_weights_together():
    """Each look may take seconds where a server hangs."""
    source = Refusing(error=SourceLost, fails=lambda place, attempt: attempt == 1)
    trained(source, steps=1)
    assert set(source.asked.values()) == {2}
    assert source.versions < 10


@pytest.mark.parametrize("error", [SourceLost, SourceBusy, ConnectionError])
def test_a_lost_turn_is_asked_for_again_alone(error):
    """Its conversation goes on, with what its environment has done, and so do the others of its
    group.
    """
    calls = Counter()

    class Counting:
        def reset(self, row):
            calls["reset"] += 1
            return [1, 2]

        def step(self, completion):
            calls["step"] += 1
            return Step([5], reward=1.0)

    def conversations(source):
        return MultiTurnSource(source, Counting, lambda task: {}, None, Limits(turns=6, tokens=100))

    undisturbed, _ = trained(conversations(Refusing()), steps=1, groups_per_step=1, group_size=4)
    assert calls == {"reset": 4, "step": 24}
    source = Refusing(error=error, fails=lambda place, attempt: place == (0, 2, 2) and attempt == 1)
    again, retries = trained(conversations(source), steps=1, groups_per_step=1, group_size=4)
    assert again == undisturbed and retries == 1
    assert calls == {"reset": 8, "step": 48}
    assert source.asked.total() == 25 and source.asked[0, 2, 2] == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": [2000, 0]}, "completion token 2000 is outside the vocabulary of 2000"),
        ({"tokens": [-1, 0]}, "completion token -1 is outside the vocabulary of 2000"),
        ({"logprobs": [-1.0]}, "logprobs must have one entry per token, 2, got 1"),
        ({"logprobs": [0.5, -1.0]}, "log-probs must be finite and <= 0, got 0.5"),
        ({"logprobs": [float("nan"), -1.0]}, "log-probs must be finite and <= 0, got nan"),
        (
            {"spans": [VersionSpan(None, 0, 2)]},
            "wanted the version of the weights that its tokens are from, got None",
        ),
        ({"spans": [VersionSpan(0, 0, 1)]}, "no version is known for token 1"),
        ({"spans": []}, "no version is known for token 0"),
        ({"prompt": [-5]}, "prompt token -5 is outside the vocabulary"),
    ],
    ids=str,
)
def test_what_a_source_gives_is_checked_at_the_door(changes, says):
    class Wrong(Refusing):
        def _answer(self, request, index):
            sample = super()._answer(request, index)
            vars(sample).update(changes)
            return sample

    with pytest.raises(SourceError, match=says):
        trained(Wrong(), attempts=2)
