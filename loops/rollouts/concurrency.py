"""Blocking functions beside an event loop, and several coroutines of which one failure ends all."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


async def off_loop(function: Callable[[], T]) -> T:
    """Return the function's result, from a daemon thread; a wait that is cancelled leaves the thread behind."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[tuple[bool, Any]] = loop.create_future()
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Worker()
    thread.calls.put((function, loop, arrived))
    try:
        fine, value = await arrived
    except asyncio.CancelledError:
        thread.calls.put(None)  # should it ever come back, it ends
        raise
    _idle.append(thread)
    if not fine:
        raise value
    result: T = value
    return result


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; where one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class _Worker:
    """A daemon thread that makes one call at a time; an executor's threads would be waited for when Python exits."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Any] = SimpleQueue()
        Thread(target=self._work, daemon=True, name="burnish-call").start()

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            function, loop, arrived = call
            try:
                outcome = True, function()
            except BaseException as error:
                outcome = False, error
            try:
                loop.call_soon_threadsafe(_deliver, arrived, outcome)
            except RuntimeError:  # the loop has ended, and nothing waits
                return
            del call, function, outcome


def _deliver(arrived: "asyncio.Future[tuple[bool, Any]]", outcome: tuple[bool, Any]) -> None:
    if not arrived.done():
        arrived.set_result(outcome)


_idle: list[_Worker] = []
os.register_at_fork(after_in_child=_idle.clear)  # threads don't survive a fork
