"""Notice a rank that has ended, stopped, or stands still, so that no rank waits for it without end.

Every rank has one thread, the watch, from before its process group is made until its process ends.
Rank 0 is connected with each of the others by a socket, over which they send each other a beat
every second or so: where the main thread is, and for how long it has not moved.

ended      The socket of a process is closed with it. Where a run is open, the others end with a message.
silent     No beat has come for ``hang_seconds``: the process is stopped, its machine is gone, or a function that does
           not let go of Python's interpreter lock keeps its watch from running.
standing   No rank has moved for ``hang_seconds``. A rank moves if its main thread computes, or if that or a thread that
           runs code of burnish is seen at another instruction than before. One that waits for
           another stands still, and so does one whose disk or lock never answers; as long as any
           rank moves, the others may be waiting for it. A wait in NCCL computes: its own time-out,
           of ten minutes, ends the process, which the others then see.

Where a rank is silent, or all stand, each rank writes the reason and the stacks of its threads to
standard error and exits with `HUNG`.
"""

import atexit
import faulthandler
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from . import stop
from .peers import Peer, Unreachable, connect, end_stopped

log = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds for a rank to exit by itself after another one has ended."""
NEWS = 3.0
"""Seconds in which the end of a rank becomes known to all others."""
HUNG = 75
"""Exit status of ranks that were ended because one hung: EX_TEMPFAIL, on which a batch system
queues the job again.
"""
AT_ONCE = 1.0
"""Seconds in which a signal that should end a process may be handled by its main thread."""
SILENT = 5.0
"""Seconds without a beat after which a rank is not expected to take part in finishing the step."""

_BURNISH = str(Path(__file__).parents[2]) + os.sep
_NAMED = 8  # ranks in a message
# Seconds of the processor between two looks. A loop without calls of Python functions gives up the
# interpreter lock, as it does for the watch, always at the same instruction; a thread that waits
# takes no time at all.
_COMPUTES = 0.001
# where one waits for the other ranks
_WAITING = (f"torch{os.sep}distributed{os.sep}", f"accelerate{os.sep}")
_WAITS = ", where it waits for other ranks"


class RankLost(RuntimeError):
    """The process of another rank has ended, or has failed."""


def open_watch(hang_seconds: float | None) -> bool:
    """Watch the other ranks from now on, if there are any: every rank calls it once for each run
    that it opens.

    It comes before the process group, whose ranks wait for each other, too.

    Returns:
        False if there is no other rank, or if the launcher announces ranks by other variables than
        torch's: then they can be watched as soon as there is a process group.

    Raises:
        DistStoreError: if they don't meet in ``hang_seconds``.
        RankLost: if one of them has ended since the last run of this process, or can't be
            connected.
    """
    global _watch
    if _watch is None:
        store = _meet(hang_seconds)
        if store is None:
            return False
        rank, ranks = _numbers()
        try:
            peers = connect(store, rank, ranks)
        except Unreachable as error:
            raise RankLost(str(error)) from error
        _watch = Watch(rank, ranks, peers)
        # Kept: rank 0 hosts one store per port, which the process group that is made next finds, if
        # it is still there.
        _watch.store = store
        atexit.register(_watch.close)
        os.register_at_fork(after_in_child=_forget)
    _watch.begin(hang_seconds)
    return True


def form_restarted_group() -> None:
    """Form the process group of ranks that torchrun has restarted, before Accelerate would.

    torchrun keeps its store from one attempt to the next, and torch would look there for the
    addresses of other ranks: it finds those of the attempt before, whose processes have ended. Here
    each attempt has names of its own.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if _watch is None or attempt == "0" or dist.is_initialized():
        return
    assert _watch.store is not None  # set where the watch is opened
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    store = dist.distributed_c10d.PrefixStore(f"burnish/attempt-{attempt}", _watch.store)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=_watch.rank, world_size=_watch.ranks)


def _numbers() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _meet(hang_seconds: float | None) -> Store | None:
    """The key-value store of the ranks.

    None for one alone, or where it is not known yet how they meet.
    """
    if dist.is_initialized():
        simulated = dist.get_backend() == "fake"  # its other ranks don't exist
        if simulated or dist.get_world_size() == 1:
            return None
        return dist.distributed_c10d._get_default_store()
    announced = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    known = all(os.environ.get(name) for name in announced)
    if not known or int(os.environ["WORLD_SIZE"]) == 1:
        return None
    longest = dist.distributed_c10d.default_pg_timeout
    if hang_seconds:
        longest = timedelta(seconds=hang_seconds)
    meeting: Iterator[tuple[Store, int, int]] = rendezvous("env://", timeout=longest)
    store, _, _ = next(meeting)
    return store


def begin_step(step: int) -> None:
    """Say which step is taken, for messages of the other ranks."""
    if _watch is not None:
        _watch.step = step


