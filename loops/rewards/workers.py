"""Calls of user functions that may never return, kept from holding up the run.

async function    awaited, and cancelled when its time is up; it must not block the event loop
plain function    called in a daemon thread, which is left behind when its time is up: nothing stops a thread of
                  Python, and one that computes without letting go of the interpreter (a regular expression that
                  backtracks forever, a power of huge integers) holds up all others; `isolated` is for those
"""

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class OutOfTime(Exception):
    """A call took longer than it may."""


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a plain or async function and return its result."""
    try:
        if is_async(function):
            return await function(*arguments, **named)
        value = await in_thread(functools.partial(function, *arguments, **named))
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:  # asyncio would let it end the run
        raise RuntimeError(f"the function called sys.exit({error.code!r})") from error


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; when its time is up it is cancelled, and not waited for: it might refuse.

    Raises:
        OutOfTime: if it takes longer than that.
    """
    task = asyncio.ensure_future(coroutine)
    _running.add(task)
    task.add_done_callback(_finished)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if not done:
        raise OutOfTime(f"took longer than {seconds:g} s")
    return task.result()


async def in_thread(function: Callable[[], T]) -> T:
    """Run the function in a thread of its own; a wait that is cancelled leaves the thread behind."""
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


def is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


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
            except RuntimeError:  # the loop has ended, and nobody waits
                return
            del call, function, outcome


def _deliver(arrived: "asyncio.Future[tuple[bool, Any]]", outcome: tuple[bool, Any]) -> None:
    if not arrived.done():
        arrived.set_result(outcome)


def _finished(task: "asyncio.Future[Any]") -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # of a task that was given up, nobody else asks


_idle: list[_Worker] = []
_running: "set[asyncio.Future[Any]]" = set()  # asyncio holds tasks by weak references
os.register_at_fork(after_in_child=_idle.clear)  # threads don't survive a fork
