"""How ranks wait for each other: for the main process without a limit, and never for a process that
has ended.

All of this uses gloo: waiting in NCCL occupies the device, and times out after ten minutes;
rollouts may take longer.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from . import liveness
from .liveness import RankLost

T = TypeVar("T")
Group = dist.ProcessGroup | None  # ranks over gloo; None in a single process

_LONGEST = timedelta(
    days=7
)  # gloo has no wait without an end; the watch ends a wait that is in vain
_waited = 0.0


class MainProcessError(RuntimeError):
    """The main process failed at what the other ranks were waiting for."""


def from_main(
    accelerator: Accelerator,
    function: Callable[[], T],
    follow: Callable[[Any], object] | None = None,
) -> T:
    """Return on every rank what ``function()`` returns on the main process.

    All ranks call it; it is pickled.

    Args:
        follow: called on the waiting ranks with each order that ``function`` sends by `leading`.

    Raises:
        MainProcessError: on the other ranks, with its message, where the main process raises an
            error.
        RankLost: if a rank has ended meanwhile.
    """
    if accelerator.num_processes == 1:
        return function()
    if accelerator.is_main_process:
        try:
            result = function()
        except Exception as error:
            with suppress(RankLost):  # the error itself says more
                _broadcast(("error", f"{type(error).__name__}: {error}"))
            raise
        _broadcast(("result", result))
        return result
    # The other ranks take part in one broadcast after the other: orders, if any, then the outcome.
    while True:
        kind, content = _broadcast(None)
        if kind == "error":
            raise MainProcessError(
                f"rank {accelerator.process_index}: the main process failed: {content}"
            )
        if kind == "result":
            return cast(T, content)
        assert follow is not None
        follow(content)
        barrier()


def main_first(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Return ``function()``, called on the main process first and then on the others, which find
    its files on the disk.

    Raises what `from_main` does.
    """
    computed = on_main(accelerator, lambda: (function(),))
    return computed[0] if computed else function()


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T | None:
    """Call the function on the main process only and return its result there.

    None on the others, which wait for it.

    Raises what `from_main` does.
    """
    computed: list[T] = []
    from_main(accelerator, lambda: computed.append(function()))
    return computed[0] if computed else None


def gather_to_main(accelerator: Accelerator, value: T) -> list[T]:
    """The values of all ranks, on the main process; nothing on the others.

    All ranks call it; they are pickled.
    """
    if accelerator.num_processes == 1:
        return [value]
    gathered: list[T] | None = None
    if accelerator.is_main_process:
        gathered = [value] * accelerator.num_processes  # to be overwritten
    with _connected(f"rank {dist.get_rank()}: another rank ended while its part was waited for"):
        dist.gather_object(value, gathered, dst=0, group=gloo_group("control"))
    return gathered or []


def tensors_from_main(accelerator: Accelerator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the main process, in host memory, on every rank. All ranks call it."""
    if accelerator.num_processes == 1:
        return tensors
    kinds = from_main(
        accelerator, lambda: {name: (each.shape, each.dtype) for name, each in tensors.items()}
    )
    received = {}
    for name, (shape, dtype) in kinds.items():
        tensor = torch.empty(shape, dtype=dtype)
        if accelerator.is_main_process:
            tensor = tensors[name].contiguous()
        if tensor.numel():
            as_bytes = tensor.view(-1).view(torch.uint8)  # gloo lacks some dtypes
            with _connected(_waiting_for_main()):
                dist.broadcast(as_bytes, src=0, group=gloo_group("control"))
        received[name] = tensor
    return received


def _waiting_for_main() -> str:
    return f"rank {dist.get_rank()}: another rank ended while the main process was waited for"


def barrier() -> None:
    """Wait for all ranks.

    Raises:
        RankLost: if one has ended.
    """
    if dist.is_initialized():
        with _connected(f"rank {dist.get_rank()}: another rank ended while this one waited for it"):
            dist.barrier(group=gloo_group("control"))


@contextmanager
def broadcast_order(order: object) -> Iterator[None]:
    """Have the other ranks follow this order, and wait for them.

    For the main process, in the function of a `from_main`.
    """
    _broadcast(("order", order))
    try:
        yield
    finally:
        barrier()


def _broadcast(message: tuple[str, object] | None) -> tuple[str, Any]:
    """The message of the main process, on every rank."""
    messages: list[Any] = [message]
    with _connected(_waiting_for_main()):
        # On the CPU: without a device torch would move the bytes to the GPU and back.
        dist.broadcast_object_list(
            messages, src=0, group=gloo_group("control"), device=torch.device("cpu")
        )
    return cast(tuple[str, Any], messages[0])


def send(message: object, rank: int, group: Group) -> None:
    """Send a message to a rank of the group, which must `receive` it."""
    with _connected(f"rank {rank} has ended"):
        dist.send_object_list([message], rank, group=group, device=torch.device("cpu"))


def receive(rank: int, group: Group) -> Any:
    """Wait for the next message of a rank, and return it."""
    messages = [None]
    with _connected(f"rank {rank} has ended"):
        dist.recv_object_list(messages, rank, group=group, device=torch.device("cpu"))
    return messages[0]


@contextmanager
def _connected(otherwise: str) -> Iterator[None]:
    """Turn gloo's error about a broken connection into `RankLost`.

    Args:
        otherwise: the message where it is not known which rank has ended.
    """
    global _waited
    began = perf_counter()
    try:
        yield
    except RuntimeError as error:
        raise RankLost(liveness.lost_rank() or f"{otherwise} ({error})") from error
    if threading.current_thread() is threading.main_thread():  # others wait beside the steps
        _waited += perf_counter() - began


def seconds_waited() -> float:
    """Seconds for which the main thread has waited here for other ranks, since the process began."""
    return _waited


def gloo_group(purpose: str) -> Group:
    """A gloo group of all ranks for one purpose; None in a single process.

    All ranks must make the first call of each purpose together: it returns on all of them, or on
    none. "control" comes first, as soon as there are ranks.
    """
    return _new_group(dist.group.WORLD, purpose) if dist.is_initialized() else None


# Groups are made once. The world is an argument so that a process which forms another one, as tests
# do, gets other groups.
@lru_cache(maxsize=8)
def _new_group(world: Group, purpose: str) -> Group:
    if purpose != "control":
        # `new_group` would wait for a rank that has ended, and the connections of "control" report
        # it
        barrier()
    group: Group = dist.new_group(backend="gloo", timeout=_LONGEST)
    return group


@contextmanager
def opening() -> Iterator[None]:
    """Context in which all ranks open a run: none of them waits for one that has ended or failed
    meanwhile.

    Raises:
        RankLost: names the rank, where a collective failed because of it.
    """
    try:
        yield
    except BaseException as error:
        liveness.raise_failed(error, everywhere=isinstance(error, MainProcessError))


@contextmanager
def watching() -> Iterator[None]:
    """Context of the steps of an open run, entered by all ranks: none of them outlives another one
    for long.

    A rank that waits for one whose process has ended, or that has failed, ends with an error that
    names it; one that waits where no error arrives, as in NCCL, is ended after `liveness.GRACE`
    seconds.

    Raises:
        RankLost: names the rank, where a collective failed because of it.
    """
    try:
        yield
    except BaseException as error:
        liveness.raise_failed(error, everywhere=isinstance(error, MainProcessError))
    liveness.end_run()
