"""Calls of user functions that may never return, kept from holding up the run.

async function    awaited, and cancelled when its time is up; it must not block the event loop
plain function    called in a daemon thread, which is left behind when its time is up: nothing stops a thread of
                  Python, and one that computes without letting go of the interpreter (a regular expression that
                  backtracks forever, a power of huge integers) holds up all others; `isolated` is for those
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..rollouts.event_loops import off_loop

T = TypeVar("T")


class OutOfTime(Exception):
    """A call took longer than it may."""


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a plain or async function and return its result."""
    try:
        if is_async(function):
            return await function(*arguments, **named)
        value = await off_loop(functools.partial(function, *arguments, **named))
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


def is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _finished(task: "asyncio.Future[Any]") -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # retrieve it: nothing else does for a task that was given up


_running: "set[asyncio.Future[Any]]" = set()  # asyncio holds tasks by weak references
