"""Connections between the watches of ranks: rank 0 with each of the others, by sockets of their
own.

They are no part of a process group, so that they tell of a process that ends while a group is made,
and can be left in the middle of a message. Whoever connects has to give a token, which rank 0
passes to the others where all of them meet.
"""

import fcntl
import json
import os
import secrets
import signal
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

MEETING = 12.0
"""Seconds in which ranks that have just met connect their watches."""

# Messages are lines of JSON: ["beat", 0.3, 17, "saving"], ["failed", 1, "rank 2 ..."],
# ["hung", "..."], ["bye"]; see `liveness`.
_Message = list[Any]
# What identifies a process: [machine and namespace, process id, start in ticks of the machine], of
# which the last tells it from a later process with the same id.
_Process = list[Any]

_PATIENCE = 1.0  # seconds for a process to end
_LONGEST_LINE = 1 << 16
_SIOCGIFADDR = 0x8915  # the request of an ioctl for the address of a network interface


class Unreachable(RuntimeError):
    """A rank did not come to be connected, or does not reach rank 0."""


@dataclass(eq=False)
class Peer:
    """The connection to the watch of another rank, and what that has reported.

    Attributes:
        process: see `own_process`.
        heard: when its last beat came.
        still: seconds for which its main thread had not moved by then.
        step, place: of its main thread.
        gone: whether its process has ended.
    """

    rank: int
    connection: socket.socket
    process: _Process
    heard: float = field(default_factory=time.monotonic)
    still: float = 0.0
    step: int = 0
    place: str = "set-up"
    gone: bool = False

    def __post_init__(self) -> None:
        self.connection.setblocking(False)
        self.unsent: deque[bytes] = deque()  # any thread may append to it
        self._sending = b""  # the rest of a line that the connection took a part of
        self._unread = b""  # the beginning of a line that is still to come

    def queue(self, *message: object) -> None:
        self.unsent.append(json.dumps(message).encode() + b"\n")

    def flush(self) -> None:
        """Send as much as its buffer takes: a process that is stopped reads nothing."""
        with suppress(OSError):
            while self._sending or self.unsent:
                self._sending = self._sending or self.unsent.popleft()
                self._sending = self._sending[self.connection.send(self._sending) :]

    def read(self) -> list[_Message]:
        """The messages that have come. `gone` is set if the process has ended."""
        try:
            received = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:  # reset
            received = b""
        self.gone = not received or len(self._unread) > _LONGEST_LINE
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]


def connect(store: Store, rank: int, ranks: int) -> dict[int, Peer]:
    """Connect this rank with rank 0, or rank 0 with all others.

    Args:
        store: the key-value store of all ranks, where rank 0 leaves its address and a token:
            {"token": "9f2c...", "addresses": ["10.0.0.1", "node-0"], "port": 40213}.

    Raises:
        Unreachable: if one of them does not come in `MEETING` seconds, or this one does not reach
            rank 0.
    """
    # torchrun keeps the store from one attempt to the next.
    key = f"burnish/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        with _listener() as listener:
            token = secrets.token_hex(16)
            meeting = {"token": token, "addresses": _addresses(), "port": listener.getsockname()[1]}
            store.set(key, json.dumps(meeting))
            return _accept_all(listener, token, ranks)
    meeting = json.loads(store.get(key))  # waits until rank 0 has set it
    problems = []
    for address in meeting["addresses"]:
        try:
            connection = socket.create_connection((address, meeting["port"]), timeout=MEETING / 3)
            connection.sendall(json.dumps([meeting["token"], rank, own_process()]).encode() + b"\n")
            return {0: Peer(0, connection, _read_line(connection, MEETING))}
        except (OSError, ValueError) as error:
            problems.append(f"{address} ({error})")
    raise Unreachable(
        f"rank {rank}: rank 0 can't be reached for the watch over ranks, at port {meeting['port']} of "
        f"{', '.join(problems)}; set MASTER_ADDR to an address of rank 0's machine, or GLOO_SOCKET_IFNAME to the "
        "interface between the machines, and let them connect to each other at any port"
    )


def _accept_all(listener: socket.socket, token: str, ranks: int) -> dict[int, Peer]:
    peers: dict[int, Peer] = {}
    end = time.monotonic() + MEETING
    own = own_process()
    while len(peers) < ranks - 1:
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            missing = [rank for rank in range(1, ranks) if rank not in peers]
            raise Unreachable(
                f"rank 0: the process of rank {missing[0]} has ended just after it met the others, or can't reach "
                f"this one at any of {', '.join(_addresses())}; its own output may say why"
            ) from error
        try:
            given, rank, process = _read_line(connection, MEETING)
        except (OSError, ValueError):
            connection.close()
            continue
        # Whatever else connects to the port, such as a scanner of the network, is turned away.
        if not secrets.compare_digest(str(given), token) or rank not in range(1, ranks):
            connection.close()
            continue
        connection.sendall(json.dumps(own).encode() + b"\n")
        peers[rank] = Peer(rank, connection, process)
    return peers


def _read_line(connection: socket.socket, seconds: float) -> Any:
    """The first message of a connection, byte by byte: what follows it is for the watch."""
    connection.settimeout(seconds)
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)) or len(line) > _LONGEST_LINE:
            raise ConnectionError("closed")
        line += byte
    return json.loads(line)


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():  # one socket for both families
        with suppress(OSError):
            return socket.create_server(
                ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
    return socket.create_server(("", 0), backlog=1024)


def _addresses() -> list[str]:
    """Addresses under which other ranks may reach this machine, the likeliest first."""
    found = []
    master = os.environ.get("MASTER_ADDR", "")
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # struct ifreq of Linux: 16 bytes of name, 2 of family, 2 of port, 4 of address
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            found.append(socket.inet_ntoa(answer[20:24]))
    if master:
        with suppress(OSError):
            kind, *_, destination = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(destination)  # sends nothing, and finds the interface
                found.append(probe.getsockname()[0])
        found.append(master)
    found.append(socket.gethostname())
    with suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    return list(dict.fromkeys(found))


def own_process() -> _Process:
    """What identifies this process; see `_Process`."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers of one machine number their processes independently.
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return [f"{boot} {namespace}", os.getpid(), _start_of(os.getpid())]
    except OSError:  # not on Linux
        return ["", os.getpid(), ""]


def _start_of(process: int) -> str:
    """When a process was started, in ticks of its machine; OSError if it has ended."""
    # "4711 (a name that may hold brackets) S 1 ...": the start is the 22nd field of all.
    state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    if state == "Z":  # ended, and not waited for by its parent
        raise ProcessLookupError(process)
    return numbers[18]


def end_stopped(process: _Process) -> None:
    """End a silent process of this machine; its launcher has to, on another one.

    Where it was stopped it goes on, finds that the others have ended, and reports its stacks
    itself. Where its watch can't run, faulthandler reports them at SIGABRT.
    """
    machine, number, start = process
    if not start or machine != own_process()[0]:
        return

    def alive() -> bool:
        try:
            same = _start_of(number) == str(start)
        except OSError:
            return False
        return same

    with suppress(OSError):
        for each in (signal.SIGCONT, signal.SIGABRT, signal.SIGKILL):
            if alive():
                os.kill(number, each)
            end = time.monotonic() + _PATIENCE
            while alive() and time.monotonic() < end:
                time.sleep(0.05)
