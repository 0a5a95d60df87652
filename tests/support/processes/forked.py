"""Functions in processes of their own, forked from one that has imported what they need and
computed nothing.

That process starts with the first call, imports each module once, and is killed with the process
that started it, as are the processes that it forks. Imports take seconds and a fork takes none;
what has run autograd or threads, as pytest's own process has, must not fork.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

# this file is a script, too: what tests share is beside it
for folder in Path(__file__).parents[1].iterdir():
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

GRACE = 60.0  # seconds in which a process should notice that another one of its group failed
PR_SET_PDEATHSIG = 1


@functools.cache
def _server():
    server = subprocess.Popen(
        [sys.executable, __file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    atexit.register(_end, server)
    return server


def _end(server):
    """Kill the server and what it has forked, and close its pipes."""
    _server.cache_clear()
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    with server:  # waits, and closes
        pass


def run_forked(count, module, *arguments, timeout=600):
    """Call ``module.be_rank(*arguments)`` in ``count`` processes; returns (exit status, what was
    printed) of each.

    Several find in their environment what torchrun tells the ranks of a group. Arguments pass
    through JSON.
    """
    server = _server()
    print(json.dumps([count, module, *arguments]), file=server.stdin, flush=True)
    if not select.select([server.stdout], [], [], timeout)[0]:
        _end(server)
        raise TimeoutError(f"{module}.be_rank{arguments} has not ended in {timeout} s")
    line = server.stdout.readline()
    if not line:
        _end(server)
        raise RuntimeError(
            f"the process that should import {module} and fork has ended; its stderr says why"
        )
    return json.loads(line)


def die_with(parent):
    """Have the kernel kill this process when the thread that started it ends; ``parent`` is that
    thread's process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def fork(function, arguments, environment, log):
    """The id of a process that calls the function, and exits with status 0 if that returns."""
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    die_with(parent)
    os.environ |= {name: str(value) for name, value in environment.items()}
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    status = 1
    try:
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait_for_all(children):
    """Exit statuses of the processes; those that outlive a failed one by `GRACE` are killed."""
    statuses, end = {}, None
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses and os.waitid(
                os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT
            ):
                statuses[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if statuses[child] and end is None:
                    end = time.monotonic() + GRACE
        if end is not None and time.monotonic() > end:
            for child in children:
                os.kill(child, signal.SIGKILL) if child not in statuses else None
        time.sleep(0.02)
    return [statuses[child] for child in children]


def group(count, taken):
    """The environment of each rank of a group over gloo on this machine, that meets at the port of
    this socket.

    While the socket has it, without listening, the kernel gives the port to nobody who asks for
    any.
    """
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    common = {
        "WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
    }
    return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]


def run(count, function, arguments, directory):
    logs = [Path(directory, f"{rank}.txt") for rank in range(count)]
    with socket.socket() as taken:
        environments = group(count, taken) if count > 1 else [{}]
        children = [
            fork(function, arguments, *rank) for rank in zip(environments, logs, strict=True)
        ]
        return list(zip(wait_for_all(children), [log.read_text() for log in logs], strict=True))


def main(parent):
    die_with(parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints is no answer
    for line in sys.stdin:
        count, module, *arguments = json.loads(line)
        if module not in sys.modules:
            gc.disable()  # a fifth of the time of an import goes into looking for garbage
            importlib.import_module(module)
            gc.enable()
            gc.collect()
            # a child that looked at the million objects of the imports would have its own copy of
            # them
            gc.freeze()
        with tempfile.TemporaryDirectory() as directory:
            outcomes = run(count, sys.modules[module].be_rank, arguments, directory)
        print(json.dumps(outcomes), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
