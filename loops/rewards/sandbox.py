"""Functions in processes of their own, which are killed when a call takes too long.

A process imports only what the function needs: math equivalence starts in a second, torch alone takes several. So it is
started without `multiprocessing`, which would import the running script.
"""

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
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


class isolated:
    """A function that is called in another process, because it may be slow, hang or crash.

    A cancelled call kills its process, with those that the function has started in it, and the next one starts another,
    which takes as long as the function's imports.
    Global variables of the function live in that process, and what it changes in its arguments is not sent back.

    Args:
        function: anything that can be pickled: a function of a module, or an object such as `MathEquivalence`.
        processes: number of calls that can run at the same time.

    Raises:
        ValueError: if another process could not import the function.
    """

    def __init__(self, function: Callable[..., Any], *, processes: int = 1) -> None:
        self.__name__ = name = str(getattr(function, "__name__", type(function).__name__))
        if processes < 1:
            raise ValueError(f"isolated: processes must be >= 1, got {processes}")
        if getattr(function, "__module__", "") == "__main__":
            where = "in the script that runs, which another process can't import"
            raise ValueError(f"isolated: {name} is defined {where}; move it to a module")
        try:
            self._pickled = pickle.dumps(function)
        except Exception as error:  # pickle raises whatever objects raise
            raise ValueError(
                f"isolated: {name} can't be sent to another process ({error}); use a function that a module defines, "
                "no lambda and no closure"
            ) from error
        self.over = getattr(function, "over", "sample")
        self.columns = getattr(function, "columns", ())
        self.concurrency = processes
        self._idle: list[tuple[subprocess.Popen[bytes], Connection]] = []

    async def __call__(self, *arguments: Any) -> Any:
        process, connection = self._idle.pop() if self._idle else self._start()
        try:
            succeeded, value = await off_loop(partial(_ask, connection, arguments))
        except (asyncio.CancelledError, EOFError, OSError) as error:
            code = _end(process)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise RuntimeError(f"{self.__name__}: its process ended with code {code}") from error
        self._idle.append((process, connection))
        if not succeeded:
            raise RuntimeError(f"in its process:\n{value}")
        return value

    def _start(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        connection, far_end = Pipe()
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({far_end.fileno()})"]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            command,
            pass_fds=[far_end.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the run, which may need this process until its step is finished
        )
        far_end.close()
        connection.send_bytes(self._pickled)
        weakref.finalize(connection, _end, process)  # at exit too
        return process, connection


def _ask(connection: Connection, arguments: tuple[Any, ...]) -> Any:
    connection.send_bytes(pickle.dumps(arguments))
    return pickle.loads(connection.recv_bytes())


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kill a process with all that its function has started, which may hold the other end of the connection, too."""
    if process.returncode is None:  # until it is waited for, its number is that of no other group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()  # the thread that reads the connection sees it close from the other side


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
            outcome = pickle.dumps((True, asyncio.run(value) if inspect.iscoroutine(value) else value))
        except BaseException:
            outcome = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(outcome)


def _end_with(parent: int) -> None:
    """End this process, and what it has started, with its parent, which can't do it when it is killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
