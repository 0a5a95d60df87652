"""Work of the main process for all ranks, which wait for it as long as it takes, and fail where it fails.

All of it is over gloo: waiting in NCCL occupies the device, and times out after ten minutes, less than a rollout may
take.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator

T = TypeVar("T")

_LONGEST = timedelta(days=7)


class MainProcessError(RuntimeError):
    """The main process failed at what the other ranks were waiting for."""


class RankLost(RuntimeError):
    """The process of another rank has ended; says which."""


def from_main(accelerator: Accelerator, function: Callable[[], T], follow: Callable[[Any], object] | None = None) -> T:
    """Return on every rank what ``function()`` returns on the main process. All ranks call it; it is pickled.

    Args:
        follow: what the other ranks do with each order that ``function`` gives by `leading` while they wait.

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
                _tell("error", f"{type(error).__name__}: {error}")
            raise
        _tell("result", result)
        return result
    who = f"rank {accelerator.process_index}"
    while True:
        message: list[Any] = [None, None]
        try:
            _broadcast(message)
        except RuntimeError as error:
            raise RankLost(f"{who}: another rank ended while this one waited for the main process ({error})") from error
        kind, content = message
        if kind == "error":
            raise MainProcessError(f"{who}: the main process failed: {content}")
        if kind == "result":
            return cast(T, content)
        assert follow is not None
        follow(content)
        _meet(who)


@contextmanager
def leading(order: Any) -> Iterator[None]:
    """On the main process, in the function of a `from_main`: the other ranks follow this order, and are waited for."""
    _tell("order", order)
    try:
        yield
    finally:
        _meet("rank 0")


def _meet(who: str) -> None:
    try:
        dist.barrier(group=gloo_group("control"))
    except RuntimeError as error:
        raise RankLost(f"{who}: another rank ended while it published weights ({error})") from error


def _tell(kind: str, content: Any) -> None:
    try:
        _broadcast([kind, content])
    except RuntimeError as error:
        raise RankLost(f"rank 0: another rank ended while it waited for the main process ({error})") from error


def _broadcast(message: list[Any]) -> None:
    dist.broadcast_object_list(message, src=0, group=gloo_group("control"), device=torch.device("cpu"))


def send(message: Any, rank: int, group: Any) -> None:
    """Send a rank of the group a message, which it is to `receive`."""
    try:
        dist.send_object_list([message], rank, group=group, device=torch.device("cpu"))
    except RuntimeError as error:
        raise RankLost(f"rank {rank} has ended ({error})") from error


def receive(rank: int, group: Any) -> Any:
    """Wait for the next message of a rank, and return it."""
    message = [None]
    try:
        dist.recv_object_list(message, rank, group=group, device=torch.device("cpu"))
    except RuntimeError as error:
        raise RankLost(f"rank {rank} has ended ({error})") from error
    return message[0]


def gloo_group(purpose: str) -> Any:
    """All ranks, connected for this purpose alone. The first call of each purpose is for all ranks to make together."""
    return _new_group(dist.group.WORLD, purpose)


@lru_cache(maxsize=8)
def _new_group(world: Any, purpose: str) -> Any:
    return dist.new_group(backend="gloo", timeout=_LONGEST)
