"""A window of groups: what is due first, then what is ready; each once, and never too old."""

import asyncio
import random

import pytest
import torch
from burnish.benchmarks.experiments.idle import GROUPS, WINDOW, idle
from burnish.loops.rollouts.sample import VersionSpan
from scripted import B, G, Scripted, Trainer, wait_until


def taken_by(trainer, steps, start=0):
    """(step, tasks, ages) of each step."""
    trainer.version = start
    trainer.scheduler.publish()
    found = []
    for step in range(start, steps):
        selection = trainer.scheduler.select(step=step)
        groups = selection.kept
        ages = [step - sample.oldest for group in groups for sample in group]
        taken = [group[0].task for group in [*groups, *selection.passed_over]]
        found.append((step, taken, ages))
        trainer.version = step + 1
        trainer.scheduler.publish()
    return found


class Held(Scripted):
    """Some groups end only when they are let go."""

    def __init__(self, held):
        super().__init__()
        self.held = {task: asyncio.Event() for task in held}
        self.ended = 0

    async def sample(self, request):
        begun = self.at
        if request.task in self.held:
            await self.held[request.task].wait()
        else:
            await asyncio.sleep(0.001)
        self.ended += 1
        spans = [VersionSpan(begun, 0, 1)]
        return [self._answer(request, index, spans) for index in request.indices]

    def let_go(self, trainer, task):
        trainer.scheduler.loop.loop.call_soon_threadsafe(self.held[task].set)


@pytest.mark.parametrize(
    ("in_flight", "max_staleness"), [(B, 1), (2 * B, 1), (2 * B, 3), (3 * B, 6), (7 * B, 6)]
)
@pytest.mark.parametrize("seed", range(2))
def test_each_task_is_trained_on_once_and_no_age_exceeds_the_bound(in_flight, max_staleness, seed):
    source = Scripted(seed, delay=0.01, crashes=0.05)
    trainer = Trainer(source, in_flight=in_flight, max_staleness=max_staleness, attempts=50)
    with trainer.scheduler as scheduler:
        steps = taken_by(trainer, 30)
        tasks = [task for _, taken, _ in steps for task in taken]
        assert all(len(taken) == B for _, taken, _ in steps)
        assert max(age for *_, ages in steps for age in ages) <= max_staleness
        assert len(tasks) == len(set(tasks)) == scheduler.tasks == 30 * B
        assert max(tasks) < 30 * B + in_flight
        assert source.most <= in_flight * G  # after a crash each completion by itself


def test_a_slow_group_is_waited_for_when_it_is_due_and_not_before():
    """Begun at version 0, with a bound of 3 it must be trained on by step 3."""
    source = Held([1])
    trainer = Trainer(source, in_flight=2 * B, max_staleness=3)
    with trainer.scheduler as scheduler:
        first = taken_by(trainer, 3)
        assert all(1 not in taken for _, taken, _ in first)
        choosing = asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(scheduler._take(3, B, float("inf")), 60), scheduler.loop.loop
        )
        wait_until(lambda: source.ended == 5 * B - 1)
        assert not choosing.done()  # others are ready
        source.let_go(trainer, 1)
        kept = [group[0].task for group in choosing.result(60).kept]
    assert 1 in kept and len(kept) == B


def test_groups_are_taken_before_so_many_are_due_that_a_step_can_not_take_them():
    """Of 2B that are begun at once and due in two steps the trainer takes B in the first of them,
    although younger ones are ready.
    """
    slow = range(1, 2 * B + 1)
    source = Held(slow)
    trainer = Trainer(source, in_flight=3 * B, max_staleness=3)
    with trainer.scheduler as scheduler:
        taken_by(trainer, 2)
        choosing = asyncio.run_coroutine_threadsafe(
            scheduler._take(2, B, float("inf")), scheduler.loop.loop
        )
        wait_until(lambda: source.ended == 3 * B)  # all others that were begun
        assert not choosing.done()
        for task in slow[:B]:
            source.let_go(trainer, task)
        assert {group[0].task for group in choosing.result(60).kept} <= {*slow[:B]}


def test_ready_groups_are_taken_the_oldest_first():
    trainer = Trainer(Held([]), in_flight=3 * B, max_staleness=6)
    with trainer.scheduler as scheduler:
        steps = []
        trainer.scheduler.publish()
        for step in range(6):
            wait_until(lambda: all(group.done() for group in [*scheduler._groups.values()]))
            steps.append([group[0].task for group in scheduler.take(step=step)])
            trainer.version = step + 1
            trainer.scheduler.publish()
    assert steps == [list(range(step * B, (step + 1) * B)) for step in range(6)]


def test_killed_and_resumed_fifty_times_each_task_is_trained_on_once(tmp_path):
    rng, found, start = random.Random(0), [], 0
    options = {"in_flight": 3 * B, "max_staleness": 6, "attempts": 50}
    state = None
    for life in range(50):
        trainer = Trainer(Scripted(life, delay=0.004, crashes=0.02), **options)
        if state is not None:
            trainer.scheduler.load_state_dict(state)
        with trainer.scheduler as scheduler:
            found += taken_by(trainer, start + 2, start)
            torch.save(scheduler.state_dict(), tmp_path / "state.pt")
            if rng.random() < 0.5:  # it goes on for a while, and nothing of that is kept
                trainer.scheduler.publish()
                trainer.scheduler.select(step=start + 2)
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        start += 2
    tasks = [task for _, taken, _ in found for task in taken]
    assert [step for step, *_ in found] == list(range(100))
    assert len(tasks) == len(set(tasks)) == 100 * B
    assert set(range(97 * B)) <= {*tasks}
    assert max(age for *_, ages in found for age in ages) <= 6


def test_groups_without_variance_are_passed_over_in_a_window_too():
    def useful(group):
        return group[0].task % 3 != 0

    trainer = Trainer(Scripted(delay=0.004), in_flight=3 * B, max_staleness=6, keep=useful)
    with trainer.scheduler:
        steps = taken_by(trainer, 25)
    tasks = [task for _, taken, _ in steps for task in taken]
    assert all(len([task for task in taken if task % 3]) == B for _, taken, _ in steps)
    assert len(tasks) == len(set(tasks))
    assert max(age for *_, ages in steps for age in ages) <= 6


@pytest.mark.parametrize(("in_flight", "max_staleness"), [(B - 1, 3), (4 * B + 1, 3), (2 * B, 0)])
def test_a_window_that_the_bound_can_not_keep_is_refused(in_flight, max_staleness):
    says = rf"in_flight must be from groups_per_step, {B}, to .* got {in_flight}"
    with pytest.raises(ValueError, match=says):
        Trainer(Scripted(), in_flight=in_flight, max_staleness=max_staleness)


@pytest.mark.parametrize(("training", "most"), [(0.5, 0.05), (0.25, 0.25)])
def test_in_a_window_the_trainer_hardly_waits_at_the_same_mean_age(training, most):
    """Simulated servers and seconds; the whole table, and ten thousand steps, are the
    benchmark's.
    """
    window = idle(training, 150, **WINDOW)
    in_order = idle(training, 150, max_staleness=2)
    assert window["idle"] < most < in_order["idle"]
    assert window["age/mean"] == pytest.approx(in_order["age/mean"], abs=0.05)
    assert window["age/max"] <= WINDOW["max_staleness"]
    assert WINDOW["in_flight"] == 3 * GROUPS
