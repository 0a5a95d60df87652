"""A process in which providers run: one that crashes or hangs loses its row, and the report goes
on.

An illegal memory access ends every later use of the GPU in its process; a lock that is never
released waits for ever.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .operation import first_line
from .real_model import Unavailable


class CallFailed(RuntimeError):
    """An error that is no provider's fault, such as no memory for the truth."""


class Lost(RuntimeError):
    """The process has ended, lost the GPU, or (``silent``) run out of time."""

    silent = False


class Worker:
    """Calls functions that stand at the top of a module: in another process, and in a new one after
    any failure.

    Args:
        isolated: False calls them in this process, without a time limit.
        start: seconds for a new process, and for calls in which no provider runs.
    """

    def __init__(self, isolated: bool = True, start: float = 600.0) -> None:
        self.isolated, self.start = isolated, start
        self._process: Any = None
        self._line: Any = None

    def call(
        self, function: Callable[..., object], *arguments: object, seconds: float | None = None
    ) -> Any:
        """``function(*arguments)``.

        Raises:
            ValueError: for a mistake in the arguments.
            CallFailed: if the function has raised, or no process can be started.
            Lost: if the process has ended or lost the GPU, or does not answer within ``seconds``.
        """
        if not self.isolated:
            return function(*arguments)
        try:
            if self._process is None:
                self._open()
            self._line.send((function, arguments))
            return self._receive(seconds)
        except BaseException:
            self.close()
            raise

    def prepare(
        self, function: Callable[..., object], *arguments: object, seconds: float | None = None
    ) -> Any:
        """A call in which no provider runs: if it is lost that is a `CallFailed`."""
        try:
            return self.call(
                function, *arguments, seconds=self.start if seconds is None else seconds
            )
        except Lost as error:
            raise CallFailed(str(error)) from error

    def _open(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,))
        self._process.start()
        other.close()
        try:
            self._receive(self.start)
        except Lost as error:
            raise CallFailed(str(error)) from error

    def _receive(self, seconds: float | None) -> Any:
        if not self._line.poll(seconds):
            lost = Lost(f"no answer in {round(seconds or 0, 1):g} s")
            lost.silent = True
            raise lost
        try:
            error, content = self._line.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise Lost(f"ended its process with status {self._process.exitcode}") from None
        if error is not None:
            raise error(content)
        return content

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._line.close()
            self._process = None


def _serve(line: Connection) -> None:
    line.send((None, "ready"))
    while True:
        try:
            function, arguments = line.recv()
        except EOFError:
            return
        try:
            line.send((None, function(*arguments)))
        except Lost as error:
            line.send((Lost, f"the GPU was lost: {error}"))
        except (ValueError, Unavailable) as error:
            line.send((ValueError, str(error)))
        except Exception as error:
            traceback.print_exc()
            line.send((CallFailed, first_line(error)))
