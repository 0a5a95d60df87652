"""Checkpoints: what training needs to go on after a step, on any number of ranks, sharded or not.

    checkpoints/step-00000120/
        shard-0.safetensors   rank 0's part of the trained parameters, buffers and optimizer state, by name
        random-0.pt           generator states of rank 0
        state.pt              step, schedule, parameter groups, and what the recipe remembers
        manifest.json         sha256 of every file, written last

The batches of a step are a function of its number, so the step is the data cursor.
"""

import errno
import io
import logging
import math
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils.serialization import config as serialization

from ..registry import nearest
from .storage import DirectoryWriter, damage, read_manifest, remove_partial

T = TypeVar("T")

log = logging.getLogger(__name__)


class StepMemory(Protocol):
    """State of a recipe beside its parameters, the same on every rank; it sees the metrics of every step."""

    def observe(self, metrics: Mapping[str, float]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


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
        CheckpointError: if any rank could not write, or was lost; the checkpoints that were there stay as they were.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        cause, by = _cause(error)
        full = getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
            sign in str(cause)
            for sign in ("No space left", "failed writing file")  # of safetensors, and of torch
        )
        lost = isinstance(cause, dist.DistError) or any(sign in str(cause) for sign in ("gloo", "Connection closed"))
        parent = next(path for path in directory.parents if path.exists())
        free = shutil.disk_usage(parent).free / 2**20
        newest = [path.name for path in _all(directory)]
        raise CheckpointError(
            f"{what} could not be written to {directory.parent}{by}"
            + (f": the disk is full ({free:.0f} MiB free)" if full else ": another rank ended" if lost else "")
            + f". {newest[0] + ' is intact' if newest else 'There is no earlier checkpoint'}: "
            + ("make room and " if full else "")
            + f"start again with --resume true ({cause})"
        ) from error


def _cause(error: BaseException) -> tuple[BaseException, str]:
    """The error that made all ranks fail, and the rank that it is of. A KeyboardInterrupt is raised as it is."""
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
) -> Path:
    """Write the checkpoint of ``step`` under ``directory``, and drop older ones. Every rank calls it.

    Args:
        parts: what else has a state: optimizer, schedule, and what the recipe remembers.
        data: digest of the data that the step is a cursor of.
        keep: how many of the newest stay.
        best: the step of one that stays as well.

    Raises:
        CheckpointError: if any rank could not write, or was lost; the checkpoints that were there stay as they were.
    """
    final = path_of(directory, step)

    def drop_older() -> None:
        for old in _all(directory)[keep:]:
            if best is None or old != path_of(directory, best):
                shutil.rmtree(old)

    tensors, state = _capture(accelerator.unwrap_model(policy), parts)
    files = {f"random-{accelerator.process_index}.pt": _dump(_random_state())}
    if accelerator.is_main_process:
        files["state.pt"] = _dump({"step": step, "data": data, **state})
    with writing(f"checkpoint of step {step}", directory):
        try:
            with _collective(accelerator) as ranks:
                dcp.save(tensors, storage_writer=DirectoryWriter(final, files, drop_older), **ranks)
        except CheckpointException:  # all ranks have stopped to write
            if accelerator.is_main_process:
                remove_partial(directory)
            raise
    return final


def load_newest(
    directory: Path, *, accelerator: Accelerator, policy: nn.Module, parts: Mapping[str, Stateful], data: str = ""
) -> int:
    """Restore the newest whole checkpoint and return its step, or 0. Damaged ones are named in the log.

    Every rank calls it, verifies a share of the files, and reads of them what it needs.

    Raises:
        CheckpointError: if it is of other data, or of a model that trains other parameters, or could not be read.
    """
    path = _newest_whole(directory, accelerator)
    if path is None:
        return 0
    state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    if "model" in state:
        raise CheckpointError(
            f"resume: {path.name} is of an earlier version of burnish, which wrote the weights into state.pt; "
            "go on with that version, or begin in another directory"
        )
    if state["data"] != data:
        raise CheckpointError(
            f"resume: the data is not what {path.name} was trained on, so its steps would be other examples; "
            "give it the data as it was, or begin in another directory"
        )
    try:
        with _collective(accelerator) as ranks:
            _restore(path, state, accelerator.unwrap_model(policy), parts, ranks)
    except CheckpointException as error:
        cause, by = _cause(error)
        raise CheckpointError(
            f"{path} could not be read{by}: start again with --resume true, or remove it to go on from the one before "
            f"({cause})"
        ) from error
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


def _newest_whole(directory: Path, accelerator: Accelerator) -> Path | None:
    """The same on every rank: each reads an equal share of the files to verify them."""
    for name in _gather(accelerator, [path.name for path in _all(directory)])[0]:
        manifest: dict[str, str] = {}
        problem = None
        try:
            manifest = read_manifest(directory / name)
        except (OSError, ValueError) as error:
            problem = str(error)
        manifest, problem = _gather(accelerator, (manifest, problem))[0]
        share = sorted(manifest.items())[accelerator.process_index :: accelerator.num_processes]
        problems = _gather(accelerator, problem or damage(directory / name, dict(share)))
        if not any(problems):
            return directory / name
        if accelerator.is_main_process:
            log.warning("checkpoint %s is damaged and passed over: %s", name, next(filter(None, problems)))
    return None


