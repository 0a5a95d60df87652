"""How ranks wait for each other: for the main process without a limit, and never for a process that has ended.

All of this uses gloo: waiting in NCCL occupies the device, and times out after ten minutes; rollouts may take longer.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator

T = TypeVar("T")

log = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds for a rank to exit by itself after another one has ended."""
_LONGEST = timedelta(days=7)
_NEWS = 3.0  # seconds in which rank 0 reports to the others that a rank has ended


class MainProcessError(RuntimeError):
    """The main process failed at what the other ranks were waiting for."""


class RankLost(RuntimeError):
    """The process of another rank has ended."""


def from_main(accelerator: Accelerator, function: Callable[[], T], follow: Callable[[Any], object] | None = None) -> T:
    """Return on every rank what ``function()`` returns on the main process. All ranks call it; it is pickled.

    Args:
        follow: called on the waiting ranks with each order that ``function`` sends by `leading`.

    Raises:
        MainProcessError: on the other ranks, with its message, where the main process raises an error.
        RankLost: if a rank has ended meanwhile.
    """
    if accelerator.num_processes == 1:
        return function()
    if accelerator.is_main_process:
        try:
            result = function()
        except Exception as error:
            with suppress(RankLost):
                _broadcast(("error", f"{type(error).__name__}: {error}"))
            raise
        _broadcast(("result", result))
        return result
    while True:
        kind, content = _broadcast(None)
        if kind == "error":
            raise MainProcessError(f"rank {accelerator.process_index}: the main process failed: {content}")
        if kind == "result":
            return cast(T, content)
        assert follow is not None
        follow(content)
        meet()


def main_first(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Return ``function()``, called on the main process first and then on the others, which find its files on the disk.

    Raises what `from_main` does.
    """
    computed = on_main(accelerator, lambda: (function(),))
    return computed[0] if computed else function()


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T | None:
    """Call the function on the main process only and return its result there; None on the others, which wait for it.

    Raises what `from_main` does.
    """
    computed: list[T] = []
    from_main(accelerator, lambda: computed.append(function()))
    return computed[0] if computed else None


def meet() -> None:
    """Wait for all ranks.

    Raises:
        RankLost: if one has ended.
    """
    if dist.is_initialized():
        with _connected(f"rank {dist.get_rank()}: another rank ended while this one waited for it"):
            dist.barrier(group=gloo_group("control"))


@contextmanager
def leading(order: Any) -> Iterator[None]:
    """On the main process, in the function of a `from_main`: the other ranks follow this order, and are waited for."""
    _broadcast(("order", order))
    try:
        yield
    finally:
        meet()


def _broadcast(message: tuple[str, Any] | None) -> tuple[str, Any]:
    """The message of the main process, on every rank."""
    messages: list[Any] = [message]
    with _connected(f"rank {dist.get_rank()}: another rank ended while the main process was waited for"):
        dist.broadcast_object_list(messages, src=0, group=gloo_group("control"), device=torch.device("cpu"))
    return cast(tuple[str, Any], messages[0])


def send(message: Any, rank: int, group: Any) -> None:
    """Send a message to a rank of the group, which must `receive` it."""
    with _connected(f"rank {rank} has ended"):
        dist.send_object_list([message], rank, group=group, device=torch.device("cpu"))


def receive(rank: int, group: Any) -> Any:
    """Wait for the next message of a rank, and return it."""
    messages = [None]
    with _connected(f"rank {rank} has ended"):
        dist.recv_object_list(messages, rank, group=group, device=torch.device("cpu"))
    return messages[0]


@contextmanager
def _connected(otherwise: str) -> Iterator[None]:
    """Turn gloo's error about a broken connection into `RankLost` with this message."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"{otherwise} ({error})") from error


def gloo_group(purpose: str) -> Any:
    """A gloo group of all ranks for one purpose; None in a single process. All ranks must make the first call of each
    purpose together: it returns on all of them, or on none. "control" comes first, as soon as there are ranks."""
    return _new_group(dist.group.WORLD, purpose) if dist.is_initialized() else None


@lru_cache(maxsize=8)
def _new_group(world: Any, purpose: str) -> Any:
    if purpose != "control":
        meet()  # `new_group` would wait for a rank that has ended, and the connections of "control" report it
    return dist.new_group(backend="gloo", timeout=_LONGEST)


@contextmanager
def watching(accelerator: Accelerator) -> Iterator[None]:
    """Context in which no rank outlives another for long, entered by all ranks.

    A rank that waits for one whose process has ended, or that has failed, ends with an error that names it; one that
    waits where no error arrives, as in NCCL, is ended after `GRACE` seconds.

    Raises:
        RankLost: names the rank, where a collective failed because of it.
    """
    if accelerator.num_processes == 1:
        yield
        return
    watch = _Watch(accelerator.process_index, accelerator.num_processes)
    try:
        yield
    except BaseException as error:
        all_failed = isinstance(error, MainProcessError)
        # A failed collective reports a broken connection but not whose: wait to learn the rank.
        cause = error.__cause__ or error
        by_collective = type(cause) is RuntimeError or isinstance(cause, RankLost | dist.DistError)
        lost = by_collective and watch.lost.wait(_NEWS)
        why = watch.news if lost else f"rank {watch.rank} failed with {type(error).__name__}: {error}"
        watch.leave(None if all_failed else why)
        if lost:
            raise RankLost(f"rank {watch.rank}: {watch.news}") from error
        raise
    watch.leave(None)


class _Watch:
    """Connections of rank 0 with every other rank, idle until a rank leaves or its process ends.

    Attributes:
        lost: set when ``news`` reports a lost rank.
        left: set when this rank leaves; ``gone`` when the others have been notified.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.group = rank, gloo_group("watch")
        self.peers = range(1, ranks) if rank == 0 else [0]
        self.lost, self.left, self.gone = threading.Event(), threading.Event(), threading.Event()
        self.sending = threading.Lock()
        self.news = ""
        self.listeners = [threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in self.peers]
        for thread in self.listeners:
            thread.start()

    def leave(self, why: str | None) -> None:
        """Notify the others; ``why`` is this rank's error."""
        self.left.set()
        for peer in self.peers:
            self._send(("last", why), peer)
        end = time.monotonic() + (GRACE if why is None else _NEWS)
        for thread in self.listeners:  # a thread that waits in gloo when its process ends aborts it
            thread.join(max(0.0, end - time.monotonic()))
        self.gone.set()

    def _send(self, message: tuple[str, str | None], peer: int) -> None:
        with self.sending, suppress(RankLost):
            send(message, peer, self.group)

    def _listen(self, peer: int) -> None:
        kind = ""
        while kind != "last":
            try:
                kind, news = receive(peer, self.group)
            except RankLost:
                ended = f"the process of rank {peer} has ended: it was killed, or failed; its own output may say why"
                kind, news = "last", ended
            if news is None or self.lost.is_set():
                continue
            self.news = news
            self.lost.set()
            threading.Thread(target=self._end, daemon=True).start()
            for other in self.peers:
                if other != peer and not self.left.is_set():
                    self._send(("news", news), other)

    def _end(self) -> None:
        """End this process if it does not exit by itself: it may wait forever."""
        if not self.left.wait(_NEWS):
            log.critical("rank %d: %s; this one ends, too", self.rank, self.news)
            if not self.left.wait(GRACE):
                os._exit(1)
        if not self.gone.wait(GRACE + _NEWS):  # notifying a dead rank may block, too
            os._exit(1)