@contextmanager
def at(place: str) -> Iterator[None]:
    """Say what the main thread does within, such as "saving", for messages of the other ranks."""
    if _watch is None:
        yield
        return
    before, _watch.place = _watch.place, place
    try:
        yield
    finally:
        _watch.place = before


@contextmanager
def may_stand(seconds: float) -> Iterator[None]:
    """Within, this rank may stand still for so many seconds more: what it waits for has a time-out
    of its own.
    """
    if _watch is None:
        yield
        return
    _watch.allowed += seconds
    try:
        yield
    finally:
        _watch.moved()
        _watch.allowed -= seconds


def raise_failed(error: BaseException, *, everywhere: bool = False) -> NoReturn:
    """Raise the error that ends a run on this rank, or `RankLost` with its cause, after the others
    were told of it.

    Args:
        everywhere: the others have it, too.

    Raises:
        RankLost: names the rank, where a collective failed because that has ended.
    """
    if _watch is None:
        raise error
    news = None if everywhere else news_behind(error)
    if news or everywhere:
        _watch.fail(None)
    else:
        _watch.fail(f"rank {_watch.rank} failed with {type(error).__name__}: {error}")
    if news is not None and not isinstance(error, RankLost):
        raise RankLost(news) from error
    raise error


def news_behind(error: BaseException) -> str | None:
    """The message about the rank whose end is the cause of this error.

    None if there is no such rank.

    A failed collective reports a broken connection but not whose: the rank becomes known within
    `NEWS` seconds.
    """
    cause: BaseException | None = error
    while cause is not None:
        # gloo raises RuntimeError itself; the classes below it are of other errors
        if type(cause) is RuntimeError or isinstance(cause, RankLost | dist.DistError):
            return lost_rank()
        cause = cause.__cause__
    return None


def lost_rank() -> str | None:
    """The message about a rank that has ended, if one has or is found to have within `NEWS`
    seconds.
    """
    if _watch is None or not _watch.lost.wait(NEWS):
        return None
    return f"rank {_watch.rank}: {_watch.news}"


def end_run() -> None:
    """A run that was open has ended, or will not be continued: it needs the other ranks no more."""
    if _watch is not None:
        _watch.end_run()