def trained_state(policy: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, and all buffers, each once. What is frozen comes from the model's own
    files. Where the policy is sharded, so are these."""
    state = policy.state_dict(keep_vars=True)
    trained = {name for name, tensor in policy.named_parameters(remove_duplicate=False) if tensor.requires_grad}
    buffers = {name for name, _ in policy.named_buffers(remove_duplicate=False)}
    assert trained <= state.keys()
    first = {id(tensor): name for name, tensor in reversed(state.items())}  # of tied weights
    return {name: state[name] for name in state if name in trained | buffers and first[id(state[name])] == name}


def _capture(policy: nn.Module, parts: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors by name, and the rest of the state, which is the same on every rank."""
    tensors = {f"model/{name}": tensor for name, tensor in trained_state(policy).items()}
    names = {parameter: name for name, parameter in policy.named_parameters()}
    rest: dict[str, Any] = {}
    for part, stateful in parts.items():
        if not isinstance(stateful, Optimizer):
            rest[part] = stateful.state_dict()
            continue
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, state in stateful.state.items():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    numbers.setdefault(names[parameter], {})[key] = value
                    continue
                if isinstance(parameter, DTensor) and value.ndim and not isinstance(value, DTensor):
                    raise CheckpointError(
                        f"checkpoint: wanted a DTensor for the optimizer's {key} of {names[parameter]}, which is "
                        f"sharded, got a tensor of one rank; use an optimizer that shards its state, such as AdamW"
                    )
                tensors[f"{part}/{names[parameter]}/{key}"] = value
        groups = [{**group, "params": [names[each] for each in group["params"]]} for group in stateful.param_groups]
        rest[part] = {"numbers": numbers, "groups": groups}
    return tensors, rest


def _restore(
    path: Path, rest: Mapping[str, Any], policy: nn.Module, parts: Mapping[str, Stateful], ranks: Mapping[str, Any]
) -> None:
    """Read what `_capture` gave. Unlike `Optimizer.load_state_dict` this keeps the dtype of every tensor, and unlike
    `torch.distributed.checkpoint.state_dict` it takes no step to find out what an optimizer remembers."""
    reader = HuggingFaceStorageReader(str(path))
    saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    targets = {f"model/{name}": tensor for name, tensor in trained_state(policy).items()}
    odd = sorted({name for name in saved if name.startswith("model/")} ^ targets.keys())
    if odd:
        parameter = odd[0].removeprefix("model/")
        raise CheckpointError(f"checkpoint: holds other parameters than this model trains, such as {parameter!r}")
    for name, tensor in targets.items():
        if saved[name].size != tensor.shape:
            raise CheckpointError(
                f"checkpoint: holds {name.removeprefix('model/')!r} as {tuple(saved[name].size)}, "
                f"this model trains it as {tuple(tensor.shape)}"
            )
    parameters = dict(policy.named_parameters())
    for part, stateful in parts.items():
        if isinstance(stateful, Optimizer):
            targets |= _prepare(stateful, part, rest[part], parameters, saved)
        else:
            stateful.load_state_dict(rest[part])
    dcp.load(targets, storage_reader=reader, **ranks)


def _prepare(
    optimizer: Optimizer,
    part: str,
    rest: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    saved: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Restore the settings and numbers of an optimizer, and give it empty tensors, which are returned to be filled."""
    optimizer.state.clear()
    place: dict[str, Any] = {}
    for group, before in zip(optimizer.param_groups, rest["groups"], strict=True):
        assert all(parameters[name] is each for name, each in zip(before["params"], group["params"], strict=True))
        group |= {**before, "params": group["params"]}
        on_device = group.get("fused") or group.get("capturable")  # as torch.optim places its counts of steps
        place |= {name: parameters[name].device if on_device else "cpu" for name in before["params"]}
    for name, numbers in rest["numbers"].items():
        optimizer.state[parameters[name]].update(numbers)
    targets = {}
    for path, about in saved.items():
        owner, _, path_in_part = path.partition("/")
        if owner == part:
            name, _, key = path_in_part.rpartition("/")
            parameter, size, dtype = parameters[name], about.size, about.properties.dtype
            if size == parameter.shape:
                tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                tensor = torch.empty(size, dtype=dtype, device=parameter.device if size else place[name])
                if isinstance(parameter, DTensor) and size:
                    mesh = parameter.device_mesh
                    tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim)
            targets[path] = optimizer.state[parameter][key] = tensor
    return targets


@contextmanager
def _collective(accelerator: Accelerator) -> Iterator[dict[str, Any]]:
    """Options of `torch.distributed.checkpoint` for these ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield {"no_dist": accelerator.num_processes == 1, "process_group": _group(dist.group.WORLD)}


def _gather(accelerator: Accelerator, value: T) -> list[T]:
    """The values of all ranks."""
    if accelerator.num_processes == 1:
        return [value]
    values: list[Any] = [None] * accelerator.num_processes
    dist.all_gather_object(values, value, group=_group(dist.group.WORLD))
    return values


@lru_cache(maxsize=1)
def _group(world: Any) -> Any:
    """Over gloo: a write of minutes is too long a wait for NCCL."""
    return world and dist.new_group(backend="gloo", timeout=timedelta(days=7))


def _dump(state: Any) -> memoryview:
    buffer = io.BytesIO()
    # The SHA-256 stands for the checksum that torch computes of every tensor.
    options: Any = serialization
    with options.patch("save.compute_crc32", False):
        torch.save(state, buffer)
    return buffer.getbuffer()


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def _all(directory: Path) -> list[Path]:
    """Every checkpoint, newest first."""
    return sorted(directory.glob("step-*"), reverse=True)


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
