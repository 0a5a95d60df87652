"""Ranks of a process group, forked from one process that has imported everything and computed nothing.

    python ranks.py '[[COUNT, MODULE, ARGUMENT, ...], ...]'

Each job is ``MODULE.be_rank(*arguments)`` in so many processes, with the environment in which torchrun starts ranks.
Prints as JSON, for every job, the exit status of each rank and what it printed.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

GRACE = 60.0  # seconds in which a rank should notice that another one failed


def run_ranks(*jobs, timeout=600):
    """Run jobs ``(count, module, *arguments)`` one after the other; (exit status, what was printed) of each rank."""
    command = [sys.executable, __file__, json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def fork_rank(function, arguments, environment, log):
    """The id of a process that calls the function, and exits with status 0 if that returns."""
    child = os.fork()
    if child:
        return child
    os.environ |= {name: str(value) for name, value in environment.items()}
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


def run_job(count, module, arguments, directory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    function = importlib.import_module(module).be_rank
    logs = [directory / f"{rank}.txt" for rank in range(count)]
    children = [
        fork_rank(function, arguments, {**group, "RANK": rank, "LOCAL_RANK": rank}, log)
        for rank, log in enumerate(logs)
    ]
    return list(zip(wait_for_all(children), [log.read_text() for log in logs], strict=True))


def main():
    jobs = json.loads(sys.argv[1])
    for _, module, *_ in jobs:
        importlib.import_module(module)
    outcomes = []
    for count, module, *arguments in jobs:
        with tempfile.TemporaryDirectory() as directory:
            outcomes.append(run_job(count, module, arguments, Path(directory)))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
