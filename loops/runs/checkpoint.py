"""Checkpoints: everything that training needs to continue after a step, on any number of ranks,
sharded or not.

    checkpoints/step-00000120/
        shard-0.safetensors   rank 0's part of the trained parameters, buffers and optimizer state, by name
        random-0.pt           generator states of rank 0
        state.pt              step, schedule, parameter groups, and the recipe's own state
        manifest.json         sha256 of every file, written last

The batches of a step are a function of its number, so the step is the data cursor.
"""

import errno
import logging
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from ..models.sharding import ranks_together
from .ranks import from_main, gloo_group
from .state import Rest, capture, dump, random_state, restore, set_random_state, trained_state
from .storage import DirectoryWriter, damage, remove, remove_partial, sync, write

log = logging.getLogger(__name__)
# a single process saves and loads without a group
warnings.filterwarnings("ignore", "torch.distributed is disabled")


FORMAT = 1  # of state.pt; a later one is refused, one without a number is of the first versions
_FULL = "the disk is full"
# Errors of the system, or what safetensors and torch say in their place, which keep no number; with
# their cause and remedy.
_REMEDIES: tuple[tuple[set[int], tuple[str, ...], str, str], ...] = (
    (
        {errno.ENOSPC, errno.EDQUOT},
        ("No space left", "Disk quota exceeded", "failed writing file"),
        _FULL,
        "make room",
    ),
    (
        {errno.EFBIG},
        ("File too large",),
        "the file would be larger than this process may write",
        "raise that limit (ulimit -f unlimited)",
    ),
    (
        {errno.EROFS},
        ("Read-only file system",),
        "the file system is read-only, as the kernel makes it after an error of the disk",
        "have it mounted for writing",
    ),
    (
        {errno.EPERM, errno.EACCES},
        ("Operation not permitted", "Permission denied"),
        "this user may not write it",
        "give the right to (chmod, chown, or chattr -i where lsattr shows an i)",
    ),
)


class CheckpointError(RuntimeError):
    """A checkpoint, or another file of a run, could not be written, or no checkpoint could be
    read.
    """


