"""Start a vLLM server with the flags that training needs, restart it if it dies, and end it with
this process.
"""

import argparse
import atexit
import contextlib
import itertools
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import httpx2

from ...versions import variables_of_no_rank
from ..source import SourceError, SourceLost
from .plugin import burnish_vllm_files as plugin
from .plugin import burnish_vllm_key
from .weights import Files, free_port

# In the server's process group, `cat` reads a pipe that only this process can write to, until the
# kernel closes it.
_KEPT = ("sh", "-c", 'exec 3<&0 </dev/null; { cat <&3; kill -KILL 0; } & exec "$0" "$@" 3<&-')
LOOPBACK = "127.0.0.1"
UNSAFE = {
    "host": "opens the server to the network; if that is meant, name the address in vllm.host",
    "api_key": "all users of the machine see the arguments of a process; leave it out, since a server that is started "
    "has a random key, or set VLLM_API_KEY in vllm.environment",
}
"""Options of vLLM that a server is not started with, and why."""

_log = logging.getLogger(__name__)
_DYING = 3.0  # seconds that a server may take to end after it has stopped answering
SHARE = 0.4
"""Share of a device's memory that vLLM takes beside a trainer on it."""

# Patterns of a log: vLLM's processes fail one after the other, and only the first says why.
# level, and text
_LINE = re.compile(r"(?:\([^)]*pid=\d+\) ?(?:([A-Z]+) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?)?(.*)")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b|\S+: error: |\S+: Error while |.*: not found$")
_EXPLANATION = re.compile(r" (?!\s*File )")
_FIXES = (  # the first pattern that is found, and what a user of the command line can do
    (
        r"(Free memory on device|Available memory on node)|out of memory",
        "give the server less memory, such as --vllm.options '{gpu_memory_utilization: 0.3}' (on CPUs too), or fewer "
        "bytes of keys and values, such as --vllm.environment '{VLLM_CPU_KVCACHE_SPACE: \"1\"}' (GiB, CPUs only)",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "give the server more memory, such as --vllm.options '{gpu_memory_utilization: 0.6}', or shorter sequences, "
        "such as --vllm.options '{max_model_len: 2048}'",
    ),
    (
        r"[Aa]ddress already in use",
        "another process has taken its port: start again, which takes a free one, or name one in --vllm.options "
        "'{port: 8001}'",
    ),
    (
        r"No module named '?vllm\b",
        "name the interpreter of an environment that vLLM is installed in, --vllm.python",
    ),
    (
        r"No module named",
        "install what is missing beside vLLM, in the environment of --vllm.python",
    ),
    (r"only supported on GPUs with compute capability", "choose --dtype float32, or another GPU"),
    (r"unrecognized arguments", "leave it out of --vllm.options: this vLLM has no such flag"),
    (
        r"greater than the derived max_model_len",
        "lower max_model_len in --vllm.options to what the model can do",
    ),
)


