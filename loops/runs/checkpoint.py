"""Checkpoints that are whole or not there: written aside, checksummed, renamed into place.

    checkpoints/step-00000120/
        state.pt         trained parameters, optimizer, schedule, and what the recipe remembers
        random-0.pt      generator states of rank 0 (one file per rank)
        manifest.json    sha256 of every file, written last

The batches of a step are a function of its number, so the step is the data cursor.
"""

import errno
import hashlib
import json
import logging
import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.serialization import config as serialization

from ..models.sharding import whole
from ..registry import nearest

log = logging.getLogger(__name__)


class StepMemory(Stateful, Protocol):
    """State of a recipe beside its parameters, the same on every rank; it sees the metrics of every step."""

    def observe(self, metrics: Mapping[str, float]) -> None: ...


class CheckpointError(RuntimeError):
    """A checkpoint, or the trained model, could not be written, or none could be read."""


class Best:
    """The saved step at which a metric was lowest, or with ``max:`` before its name highest.

    Attributes:
        step: None before there is one.
    """

    def __init__(self, metric: str | None) -> None:
        self.name = metric and metric.removeprefix("max:")
        self.sign = 1.0 if metric == self.name else -1.0
        self.step: int | None = None
        self.lowest = math.inf

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True if these metrics, of an evaluation after ``step``, are the best so far, which is to be saved.

        Raises:
            ValueError: before the first step, if the metric is not among them.
        """
        if self.name and step == 0 and self.name not in metrics:
            raise ValueError(nearest("keep_best: no metric", self.name, metrics))
        value = self.sign * metrics.get(self.name or "", math.nan)
        if step == 0 or not value < self.lowest:
            return False
        self.step, self.lowest = step, value
        return True


@contextmanager
def writing(what: str, directory: Path) -> Iterator[None]:
    """Write to the disk; where that fails, the message names the checkpoint under ``directory`` to go on from.

    Raises:
        CheckpointError: if the disk is full or not writable; the checkpoints that were there stay as they were.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as RuntimeError
        for partial in directory.glob(".partial-*"):
            shutil.rmtree(partial, ignore_errors=True)
        full = (
            getattr(error, "errno", None) == errno.ENOSPC
            or "No space left" in str(error)
            or "failed writing" in str(error)
        )
        free = shutil.disk_usage(directory.parent).free / 2**20
        newest = [path.name for path in _all(directory)]
        raise CheckpointError(
            f"{what} could not be written to {directory.parent}"
            + (f": the disk is full ({free:.0f} MiB free)" if full else "")
            + f". {newest[0] + ' is intact' if newest else 'There is no earlier checkpoint'}: "
            + ("make room and " if full else "")
            + f"start again with --resume true ({error})"
        ) from error


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
) -> Path:
    """Write the checkpoint of ``step`` under ``directory``, and drop older ones. Every rank calls it.

    Args:
        parts: what else has a state: optimizer, schedule, and what the recipe remembers.
        data: digest of the data that the step is a cursor of.
        keep: how many of the newest stay.
        best: the step of one that stays as well.

    Raises:
        CheckpointError: if the disk is full or not writable; the checkpoints that were there stay as they were.
    """
    final = path_of(directory, step)
    partial = directory / f".partial-{final.name}"
    with writing(f"checkpoint of step {step}", directory):
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        random_file = f"random-{accelerator.process_index}.pt"
        digests = {random_file: _write(partial / random_file, _random_state())}
        state: dict[str, Any] = {
            "step": step,
            "data": data,
            "model": trained_state(accelerator.unwrap_model(policy)),
        }
        state |= {name: part.state_dict() for name, part in parts.items()}
        state = tree_map_only(DTensor, whole, state)
        if accelerator.is_main_process:
            digests["state.pt"] = _write(partial / "state.pt", state)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            # The files of other ranks are read for their digests.
            manifest = {path.name: digests.get(path.name) or _sha256(path) for path in sorted(partial.iterdir())}
            with (partial / "manifest.json").open("w") as file:
                json.dump(manifest, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            _sync(partial)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
            partial.rename(final)
            _sync(directory)
            for old in _all(directory)[keep:]:
                if best is None or old != path_of(directory, best):
                    shutil.rmtree(old)
    return final


def load_newest(
    directory: Path, *, accelerator: Accelerator, policy: nn.Module, parts: Mapping[str, Stateful], data: str = ""
) -> int:
    """Restore the newest whole checkpoint and return its step, or 0. Damaged ones are named in the log.

    Raises:
        CheckpointError: if it is of other data, or of a model that trains other parameters.
    """
    for path in _all(directory):
        if problem := _damage(path):
            log.warning("checkpoint %s is damaged and passed over: %s", path.name, problem)
            continue
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        if state["data"] != data:
            raise CheckpointError(
                f"resume: the data is not what {path.name} was trained on, so its steps would be other examples; "
                "give it the data as it was, or begin in another directory"
            )
        restore_trained_state(accelerator.unwrap_model(policy), state["model"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
        random_file = path / f"random-{accelerator.process_index}.pt"
        if random_file.exists():
            _set_random_state(torch.load(random_file, map_location="cpu", weights_only=True))
        else:
            log.warning(
                "checkpoint %s was written by fewer ranks: rank %d keeps its fresh generators",
                path.name,
                accelerator.process_index,
            )
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
    """Write the file and flush it to the disk; returns its SHA-256, computed in another thread meanwhile."""
    sha256 = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as thread:

        def write(data: bytes) -> int:
            hashed = thread.submit(sha256.update, data)
            try:
                return file.write(data)
            finally:
                hashed.result()  # torch frees the data when this returns

        # The SHA-256 stands for the checksum that torch computes of every tensor in one thread.
        options: Any = serialization
        with options.patch("save.compute_crc32", False):
            torch.save(state, cast(Any, SimpleNamespace(write=write, flush=file.flush)))
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def _damage(path: Path) -> str | None:
    """Describe what is wrong with this checkpoint; None if nothing is."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, digest in manifest.items():
            if _sha256(path / name) != digest:
                return f"{name} has another sha256 than when it was written"
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return None


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


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
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    numpy.random.set_state(state["numpy"])
    random.setstate(state["python"])
