"""Functions in processes of their own, which are killed when a call takes too long.

A process imports no more than the function needs: math equivalence starts in a second, and torch alone takes several,
and hundreds of megabytes. So it is started anew rather than by `multiprocessing`, which would import the script that
runs, and need its ``if __name__ == "__main__"``.
"""

import asyncio
import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any

from ..rollouts.event_loops import off_loop

_SERVE = f"from {__name__} import serve; serve({{}})"


class ProcessError(RuntimeError):
    """A function failed in its process; the message is the traceback there."""


class isolated:
    """A function that is called in another process: for what computes for long, hangs or crashes.

    A call that is given up kills its process, and the next one starts another, which takes as long as importing what
    the function needs. What the function keeps in global variables lives in that process.

    Args:
        function: anything that can be pickled: a function of a module, or an object such as `MathEquivalence`.
        processes: how many calls run at the same time.

    Raises:
        ValueError: if another process could not import the function.
    """

    def __init__(self, function: Callable[..., Any], *, processes: int = 1) -> None:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        if processes < 1:
            raise ValueError(f"isolated: processes must be >= 1, got {processes}")
        if getattr(function, "__module__", "") == "__main__":
            raise ValueError(
                f"isolated: {name} is defined in the script that runs, which another process can't import; move it to "
                "a module"
            )
        try:
            self._pickled = pickle.dumps(function)
        except Exception as error:  # pickle raises whatever objects raise
            raise ValueError(
                f"isolated: {name} can't be sent to another process ({error}); use a function that a module defines, "
                "no lambda and no closure"
            ) from error
        self.__name__ = name
        self.over = getattr(function, "over", "sample")
        self.columns = getattr(function, "columns", ())
        self.concurrency = processes
        self._idle: list[_Child] = []

    async def __call__(self, *arguments: Any) -> Any:
        child = self._idle.pop() if self._idle else _Child(self._pickled)
        try:
            fine, value = await off_loop(partial(child.ask, arguments))
        except (asyncio.CancelledError, EOFError, OSError) as error:
            code = child.end()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise ProcessError(f"{self.__name__}: its process ended with code {code}") from error
        self._idle.append(child)
        if not fine:
            raise ProcessError(f"in its process:\n{value}")
        return value


class _Child:
    def __init__(self, pickled: bytes) -> None:
        self.connection, far_end = Pipe()
        command = [sys.executable, "-P", "-c", _SERVE.format(far_end.fileno())]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            command, pass_fds=[far_end.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
        )
        far_end.close()
        self.connection.send_bytes(pickled)
        self.end = weakref.finalize(self, _end, self.process, self.connection)  # at exit too

    def ask(self, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        self.connection.send_bytes(pickle.dumps(arguments))
        outcome: tuple[bool, Any] = pickle.loads(self.connection.recv_bytes())
        return outcome


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> int:
    process.kill()
    return process.wait()  # the connection closes with its last reader, who learns of the end from the other side


def serve(descriptor: int) -> None:
    """Answer calls one after the other, in the process of `isolated`.

    It receives a function, then arguments, and sends (True, what the function returned) or (False, its traceback).
    """
    connection = Connection(descriptor)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    function: Any = None
    pickled = connection.recv_bytes()
    while True:
        try:
            arguments = connection.recv_bytes()
        except EOFError:
            return
        try:
            function = function or pickle.loads(pickled)
            value = function(*pickle.loads(arguments))
            outcome = pickle.dumps((True, asyncio.run(_result(value)) if inspect.isawaitable(value) else value))
        except BaseException:
            outcome = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(outcome)


async def _result(value: Any) -> Any:
    return await value


def _end_with(parent: int) -> None:
    """End this process with its parent, which can't do so itself when it is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
