"""Work of the main process for all ranks, which wait for it as long as it takes, and fail where it fails."""

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator

T = TypeVar("T")

_LONGEST = timedelta(days=7)  # of NCCL it is ten minutes, less than a rollout may take


class MainProcessError(RuntimeError):
    """The main process failed at what the other ranks were waiting for."""


def from_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Return on every rank what ``function()`` returns on the main process. All ranks call it; it is pickled.

    Raises:
        MainProcessError: on the other ranks, with its message, where the main process raises an error.
    """
    if accelerator.num_processes == 1:
        return function()
    answer: list[Any] = [None, None]  # the result, and what went wrong
    failed: Exception | None = None
    if accelerator.is_main_process:
        try:
            answer[0] = function()
        except Exception as error:
            failed, answer[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(answer, src=0, group=_control(dist.group.WORLD), device=torch.device("cpu"))
    if failed is not None:
        raise failed
    result, problem = answer
    if problem is not None:
        raise MainProcessError(f"rank {accelerator.process_index}: the main process failed: {problem}")
    return cast(T, result)


@lru_cache(maxsize=1)
def _control(world: Any) -> Any:
    """A group of all ranks over gloo: waiting in NCCL occupies the device, and times out too soon."""
    return dist.new_group(backend="gloo", timeout=_LONGEST)
