"""Update the weights of a running vLLM: by file, by NCCL, or as one more adapter.

Whole weights are put in while the engine is paused. Completions under way stay where they are, and
their keys and values are computed anew: with the old cache they would continue from a mix of both
weights, labeled with the new ones. Files are written before the pause, which lasts only while the
server loads them. A `VLLMEngine` has the methods of a `VLLMClient` for this: weight_version, pause,
resume and control.

vLLM knows the weights by a label. Ours names the version and the source that published it: a server
that was restarted, was left behind by another run, or was cut off in the middle of an update has
some other label.
"""

import asyncio
import contextlib
import functools
import json
import shlex
import shutil
import socket
import tempfile
import uuid
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..event_loops import gather_or_cancel, off_loop
from ..sample import VersionSpan
from ..source import NamedWeights, SourceError, SourceLost
from .answers import shown
from .client import Rejected, VLLMClient
from .plugin.burnish_vllm_files import BACKEND

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, as vLLM's flag takes them
# starts of adapters that change the weights which the server has
_CHANGING = ("pissa", "olora", "corda", "loftq")
_PART = 1 << 30  # bytes that are on their way at once, to all servers


async def send_weights(
    sources: Sequence[Any], weights: NamedWeights, version: int
) -> dict[Any, BaseException]:
    """Send the weights to all sources in lockstep.

    Returns the errors of those that failed, and raises if all did, or if the weights can't be read
    to the end or written: then the servers go on with their former weights.

    They are read once, a part at a time, and the next part when this one is written, and sent to
    every source: however slow one of them is, the copies of a part take no more than 1 GiB in all,
    or one tensor each.

    Args:
        sources: with ``updates``, which several may share, and ``update(step, *arguments)``:
            ``step(vllm, *arguments)`` within their patience.
    """
    failed: dict[Any, BaseException] = {}
    updates = list(dict.fromkeys(source.updates for source in sources))

    async def each(step: str, *arguments: Any) -> None:
        left = [source for source in sources if source not in failed]
        steps = [source.update(getattr(source.updates, step), *arguments) for source in left]
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
        for source, error in zip(left, outcomes, strict=True):
            if error is not None:  # it is left out of the further steps
                failed[source] = error

    await each("begin")
    try:
        for part in _parts(weights, _PART // len(updates)):
            if len(failed) == len(sources):
                break
            await asyncio.gather(*(update.stage(part) for update in updates))
            await each("send", part)
        await each("finish", version)
    finally:
        for update in updates:
            update.discard()
    if len(failed) == len(sources):
        raise next(iter(failed.values()))
    return failed


async def undo_update(vllm: VLLMClient) -> None:
    """End an update that another trainer left half done: it may or may not have begun, and may have
    failed.
    """
    for operation in (
        "start_weight_update",
        "finish_weight_update",
        "shutdown_weight_transfer_engine",
    ):
        with contextlib.suppress(Rejected):
            await vllm.control(operation)


class FullWeights:
    """All of the weights, in place of the former ones.

    An update is ``begin``, then ``stage`` and ``send`` for each part of the weights, and
    ``finish``.
    """

    merged = True  # takes adapters merged into the weights that they adapt
    backend: str
    flags: Sequence[str]  # of a server that is updated so
    # to an engine that has just been started, or belonged to another trainer
    connect: Callable[[Any], Awaitable[None]]

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._newest = -1  # version that was published

    def misfit(self, config: Mapping[str, object]) -> tuple[str, str] | None:
        """Why a server of this configuration can't be updated so, and the flags that it needs.

        None if it can.
        """
        if config.get("lora_config") is not None:
            return (
                "has lora_config, under which whole weights can't be replaced",
                "no --enable-lora",
            )
        transfer = config.get("weight_transfer_config")
        if not isinstance(transfer, Mapping) or transfer.get("backend") != self.backend:
            return (
                f"has weight_transfer_config={shown(transfer)}, but weights are to come another way",
                shlex.join(self.flags),
            )
        return None

    async def version(self, vllm: Any) -> int | None:
        return self._version(await vllm.weight_version())

    async def begin(self, vllm: VLLMClient) -> None:
        """Connect to a server that does not have our weights; any other goes on completing."""
        label = await vllm.weight_version()
        if self._version(label) is None:
            if label != "default":  # the state of a vLLM that has just been started
                await vllm.pause()
                await undo_update(vllm)
            await self.connect(vllm)

    async def stage(self, part: dict[str, Tensor]) -> None:
        """Keep a part until ``finish``, for all servers."""

    async def send(self, vllm: VLLMClient, part: dict[str, Tensor]) -> None:
        """Send a part to a server at once."""

    def discard(self) -> None:
        """Let go of what was staged."""

    async def pause(self, vllm: VLLMClient) -> None:
        """Have no tokens drawn until ``finish``, and be ready for the parts."""
        await vllm.pause()
        # Mark the weights invalid until the update is complete: if this process dies, the next one
        # publishes again.
        await vllm.control("update_weight_version", new_version=f"incomplete@{self._name}")
        await vllm.control("start_weight_update")

    async def finish(self, vllm: VLLMClient, version: int) -> None:
        self._newest = max(version, self._newest)
        await vllm.control("finish_weight_update", weight_version=f"{version}@{self._name}")
        await vllm.resume()

    def model(self) -> contextlib.AbstractContextManager[str | None]:
        """The model to request, which stays loaded within the context; None for the only one."""
        return contextlib.nullcontext()

    def spans(self, labels: Iterable[tuple[str, int, int]], model: str | None) -> list[VersionSpan]:
        """The versions that a completion is from, by vLLM's labels of the tokens [start, end) and
        the requested model.

        Raises:
            SourceLost: if it is from weights that were not published here.
            SourceError: if it is from a version that is yet to come.
        """
        spans = []
        for label, start, end in labels:
            version = self._version(label)
            if version is None:
                raise SourceLost(
                    f"vllm: it answered from weights {label[:80]!r}, not from published ones"
                )
            if version > self._newest:
                raise SourceError(
                    f"vllm: it answered from version {version}; the newest one is {self._newest}"
                )
            spans.append(VersionSpan(version, start, end))
        return spans

    def _version(self, label: str) -> int | None:
        version, _, name = label.partition("@")
        ours = name == self._name and version.isdecimal() and len(version) < 20
        return int(version) if ours else None


def transit_directory() -> Path:
    """Where weights on their way lie on one machine: in memory where there is ``/dev/shm``."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


class Files(FullWeights):
    """Whole weights through files, which are not kept.

    Several servers may share one of these: each part is written once for all of them.

    Args:
        directory: one that trainer and servers see, with room for all of the weights; a new one
            within `transit_directory` unless given, which goes with this object or the process.
    """

    backend = BACKEND
    flags = ("--weight-transfer-config", json.dumps({"backend": backend}))

    def __init__(self, directory: str | Path | None = None) -> None:
        super().__init__()
        if directory is None:
            directory = tempfile.mkdtemp(prefix="burnish-", dir=transit_directory())
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        self.directory = Path(directory).resolve()
        self._staged: list[Path] = []

    async def connect(self, vllm: VLLMClient) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        await vllm.control(
            "init_weight_transfer_engine", init_info={"directory": str(self.directory)}
        )

    async def stage(self, part: dict[str, Tensor]) -> None:
        path = self.directory / f"{self._name}-{len(self._staged)}.safetensors"
        self._staged.append(path)
        try:
            await off_loop(functools.partial(save_file, _copies(part.items()), path))
        except (OSError, SafetensorError) as error:
            raise SourceError(
                f"vllm: the weights can't be written to {self.directory} ({error}); there must be room for all of "
                "them at once; name another directory, vllm.directory"
            ) from error

    async def finish(self, vllm: VLLMClient, version: int) -> None:
        await self.pause(vllm)
        for path in self._staged:
            last = path == self._staged[-1]
            await vllm.control("update_weights", update_info={"path": str(path), "last": last})
        await super().finish(vllm, version)

    def discard(self) -> None:
        for path in self._staged:
            path.unlink(missing_ok=True)
        self._staged.clear()


class Nccl(FullWeights):
    """Whole weights from GPU to GPUs, broadcast by this process.

    Needs vLLM in the trainer's environment, too.

    Written to vLLM 0.32's contract and tested against a stand-in; no GPU has run it yet. Seconds
    per publication on one host with two GPUs, compared with `Files` in ``/dev/shm``, will decide if
    it stays.

    Args:
        address: of this machine, as the server sees it; unless given, the one that it sends
            requests from.
        timeout: seconds that one broadcast may take.
    """

    backend = "nccl"
    flags = ("--weight-transfer-config", json.dumps({"backend": backend}))

    def __init__(self, address: str | None = None, *, timeout: float = 300.0) -> None:
        super().__init__()
        self.address = address
        self.timeout = timeout
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._group: Any = None  # vLLM's communicator

    async def connect(self, vllm: VLLMClient) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        if self._group is not None:
            self._group.destroy()
            self._group = None
        ranks = 1 + await vllm.get("/get_world_size", "world_size", int)
        address = self.address or vllm.own_address
        group = {"master_address": address, "master_port": free_port(), "world_size": ranks}
        joining = vllm.control(
            "init_weight_transfer_engine", init_info={**group, "rank_offset": 1, "packed": False}
        )
        self._group = await self._collective(lambda: trainer_init(group), joining)

    async def begin(self, vllm: VLLMClient) -> None:
        await super().begin(vllm)
        await self.pause(vllm)  # a broadcast goes into the weights themselves

    async def send(self, vllm: VLLMClient, part: dict[str, Tensor]) -> None:
        tensors = [tensor.detach().to(self.device).contiguous() for tensor in part.values()]
        info = {
            "names": list(part),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }

        def broadcast() -> None:
            for tensor in tensors:
                self._group.broadcast(tensor, src=0)

        await self._collective(broadcast, vllm.control("update_weights", update_info=info))

    async def _collective(
        self, trainer: Callable[[], object], server: Coroutine[Any, Any, None]
    ) -> Any:
        """Run both sides of a collective.

        If one fails, the other waits in NCCL forever, and is abandoned.
        """

        def on_device() -> Any:
            if not torch.cuda.is_available():
                return trainer()
            with torch.cuda.device(self.device):  # another thread does not know of it
                result = trainer()
                torch.cuda.current_stream().synchronize()
            return result

        try:
            async with asyncio.timeout(self.timeout):
                return (await gather_or_cancel([off_loop(on_device), server]))[0]
        except TimeoutError as error:
            raise SourceLost(f"vllm: NCCL did not finish within {self.timeout:g} s") from error


class Adapters:
    """One more LoRA adapter for every version, under a name of its own.

    Nothing is merged, nothing changed in place.

    Here ``publish`` takes the adapter's own tensors, by the names of
    ``peft.get_peft_model_state_dict``. A completion under way continues with the adapter that it
    began with, which is unloaded after the last of them.

    Args:
        directory: that trainer and server both see.
        config: of the adapter, ``model.peft_config["default"]``.
        loaded: how many the server can hold at once: two more than the maximal staleness.
    """

    merged = False

    def __init__(self, directory: str | Path, config: LoraConfig, loaded: int = 4) -> None:
        self.directory = Path(directory).resolve()
        self.config = config
        self.flags = (
            "--enable-lora",
            "--max-lora-rank",
            str(max_lora_rank(vars(config))),
            "--max-loras",
            str(loaded),
        )
        self._tensors: dict[str, Tensor] = {}  # on their way
        self._versions: dict[str, int] = {}  # by name; the last one is drawn from
        self._in_use: Counter[str] = Counter()

    def misfit(self, config: Mapping[str, Any]) -> tuple[str, str] | None:
        lora = config.get("lora_config")
        if not isinstance(lora, Mapping):
            return "takes no adapters", shlex.join(self.flags)
        rank = lora.get("max_lora_rank", self.config.r)
        if not isinstance(rank, int) or rank < self.config.r:
            return f"takes adapters up to rank {rank}, lora.r is {self.config.r}", shlex.join(
                self.flags[1:3]
            )
        return None

    async def version(self, vllm: VLLMClient) -> int | None:
        loaded = {name for name, _ in await vllm.models()}
        if not self._versions.keys() <= loaded:  # the server was restarted
            self._versions.clear()
        return list(self._versions.values())[-1] if self._versions else None

    begin = version  # notices a restart

    async def stage(self, part: dict[str, Tensor]) -> None:
        self._tensors |= _copies(part.items())  # a file holds all of an adapter

    async def send(self, vllm: VLLMClient, part: dict[str, Tensor]) -> None:
        """Nothing goes to a server before the file is whole."""

    def discard(self) -> None:
        self._tensors = {}

    async def finish(self, vllm: VLLMClient, version: int) -> None:
        path = self.directory / f"burnish-{version}-{uuid.uuid4().hex}"
        path.mkdir(parents=True)
        await off_loop(
            functools.partial(save_file, self._tensors, path / "adapter_model.safetensors")
        )
        self.config.save_pretrained(str(path))
        try:
            await vllm.post(
                "/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path)}
            )
        except Rejected as error:
            raise SourceError(
                f"{error}; trainer and server must both see {self.directory}, and the server's --max-lora-rank be at "
                f"least {self.config.r}"
            ) from error
        self._versions[path.name] = version
        older = [name for name in self._versions if name != path.name]
        unused = [name for name in older if not self._in_use[name]]  # by completions under way
        for name in unused:
            del self._versions[name]
            await vllm.post("/v1/unload_lora_adapter", {"lora_name": name})
            await off_loop(
                functools.partial(shutil.rmtree, self.directory / name, ignore_errors=True)
            )

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

    def spans(self, labels: list[tuple[str, int, int]], model: str | None) -> list[VersionSpan]:
        if model not in self._versions:
            raise SourceLost(f"vllm: the adapter {model} is gone")
        return [VersionSpan(self._versions[model], 0, labels[-1][-1])] if labels else []


def _copies(weights: NamedWeights) -> dict[str, Tensor]:
    """On the CPU, each in memory of its own: tied weights may not share it in a file."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}


def _parts(weights: NamedWeights, limit: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive parts of the weights of so many bytes, or of one tensor."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > limit:
            yield part
            part = {}
            size = 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def max_lora_rank(adapter: Mapping[str, Any]) -> int:
    """The smallest of vLLM's ranks of adapters that all of one with these fields of peft's
    ``LoraConfig`` fit in.

    Raises:
        ValueError: if there is none, or vLLM can't load such adapters
            (``vllm.lora.peft_helper.PEFTHelper``).
    """
    init = adapter.get("init_lora_weights")
    remedy = "or set vllm.updates to files, which sends the merged weights"
    refused = {name: adapter.get(name) for name in ("use_dora", "modules_to_save", "lora_bias")}
    refused["bias"] = adapter.get("bias", "none") != "none"
    refused["init_lora_weights"] = str(init).lower().startswith(_CHANGING)
    for name, wrong in refused.items():
        if wrong:
            raise ValueError(
                f"lora.{name}: vLLM can't load adapters with {name}={adapter[name]}; leave it out, {remedy}"
            )
    rank = max(adapter["r"], *(adapter.get("rank_pattern") or {}).values(), 0)
    if rank > _RANKS[-1]:
        raise ValueError(
            f"lora.r: vLLM takes adapters up to rank {_RANKS[-1]}, got {rank}; lower lora.r, {remedy}"
        )
    return next(known for known in _RANKS if rank <= known)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