class ServerProcess(contextlib.AbstractContextManager["ServerProcess"]):
    """Start a server of a model and wait until it is healthy.

    It ends with this process, even if that is killed.

    Each of its routes needs a key, which is drawn at random and only in its environment: other
    users of the machine can reach its port, and would otherwise replace weights or call methods in
    its workers. The key guards requests over HTTP, not the connections that vLLM's own processes,
    or NCCL, open to each other.

    A run that must end with the same weights whatever dies (at max_staleness 0) needs log-probs
    that do not depend on other requests. On CPUs in float32 they were bit for bit the same with
    ``OMP_NUM_THREADS=1`` in the environment; for GPUs vLLM has ``VLLM_BATCH_INVARIANT=1``. Where
    neither can be, recomputed old log-probs leave only tokens.

    Args:
        log: file that its output is added to.
        dtype: the precision that it computes in; the trainer's.
        python: interpreter of the environment that vLLM is installed in; burnish need not be there.
        update_flags: those of `Files`, `Nccl`, or `Adapters`.
        flags: further flags of vLLM's API server. Unless ``--gpu-memory-utilization`` is one of
            them, the server takes `SHARE` of the device's memory (on CPUs of the machine's), so
            that there is room for a trainer beside it; unless ``--port`` is one, a free port.
        environment: further variables. With ``CUDA_VISIBLE_DEVICES`` among them, the server is
            taken to have devices of its own, and the share of their memory is vLLM's own choice.
            ``VLLM_API_KEY`` is the key, unless random.
        host: address that it listens at. Another one than this machine's own opens it to the
            network.
        patience: seconds it may take to start.
        share: of the device's memory, in place of `SHARE`.

    Attributes:
        url, key: stay the same when it is restarted.

    Raises:
        ValueError: if the flags name a host or a key.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        log: str | Path,
        dtype: str,
        python: str | Path = sys.executable,
        update_flags: Sequence[str] = Files.flags,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
        patience: float = 1200.0,
        share: float = SHARE,
    ) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--port", type=int)
        parser.add_argument("--gpu-memory-utilization")
        for name in UNSAFE:
            parser.add_argument("--" + name.replace("_", "-"))
        chosen, _ = parser.parse_known_args(flags)
        environment = environment or {}
        refuse_unsafe([name for name in UNSAFE if getattr(chosen, name) is not None])
        port = chosen.port or free_port()
        has_share = chosen.gpu_memory_utilization or "CUDA_VISIBLE_DEVICES" in environment
        self.url = f"http://{_reached_at(host)}:{port}"
        self.key = environment.get(burnish_vllm_key.VARIABLE) or secrets.token_urlsafe(32)
        self.log = Path(log).resolve()
        self._patience = patience
        if host != LOOPBACK:
            _log.warning(
                "vllm: the server listens at %s: whoever reaches port %d there can try its key",
                host,
                port,
            )
        # `vllm serve` does not start a CPU build
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--host", host, "--port", str(port), "--dtype", dtype]
        command += ["--middleware", burnish_vllm_key.MIDDLEWARE]
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--generation-config", "vllm"]  # the request alone says how tokens are drawn
        command += ["--enable-scale-out"]  # requests of token ids
        if not has_share:
            command += ["--gpu-memory-utilization", str(share)]
        self._command = [*command, *update_flags, *flags]
        switches = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        # In the environment, which other users can't read, and not among the arguments, which all
        # see in the list of processes.
        self._environment = {
            # with those of a rank, another group over TCP would wait for a store in vain
            **variables_of_no_rank(),
            **switches,
            **environment,
            burnish_vllm_key.VARIABLE: self.key,
        }
        paths = [str(Path(plugin.__file__).parent), self._environment.get("PYTHONPATH", "")]
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()  # no process is started after `close`
        self.log.parent.mkdir(parents=True, exist_ok=True)
        atexit.register(self.close)
        self.restart()

    @property
    def pid(self) -> int | None:
        """The leader of its process group; None if it is not running."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def restart(self) -> None:
        """End it if it runs, start it, and wait until it is healthy.

        Raises:
            SourceError: with the first error in its log, if it dies (`SourceLost`) or takes longer
                than its patience.
        """
        self._closed = False
        self._start()

    def revive(self) -> None:
        """`restart` it if it has died, or is dying; a running server is not touched, and one that
        was closed stays closed.
        """
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_DYING)
        if self.pid is None and not self._closed:
            self._start()

    def close(self) -> None:
        """SIGKILL it and all of its workers."""
        self._closed = True
        with self._lock:
            self._kill()

    def _start(self) -> None:
        with self._lock, self.log.open("ab") as log:
            self._kill()
            if self._closed:
                raise SourceError("vllm: the server was closed")
            before = log.tell()
            process = self._process = subprocess.Popen(
                [*_KEPT, *self._command],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(process, before)
        except BaseException:
            with self._lock:
                self._kill()
            raise

    def _wait_until_healthy(self, process: subprocess.Popen[bytes], before: int) -> None:
        """Raise what `restart` raises, with the first error in the log after its first ``before``
        bytes, which are of earlier servers.
        """
        until = time.monotonic() + self._patience
        while not self._healthy():
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(0.5)
                why = f"it ended with status {status}"
                if status == -signal.SIGKILL:
                    why = "it was killed, as the kernel does where memory runs out"
                raise SourceLost(self._failure(why, before))
            if time.monotonic() > until:  # one attempt is enough after such patience
                raise SourceError(self._failure(f"not healthy after {self._patience:g} s", before))

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _healthy(self) -> bool:
        headers = {"Authorization": f"Bearer {self.key}"}
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(
                f"{self.url}/health", headers=headers, timeout=5, trust_env=False, verify=False
            ).is_success
        return False

    def _failure(self, why: str, before: int) -> str:
        """The message, with the first error in its log after so many bytes and its fix, or else
        with its last lines.
        """
        # Earlier starts have added to the same file.
        text = self.log.read_bytes()[before:].decode(errors="replace")
        found = first_error(text)
        if found is None:
            last_lines = "\n".join(text.splitlines()[-30:])
            cause = f"; its log, {self.log}, ends with:\n{last_lines}"
        else:
            error, fix = found
            advice = f"To fix it, {fix}. " if fix else ""
            cause = f": {error}\n{advice}Its log is {self.log}"
        return f"vllm: the server did not start ({why}){cause}"


def refuse_unsafe(options: Iterable[str]) -> None:
    """Raise ValueError for options of vLLM that would open the server, or show its key.

    Args:
        options: vLLM's names of them, with underscores or hyphens.
    """
    for name in options:
        reason = UNSAFE.get(name.replace("-", "_"))
        if reason is not None:
            raise ValueError(f"vllm.options: {name}: {reason}")


def _reached_at(host: str) -> str:
    """The host of a URL that reaches a server on this machine which listens at ``host``."""
    if host == "0.0.0.0":
        return LOOPBACK
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def first_error(log: str) -> tuple[str, str | None] | None:
    """The first line of a log that names an error, with the lines that explain it, and its fix.

    None where unknown.
    """
    matches = map(_LINE.match, log.splitlines())
    lines = [match.groups() for match in matches if match is not None]
    for i, (level, text) in enumerate(lines):
        if _ERROR.match(text) and level in (None, "ERROR", "CRITICAL"):
            following = [line for _, line in lines[i + 1 : i + 6]]
            explanation = itertools.takewhile(_EXPLANATION.match, following)
            error = "\n".join([text, *explanation])
            return error, _fix_of(error)
    return None


def _fix_of(error: str) -> str | None:
    """What a user of the command line can do about an error; None where it is not known."""
    for pattern, fix in _FIXES:
        if re.search(pattern, error):
            return fix
    return None
