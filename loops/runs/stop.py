"""Stop a run at a signal: the current step is finished and saved, and the exit status names the
signal.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# A shell's exit status for a signal; 75 is EX_TEMPFAIL, on which a batch system queues the job
# again.
STATUS = {"SIGUSR1": 75, "SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}

_catching: set[signal.Signals] = set()


class Stopped(SystemExit):
    """A signal ended the run after a whole step, which was saved.

    Uncaught, it ends the process with ``code``.
    """


@contextmanager
def signals(*, visible: bool) -> Iterator[dict[str, float]]:
    """Catch the signals of `STATUS`.

    Yields a count for each, 1 for the first that arrives and 0 for the others.

    A second SIGINT has its usual effect. A handler that the program has set itself stays, as do
    signals that are ignored; outside of the main thread none is caught.

    Args:
        visible: acknowledge a signal on standard error.
    """
    received, owner = dict.fromkeys(STATUS, 0.0), os.getpid()
    before: dict[signal.Signals, Any] = {}

    def receive(number: int, frame: object) -> None:
        caught = signal.Signals(number)
        if os.getpid() != owner:  # a child process forked by a library, which should end
            signal.signal(caught, before[caught])
            signal.raise_signal(caught)
            return
        if caught == signal.SIGINT:
            signal.signal(caught, before[caught])
        if not any(received.values()):
            received[caught.name] = 1.0
            if visible:  # `print` may have been interrupted itself
                with suppress(OSError):  # Ctrl-C also ends what reads a pipe
                    os.write(
                        2,
                        f"{caught.name}: stops after this step; a second SIGINT ends it at once\n".encode(),
                    )

    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        known = {each: signal.getsignal(each) for each in map(signal.Signals.__getitem__, STATUS)}
        before |= {each: handler for each, handler in known.items() if handler in usual}
    try:
        for each in before:
            signal.signal(each, receive)
        _catching.update(before)
        yield received
    finally:
        _catching.difference_update(before)
        for each, handler in before.items():
            signal.signal(each, handler)


def ends_the_run(caught: signal.Signals) -> bool:
    """Whether this signal would end the run, or the process, if its handler could run: not one of
    the program's own.
    """
    return caught in _catching or signal.getsignal(caught) in (
        signal.SIG_DFL,
        signal.default_int_handler,
    )
