"""Run the async scheduler from a synchronous trainer, and blocking functions outside an event
loop.
"""

import asyncio
import heapq
import logging
import os
import sys
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
# of a call, whether it has returned, and its result or its error
Outcome = Future[tuple[bool, Any]]
Calls = SimpleQueue[tuple[Callable[[], object], Outcome]]

_DEVICES = ("cpu", "cuda")  # whose autocast is looked after
# seconds between two awaits, from which on a function is said to block the event loop
_BLOCKS = 1.0


class EventLoop:
    """An event loop in the trainer's thread, which runs only while the trainer waits for it, or in
    a background thread.

    It also runs in the background if this thread already runs a loop, as in a notebook.
    """

    def __init__(self, *, background: bool = False) -> None:
        self.closed = False
        self.runner = asyncio.Runner()
        self.thread: threading.Thread | None = None
        if background or asyncio._get_running_loop() is not None:
            self.loop = self.runner.get_loop()
            self.stopped = asyncio.Event()
            self.thread = threading.Thread(
                target=self._serve, name="burnish-scheduler", daemon=True
            )
            self.thread.start()
        else:  # of a script that ends without `close`
            self._dropped = weakref.finalize(self, _close_dropped, self.runner)

    def _serve(self) -> None:
        with self.runner:  # cancels pending tasks
            self.runner.run(self.stopped.wait())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self.thread is None:
            return self.runner.run(coroutine)
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where this thread was interrupted while it waited

    def close(self) -> None:
        self.closed = True
        if self.thread is None:
            self._dropped.detach()
            self.runner.close()
        else:
            self.loop.call_soon_threadsafe(self.stopped.set)
            self.thread.join()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, from an event loop of its own."""
    with closing(EventLoop()) as loop:
        return loop.run(coroutine)


def _close_dropped(runner: asyncio.Runner) -> None:
    """Close a loop that is collected as garbage, which may happen while another one runs in this
    thread.
    """
    if asyncio._get_running_loop() is not None:
        runner.get_loop().close()
    else:
        runner.close()


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; if one fails, the others are cancelled, and have ended."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Gate:
    """A semaphore whose places go to those of the lowest priority number, then to who came first.

    Args:
        places: how many may be taken at once.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._free = places
        self._numbers = count()
        # A heap: priority, number of arrival, places wanted, and a future that is done with them.
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def passed(self, priority: int = 0, size: int = 1) -> AsyncIterator[None]:
        """Within it so many places are taken, or all of them if there are fewer."""
        size = min(size, self._places)
        await self._enter(priority, size)
        try:
            yield
        finally:
            self._leave(size)

    async def _enter(self, priority: int, size: int) -> None:
        """Take so many places, when it is their turn."""
        if self._free >= size and not self._waiting:
            self._free -= size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._numbers), size, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it got its places at the same moment
                self._leave(size)
            else:
                self._admit()  # those behind it
            raise

    def _leave(self, size: int) -> None:
        self._free += size
        self._admit()

    def _admit(self) -> None:
        """Give free places to those that wait, in their order."""
        while self._waiting:
            _, _, size, turn = self._waiting[0]
            if turn.done():  # it was given up
                heapq.heappop(self._waiting)
                continue
            if size > self._free:  # a smaller one does not overtake it
                return
            heapq.heappop(self._waiting)
            self._free -= size
            turn.set_result(None)


class _TorchState:
    """What torch does in this thread: gradients, inference mode, autocast.

    Torch may be absent from this process.
    """

    def __init__(self) -> None:
        self.torch: Any = sys.modules.get("torch")
        self.grad = self.inference = False
        self.autocast: dict[str, bool] = {}
        if self.torch is not None:
            self.grad = self.torch.is_grad_enabled()
            self.inference = self.torch.is_inference_mode_enabled()
            self.autocast = {device: self.torch.is_autocast_enabled(device) for device in _DEVICES}

    def restore(self) -> None:
        for device, enabled in self.autocast.items():
            self.torch.set_autocast_enabled(device, enabled)
        if self.torch is not None:
            self.torch.set_grad_enabled(self.grad)


