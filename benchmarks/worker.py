"""A process in which providers run, so that one who takes it along loses a row and not the report.

An illegal memory access ends every later use of the GPU in its process; a lock that is never released waits for ever.
"""

import math
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from .operation import first_line
from .real_model import Unavailable

Notice = Callable[[str], None]
START = 600.0  # seconds until the first provider runs: the process, the inputs, and the truth about them


class LostDevice(RuntimeError):
    """The GPU can't be used any more in this process."""


class Failure(RuntimeError):
    """A case could not be measured, for no provider's fault: as where there is no room for the truth."""


def check_device(device: torch.device) -> None:
    """Raises `LostDevice` if what has run so far has left the GPU unusable."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except Exception as error:
        raise LostDevice(str(error).strip().partition("\n")[0]) from error


class Lost(RuntimeError):
    """``provider`` has ended its process, taken the GPU along, or (``silent``) given no answer."""

    def __init__(self, reason: str, provider: str, *, silent: bool) -> None:
        super().__init__(reason)
        self.provider, self.silent = provider, silent


class Room:
    """Calls functions in another process, in a new one after whoever has ended it.

    A function is at the top of a module, and takes ``notice`` last: it calls ``notice(name)`` before it lets a provider
    run.

    Args:
        patience: seconds between notices after which the one who runs is given up.
        start: seconds until the first notice after which the call is given up.
    """

    def __init__(self, patience: float, start: float = START) -> None:
        self.patience, self.start = patience, start
        self._process: Any = None
        self._line: Any = None

    def __call__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], names: list[str]
    ) -> tuple[Any, dict[str, str]]:
        """What ``function(*arguments, names, notice)`` returns, called again without whoever has ended it; and why.

        Raises:
            ValueError: for a mistake in the arguments.
            Failure: if it was no provider who failed.
        """
        lost: dict[str, str] = {}
        while True:
            try:
                return self.once(function, (*arguments, [name for name in names if name not in lost])), lost
            except Lost as error:
                if error.provider not in names or error.provider in lost:
                    raise Failure(str(error)) from error
                lost[error.provider] = str(error)

    def once(self, function: Callable[..., Any], arguments: tuple[Any, ...], limit: float = math.inf) -> Any:
        """What ``function(*arguments, notice)`` returns.

        Raises:
            ValueError: for a mistake in the arguments.
            Failure: if it was no provider who failed.
            Lost: if it was one.
            TimeoutError: after ``limit`` seconds.
        """
        self._open()
        self._line.send((function, arguments))
        try:
            kind, content = self._listen(time.monotonic() + limit)
        except BaseException:
            self.close()
            raise
        if kind == "done":
            return content
        self.close()
        raise ValueError(content) if kind == "mistake" else Failure(content)

    def _listen(self, deadline: float) -> tuple[str, Any]:
        running: str | None = None
        while True:
            patience, left = self.start if running is None else self.patience, deadline - time.monotonic()
            if not self._line.poll(max(0.0, min(patience, left))):
                if left < patience:
                    raise TimeoutError
                raise self._gone(f"no answer in {patience:g} s", running, silent=True)
            try:
                kind, content = self._line.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                reason = f"ended its process with status {self._process.exitcode}"
                raise self._gone(reason, running, silent=False) from None
            if kind == "lost":
                raise self._gone(content, running, silent=False)
            if kind != "on":
                return kind, content
            running = content

    @staticmethod
    def _gone(reason: str, running: str | None, *, silent: bool) -> RuntimeError:
        return Failure(reason) if running is None else Lost(reason, running, silent=silent)

    def _open(self) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._line, other = context.Pipe()
            self._process = context.Process(target=_work, args=(other,))
            self._process.start()
            other.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._line.close()
            self._process = None


def _work(line: Connection) -> None:
    while True:
        try:
            function, arguments = line.recv()
        except EOFError:
            return
        try:
            line.send(("done", function(*arguments, lambda name: line.send(("on", name)))))
        except LostDevice as error:
            line.send(("lost", f"the GPU was lost: {error}"))
        except (ValueError, Unavailable) as error:
            line.send(("mistake", str(error)))
        except Exception as error:
            traceback.print_exc()
            line.send(("failure", first_line(error)))