class Watch:
    """The watch of this process; see the module. `open_watch` makes one.

    Attributes:
        lost: set when ``news`` is about a rank that has ended, or has failed, in the run that is
            open.
        step, place: of the main thread, for messages.
        allowed: seconds for which this rank may stand still in addition to ``hang_seconds``.
    """

    def __init__(self, rank: int, ranks: int, peers: dict[int, Peer]) -> None:
        self.rank = rank
        self.ranks = ranks
        self.peers = peers
        self.lost = threading.Event()
        self.news = ""
        self.step = 0
        self.place = "set-up"
        self.allowed = 0.0
        self.hang_seconds: float | None = None
        self.store: Store | None = None
        self.run = 0  # how many were opened: on every rank the same, as all open them together
        self.in_run = False
        self._lost_at: float | None = None
        self._said = False
        self._since = time.monotonic()  # when this rank was last seen to move
        self._seen: dict[int, int] = {}  # a fingerprint of the stack of each thread
        self._computed = 0.0  # processor time of the main thread
        self._main_since = self._since  # when the main thread was
        self._signals: list[signal.Signals] = []  # in this run
        self._signaled = 0.0  # when the last one came
        self._main = threading.main_thread().ident
        self._selector = selectors.DefaultSelector()
        for peer in peers.values():
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._wake, woken = socket.socketpair()
        for end in (self._wake, woken):
            end.setblocking(False)
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ, None)
        self._hears_signals = _write_signals_to(self._wake)
        if not faulthandler.is_enabled():
            faulthandler.enable(2)
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="burnish-watch", daemon=True)
        self._thread.start()

    def begin(self, hang_seconds: float | None) -> None:
        """A run is opened."""
        gone = [peer.rank for peer in self.peers.values() if peer.gone]
        if gone:
            raise RankLost(f"rank {self.rank}: {_has_ended(gone[0])}")
        self.run += 1
        self.hang_seconds = hang_seconds or None
        self.step = 0
        self.place = "set-up"
        self.allowed = 0.0
        self.lost.clear()
        self._lost_at = None
        self._said = False
        self.in_run = True
        self._signals.clear()
        self.moved()

    def end_run(self) -> None:
        self.in_run = False

    def fail(self, why: str | None) -> None:
        """The run has failed on this rank. The others are told why, unless they are the cause."""
        self.in_run = False
        if why is not None:
            self._tell_all("failed", self.run, why)

    def close(self) -> None:
        """The process ends in order, unless in an error that nobody handled, in the middle of a
        run.
        """
        if not (self.in_run and getattr(sys, "last_value", None) is not None):
            self._tell_all("bye")
        self._closed = True
        self._wake_up()
        self._thread.join(AT_ONCE)

    def moved(self) -> None:
        self._since = time.monotonic()

    def _tell_all(self, *message: object) -> None:
        for peer in self.peers.values():
            peer.queue(*message)
        self._wake_up()

    def _wake_up(self) -> None:
        with suppress(OSError):
            self._wake.send(b"\0")

    @property
    def _tick(self) -> float:
        """Seconds between beats."""
        return min(max((self.hang_seconds or 80.0) / 40, 0.25), 2.0)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed:
            # After a signal it looks more often: the main thread has a second to handle it.
            ready = self._selector.select(min(self._tick, 0.25) if self._signals else self._tick)
            now = time.monotonic()
            if (stopped := now - last - 2 * self._tick) > 0:
                self._excuse(stopped)
            last = now
            for key, _ in ready:
                self._hear(key.data, now)
            self._look(now)
            for peer in self.peers.values():
                # A peer that reads nothing gets no further beats: they would fill the memory.
                if not peer.unsent:
                    peer.queue("beat", round(self._still(now), 1), self.step, self._where())
                peer.flush()
            self._judge(now)
        for peer in self.peers.values():
            peer.flush()

    def _excuse(self, seconds: float) -> None:
        """This process was stopped itself: for so long it heard from nobody, and did not move."""
        self._since += seconds
        self._main_since += seconds
        for peer in self.peers.values():
            peer.heard += seconds

    def _still(self, now: float) -> float:
        """Seconds for which this rank has not moved, beyond what it may take."""
        return max(0.0, now - self._since - self.allowed)

    def _hear(self, peer: Peer | None, now: float) -> None:
        if peer is None:
            self._receive_signals(now)
            return
        for kind, *content in peer.read():
            if kind == "beat":
                peer.heard = now
                peer.still, peer.step, peer.place = content
            elif kind == "failed":
                self._pass_on(peer, *content)
            elif kind == "hung":
                self._end_hung(content[0])
            elif kind == "bye":
                peer.gone = True
                self._selector.unregister(peer.connection)
                return
        if peer.gone:
            self._selector.unregister(peer.connection)
            self._pass_on(peer, self.run, _has_ended(peer.rank))

    def _pass_on(self, peer: Peer, run: int, news: str) -> None:
        """The end of a rank: rank 0 tells it to the others."""
        if self.rank == 0:
            for other in self.peers.values():
                if other is not peer and not other.gone:
                    other.queue("failed", run, news)
        if run == self.run and not self.lost.is_set():
            self.news, self._lost_at = news, time.monotonic()
            self.lost.set()

    def _look(self, now: float) -> None:
        """See whether a thread of this rank has moved."""
        seen: dict[int, int] = {}
        for thread, frame in _frames().items():
            if thread == self._thread.ident:
                continue
            fingerprint, ours = _fingerprint(frame)
            if ours or thread == self._main:
                seen[thread] = fingerprint
        computed = _processor_seconds(self._main)
        if seen != self._seen or computed - self._computed > _COMPUTES:
            self._since = now
        self._computed = computed
        if seen.get(self._main or 0) != self._seen.get(self._main or 0):
            self._main_since = now
        self._seen = seen

    def _where(self) -> str:
        """What the main thread does, in which function of burnish, and whether it waits for other
        ranks.
        """
        frame = _frames().get(self._main or 0)
        waits = False
        while frame is not None and not frame.f_code.co_filename.startswith(_BURNISH):
            waits = waits or any(name in frame.f_code.co_filename for name in _WAITING)
            frame = frame.f_back
        where = self.place
        if frame is not None:
            file = frame.f_code.co_filename.removeprefix(_BURNISH)
            where += f" ({file}:{frame.f_lineno}, {frame.f_code.co_name})"
        return where + _WAITS if waits else where

    def _judge(self, now: float) -> None:
        self._end_lost(now)
        self._end_by_signal(now)
        if self.hang_seconds is None or not self.in_run:
            return
        peers = [peer for peer in self.peers.values() if not peer.gone]
        silent = [peer for peer in peers if now - peer.heard > self.hang_seconds]
        if silent:
            named = "; ".join(_silence(peer, now) for peer in silent[:_NAMED])
            why = f"{named}: its process is stopped, or its machine can't be reached"
            self._tell_hung(why, silent)
        elif self.rank == 0 and len(peers) == self.ranks - 1:
            stands = [self._still(now)] + [peer.still + now - peer.heard for peer in peers]
            if min(stands) > self.hang_seconds:
                self._tell_hung(self._standing(min(stands)), [])

    def _standing(self, seconds: float) -> str:
        places = {0: f"step {self.step}, {self._where()}"}
        places |= {peer.rank: f"step {peer.step}, {peer.place}" for peer in self.peers.values()}
        # One that waits for no other is more likely to be the cause.
        order = sorted(places, key=lambda rank: (places[rank].endswith(_WAITS), rank))
        named = "; ".join(f"rank {rank} in {places[rank]}" for rank in order[:_NAMED])
        return f"no rank has moved for {seconds:.0f} s: {named}"

    def _tell_hung(self, why: str, silent: list[Peer]) -> None:
        for peer in self.peers.values():
            peer.queue("hung", why)
            peer.flush()
        for peer in silent:
            end_stopped(peer.process)
        self._end_hung(why)

    def _end_hung(self, why: str) -> None:
        remedy = "if nothing was wrong, raise hang_seconds; --resume true continues from the newest checkpoint"
        _exit(
            HUNG,
            f"rank {self.rank}: {why}; this one ends, too ({remedy}). Its threads:\n",
            stacks=True,
        )

    def _end_lost(self, now: float) -> None:
        """End this process if it does not exit by itself: it may wait forever."""
        if self._lost_at is None or not self.in_run:
            return
        if now - self._lost_at > NEWS and not self._said:
            self._said = True
            log.critical("rank %d: %s; this one ends, too", self.rank, self.news)
        if now - self._lost_at > NEWS + GRACE:
            os._exit(1)

    def _receive_signals(self, now: float) -> None:
        with suppress(BlockingIOError):
            for number in self._woken.recv(1 << 10):
                caught = signal.Signals(number) if number else None
                if caught in (signal.SIGINT, signal.SIGTERM) and stop.ends_the_run(caught):
                    self._signals.append(caught)
                    self._signaled = now

    def _end_by_signal(self, now: float) -> None:
        """End a process whose main thread can't: it waits in a collective, where no handler of
        Python runs.

        Of SIGINT that is the second one. SIGTERM lets the step be finished, as long as no rank is
        silent.
        """
        if not (self._signals and self.in_run):
            return
        if now - max(self._signaled, self._main_since) < AT_ONCE:
            return
        others = [peer for peer in self.peers.values() if not peer.gone]
        silent = [peer.rank for peer in others if now - peer.heard > SILENT]
        if self._signals.count(signal.SIGINT) > 1:
            caught = signal.SIGINT
        elif silent and signal.SIGTERM in self._signals:
            caught = signal.SIGTERM
        else:
            return
        why = f"rank {silent[0]} has been silent for a while, so " if silent else ""
        what = f"rank {self.rank}: {caught.name} while it waited for other ranks; {why}it ends without a checkpoint"
        _exit(128 + caught, f"{what}; --resume true continues from the newest one\n", stacks=False)


