"""Event loops of schedulers, which are closed when they are collected, and the threads of blocking functions."""

import asyncio
import gc
import threading
import warnings

import pytest
from burnish.loops.rollouts.event_loops import EventLoop, off_loop


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


def test_blocking_functions_run_in_a_thread_that_is_used_again_and_raise_where_they_are_awaited():
    async def body():
        thread = await off_loop(threading.current_thread)
        with pytest.raises(ZeroDivisionError):
            await off_loop(lambda: 1 / 0)
        assert await off_loop(threading.current_thread) is thread is not threading.current_thread()

    asyncio.run(body())


def test_a_wait_that_is_cancelled_leaves_its_thread_behind_which_then_ends():
    threads, released = [], threading.Event()

    def hang():
        threads.append(threading.current_thread())
        released.wait()

    async def body():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(off_loop(hang), 0.2)
        assert await off_loop(threading.current_thread) not in threads

    asyncio.run(body())
    (left,) = threads
    assert left.is_alive()
    released.set()
    left.join(10)
    assert not left.is_alive()
