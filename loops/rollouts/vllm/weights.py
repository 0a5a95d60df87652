"""How new weights get into a vLLM that is running: by file, by NCCL, or as one more adapter.

Whole weights are put in while the engine is paused. Answers under way stay where they are, and their keys and values
are computed anew (``clear_cache``: without, they go on from a mixture of both weights that is labelled with the new
ones). Each of these is given `ControlPlane`, and so works over HTTP and in process alike.

vLLM knows the weights by a label. Ours names the version and the source that published it: a server that was restarted,
was left behind by another run, or was cut off in the middle of an update has some other label.
"""

import asyncio
import contextlib
import functools
import itertools
import shutil
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..sample import VersionSpan
from ..source import SourceError, SourceLost
from .client import Rejected
from .plugin import BACKEND

_PART = 1 << 30  # bytes that are on their way at once
_INCOMPLETE = "incomplete"
_RESTARTED = "default"  # vLLM's own, for the weights that it was started with

# Ends an update that somebody has left half done: it may or may not have been begun, and may have failed.
UNDO = ("/start_weight_update", "/finish_weight_update", "/shutdown_weight_transfer_engine")

Weights = Iterable[tuple[str, Tensor]]
Settings = Mapping[str, Mapping[str, Any] | None]
T = TypeVar("T")


class ControlPlane(Protocol):
    """What vLLM is told by the path of its HTTP interface, whether or not there is HTTP in between."""

    async def order(self, path: str, body: Any = None) -> Any: ...


class Updates(Protocol):
    """One of the ways."""

    merged: ClassVar[bool]
    """Whether `publish` is to be given all of the weights with adapters merged, or an adapter's own."""

    @property
    def settings(self) -> Settings:
        """What the server's configuration must say; None for what it must not have."""
        ...

    async def version(self, vllm: ControlPlane) -> int | None: ...

    async def publish(self, vllm: ControlPlane, weights: Weights, version: int) -> None: ...

    def model(self) -> contextlib.AbstractContextManager[str | None]:
        """The model to ask for, which stays while it is asked; None for the only one."""
        ...

    def spans(self, labels: list[dict[str, Any]], model: str | None) -> list[VersionSpan]:
        """Which versions an answer is from, by vLLM's labels of its tokens and the model that was asked for.

        Raises:
            SourceLost: if it is from weights that were not published here.
        """
        ...


class _Whole:
    """All of the weights, in place of those that were there."""

    merged: ClassVar[bool] = True
    backend: ClassVar[str]

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex

    @property
    def settings(self) -> Settings:
        return {"weight_transfer_config": {"backend": self.backend}, "lora_config": None}

    async def connect(self, vllm: ControlPlane) -> None:
        """To an engine that has just been started, or belonged to another trainer."""
        raise NotImplementedError

    async def send(self, vllm: ControlPlane, weights: Weights) -> None:
        raise NotImplementedError

    async def version(self, vllm: ControlPlane) -> int | None:
        return self._version((await vllm.order("/weight_info"))["weight_version"])

    async def publish(self, vllm: ControlPlane, weights: Weights, version: int) -> None:
        label = (await vllm.order("/weight_info"))["weight_version"]
        await vllm.order("/pause?mode=keep&clear_cache=true", {})
        if self._version(label) is None:
            await self._begin_anew(vllm, label)
        # Until the update is whole the weights are nobody's: if this process dies, the next one publishes again.
        await vllm.order("/update_weight_version", {"new_version": f"{_INCOMPLETE}@{self._name}"})
        await vllm.order("/start_weight_update", {})
        await self.send(vllm, weights)
        await vllm.order("/finish_weight_update", {"weight_version": f"{version}@{self._name}"})
        await vllm.order("/resume", {})

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

    async def _begin_anew(self, vllm: ControlPlane, label: str) -> None:
        if label != _RESTARTED:
            for path in UNDO:
                with contextlib.suppress(Rejected):
                    await vllm.order(path, {})
        await self.connect(vllm)

    def _version(self, label: str) -> int | None:
        version, _, name = label.partition("@")
        return int(version) if name == self._name and version != _INCOMPLETE else None


