"""A process in which providers run, so that one who takes it along loses a row and not the report.

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


class Room:
    """Calls ``function(*arguments, names, notice)`` in another process, again without whoever has ended it.

    Args:
        function: at the top of a module; it calls ``notice(name)`` before it lets a provider run.
        patience: seconds between notices after which the one who runs is given up.
    """

    def __init__(self, function: Callable[..., Any], patience: float) -> None:
        self.function, self.patience = function, patience
        self._process: Any = None
        self._line: Any = None

    def __call__(self, arguments: tuple[Any, ...], names: list[str]) -> tuple[Any, dict[str, str]]:
        """What the function returns, and for each provider who had to be left out, why.

        Raises:
            ValueError: for a mistake in the arguments.
            Failure: if it was no provider who failed.
        """
        lost: dict[str, str] = {}
        while True:
            self._open()
            self._line.send((arguments, [name for name in names if name not in lost]))
            kind, content, running = self._listen()
            if kind == "done":
                return content, lost
            self.close()
            if kind == "mistake":
                raise ValueError(content)
            if kind == "failure" or running not in names or running in lost:
                raise Failure(content)
            lost[running] = content

    def _listen(self) -> tuple[str, Any, str | None]:
        running: str | None = None
        while True:
            patience = START if running is None else self.patience
            if not self._line.poll(patience):
                return "lost", f"no answer in {patience:g} s", running
            try:
                kind, content = self._line.recv()
            except EOFError:
                self._process.join()
                return "lost", f"ended its process with status {self._process.exitcode}", running
            if kind != "on":
                return kind, content, running
            running = content

    def _open(self) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._line, other = context.Pipe()
            self._process = context.Process(target=_work, args=(self.function, other))
            self._process.start()
            other.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._line.close()
            self._process = None


def _work(function: Callable[..., Any], line: Connection) -> None:
    while True:
        try:
            arguments, names = line.recv()
        except EOFError:
            return
        try:
            line.send(("done", function(*arguments, names, lambda name: line.send(("on", name)))))
        except LostDevice as error:
            line.send(("lost", f"the GPU was lost: {error}"))
        except (ValueError, Unavailable) as error:
            line.send(("mistake", str(error)))
        except Exception as error:
            traceback.print_exc()
            line.send(("failure", first_line(error)))
