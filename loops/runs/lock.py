"""The lock of a run directory, which has one writer: that of the system, or a file with a
heartbeat.

File systems of clusters, such as Lustre mounted without flock, have no locks of the system. There
the lock is a file that one process alone can create (``O_EXCL``) and rewrites every few seconds. A
file that nobody has rewritten for a minute, or whose process has ended on this machine, belongs to
a run that was killed, and is taken over.
"""

import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2s
from pathlib import Path
from uuid import uuid4

log = logging.getLogger(__name__)

BEAT = 10.0  # seconds between two heartbeats
STALE = 60.0  # seconds without one after which the owner is taken to be dead
_POLL = 1.0


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory.

    It is released with the process at the latest, or becomes stale.

    Raises:
        ValueError: if another process holds it.
    """
    path = directory / ".lock"
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _taken(directory) from error
            except OSError:  # as of network file systems: ENOLCK, EOPNOTSUPP, ENOSYS
                break
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield
                return
            # Someone has removed the file between our opening and locking it: lock the one that
            # others will see.
    with heartbeat(directory):
        yield


def _taken(directory: Path, owner: str = "another process") -> ValueError:
    return ValueError(
        f"output: {owner} trains in {directory}; wait for it, or name another directory"
    )


@contextmanager
def heartbeat(directory: Path) -> Iterator[None]:
    """Hold a lock that is a file with a heartbeat; see `locked`."""
    path = directory / ".lock.owner"
    token = uuid4().hex
    while not _create(path, token):
        _wait_for(path, directory)
    done = threading.Event()
    beats = threading.Thread(target=_beat, args=(path, token, done), daemon=True, name="lock")
    beats.start()
    try:
        yield
    finally:
        done.set()
        beats.join()
        if _token_in(_read(path)) == token:
            path.unlink(missing_ok=True)


def _content(token: str, count: int) -> bytes:
    """The file as its owner writes it; always as long, so that it is overwritten in place."""
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "token": token,
        "beat": f"{count:012}",
    }
    return json.dumps(owner).encode()


def _create(path: Path, token: str) -> bool:
    """Create the file as its only owner; False if it is there."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(_content(token, 0))
        file.flush()
        os.fsync(descriptor)
    return True


def _read(path: Path) -> bytes | None:
    """The content, read anew, as a client of a network file system may have kept an older one.

    None without a file.
    """
    with suppress(OSError):
        return path.read_bytes()
    return None


def _token_in(content: bytes | None) -> str | None:
    owner = _owner(content)
    return None if owner is None else str(owner.get("token"))


def _owner(content: bytes | None) -> dict[str, object] | None:
    with suppress(ValueError, TypeError):
        owner = json.loads(content or b"")
        return owner if isinstance(owner, dict) else None
    return None


def _wait_for(path: Path, directory: Path) -> None:
    """Return when the file of another owner is gone, or was stale and is removed.

    Raises:
        ValueError: if its owner is alive.
    """
    first = _read(path)
    owner = _owner(first) or {}
    until = time.monotonic() + STALE
    if not _has_died(owner):
        log.warning(
            "output: %s is locked; taking over if its owner is silent for %g s", directory, STALE
        )
        while time.monotonic() < until:
            time.sleep(_POLL)
            now = _read(path)
            if now is None:
                return
            if now != first:
                raise _taken(directory, f"process {owner.get('pid')} on {owner.get('host')}")
    _remove_stale(path, first, directory)


def _has_died(owner: dict[str, object]) -> bool:
    """True if the owner was a process of this machine that has ended."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _remove_stale(path: Path, stale: bytes | None, directory: Path) -> None:
    """Remove a stale file, as the only one of the processes that found it.

    They agree by a second file, named by what they found, that one of them alone can create. The
    stale file is never moved: where it was, a new owner's may be a moment later.

    Raises:
        ValueError: if another process removes it, or has replaced it meanwhile.
    """
    if stale is None:
        return
    claim = path.with_name(f"{path.name}.{blake2s(stale, digest_size=8).hexdigest()}")
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError as error:
        raise ValueError(
            f"output: another process takes {directory} over from one that has ended; wait for it, "
            f"or remove {claim} if there is none"
        ) from error
    try:
        now = _read(path)
        if now is None:
            return  # without removing what a new owner may be creating
        if now != stale:
            raise _taken(directory)
        path.unlink()
    finally:
        claim.unlink()
    log.warning(
        "output: the lock of %s was left by a process that has ended, and is taken over", directory
    )


def _is_lost(path: Path, token: str) -> bool:
    """True if the file is another's, also when it is looked at again: a network file system may
    have failed to read it once.
    """
    if _token_in(_read(path)) == token:
        return False
    time.sleep(_POLL)
    return _token_in(_read(path)) != token


def _beat(path: Path, token: str, done: threading.Event) -> None:
    """Rewrite the file until done.

    If another process has taken it, because this one stood still, end the run.
    """
    count = 0
    while not done.wait(BEAT):
        count += 1
        if _is_lost(path, token):
            log.error(
                "output: another process has taken the lock %s while this one stood still; stopping",
                path,
            )
            os.kill(os.getpid(), signal.SIGTERM)
            return
        with suppress(OSError), path.open("r+b") as file:
            file.write(_content(token, count))
            file.flush()
            os.fsync(file.fileno())