@contextmanager
def writing(what: str, directory: Path) -> Iterator[None]:
    """Write to the disk; on failure, the message names the checkpoint under ``directory`` to resume
    from.

    Raises:
        CheckpointError: if any rank could not write, or was lost; the checkpoints that were there
            stay as they were.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        cause, by = _cause(error)
        reason, remedy = _explained(cause, directory)
        newest = next(iter(_all(directory)), None)
        left = "There is no earlier checkpoint" if newest is None else f"{newest.name} is intact"
        raise CheckpointError(
            f"{what} could not be written to {directory.parent}{by}{reason}. {left}: {remedy}"
            f"start again with --resume true ({cause})"
        ) from error


def remedy_of(cause: BaseException) -> tuple[str, str] | None:
    """Why a file could not be written, and what to do about it; None where it is not known."""
    number, text = getattr(cause, "errno", None), str(cause)
    for numbers, signs, reason, remedy in _REMEDIES:
        if number in numbers or any(sign in text for sign in signs):
            return reason, remedy
    return None


def _explained(cause: BaseException, directory: Path) -> tuple[str, str]:
    """Why something could not be written, and what to do before the run is started again, as parts
    of a sentence.
    """
    text = str(cause)
    if known := remedy_of(cause):
        reason, remedy = known
        if reason == _FULL:
            existing = next(path for path in directory.parents if path.exists())
            free = shutil.disk_usage(existing).free / 2**20
            reason = f"{reason} ({free:.0f} MiB free)"
        return f": {reason}", f"{remedy} and "
    # gloo's errors are plain RuntimeErrors.
    if isinstance(cause, dist.DistError) or "gloo" in text or "Connection closed" in text:
        return ": another rank ended", ""
    if isinstance(cause, FileNotFoundError):
        return ": it was removed, or is on no file system that all ranks share", ""
    return "", ""


def replace(path: Path, content: str, *, mode: int | None = None) -> None:
    """Replace a file of a run; a process that is killed leaves it whole. Raises as `writing` does.

    Args:
        mode: permissions of the file; unless given, those of every new file.
    """
    with writing(path.name, path.parent / "checkpoints"):
        partial = path.with_suffix(".partial")
        if mode is not None:
            partial.unlink(missing_ok=True)
            partial.touch(mode=mode)  # before there is something to read
        write(partial, [content.encode()])
        partial.replace(path)
        sync(path.parent)


def _cause(error: BaseException) -> tuple[BaseException, str]:
    """The error that made all ranks fail, and its rank. A KeyboardInterrupt is raised unchanged."""
    if not isinstance(error, CheckpointException):
        return error, ""
    rank, (cause, _) = min(error.failures.items())
    if not isinstance(cause, Exception):
        raise cause
    return cause, f" by rank {rank}" if dist.is_initialized() else ""


def save(
    directory: Path,
    step: int,
    *,
    accelerator: Accelerator,
    policy: nn.Module,
    parts: Mapping[str, Stateful],
    data: str = "",
    keep: int = 2,
    best: int | None = None,
    end_tokens: Sequence[int] = (),
    thread: ThreadPoolExecutor | None = None,
) -> Path | Future[Path]:
    """Write the checkpoint of ``step`` under ``directory``, and drop older ones.

    Every rank calls it.

    Args:
        parts: everything else with a state: optimizer, schedule, and the recipe's own state.
        data: digest of the data that the step is a cursor of.
        keep: number of newest checkpoints to keep.
        best: step of another checkpoint to keep.
        end_tokens: at which the model ends its completions.
        thread: writes the checkpoint, from copies in host memory, while training continues.

    Returns:
        Its directory, or a future of it if a thread writes it.

    Raises as `writing` does.
    """
    tensors, rest = capture(accelerator.unwrap_model(policy), parts)
    if thread is not None:  # copies in host memory: the next step changes the tensors in place
        tensors = BlockingAsyncStager().stage(tensors)
    files = {f"random-{accelerator.process_index}.pt": dump(random_state())}
    if accelerator.is_main_process:
        known = {"format": FORMAT, "step": step, "data": data, "end_tokens": list(end_tokens)}
        files["state.pt"] = dump({**known, **rest})
    final = path_of(directory, step)
    # A group of its own: messages of a thread must not come between those of the main thread.
    group = gloo_group("checkpoint")

    def drop_older() -> None:
        # later ones were found damaged
        up_to_this = [path for path in _all(directory) if path <= final]
        for old in up_to_this[keep:]:
            if best is None or old != path_of(directory, best):
                remove(old)

    def write_all() -> Path:
        with writing(f"checkpoint of step {step}", directory):
            try:
                writer = DirectoryWriter(final, files, drop_older)
                state_dict_saver.save(tensors, storage_writer=writer, process_group=group)
            except CheckpointException:  # all ranks have stopped to write
                if accelerator.is_main_process:
                    remove_partial(directory)
                raise
        return final

    return write_all() if thread is None else thread.submit(write_all)


class Saver:
    """Saves checkpoints one at a time, as `save` does; if ``background``, in a thread.

    Every rank has one, and calls it at the same steps. What the last one could not write is raised
    by the next call.
    """

    def __init__(self, *, background: bool) -> None:
        self._thread = ThreadPoolExecutor(1) if background else None
        self._pending: Future[Path] | None = None

    @property
    def failed(self) -> bool:
        """True if this rank failed to write the last checkpoint: all ranks should `wait`, which
        raises the reason.
        """
        return (
            self._pending is not None
            and self._pending.done()
            and self._pending.exception() is not None
        )

    def save(self, directory: Path, step: int, **options: Any) -> None:
        """Wait for the previous checkpoint, then begin this one; see `save`."""
        self.wait()
        saved = save(directory, step, **options, thread=self._thread)
        self._pending = saved if isinstance(saved, Future) else None

    def wait(self) -> None:
        """Return when the last checkpoint is written."""
        pending = self._pending
        self._pending = None  # so that its error is raised once
        if pending is not None:
            pending.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def load_newest(
    directory: Path,
    *,
    accelerator: Accelerator,
    policy: nn.Module,
    parts: Mapping[str, Stateful],
    data: str = "",
) -> int:
    """Restore the newest whole checkpoint and return its step, or 0.

    Damaged checkpoints are named in the log.

    Every rank calls it, verifies a share of the files, and reads only what it needs.

    Raises:
        CheckpointError: if it belongs to other data, or to a model with other trained parameters,
            or can't be read.
    """
    path = _newest_whole(directory, accelerator)
    if path is None:
        return 0
    state = _read_state(path, ("step", "data", *parts))
    if state["data"] != data:
        raise CheckpointError(
            f"resume: the data is not what {path.name} was trained on, so its steps would be other examples; "
            "give it the data as it was, or begin in another directory"
        )
    plain = accelerator.unwrap_model(policy)
    _restore(path, plain, parts, state)
    rank = accelerator.process_index
    together = ranks_together(plain)
    # Ranks that compute the same rows draw the same numbers: those of the first of them.
    random_file = path / f"random-{rank // together * together}.pt"
    if random_file.exists():
        set_random_state(torch.load(random_file, map_location="cpu", weights_only=True))
    else:
        log.warning(
            "checkpoint %s was written by fewer ranks: rank %d keeps its fresh generators",
            path.name,
            rank,
        )
    return int(state["step"])


def load_weights(path: Path, policy: nn.Module, optimizer: Optimizer | None = None) -> Rest:
    """Give the policy the trained parameters and buffers of a whole checkpoint.

    All ranks of a run call it.

    Args:
        optimizer: one that averages the weights it trains, whose state is restored, too: its
            ``eval`` then gives the weights to save.

    Returns:
        What state.pt holds.

    Raises:
        CheckpointError: if it is the checkpoint of a model with other trained parameters, or can't
            be read.
    """
    parts: dict[str, Stateful] = {} if optimizer is None else {"optimizer": optimizer}
    state = _read_state(path, ("step", *parts))
    _restore(path, policy, parts, state)
    return state


def _restore(
    path: Path, policy: nn.Module, parts: Mapping[str, Stateful], state: Mapping[str, object]
) -> None:
    """Fill the policy, and these parts, from a checkpoint whose state.pt was read.

    Every rank calls it: torch divides what is to be read between them.
    """
    reader = HuggingFaceStorageReader(str(path))
    metadata = reader.read_metadata().state_dict_metadata
    # Only tensors are in the shards, so no entry is of bytes.
    saved = cast(Mapping[str, TensorStorageMetadata], metadata)
    _check(trained_state(policy), saved)
    tensors = restore(policy, parts, state, saved)
    try:
        state_dict_loader.load(
            tensors, storage_reader=reader, process_group=gloo_group("checkpoint")
        )
    except CheckpointException as error:
        cause, by = _cause(error)
        raise CheckpointError(
            f"{path} could not be read{by}: start again with --resume true, or remove it to resume from the one before "
            f"({cause})"
        ) from error


def _read_state(path: Path, needed: Sequence[str]) -> Rest:
    """What state.pt of a whole checkpoint holds.

    Args:
        needed: names of its parts.

    Raises:
        CheckpointError: if another version of burnish, or another program, has written it.
    """
    another = f"remove {path} to resume from the one before, or begin in another directory"
    try:
        # weights_only: a checkpoint that somebody sends must not be able to run code.
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path.name}: state.pt is no state of a run ({reason}); {another}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path.name}: state.pt is no state of a run but a {type(state).__name__}; {another}"
        )
    written = state.get("format", FORMAT)
    if written != FORMAT:
        raise CheckpointError(
            f"{path.name}: it has format {written}, of another version of burnish, and this one reads format {FORMAT}; "
            f"install that version, or {another}"
        )
    if missing := [name for name in needed if name not in state]:
        raise CheckpointError(
            f"{path.name}: state.pt is no state of this run, it has no {missing[0]}; {another}"
        )
    return state


def _newest_whole(directory: Path, accelerator: Accelerator) -> Path | None:
    """Identical on every rank: each verifies an equal share of the files."""
    for name in from_main(accelerator, lambda: [path.name for path in _all(directory)]):
        problem = damage_on_ranks(directory / name, accelerator)
        if problem is None:
            return directory / name
        if accelerator.is_main_process:
            log.warning("checkpoint %s is damaged and passed over: %s", name, problem)
    return None


def damage_on_ranks(path: Path, accelerator: Accelerator) -> str | None:
    """Describe what is wrong with a checkpoint; None if nothing is.

    Every rank calls it, and verifies an equal share of the files.
    """
    rank, ranks = accelerator.process_index, accelerator.num_processes
    problems: list[str | None] = [damage(path, slice(rank, None, ranks))]
    if ranks > 1:
        problems *= ranks
        dist.all_gather_object(problems, problems[rank], group=gloo_group("checkpoint"))
    return next(filter(None, problems), None)


def _check(trained: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise CheckpointError unless the checkpoint has the parameters that this model trains."""
    before = {}
    for path, metadata in saved.items():
        if path.startswith("model/"):
            before[path.removeprefix("model/")] = tuple(metadata.size)
    now = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    for name in sorted(before.keys() | now.keys()):
        held = before.get(name, "nothing")
        wanted = now.get(name, "nothing")
        if held != wanted:
            raise CheckpointError(
                f"checkpoint: holds {name!r} as {held}, this model trains it as {wanted}"
            )


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """The steps of every checkpoint, the newest first."""
    return [int(path.name.removeprefix("step-")) for path in _all(directory)]


def _all(directory: Path) -> list[Path]:
    """Every checkpoint, newest first; without copies that someone keeps, such as step-00000120.old."""
    found = []
    for path in directory.glob("step-*"):
        if path.name.removeprefix("step-").isdecimal():
            found.append(path)
    return sorted(found, reverse=True)
