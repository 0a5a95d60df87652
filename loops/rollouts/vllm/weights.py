"""New weights for a running vLLM: by file, by NCCL, or as one more adapter.

Whole weights are put in while the engine is paused. Completions under way stay where they are, and their keys and
values are computed anew: with the old cache they would go on from a mixture of both weights, labeled with the new ones.
All of this works through `ControlPlane`, over HTTP and in process alike.

vLLM knows the weights by a label. Ours names the version and the source that published it: a server that was restarted,
was left behind by another run, or was cut off in the middle of an update has some other label.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import shutil
import socket
import tempfile
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..event_loops import off_loop
from ..sample import VersionSpan
from ..source import NamedWeights, SourceError, SourceLost
from .client import Rejected, VLLMClient
from .launch import free_port, max_lora_rank
from .plugin import BACKEND

_PART = 1 << 30  # bytes that are on their way at once
_INCOMPLETE = "incomplete"
_RESTARTED = "default"  # vLLM's own, for the weights that it was started with

T = TypeVar("T")


class ControlPlane(Protocol):
    """Control of vLLM while whole weights change: `VLLMClient` over HTTP, `VLLMEngine` in this process.

    A call that vLLM refuses raises `Rejected`.
    """

    async def weight_version(self) -> str: ...
    async def update_weight_version(self, label: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def init_transfer(self, info: dict[str, Any]) -> None: ...
    async def shutdown_transfer(self) -> None: ...
    async def start_update(self) -> None: ...
    async def update_weights(self, info: dict[str, Any]) -> None: ...
    async def finish_update(self, label: str | None = None) -> None: ...
    async def world_size(self) -> int: ...


async def undo_update(vllm: ControlPlane, *, and_resume: bool = False) -> None:
    """End an update that another trainer left half done: it may or may not have begun, and may have failed."""
    for step in (vllm.start_update, vllm.finish_update, vllm.shutdown_transfer, *([vllm.resume] if and_resume else [])):
        with contextlib.suppress(Rejected):
            await step()


class Updates(Protocol):
    """A way to update a server."""

    merged: ClassVar[bool]
    """Does `publish` take all of the weights with adapters merged, or an adapter's own?"""

    def misfit(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        """Why a server of this configuration can't be updated so, and the flags that it needs; None if it can."""
        ...

    async def version(self, vllm: VLLMClient) -> int | None: ...

    async def publish(self, vllm: VLLMClient, weights: NamedWeights, version: int) -> None: ...

    def model(self) -> contextlib.AbstractContextManager[str | None]:
        """The model to request, which stays loaded within the context; None for the only one."""
        ...

    def spans(self, labels: list[dict[str, Any]], model: str | None) -> list[VersionSpan]:
        """The versions that a completion is from, by vLLM's labels of its tokens and the requested model.

        Raises:
            SourceLost: if it is from weights that were not published here.
        """
        ...


class _Whole:
    """All of the weights, in place of the former ones."""

    merged: ClassVar[bool] = True
    backend: ClassVar[str]

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex

    def misfit(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        if config.get("lora_config") is not None:
            return "has lora_config, under which whole weights can't be replaced", "no --enable-lora"
        transfer = config.get("weight_transfer_config")
        if transfer is None or transfer.get("backend") != self.backend:
            flag = f"--weight-transfer-config '{json.dumps({'backend': self.backend})}'"
            return f"has weight_transfer_config={transfer}, but weights are to come another way", flag
        return None

    async def connect(self, vllm: ControlPlane) -> None:
        """Connect to an engine that has just been started, or belonged to another trainer."""
        raise NotImplementedError

    async def send(self, vllm: ControlPlane, weights: NamedWeights) -> None:
        raise NotImplementedError

    async def version(self, vllm: ControlPlane) -> int | None:
        return self._version(await vllm.weight_version())

    async def publish(self, vllm: ControlPlane, weights: NamedWeights, version: int) -> None:
        label = await vllm.weight_version()
        await vllm.pause()
        if self._version(label) is None:
            if label != _RESTARTED:
                await undo_update(vllm)
            await self.connect(vllm)
        # Mark the weights invalid until the update is complete: if this process dies, the next one publishes again.
        await vllm.update_weight_version(f"{_INCOMPLETE}@{self._name}")
        await vllm.start_update()
        await self.send(vllm, weights)
        await vllm.finish_update(f"{version}@{self._name}")
        await vllm.resume()

    @contextlib.contextmanager
    def model(self) -> Iterator[None]:
        yield None

    def spans(self, labels: list[dict[str, Any]], model: str | None) -> list[VersionSpan]:
        spans: list[VersionSpan] = []
        for label in labels:
            version = self._version(label["version"])
            if version is None:
                raise SourceLost(f"vllm: it answered from weights {label['version']!r}, not from published ones")
            spans.append(VersionSpan(version, label["start"], label["end"]))
        return spans

    def _version(self, label: str) -> int | None:
        version, _, name = label.partition("@")
        return int(version) if name == self._name and version != _INCOMPLETE else None


class Files(_Whole):
    """Whole weights through files, which are not kept.

    Args:
        directory: one that trainer and server both see; a new one, in memory where there is ``/dev/shm``, unless given.
    """

    backend = BACKEND

    def __init__(self, directory: str | Path | None = None) -> None:
        super().__init__()
        if directory is None:
            memory = Path("/dev/shm")
            directory = tempfile.mkdtemp(prefix="burnish-", dir=memory if memory.is_dir() else None)
        self.directory = Path(directory).resolve()

    async def connect(self, vllm: ControlPlane) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        await vllm.init_transfer({"directory": str(self.directory)})

    async def send(self, vllm: ControlPlane, weights: NamedWeights) -> None:
        path = self.directory / f"{self._name}.safetensors"
        try:
            for part, last in _parts(weights):
                await off_loop(functools.partial(save_file, _copies(part), path))
                await vllm.update_weights({"path": str(path), "last": last})
        finally:
            path.unlink(missing_ok=True)


class Nccl(_Whole):
    """Whole weights from GPU to GPUs, broadcast by this process; needs vLLM in the trainer's environment, too.

    Written to vLLM 0.32's contract and tested against a stand-in; no GPU has run it yet. Seconds per publication on
    one host of two GPUs, beside `Files` in ``/dev/shm``, will decide whether it stays.

    Args:
        address: of this machine, as the server sees it; see `address_towards`.
        timeout: seconds that one broadcast may take.
    """

    backend = "nccl"

    def __init__(self, address: str = "127.0.0.1", *, timeout: float = 300.0) -> None:
        super().__init__()
        self.address, self.timeout = address, timeout
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self._group: Any = None

    async def connect(self, vllm: ControlPlane) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self.close()
        ranks = 1 + await vllm.world_size()
        group = {"master_address": self.address, "master_port": free_port(), "world_size": ranks}
        joining = vllm.init_transfer({**group, "rank_offset": 1, "packed": False})
        self._group = await self._collective(lambda: trainer_init(group), joining)

    async def send(self, vllm: ControlPlane, weights: NamedWeights) -> None:
        for part, _ in _parts(weights):
            tensors = [(name, tensor.detach().to(self.device).contiguous()) for name, tensor in part]
            info = {
                "names": [name for name, _ in tensors],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                "shapes": [list(tensor.shape) for _, tensor in tensors],
            }
            sending = functools.partial(self._broadcast, [tensor for _, tensor in tensors])
            await self._collective(sending, vllm.update_weights(info))

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None

    def _broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, src=0)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    async def _collective(self, trainer: Callable[[], T], server: Awaitable[Any]) -> T:
        """Both sides of a collective; where one fails, the other waits in NCCL for good, and is left there."""

        def on_device() -> T:
            if torch.cuda.is_available():
                torch.cuda.set_device(self.device)  # another thread does not know of it
            return trainer()

        sides = asyncio.ensure_future(off_loop(on_device)), asyncio.ensure_future(server)
        try:
            await asyncio.wait_for(asyncio.gather(*sides), self.timeout)
        except TimeoutError as error:
            raise SourceLost(f"vllm: NCCL did not finish within {self.timeout:g} s") from error
        finally:
            for side in sides:
                side.cancel()
        return sides[0].result()


class Adapters:
    """One more LoRA adapter for every version, under a name of its own; nothing is merged, nothing changed in place.

    Here ``publish`` takes the adapter's own tensors, by the names of ``peft.get_peft_model_state_dict``.
    A completion under way goes on with the adapter that it was begun with, which is unloaded after the last of them.

    Args:
        directory: that trainer and server both see.
        config: of the adapter, ``model.peft_config["default"]``.
    """

    merged: ClassVar[bool] = False

    def __init__(self, directory: str | Path, config: Any) -> None:
        self.directory = Path(directory).resolve()
        self.config = config
        self._prefix = f"burnish-{uuid.uuid4().hex[:12]}-"
        self._serial = itertools.count()
        self._versions: dict[str, int] = {}  # by name; the last one is drawn from
        self._in_use: Counter[str] = Counter()

    def misfit(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        needed = max_lora_rank(self.config.r)
        if (lora := config.get("lora_config")) is None:
            return "takes no adapters", f"--enable-lora --max-lora-rank {needed}"
        if (rank := lora.get("max_lora_rank", needed)) < self.config.r:
            return f"takes adapters up to rank {rank}, lora.r is {self.config.r}", f"--max-lora-rank {needed}"
        return None

    async def version(self, vllm: VLLMClient) -> int | None:
        loaded = {model["id"] for model in await vllm.models()}
        if not self._versions.keys() <= loaded:  # the server was restarted
            self._versions.clear()
        return list(self._versions.values())[-1] if self._versions else None

    async def publish(self, vllm: VLLMClient, weights: NamedWeights, version: int) -> None:
        await self.version(vllm)
        path = self.directory / f"{self._prefix}{next(self._serial)}"
        await off_loop(lambda: self._save(path, weights))
        try:
            await vllm.load_adapter(path.name, str(path))
        except Rejected as error:
            raise SourceError(f"{error}; trainer and server must both see {self.directory}, and the server's "
                              f"--max-lora-rank be at least {self.config.r}") from error  # fmt: skip
        self._versions[path.name] = version
        for name in [name for name in self._versions if name != path.name and not self._in_use[name]]:
            del self._versions[name]
            await vllm.unload_adapter(name)
            await off_loop(functools.partial(shutil.rmtree, self.directory / name, ignore_errors=True))

    @contextlib.contextmanager
    def model(self) -> Iterator[str]:
        if not self._versions:
            raise SourceLost("vllm: it has no adapter; publish one")
        name = list(self._versions)[-1]
        self._in_use[name] += 1
        try:
            yield name
        finally:
            self._in_use[name] -= 1

    def spans(self, labels: list[dict[str, Any]], model: str | None) -> list[VersionSpan]:
        if model not in self._versions:
            raise SourceLost(f"vllm: the adapter {model} is gone")
        return [VersionSpan(self._versions[model], 0, labels[-1]["end"])] if labels else []

    def _save(self, path: Path, weights: NamedWeights) -> None:
        path.mkdir(parents=True, exist_ok=True)
        save_file(_copies(weights), path / "adapter_model.safetensors")
        self.config.save_pretrained(str(path))


def _copies(weights: NamedWeights) -> dict[str, Tensor]:
    """On the CPU, each in memory of its own: tied weights may not share it in a file."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}


def _parts(weights: NamedWeights) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Consecutive parts of the weights, each with whether it is the last."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > _PART:
            yield part, False
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    yield part, True


def address_towards(host: str) -> str:
    """This machine's own address on the route to another; nothing is sent there.

    Raises:
        ValueError: if there is no route.
    """
    try:
        family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"vllm.trainer_address: this machine's address on the route to {host} can't be found ({error}); set it, "
            "such as to 10.0.0.5"
        ) from error
