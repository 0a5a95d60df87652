"""A process in which providers run: one that crashes or hangs loses its row, and the report goes on.

An illegal memory access ends every later use of the GPU in its process; a lock that is never released waits for ever.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from .operation import first_line
from .real_model import Unavailable

START = 600.0  # seconds for a new process, or for the inputs of a case and their truth
Caller = Callable[[Callable[..., Any], tuple[Any, ...], float], Any]  # (function, arguments, seconds)


class LostDevice(RuntimeError):
    """The GPU can't be used any more in this process."""


class CallFailed(RuntimeError):
    """An error that is no provider's fault, such as no memory for the truth."""


class Lost(RuntimeError):
    """The process has ended, lost the GPU, or (``silent``) run out of time."""

    silent = False


def check_device(device: torch.device) -> None:
    """Raises `LostDevice` if the GPU has become unusable."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except Exception as error:
        raise LostDevice(str(error).strip().partition("\n")[0]) from error


def call_here(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
    """As `Worker.call`, in this process and without a time limit."""
    return function(*arguments)


def blameless(call: Caller, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
    """A call in which no provider runs: if it is lost that is a `CallFailed`."""
    try:
        return call(function, arguments, seconds)
    except Lost as error:
        raise CallFailed(str(error)) from error


class Worker:
    """Calls functions in another process, and in a new one after any failure; they stand at the top of a module."""

    def __init__(self, start: float = START) -> None:
        self.start = start
        self._process: Any = None
        self._line: Any = None

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
        """``function(*arguments)``.

        Raises:
            ValueError: for a mistake in the arguments.
            CallFailed: if the function has raised, or no process can be started.
            Lost: if the process has ended or lost the GPU, or does not answer within ``seconds``.
        """
        try:
            if self._process is None:
                self._open()
            self._line.send((function, arguments))
            return self._receive(seconds)
        except BaseException:
            self.close()
            raise

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

    def _receive(self, seconds: float) -> Any:
        if not self._line.poll(seconds):
            lost = Lost(f"no answer in {round(seconds, 1):g} s")
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
        except LostDevice as error:
            line.send((Lost, f"the GPU was lost: {error}"))
        except (ValueError, Unavailable) as error:
            line.send((ValueError, str(error)))
        except Exception as error:
            traceback.print_exc()
            line.send((CallFailed, first_line(error)))
