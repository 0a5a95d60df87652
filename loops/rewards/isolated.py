"""Functions in processes of their own, which are killed when a call takes too long."""

import asyncio
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from ..concurrency import off_loop


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
        self.connection, theirs = Pipe()
        loops = __package__.rpartition(".")[0]
        packages = [loops, __package__, f"{loops}.rollouts"]
        command = [sys.executable, "-P", str(Path(__file__).with_name("serve.py")), str(theirs.fileno()), *packages]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
        )
        theirs.close()
        self.connection.send_bytes(pickled)
        self.end = weakref.finalize(self, _end, self.process, self.connection)  # at exit too

    def ask(self, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        self.connection.send_bytes(pickle.dumps(arguments))
        answer: tuple[bool, Any] = pickle.loads(self.connection.recv_bytes())
        return answer


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> int:
    process.kill()
    return process.wait()  # the connection closes with its last reader, who learns of the end from the other side
