"""Functions in processes of their own, which are killed when a call takes too long.

This is isolation, no sandbox: it protects the run from a function that hangs, crashes or takes too
much, not the machine from one that means harm, which can read files and use the network. ``jail``
adds walls around code of a model.

A process imports only what the function needs: math equivalence starts in a second, torch alone
takes several. So it is started without `multiprocessing`, which would import the running script.
"""

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from ..rollouts.event_loops import off_loop
from ..rollouts.sample import Sample, plain

GIB = 1 << 30
# What comes back from a process: {"error": null, "value": ..., "infos": [...]}, or a traceback as
# error; infos are those of the samples among the arguments.
Answer = dict[str, Any]
_LARGEST_ANSWER = 64 << 20  # bytes of JSON
_LARGEST_FILE = GIB  # bytes of each file that it writes
# Variables that programs and libraries need, and those that look like secrets among them.
_PASSED_ON = re.compile(
    "(PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_FILE|SSL_CERT_DIR)$"
    "|(LC|PYTHON|CONDA|CUDA|NVIDIA|ROCR|HIP|OMP|MKL|OPENBLAS|NUMEXPR|HF|TRANSFORMERS|TOKENIZERS|TORCH|XDG)_?"
)
_SECRET = re.compile("KEY|TOKEN(?!IZERS)|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


class isolated:
    """A function that is called in another process, because it may be slow, hang or crash.

    A cancelled call kills its process, with those that the function has started in it, and the next
    one starts another, which takes as long as the function's imports.
    Global variables of the function live in that process. Of what it changes in its arguments, only
    the ``info`` of samples is sent back. It returns plain data: numbers, text, lists and mappings.

    Args:
        function: anything that can be pickled: a function of a module, or an object such as
            `MathEquivalence`.
        processes: number of calls that can run at the same time.
        memory: GiB that a process may take beyond its imports.
        processor_seconds: that one call may use, over all of its threads.
        environment: names of variables that it gets beside those that programs need, such as
            ``OPENAI_API_KEY``. All others, which may hold secrets, are not passed on.
        jail: run it by bubblewrap (``bwrap``), without network, with a file system that it can't
            write to, in which the home directory is hidden: for code that a model wrote.

    Raises:
        ValueError: if another process could not import the function, or there is no bubblewrap for
            a jail.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *,
        processes: int = 1,
        memory: float = 2.0,
        processor_seconds: float = 600.0,
        environment: Sequence[str] = (),
        jail: bool = False,
    ) -> None:
        self.__name__ = name = str(getattr(function, "__name__", type(function).__name__))
        if processes < 1:
            raise ValueError(f"isolated: processes must be >= 1, got {processes}")
        if not memory > 0:
            raise ValueError(f"isolated: memory must be > 0 GiB, got {memory}")
        if not processor_seconds > 0:
            raise ValueError(f"isolated: processor_seconds must be > 0, got {processor_seconds}")
        if jail and shutil.which("bwrap") is None:
            raise ValueError(
                f"isolated: a jail for {name} needs bubblewrap, whose program bwrap is not on the PATH; install it "
                "(the package bubblewrap of most distributions), or leave jail out"
            )
        if getattr(function, "__module__", "") == "__main__":
            where = "in the script that runs, which another process can't import"
            raise ValueError(f"isolated: {name} is defined {where}; move it to a module")
        try:
            self._pickled = pickle.dumps(function)
        except Exception as error:  # pickle raises whatever objects raise
            raise ValueError(
                f"isolated: {name} can't be sent to another process ({error}); use a function that a module defines, "
                "no lambda and no closure"
            ) from error
        self.over = getattr(function, "over", "sample")
        self.columns = getattr(function, "columns", ())
        self.concurrency = processes
        self._memory = memory
        self._processor_seconds = processor_seconds
        self._jail = jail
        self._environment = tuple(environment)
        self._idle: list[tuple[subprocess.Popen[bytes], Connection]] = []

    async def start(self) -> None:
        """Start a process, unless one is idle, and wait until it has imported the function.

        Raises:
            RuntimeError: if it can't.
        """
        if self._idle:
            return
        process, connection = self._start()
        try:
            refusal = await off_loop(partial(_receive, connection))
        except (asyncio.CancelledError, EOFError, OSError, ValueError) as error:
            code = _end(process)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise RuntimeError(
                f"{self.__name__}: its process {self._ending(code, error)}"
            ) from error
        if refusal["error"] is not None:
            _end(process)
            raise RuntimeError(f"in its process:\n{refusal['error']}")
        self._idle.append((process, connection))

    async def __call__(self, *arguments: object) -> Any:
        if not self._idle:
            await self.start()
        process, connection = self._idle.pop()
        try:
            answer = await off_loop(partial(_ask, connection, arguments))
        except (asyncio.CancelledError, EOFError, OSError, ValueError) as error:
            code = _end(process)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise RuntimeError(
                f"{self.__name__}: its process {self._ending(code, error)}"
            ) from error
        self._idle.append((process, connection))
        if answer["error"] is not None:
            explained = f"in its process:\n{answer['error']}"
            if "MemoryError" in explained or "can't allocate memory" in explained:
                explained += f"it may take {self._memory:g} GiB beyond its imports; raise memory if it needs more"
            raise RuntimeError(explained)
        for sample, info in zip(_samples(arguments), answer["infos"], strict=True):
            sample.info = info
        return answer["value"]

    def _start(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        connection, far_end = Pipe()
        serving = f"serve({far_end.fileno()}, {self._memory!r}, {self._processor_seconds!r})"
        # -P: without the working directory first on the path, where any file could be named json.py
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; {serving}"]
        if self._jail:
            command = [*_walls(), *command]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            command,
            pass_fds=[far_end.fileno()],
            stdin=subprocess.DEVNULL,
            env={**clean_environment(os.environ, self._environment), "PYTHONPATH": path},
            # Ctrl-C is for the run, which may need this process until its step is finished
            start_new_session=True,
        )
        far_end.close()
        connection.send_bytes(self._pickled)
        weakref.finalize(connection, _end, process)  # at exit too
        return process, connection

    def _ending(self, code: int, error: Exception) -> str:
        """How a process ended, in words."""
        if not isinstance(error, EOFError | ConnectionError):
            return f"gave an answer that can't be read ({error})"
        if code == -signal.SIGXCPU:
            return f"used more than {self._processor_seconds:g} s of processor time; raise processor_seconds"
        if code < 0:
            return f"ended with code {code}, by signal {signal.Signals(-code).name}"
        return f"ended with code {code}"


def clean_environment(variables: Mapping[str, str], names: Sequence[str] = ()) -> dict[str, str]:
    """The variables that programs need, without those that may be secrets, and those of these
    names.
    """
    passed_on = {}
    for name, value in variables.items():
        if _PASSED_ON.match(name) and not _SECRET.search(name):
            passed_on[name] = value
    chosen = {name: variables[name] for name in names if name in variables}
    return passed_on | chosen


def _walls() -> list[str]:
    """The command of bubblewrap that another one is run by.

    The file system is there to be read. In place of home directories and ``/tmp`` are empty ones,
    which hold only what Python imports.
    """
    private = dict.fromkeys(("/tmp", "/home", "/root", str(Path.home())))
    hidden = [path for path in private if Path(path).is_dir()]
    needed = [sys.prefix, sys.base_prefix, os.getcwd(), *sys.path]
    # --unshare-all: no network, and no processes but its own. What is bound later lies on top.
    command = ["bwrap", "--unshare-all", "--die-with-parent"]
    command += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for path in hidden:
        command += ["--tmpfs", path]
    for path in dict.fromkeys(map(os.path.abspath, needed)):
        if Path(path).exists() and path not in hidden:
            command += ["--ro-bind", path, path]
    return [*command, "--chdir", "/tmp", "--"]


def _ask(connection: Connection, arguments: tuple[object, ...]) -> Answer:
    connection.send_bytes(pickle.dumps(arguments))
    return _receive(connection)


def _receive(connection: Connection) -> Answer:
    # JSON and not pickle: what comes back from code that can't be trusted must not be able to run
    # code here.
    answer = json.loads(connection.recv_bytes(_LARGEST_ANSWER))
    if not isinstance(answer, dict) or not {"error", "value", "infos"} <= set(answer):
        raise ValueError("wanted error, value and infos")
    return answer


def _samples(arguments: tuple[object, ...]) -> list[Sample]:
    """The samples among the arguments of a reward: its last one, or those in it."""
    last = arguments[-1] if arguments else None
    several = last if isinstance(last, list) else [last]
    return [each for each in several if isinstance(each, Sample)]


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Kill a process with all that its function has started, which may hold the other end of the
    connection, too.
    """
    if process.returncode is None:  # until it is waited for, its number is that of no other group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()  # the thread that reads the connection sees it close from the other side


def serve(descriptor: int, memory: float, processor_seconds: float) -> None:
    """Answer calls one after the other, in the process of `isolated`.

    It receives a function, then arguments, and sends what the function returned, or its traceback,
    as JSON.
    """
    connection = Connection(descriptor)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, _LARGEST_FILE)
    function: Any = None
    try:
        function = pickle.loads(connection.recv_bytes())
        # After the imports, which the limit is not for.
        _lower(resource.RLIMIT_DATA, _data() + int(memory * GIB))
    except BaseException:
        connection.send_bytes(_failure())
        return
    connection.send_bytes(_success(None, []))
    while True:
        try:
            received = connection.recv_bytes()
        except EOFError:
            return
        try:
            arguments = pickle.loads(received)
            _lower(resource.RLIMIT_CPU, int(time.process_time() + processor_seconds) + 1)
            value = function(*arguments)
            value = asyncio.run(value) if inspect.iscoroutine(value) else value
            content = _success(value, _samples(arguments))
        except BaseException:
            content = _failure()
        connection.send_bytes(content)


def _success(value: object, samples: Sequence[Sample]) -> bytes:
    infos = [plain(dict(sample.info), "sample.info") for sample in samples]
    answer = {"error": None, "value": plain(value, "the function's result"), "infos": infos}
    return json.dumps(answer).encode()


def _failure() -> bytes:
    return json.dumps({"error": traceback.format_exc(), "value": None, "infos": []}).encode()


def _data() -> int:
    """Bytes of memory that this process can write to, which RLIMIT_DATA limits.

    RLIMIT_AS would count what is only reserved: CUDA reserves more than the machine has.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _lower(kind: int, limit: int) -> None:
    """Set a soft limit, at most to the hard one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _end_with(parent: int) -> None:
    """End this process, and what it has started, with its parent, which can't do it when it is
    killed.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
