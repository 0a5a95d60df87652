"""Event loops of schedulers, which are closed when they are collected, and the threads of blocking
functions.
"""

import asyncio
import gc
import signal
import sys
import threading
import time
import warnings
from contextlib import closing

import pytest
import torch
from burnish.loops.rollouts.event_loops import EventLoop, Gate, off_loop, watched


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


def test_an_interrupted_wait_cancels_what_runs_in_the_background():
    """Or else it would go on, and take groups for a trainer that gave up on them."""
    started, cancelled = threading.Event(), threading.Event()

    async def wait():
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    def interrupt():
        started.wait(60)
        while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "wait":
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # ignored in what a shell runs in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with closing(EventLoop(background=True)) as loop:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(wait())
        signal.signal(signal.SIGINT, before)
        assert cancelled.wait(60)
        assert loop.run(asyncio.sleep(0, "well")) == "well"


def test_blocking_functions_share_a_thread_and_raise_where_they_are_awaited():
    async def body():
        thread = await off_loop(threading.current_thread)
        with pytest.raises(ZeroDivisionError):
            await off_loop(lambda: 1 / 0)
        assert await off_loop(threading.current_thread) is thread is not threading.current_thread()

    asyncio.run(body())


def test_a_cancelled_wait_leaves_its_thread_behind_which_is_used_again_afterwards():
    threads, hanging, released = [], threading.Event(), threading.Event()

    def hang():
        threads.append(threading.current_thread())
        hanging.set()
        released.wait()

    async def body():
        call = asyncio.ensure_future(off_loop(hang))
        await asyncio.sleep(0)
        assert hanging.wait(60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await off_loop(threading.current_thread) not in threads

    def pause():
        time.sleep(0.05)
        return threading.current_thread()

    # by one of ever more calls at once: threads that became idle later are taken first
    async def reused():
        calls = 1
        while threads[0] not in await asyncio.gather(*(off_loop(pause) for _ in range(calls))):
            calls += 1

    asyncio.run(body())
    assert threads[0].is_alive() and threads[0].daemon
    released.set()  # what returns to a loop that has ended is dropped without a word
    asyncio.run(asyncio.wait_for(reused(), 60))


def test_an_error_of_a_blocking_function_is_raised_whatever_it_is():
    """A future takes no StopIteration, such as that of `next` on nothing."""
    for error in (StopIteration, KeyError):

        def fail(error=error):
            raise error("gone")

        async def body(fail=fail):
            await off_loop(fail)

        with pytest.raises((RuntimeError, KeyError), match=r"StopIteration|gone"):
            asyncio.run(asyncio.wait_for(body(), 60))


def _state():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.mark.parametrize(
    ("context", "inside"),
    [
        (torch.no_grad, (False, False, False)),
        (torch.inference_mode, (False, True, False)),
        (lambda: torch.autocast("cpu", torch.bfloat16), (True, False, True)),
    ],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_what_a_coroutine_sets_in_torch_holds_for_itself_alone(context, inside):
    """Two of them, each in its own context around an await, end in another order than they
    began.
    """
    seen = []

    async def judge(number, seconds):
        with context():
            seen.append(_state())
            await asyncio.sleep(seconds)
            seen.append(_state())
            weight = torch.ones(2, requires_grad=True)
        seen.append(_state())
        return float(weight.detach().sum())

    async def run():
        first = asyncio.ensure_future(watched(judge(0, 0.05), "judge"))
        second = asyncio.ensure_future(watched(judge(1, 0.1), "judge"))
        for _ in range(5):
            await asyncio.sleep(0.03)
            assert _state() == (True, False, False)
        return await first, await second

    assert asyncio.run(run()) == (2.0, 2.0)
    assert seen.count(inside) == 4 and seen.count((True, False, False)) == 2 and len(seen) == 6
    assert _state() == (True, False, False)
    torch.ones(2, requires_grad=True).sum().backward()


@pytest.mark.parametrize("ends", ["by itself", "cancelled", "closed"])
def test_a_coroutine_leaves_nothing_of_torch_behind_however_it_ends(ends):
    async def judge():
        torch.set_grad_enabled(False)  # and never on again
        with torch.inference_mode():
            await asyncio.sleep(0 if ends == "by itself" else 60)

    async def run():
        if ends == "closed":
            steps = watched(judge(), "judge")
            next(steps)
            steps.close()
            return
        task = asyncio.ensure_future(watched(judge(), "judge"))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    gc.collect()
    assert _state() == (True, False, False)


def test_a_watched_coroutine_is_cancelled_and_closed_as_any_other():
    log = []

    async def stubborn():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append("asked to end")
            await asyncio.sleep(0)
            raise
        finally:
            log.append("ended")

    async def run():
        task = asyncio.ensure_future(watched(stubborn(), "stubborn"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        steps = watched(stubborn(), "stubborn")
        next(steps)
        steps.close()

    asyncio.run(run())
    assert log == ["asked to end", "ended", "ended"]


def test_a_gate_lets_the_lowest_priority_number_pass_first_and_those_alike_in_order():
    async def passing():
        gate, passed, within, most = Gate(2), [], 0, 0

        async def go(name, priority):
            nonlocal within, most
            async with gate.passed(priority):
                within += 1
                most = max(most, within)
                passed.append(name)
                await asyncio.sleep(0)
                within -= 1

        names = [("e1", 1), ("e2", 1), ("e3", 1), ("t1", 0), ("e4", 1), ("t2", 0)]
        await asyncio.gather(*(go(*name) for name in names))
        assert most == 2
        return passed

    assert asyncio.run(passing()) == ["e1", "e2", "t1", "t2", "e3", "e4"]


def test_a_place_at_a_gate_is_not_lost_with_those_that_are_given_up():
    async def passing():
        gate = Gate(1)

        async def go():
            async with gate.passed():
                pass

        await gate._enter(0, 1)
        waiting = [asyncio.create_task(go()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # while it waits
        gate._leave(1)
        waiting[1].cancel()  # at the moment at which it has got the place
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.wait_for(go(), 10)
        return [task.cancelled() for task in waiting]

    assert asyncio.run(passing()) == [True, True, False]


def test_a_large_one_at_a_gate_is_not_overtaken_and_lets_others_in_when_it_is_given_up():
    async def passing():
        gate, within = Gate(10), []

        async def go(name, size):
            async with gate.passed(size=size):
                within.append(name)
                await asyncio.sleep(60 if name == "first" else 0)

        first = asyncio.create_task(go("first", 4))
        await asyncio.sleep(0)
        large, small = (asyncio.create_task(go(*each)) for each in (("large", 99), ("small", 1)))
        await asyncio.sleep(0.01)
        assert within == ["first"], "there is room for the small one, which came later"
        large.cancel()
        await small
        await asyncio.gather(large, return_exceptions=True)
        last = asyncio.create_task(go("all", 99))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(last, 10)
        return within

    assert asyncio.run(passing()) == ["first", "small", "all"]
