"""Checkpoints that are whole or not there: written aside, checksummed, renamed into place.

    checkpoints/step-00000120/
        state.pt         trained parameters, optimizer, schedule, and what the recipe remembers
        random-0.pt      generator states of rank 0 (one file per rank)
        manifest.json    sha256 and size of every file, written last

The batches of a step are a function of its number, so the step is the data cursor.
"""

import errno
import hashlib
import json
import logging
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, cast

import numpy
import torch
from accelerate import Accelerator
from torch import nn

log = logging.getLogger(__name__)

KEPT = 2  # an older checkpoint stands by in case the newest turns out to be damaged


class StepMemory(Protocol):
    """State of a recipe beside its parameters, the same on every rank; it sees the metrics of every step."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def observe(self, metrics: Mapping[str, float]) -> None: ...


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read."""


def save(
    directory: Path,
    step: int,
    *,
    accelerator: Accelerator,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    memory: StepMemory | None = None,
) -> Path:
    """Write the checkpoint of ``step`` under ``directory`` and drop all but the newest `KEPT`. Every rank calls it.

    Raises:
        CheckpointError: if the disk is full or not writable; the checkpoints that were there stay as they were.
    """
    final = directory / f"step-{step:08d}"
    partial = directory / f".partial-{final.name}"
    try:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        digests = {}
        random_file = partial / f"random-{accelerator.process_index}.pt"
        digests[random_file.name] = _write(random_file, _random_state())
        if accelerator.is_main_process:
            model = trained_state(accelerator.unwrap_model(policy))
            state = {"model": model, "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            state |= {"memory": memory.state_dict()} if memory is not None else {}
            digests["state.pt"] = _write(partial / "state.pt", {"step": step, **state})
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _seal(partial, digests)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
            partial.rename(final)
            _sync(directory)
            for old in _all(directory)[KEPT:]:
                shutil.rmtree(old)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error) or "write" in str(error)
        free = shutil.disk_usage(directory).free / 2**20
        last = _all(directory)
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {directory}"
            + (f": the disk is full ({free:.0f} MiB free)" if full else "")
            + f". {last[0].name + ' is intact' if last else 'There is no earlier one'}: "
            + f"make room and start again with --resume true ({error})"
        ) from error
    return final


def load_newest(
    directory: Path,
    *,
    accelerator: Accelerator,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    memory: StepMemory | None = None,
) -> int:
    """Restore the newest whole checkpoint and return its step, or 0. Damaged ones are named in the log."""
    for path in _all(directory):
        problem = _damage(path)
        if problem:
            log.warning("checkpoint %s is damaged and passed over: %s", path.name, problem)
            continue
        state = _read(path / "state.pt")
        restore_trained_state(accelerator.unwrap_model(policy), state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        if memory is not None:
            memory.load_state_dict(state["memory"])
        mine = path / f"random-{accelerator.process_index}.pt"
        if mine.exists():
            _set_random_state(_read(mine))
        else:
            log.warning("checkpoint %s was written by fewer ranks: rank %d keeps its fresh generators",
                        path.name, accelerator.process_index)  # fmt: skip
        return int(state["step"])
    return 0


def trained_state(policy: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that training changes, and all buffers. What is frozen comes from the model's own files."""
    frozen = {
        name for name, parameter in policy.named_parameters(remove_duplicate=False) if not parameter.requires_grad
    }
    return {name: tensor for name, tensor in policy.state_dict().items() if name not in frozen}


def restore_trained_state(policy: nn.Module, state: dict[str, torch.Tensor]) -> None:
    wanted = trained_state(policy).keys()
    if wanted != state.keys():
        odd = sorted(wanted ^ state.keys())
        raise CheckpointError(f"checkpoint: holds other parameters than this model trains, such as {odd[0]!r}")
    policy.load_state_dict(state, strict=False)


def _write(path: Path, state: Any) -> str:
    """Write the file and flush it to the disk; returns its SHA-256."""
    with path.open("wb") as file, _Digest(file) as digest:
        with _without_crc32():
            torch.save(state, cast(BinaryIO, digest))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


class _Digest:
    """A file whose SHA-256 is computed in another thread while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.hexdigest = self.sha256.hexdigest
        self.flush = file.flush
        self.thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.shutdown()

    def write(self, data: bytes) -> int:
        hashed = self.thread.submit(self.sha256.update, data)
        try:
            return self.file.write(data)
        finally:
            hashed.result()  # torch frees the data when this returns


@contextmanager
def _without_crc32() -> Iterator[None]:
    """The manifest's SHA-256 stands for the checksum that torch computes of every tensor in one thread."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _seal(partial: Path, digests: Mapping[str, str]) -> None:
    """Write the manifest, with the digests that are known; the files of other ranks are read."""
    files = sorted(partial.iterdir())
    manifest = {
        file.name: {"sha256": digests.get(file.name) or _sha256(file), "size": file.stat().st_size} for file in files
    }
    with (partial / "manifest.json").open("w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)


def _damage(path: Path) -> str | None:
    """Describe what is wrong with this checkpoint; None if nothing is."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, entry in manifest.items():
            if (path / name).stat().st_size != entry["size"]:
                return f"{name} has another size than when it was written"
            if _sha256(path / name) != entry["sha256"]:
                return f"{name} has another sha256 than when it was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return str(error)
    return None


def _all(directory: Path) -> list[Path]:
    """Every checkpoint, newest first."""
    return sorted(directory.glob("step-*"), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    """Make renames in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_state() -> dict[str, Any]:
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, keys.tolist(), *rest],
        "python": [version, list(internal), gauss],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
