"""Calls that may never end or may take all memory, tried in a child process first.

A chat template is such a call.

The child is a fork, which takes milliseconds, and has limits of processor time and of memory. Its
result is lost; it proves that this process can make the same call.
"""

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

SECONDS = 10  # of processor time; a long conversation takes some milliseconds to render
BYTES = 1 << 30  # beyond what this process has
_PATIENCE = 60.0  # seconds to wait for a child: of one that is out of luck, not out of time
_OUT_OF_MEMORY = 3  # its exit status


def excess(
    function: Callable[[], object], *, seconds: int = SECONDS, size: int = BYTES
) -> str | None:
    """Make a call in a child process, and say what it takes too much of; None if of nothing.

    A call that raises keeps within them. Without ``fork`` nothing is tried.

    Args:
        seconds: of processor time.
        size: bytes of memory.
    """
    if not hasattr(os, "fork"):
        return None
    with warnings.catch_warnings():
        # The child renders and ends; it takes no lock that another thread of this process may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _be_child(function, seconds, size)
    status = _wait(child)
    if status is None:
        return None  # it waited instead of computing, which says nothing of the call
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"more than {seconds} s"
    # by a system short of memory
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if killed or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == _OUT_OF_MEMORY):
        return f"more than {size >> 20} MiB of memory"
    return None


def _be_child(function: Callable[[], object], seconds: int, size: int) -> None:
    """Make the call within limits, and end this process without its parent's clean-up."""
    status = 0
    try:
        import resource  # where there is a fork, there are limits

        gc.disable()  # finalizers of objects end processes of the parent
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        held = _held()
        if held is not None:
            resource.setrlimit(resource.RLIMIT_AS, (held + size, held + size))
        function()
    except MemoryError:
        status = _OUT_OF_MEMORY
    except BaseException:
        status = 0  # the parent makes the same call, and raises the same error
    finally:
        os._exit(status)


def _held() -> int | None:
    """Bytes of address space of this process; None where the system does not say."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _wait(child: int) -> int | None:
    """The status of a child that has ended; None of one that was killed as it did not."""
    until = time.monotonic() + _PATIENCE
    pause = 0.0005
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