@types.coroutine
def watched(coroutine: Coroutine[Any, Any, T], name: str) -> Generator[Any, Any, T]:
    """Await a user's coroutine, and log a warning, once for each name, if it blocks the event loop.

    It runs from one of its awaits to the next while everything else in the loop waits, and no
    timeout can end it.

    What it sets in torch, such as ``with torch.no_grad():`` around an await, holds for itself
    alone: it would hold for the whole thread, in which the trainer trains, and be left behind where
    two coroutines end in another order.
    """
    # As `await` does it: each `send` runs the coroutine to its next await, which yields what the
    # event loop is to wait for; an error that ends the wait is thrown in instead.
    steps = coroutine.__await__()
    resume: Callable[[Any], object] = steps.send
    sent: object = None
    own = _TorchState()
    suspended: Any = None  # the inference mode of others, while this one waits in its own
    while True:
        others = _TorchState()
        if suspended is not None:
            suspended.__exit__(None, None, None)
            suspended = None
        if own.torch is others.torch:  # or else it was imported meanwhile
            own.restore()
        began = time.perf_counter()
        try:
            awaited = resume(sent)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            warn_if_blocking(name, time.perf_counter() - began)
            own = _TorchState()
            if own.inference != others.inference:
                suspended = own.torch.inference_mode(others.inference)
                suspended.__enter__()
            others.restore()
        try:
            resume, sent = steps.send, (yield awaited)
        except GeneratorExit:
            if suspended is not None:
                suspended.__exit__(None, None, None)
            steps.close()  # which leaves its own contexts
            others.restore()
            raise
        except BaseException as error:  # such as a cancellation, which the function may handle
            resume, sent = steps.throw, error


_blocking: set[str] = set()  # names that a warning was logged for


def warn_if_blocking(name: str, seconds: float) -> None:
    """Log a warning, once for each name, if a user's function ran in the event loop for so many
    seconds.
    """
    if seconds > _BLOCKS and name not in _blocking:
        _blocking.add(name)
        log.warning(
            "%s: it blocked the event loop for %.1f s, in which nothing else was sampled or scored, and no timeout "
            "holds; await what takes long, or make it a plain function (def instead of async def), which runs in a "
            "thread of its own",
            name,
            seconds,
        )


async def off_loop(function: Callable[[], T]) -> T:
    """Return the function's result, computed in a daemon thread.

    If the wait is cancelled, the call is abandoned.

    Python waits for an executor's threads when it exits, and starting a thread for each call is
    slow.
    """
    outcome: Outcome = Future()
    outcome.set_running_or_notify_cancel()  # from now on it can't be cancelled
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_work, args=(calls,), daemon=True, name="burnish-call").start()
    calls.put((function, outcome))
    try:
        succeeded, value = await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        _abandoned[outcome] = _name_of(function)
        # it has ended after all
        outcome.add_done_callback(lambda outcome: _abandoned.pop(outcome, None))
        raise
    if not succeeded:
        raise value
    result: T = value
    return result


def refuse_abandoned() -> None:
    """Raise RuntimeError if more calls than `MOST_ABANDONED` run on in threads although nobody
    waits for them.
    """
    stuck = Counter(list(_abandoned.values()))
    if stuck.total() > MOST_ABANDONED:
        names = ", ".join(f"{count} of {name}" for name, count in stuck.most_common(3))
        raise RuntimeError(
            f"{stuck.total()} calls have run out of time and still run, each in a thread that nothing can stop: "
            f"{names}. The run ends before the machine has no more threads or memory for it. Give what they wait for a "
            "time limit of its own, or have a reward run in a process, which can be killed: isolate: true"
        )


def _name_of(function: object) -> str:
    """The name of what a call runs, which may be wrapped in `functools.partial`."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _work(calls: Calls) -> None:
    """Compute one call after the other, in a thread that is idle in between."""
    while True:
        function, outcome = calls.get()
        try:
            result = True, function()
        except BaseException as error:
            result = False, error
        _idle.append(calls)  # before its caller continues, whose next call it can take
        outcome.set_result(result)
        del function, outcome, result  # an idle thread must not keep them alive


MOST_ABANDONED = 64
"""Calls out of time that may still run in threads before a run ends."""


_abandoned: dict[Outcome, str] = {}  # names of the functions that are called
_idle: list[Calls] = []  # the queues of idle threads
os.register_at_fork(after_in_child=_idle.clear)  # threads don't survive a fork
