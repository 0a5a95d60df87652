"""Run the async scheduler from a synchronous trainer: in its thread, or in a background thread."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class InlineLoop:
    """An event loop in the trainer's thread, which runs only while the trainer waits for it."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.closed = False
        self._dropped = weakref.finalize(self, _close_dropped, self.runner)  # of a script that ends without `close`

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def close(self) -> None:
        self.closed = True
        self._dropped.detach()
        self.runner.close()


class BackgroundLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.closed = False
        self.runner = asyncio.Runner()
        self.loop = self.runner.get_loop()
        self.stopped = asyncio.Event()
        self.thread = threading.Thread(target=self._serve, name="burnish-scheduler", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with self.runner:  # cancels what is left
            self.runner.run(self.stopped.wait())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        self.closed = True
        self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; in a background thread where this one has a loop already, as in a notebook."""
    loop: InlineLoop | BackgroundLoop = BackgroundLoop() if in_a_loop() else InlineLoop()
    try:
        return loop.run(coroutine)
    finally:
        loop.close()


def _close_dropped(runner: asyncio.Runner) -> None:
    """Close a loop that is collected as garbage, which may happen while another one runs in this thread."""
    if in_a_loop():
        runner.get_loop().close()
    else:
        runner.close()


def in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
