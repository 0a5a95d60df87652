"""Functions in processes of their own, forked from one that has imported what they need and computed nothing.

That process starts with the first call, imports each module once, and ends with the process that started it. Imports
take seconds and a fork takes none; what has run autograd or threads, as pytest's own process has, must not fork.
"""

import functools
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

GRACE = 60.0  # seconds in which a process should notice that another one of its group failed


@functools.cache
def _server():
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def run_forked(count, module, *arguments, timeout=600):
    """Call ``module.be_rank(*arguments)`` in ``count`` processes; returns (exit status, what was printed) of each.

    Several find in their environment what torchrun tells the ranks of a group. Arguments pass through JSON.
    """
    server = _server()
    print(json.dumps([count, module, *arguments]), file=server.stdin, flush=True)
    if not select.select([server.stdout], [], [], timeout)[0]:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        _server.cache_clear()
        raise TimeoutError(f"{module}.be_rank{arguments} has not ended in {timeout} s")
    line = server.stdout.readline()
    if not line:
        _server.cache_clear()
        raise RuntimeError(f"the process that should import {module} and fork has ended; its stderr says why")
    return json.loads(line)


def fork(function, arguments, environment, log):
    """The id of a process that calls the function, and exits with status 0 if that returns."""
    child = os.fork()
    if child:
        return child
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
            if child not in statuses and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                statuses[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if statuses[child] and end is None:
                    end = time.monotonic() + GRACE
        if end is not None and time.monotonic() > end:
            for child in children:
                os.kill(child, signal.SIGKILL) if child not in statuses else None
        time.sleep(0.02)
    return [statuses[child] for child in children]


def group(count):
    """The environment of each rank of a group over gloo on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]


def run(count, function, arguments, directory):
    logs = [Path(directory, f"{rank}.txt") for rank in range(count)]
    environments = group(count) if count > 1 else [{}]
    children = [fork(function, arguments, *rank) for rank in zip(environments, logs, strict=True)]
    return list(zip(wait_for_all(children), [log.read_text() for log in logs], strict=True))


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints is no answer
    for line in sys.stdin:
        count, module, *arguments = json.loads(line)
        with tempfile.TemporaryDirectory() as directory:
            outcomes = run(count, importlib.import_module(module).be_rank, arguments, directory)
        print(json.dumps(outcomes), file=answers, flush=True)


if __name__ == "__main__":
    main()
