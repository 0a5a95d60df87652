"""Run program.py of the working directory, and test.py after it, within limits: the process of `code`.

It imports nothing of this package and starts in some 30 ms. Limits are those of the kernel for
processor time, memory, the size of a file and open files; where user namespaces are allowed (Linux),
it also has no network, and what it starts ends with it.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys

LARGEST_FILE = 1 << 20  # bytes of what it prints, and of each file that it writes
_OPEN_FILES = 64
_PROCESSES = 32
_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000  # of sched.h
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl.h


def main() -> None:
    limits = json.loads(sys.argv[1])
    texts = {name: _take(name) for name in ("program.py", "test.py", "token")}
    separated = _separate()
    _limit(resource.RLIMIT_CPU, math.ceil(limits["seconds"]))
    _limit(resource.RLIMIT_DATA, limits["memory"])
    _limit(resource.RLIMIT_FSIZE, LARGEST_FILE)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)
    if separated:  # elsewhere it would count the processes of the user
        _limit(resource.RLIMIT_NPROC, _PROCESSES)

    sys.argv = ["program.py"]
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(texts["program.py"], "program.py", "exec"), names)
    if texts["test.py"]:
        exec(compile(texts["test.py"], "test.py", "exec"), names)
    if texts["token"]:
        sys.stdout.write(texts["token"])
    sys.stdout.flush()
    os._exit(0)  # whatever threads and exit handlers of the program there are


def _take(name: str) -> str:
    """The text of a file, which is gone before the program begins; empty if there is none."""
    try:
        with open(name) as file:
            text = file.read()
    except FileNotFoundError:
        return ""
    os.unlink(name)
    return text


def _separate() -> bool:
    """Go on in a child without network, whose processes end with it; False if that can't be had."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER | _NEW_PROCESSES | _NEW_NETWORK) != 0:
        return False
    child = (
        os.fork()
    )  # the first process of the new namespace, with which the kernel ends all others
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(0 if os.waitstatus_to_exitcode(status) == 0 else 1)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    return True


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main()
