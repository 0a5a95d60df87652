"""Groups that are not worth training on are passed over, and others are asked for at once."""

import asyncio
import threading

import pytest
import torch
from burnish.benchmarks.experiments.idle import (
    COMPLETIONS,
    SimulatedServers,
    dynamic,
    simulated,
)
from burnish.loops.rollouts.event_loops import gather_or_cancel
from burnish.loops.rollouts.sample import Request
from scripted import B, Scripted, Trainer


def useful(group):
    """Half of the groups, or about so, by the task alone."""
    return group[0].task % 5 in (1, 4)


class Noted(Scripted):
    """Notes the tasks that it is asked for, and those that are given up.

    Args:
        apart: seconds by which a group is answered later than the one that was asked for before it.
    """

    def __init__(self, *arguments, apart=0.0, **options):
        super().__init__(*arguments, **options)
        self.apart = apart
        self.tasks, self.given_up = [], []

    async def sample(self, request):
        self.tasks.append(request.task)
        try:
            await asyncio.sleep(self.apart * len(set(self.tasks)))
            return await super().sample(request)
        except asyncio.CancelledError:
            self.given_up.append(request.task)
            raise


def serial(count, steps):
    """The tasks of each step, if it asked for one group after the other."""
    found, task = [], 0
    for _ in range(steps):
        found.append([])
        while len(found[-1]) < count:
            if task % 5 in (1, 4):
                found[-1].append(task)
            task += 1
    return found


def tasks_by_step(trained):
    found = {}
    for step, task, *_ in trained:
        found.setdefault(step, []).append(task)
    return list(found.values())


@pytest.mark.parametrize("seed", range(4))
def test_without_staleness_the_first_useful_groups_are_taken_whatever_is_asked_for(seed):
    """The estimate decides how many are asked for, and the clock which come first: neither decides
    which are trained on.
    """
    trainer = Trainer(Noted(seed, delay=0.003, crashes=0.05), keep=useful, attempts=50)
    trainer.scheduler.useful.observe(seed * 3, seed)
    trained = trainer.all(8)
    assert tasks_by_step(trained) == serial(B, 8)
    assert {age for *_, age in trained} == {0}
    assert trained == Trainer(Scripted(), keep=useful).all(8)


def test_groups_are_asked_for_at_once_and_nothing_is_sampled_when_a_step_is_taken():
    source = Noted(delay=0.01, apart=0.02)
    trainer = Trainer(source, keep=useful)
    with trainer.scheduler as scheduler:
        for step in trainer.run(6):
            assert source.under_way == 0, step
            assert scheduler.state_dict()["ready"] == {}
            asked, source.tasks = source.tasks, []
            assert asked[: len(set(asked))] == sorted(set(asked))
            assert len(asked) >= 1.25 * B / 0.75
    assert source.given_up  # those after the last that was needed were under way


def test_a_group_given_up_as_surplus_is_begun_anew_by_the_next_step():
    source = Noted()
    trainer = Trainer(source, keep=useful)
    with trainer.scheduler as scheduler:
        scheduler.publish()
        first = scheduler.select(step=0)
        assert first.wasted == len(source.tasks) - len(first.kept) - len(first.passed_over) > 0
        trainer.version = 1
        scheduler.publish()
        second = scheduler.select(step=1)
    taken = [group[0].task for group in [*second.kept, *second.passed_over]]
    assert min(taken) == scheduler.ledger.ends[0]
    assert {sample.oldest for group in second.kept for sample in group} == {1}


