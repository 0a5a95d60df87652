"""A process that watches over the calls of rewards, and names the one that stops the whole run.

A time limit fires in the trainer's own process. It can't where a reward holds Python's interpreter,
as a regular expression does that backtracks for ever, and nothing is printed where one ends the
process. The watchdog is another process, so it sees both: it says which reward was being called,
and ends a run that can't go on.

Run as a script, this file is that process; it imports nothing of burnish.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

BEAT = 1.0  # seconds between signs of life
SILENCE = 4.0  # seconds without one after which the interpreter is held


class Watchdog:
    """Tells the process that watches which rewards are being called, and that this process is
    alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # of each call under way: name, and when its time is up
        self._ends: dict[object, tuple[str, float]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._under_way = threading.Event()

    @contextlib.contextmanager
    def calling(self, name: str, timeout: float) -> Iterator[None]:
        """Within the context, a reward of this name is being called, for no longer than so many
        seconds.
        """
        call = object()
        with self._lock:
            if self._process is None:
                self._start()
            self._ends[call] = (name, time.monotonic() + timeout)
            self._tell()
        self._under_way.set()
        try:
            yield
        finally:
            with self._lock:
                del self._ends[call]
                self._tell()

    def _start(self) -> None:
        if not faulthandler.is_enabled():
            # it prints the stack of a crash, and of the signal by which the run is ended
            faulthandler.enable()
        # -I and -S: nothing of the user's environment, and no packages, so that it starts at once.
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        threading.Thread(target=self._beat, daemon=True, name="burnish-watchdog").start()
        atexit.register(self.close)

    def close(self) -> None:
        """Say that this process ends in good order."""
        with self._lock:
            if self._process is not None:
                self._send({"bye": True})
                self._process.communicate()
                self._process = None

    def _beat(self) -> None:
        while self._process is not None:
            self._under_way.wait()
            with self._lock:
                self._tell()
                if not self._ends:
                    self._under_way.clear()
            time.sleep(BEAT)

    def _tell(self) -> None:
        """Send the name of each reward that is being called, and when the time of its first call is
        up.
        """
        first: dict[str, float] = {}
        for name, end in self._ends.values():
            first[name] = min(end, first.get(name, end))
        self._send({"calls": first})

    def _send(self, message: object) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        # A watchdog that has died, or is slow, holds nothing up.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(process.stdin.fileno(), json.dumps(message).encode() + b"\n")


watchdog = Watchdog()


def watch(parent: int) -> None:
    """Read what the parent says of itself, until it ends, or has to be ended."""
    calls: dict[str, float] = {}
    heard = time.monotonic()
    rest = b""
    while True:
        if select.select([0], [], [], BEAT / 2)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                _explain_end(calls)
                return
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "bye" in message:
                    return
                calls = message["calls"]
            heard = time.monotonic()
            continue
        if _is_stopped(parent):
            heard = time.monotonic()  # it says nothing, and holds nothing
        over = [name for name, end in calls.items() if time.monotonic() > end]
        silent = time.monotonic() - heard
        # rewards have threads of their own
        if over and silent > SILENCE and _busiest_thread(parent) != parent:
            _end(parent, over, silent)
            return


def _end(parent: int, names: list[str], seconds: float) -> None:
    _say(
        f"reward {' or '.join(names)}: it has held Python's interpreter for {seconds:.0f} s and its time is up. No "
        "time limit can fire meanwhile, so this run ends; its last checkpoint is kept. To have such a call killed and "
        "its completion masked, run it in a process of its own: isolate: true. Below is where it is."
    )
    with contextlib.suppress(ProcessLookupError, PermissionError):
        resource.prlimit(parent, resource.RLIMIT_CORE, (0, 0))  # the memory of the run is no use
        os.kill(parent, signal.SIGABRT)  # faulthandler then prints all stacks


def _explain_end(calls: dict[str, float]) -> None:
    if calls:
        _say(
            f"reward {' or '.join(calls)}: the run's process has ended while it was being called: it has ended the "
            "process (os._exit, os.abort), crashed in a library, or the process was killed. In a process of its own, "
            "isolate: true, only its completion would be lost."
        )


def _say(text: str) -> None:
    print(f"\nburnish: {text}\n", file=sys.stderr, flush=True)


def _is_stopped(process: int) -> bool:
    """True if a signal has stopped it, such as Ctrl-Z."""
    fields = _stat(Path(f"/proc/{process}/stat"))
    return bool(fields) and fields[0] in ("T", "t")


def _busiest_thread(process: int) -> int | None:
    """The thread that computes most for half a second; None if none does, or nothing is known."""
    before = _times(process)
    time.sleep(0.5)
    used = {thread: ticks - before.get(thread, ticks) for thread, ticks in _times(process).items()}
    busiest = max(used, key=used.__getitem__, default=None)
    return busiest if busiest is not None and used[busiest] > 0 else None


def _times(process: int) -> dict[int, int]:
    """Ticks of processor time that each thread has used."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            if fields := _stat(thread / "stat"):
                found[int(thread.name)] = int(fields[11]) + int(fields[12])
    return found


def _stat(path: Path) -> list[str]:
    """The fields of a process or thread from its state on."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    watch(int(sys.argv[1]))
