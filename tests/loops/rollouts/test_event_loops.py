"""Event loops of schedulers: one that is dropped without `close` is closed when it is collected."""

import asyncio
import gc
import warnings

import pytest
from burnish.loops.rollouts.event_loops import EventLoop


def drop(*, closed):
    loop = EventLoop()
    loop.run(asyncio.sleep(0))
    loop.itself = loop  # garbage that only the collector finds
    if closed:
        loop.close()
    return loop.runner


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["no loop runs", "another loop runs"])
def test_a_dropped_loop_is_closed_wherever_it_is_collected(inside, closed, monkeypatch):
    gc.collect()
    problems = []
    monkeypatch.setattr("sys.unraisablehook", lambda problem: problems.append(problem.exc_value))
    runner = drop(closed=closed)
    loop = None if closed else runner.get_loop()

    async def collect():
        gc.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(collect()) if inside else gc.collect()
        assert problems == [] and (closed or loop.is_closed())