@pytest.mark.parametrize("stop", range(1, 6))
def test_without_staleness_a_resumed_run_asks_for_the_same_groups(stop, tmp_path):
    """Also the same at once: which completions are read together may change their bits."""
    whole = Trainer(first := Noted(delay=0.002), keep=useful)
    asked = []
    with whole.scheduler as scheduler:
        for step in whole.run(7):
            asked.append(first.tasks)
            first.tasks = []
            if step + 1 == stop:
                torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    second = Noted(9, delay=0.002)
    resumed = Trainer(second, keep=useful)
    resumed.scheduler.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with resumed.scheduler:
        for step in resumed.run(7, start=stop):
            assert second.tasks == asked[step]
            second.tasks = []
    assert resumed.trained == [each for each in whole.trained if each[0] >= stop]


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_with_staleness_surplus_is_for_the_next_steps_and_no_age_exceeds_the_bound(
    max_staleness, seed
):
    source = Noted(seed, delay=0.004, crashes=0.05)
    trainer = Trainer(source, keep=useful, max_staleness=max_staleness, attempts=50)
    taken, wasted = [], 0
    with trainer.scheduler as scheduler:
        scheduler.publish()
        for step in range(20):
            selection = scheduler.select(step=step)
            assert len(selection.kept) == B
            assert all(map(useful, selection.kept)) and not any(map(useful, selection.passed_over))
            oldest = min(sample.oldest for group in selection.kept for sample in group)
            assert step - oldest <= max_staleness
            taken += [group[0].task for group in [*selection.kept, *selection.passed_over]]
            wasted += selection.wasted
            assert scheduler.tasks == len(taken) + wasted
            trainer.version = step + 1
            scheduler.publish()
    assert len(taken) == len(set(taken))
    assert wasted < 0.15 * len(taken)


def test_with_staleness_a_resumed_run_takes_each_task_once(tmp_path):
    def taken(trainer, steps, start=0):
        trainer.version = start
        trainer.scheduler.publish()
        found, wasted = [], 0
        for step in range(start, steps):
            selection = trainer.scheduler.select(step=step)
            wasted += selection.wasted
            found += [group[0].task for group in [*selection.kept, *selection.passed_over]]
            trainer.version = step + 1
            trainer.scheduler.publish()
        return found, wasted

    first = Trainer(Noted(delay=0.004), keep=useful, max_staleness=2)
    with first.scheduler as scheduler:
        found, wasted = taken(first, 5)
        torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    second = Trainer(Noted(1, delay=0.004), keep=useful, max_staleness=2)
    second.scheduler.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.scheduler.useful == first.scheduler.useful
    with second.scheduler:
        more, further = taken(second, 12, start=5)
    found += more
    assert len(found) == len(set(found))
    assert len(set(range(max(found))) - set(found)) <= wasted + further


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_limit_ends_the_search_where_nothing_is_useful(max_staleness):
    trainer = Trainer(Scripted(), keep=lambda group: False, max_staleness=max_staleness)
    with trainer.scheduler as scheduler:
        scheduler.publish()
        selection = scheduler.select(step=0, most=4 * B)
    assert selection.kept == []
    assert [group[0].task for group in selection.passed_over] == list(range(4 * B))


def test_held_out_prompts_take_no_longer_than_a_rollout_of_their_number():
    """Simulated servers: the same 500 requests, as a rollout and as an evaluation."""
    with simulated(SimulatedServers()) as scheduler:
        clock = scheduler.loop.clock
        scheduler.publish()
        scheduler.select(500, step=0)
        rollout = clock.now
        requests = [
            Request(task, [1], range(COMPLETIONS), scheduler.sampling, key=0, priority=1)
            for task in range(500)
        ]
        scheduler.beside(lambda source: gather_or_cancel(map(source.sample, requests)))
        assert clock.now - rollout == pytest.approx(rollout)


@pytest.mark.parametrize(("silent", "most"), [(0.25, 1.1), (0.5, 1.2), (0.75, 1.3)])
def test_a_step_waits_hardly_longer_than_for_the_same_groups_at_once(silent, most):
    """Simulated servers and seconds; the whole table is that of the benchmark."""
    before = threading.active_count()
    measured = dynamic(silent, 60)
    assert measured["over the same at once"] < most
    assert measured["begun in vain"] < 0.25
    assert threading.active_count() == before
