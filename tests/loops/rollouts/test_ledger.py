"""Tasks are taken once each, in any order; and how many groups are asked for."""

import random

import pytest
from burnish.loops.rollouts.ledger import Ledger, UsefulShare


def test_tasks_taken_in_any_order_are_known_and_none_is_taken_twice():
    ledger, rng = Ledger(), random.Random(0)
    waiting, taken = list(range(60)), set()
    for step in range(12):
        chosen = rng.sample(waiting[:12], 5)
        ledger.take(chosen, step)
        taken |= set(chosen)
        waiting = [task for task in waiting if task not in taken]
        assert [task in ledger for task in range(60)] == [task in taken for task in range(60)]
        untaken = ledger.untaken()
        assert [next(untaken) for _ in waiting] == waiting
        assert ledger.ends[-1] == len(ledger) == len(taken)
        ledger = Ledger.of_state(ledger.state_dict())
    with pytest.raises(AssertionError, match=r"task \d+ would be taken twice"):
        ledger.take([next(iter(taken))], 12)
    with pytest.raises(AssertionError, match=r"step 13, .* would come after step 11"):
        ledger.take([next(ledger.untaken())], 13)


def test_a_step_may_take_tasks_more_than_once():
    ledger = Ledger()
    ledger.take([0, 1], 0)
    ledger.take([2], 0)
    ledger.take([3], 1)
    assert ledger.ends == [3, 4]


def test_a_state_of_an_earlier_version_is_tasks_in_their_order():
    ledger = Ledger.of_state({"ends": [4, 9]})
    assert ledger.low == 9 and next(ledger.untaken()) == 9


@pytest.mark.parametrize(("share", "asked"), [(1.0, 16), (0.95, 18), (0.5, 40), (0.25, 80)])
def test_a_quarter_more_groups_are_asked_for_than_are_needed_on_average(share, asked):
    useful = UsefulShare()
    for _ in range(100):
        useful.observe(round(1000 * share), round(1000 * (1 - share)))
    assert useful.share == pytest.approx(share, abs=0.01)
    assert useful.asked(16) == asked


def test_the_share_follows_the_latest_steps():
    useful = UsefulShare()
    assert useful.share == 0.5
    for _ in range(20):
        useful.observe(8, 0)
    for _ in range(12):
        useful.observe(8, 24)
    assert useful.share == pytest.approx(0.25, abs=0.02)
    for _ in range(30):
        useful.observe(0, 64)
    assert 0 < useful.share < 0.02