_watch: Watch | None = None


def _forget() -> None:
    """In a child process that a library forks: its connections must end with the parent's."""
    global _watch
    if _watch is None:
        return
    watch = _watch
    _watch = None
    atexit.unregister(watch.close)
    if watch._hears_signals:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
    for peer in watch.peers.values():
        peer.connection.close()
    watch._wake.close()
    watch._woken.close()


def _write_signals_to(end: socket.socket) -> bool:
    """Have the numbers of signals written there as they come, even if no handler of Python can
    run.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    before = signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
    if before != -1:  # somebody else's
        signal.set_wakeup_fd(before)
        return False
    return True


def _processor_seconds(thread: int | None) -> float:
    """Processor time of a thread; 0 where the system does not tell."""
    if thread is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _frames() -> dict[int, FrameType]:
    """The frame that each thread is in.

    Python 3.11 may look for garbage while it lists them, under a lock that what it throws away may
    want, too: then the process stands still for ever (CPython issue 106883; a test suite met it).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _fingerprint(frame: FrameType | None) -> tuple[int, bool]:
    """A number that changes with any instruction of the stack, and whether a function of burnish is
    part of it.
    """
    places, ours = [], False
    while frame is not None:
        places.append((id(frame.f_code), frame.f_lasti))
        ours = ours or frame.f_code.co_filename.startswith(_BURNISH)
        frame = frame.f_back
    return hash(tuple(places)), ours


def _silence(peer: Peer, now: float) -> str:
    """How long nothing came from a rank, and where it was, for a message."""
    return (
        f"rank {peer.rank} has been silent for {now - peer.heard:.0f} s, last heard of in step {peer.step}, "
        f"{peer.place}"
    )


def _exit(status: int, message: str, *, stacks: bool) -> None:
    """End this process, whatever its other threads do; nothing that they may hold is used."""
    with suppress(OSError):
        os.write(2, message.encode(errors="replace"))
        if stacks:
            faulthandler.dump_traceback(2, all_threads=True)
    os._exit(status)


def _has_ended(rank: int) -> str:
    return f"the process of rank {rank} has ended: it was killed, or failed; its own output may say why"