class Files(_Whole):
    """Through files in a directory that trainer and server both see, such as one in ``/dev/shm``; they are not kept."""

    backend = BACKEND

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self.directory = Path(directory).resolve()

    async def connect(self, vllm: ControlPlane) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        await vllm.order("/init_weight_transfer_engine", {"init_info": {"directory": str(self.directory)}})

    async def send(self, vllm: ControlPlane, weights: Weights) -> None:
        path = self.directory / f"{self._name}.safetensors"
        try:
            for part, last in _parts(weights):
                # Copies, since tied weights may not share memory in a file.
                tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in part}
                await asyncio.to_thread(save_file, tensors, path)
                await vllm.order("/update_weights", {"update_info": {"path": str(path), "last": last}})
        finally:
            path.unlink(missing_ok=True)


class Nccl(_Whole):
    """From GPU to GPUs, by broadcast from this process; needs vLLM in the trainer's environment, too.

    Written to vLLM 0.32's contract and tested against a stand-in: no GPU has run it yet.

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
        ranks = 1 + (await vllm.order("/get_world_size"))["world_size"]
        meeting = {"master_address": self.address, "master_port": _free_port(), "world_size": ranks}
        told = vllm.order("/init_weight_transfer_engine", {"init_info": {**meeting, "rank_offset": 1, "packed": False}})
        self._group = await self._together(lambda: self._here(trainer_init, meeting), told)

    async def send(self, vllm: ControlPlane, weights: Weights) -> None:
        for part, _ in _parts(weights):
            tensors = [(name, tensor.detach().to(self.device).contiguous()) for name, tensor in part]
            info = {
                "names": [name for name, _ in tensors],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                "shapes": [list(tensor.shape) for _, tensor in tensors],
            }

            sending = functools.partial(self._here, self._broadcast, [tensor for _, tensor in tensors])
            await self._together(sending, vllm.order("/update_weights", {"update_info": info}))

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None

    def _broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, src=0)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _here(self, function: Callable[..., T], *arguments: Any) -> T:
        """On this device, which another thread does not know of."""
        if torch.cuda.is_available():
            torch.cuda.set_device(self.device)
        return function(*arguments)

    async def _together(self, mine: Callable[[], T], theirs: Awaitable[Any]) -> T:
        """Both sides of a collective; where one fails, the other waits in NCCL for good, and is left there."""
        sides = asyncio.ensure_future(_in_daemon(mine)), asyncio.ensure_future(theirs)
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

    Here ``publish`` is given the adapter's own tensors, by the names of ``peft.get_peft_model_state_dict``.
    An answer under way goes on with the adapter that it was begun with, which is unloaded after the last of them.

    Args:
        directory: that trainer and server both see.
        config: of the adapter, ``model.peft_config["default"]``.
    """

    merged: ClassVar[bool] = False

    def __init__(self, directory: str | Path, config: Any) -> None:
        self.settings: Settings = {"lora_config": {"max_lora_rank": config.r}}
        self.directory = Path(directory).resolve()
        self.config = config
        self._prefix = f"burnish-{uuid.uuid4().hex[:12]}-"
        self._serial = itertools.count()
        self._versions: dict[str, int] = {}  # by name; the last one is drawn from
        self._in_use: Counter[str] = Counter()

    async def version(self, vllm: ControlPlane) -> int | None:
        there = {model["id"] for model in (await vllm.order("/v1/models"))["data"]}
        if not self._versions.keys() <= there:  # the server was restarted
            self._versions.clear()
        return list(self._versions.values())[-1] if self._versions else None

    async def publish(self, vllm: ControlPlane, weights: Weights, version: int) -> None:
        await self.version(vllm)
        path = self.directory / f"{self._prefix}{next(self._serial)}"
        await asyncio.to_thread(self._save, path, weights)
        try:
            await vllm.order("/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path)})
        except Rejected as error:
            raise SourceError(f"{error}; trainer and server must both see {self.directory}, and the server's "
                              f"--max-lora-rank be at least {self.config.r}") from error  # fmt: skip
        self._versions[path.name] = version
        for name in [name for name in self._versions if name != path.name and not self._in_use[name]]:
            del self._versions[name]
            await vllm.order("/v1/unload_lora_adapter", {"lora_name": name})
            await asyncio.to_thread(shutil.rmtree, self.directory / name, ignore_errors=True)

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

    def _save(self, path: Path, weights: Weights) -> None:
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}
        save_file(tensors, path / "adapter_model.safetensors")
        self.config.save_pretrained(str(path))


def _parts(weights: Weights) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Some of the weights after others, and whether they are the last of them."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > _PART:
            yield part, False
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    yield part, True


async def _in_daemon(function: Callable[[], T]) -> T:
    """Its result, from a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = function(), None
        except BaseException as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop has gone
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="vllm-nccl").start()
    return await future


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


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
