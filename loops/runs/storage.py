"""A directory of shards that is complete or absent: written aside by all ranks, checksummed,
renamed into place.

`torch.distributed.checkpoint` divides the tensors between the ranks, calls the writer on each, and
raises the errors of any on all. Shards are safetensors files that its HuggingFaceStorageReader
reads, on any number of ranks.
"""

import errno
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import _TYPES
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

log = logging.getLogger(__name__)

# torch.float32 -> "F32", as safetensors has it in the header of a file
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class DirectoryWriter(FileSystemWriter):
    """Writes the shard of this rank and its other ``files``.

    The main process renames the directory when all are there.

    The format is that of HuggingFaceStorageWriter, which copies all tensors before it writes the
    first.

    Args:
        final: the directory, which appears when it is whole.
        files: contents of further files of this rank, by name.
        finished: called on the main process when the directory is there, while the others wait for
            it.
    """

    def __init__(
        self, final: Path, files: Mapping[str, memoryview], finished: Callable[[], None]
    ) -> None:
        # On the same file system, so that it can be renamed.
        super().__init__(final.with_name(f".partial-{final.name}"))
        self.final = final
        self.partial = Path(self.path)
        self.files = files
        self.finished = finished

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the main process, before any rank writes: make room, and the directory."""
        remove_partial(self.final.parent)
        self.partial.mkdir(parents=True)
        sync(self.final.parent.parent)  # of the first one, the directory of all is new
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On each rank; the result carries the SHA-256 of its files to the main process."""
        digests = {}
        for name, content in self.files.items():
            digests[name] = write(self.partial / name, [content])
        if plan.items:
            shard = f"shard-{self.rank}.safetensors"
            digests[shard] = write(self.partial / shard, _safetensors(plan.items, planner))
        # torch hands the third field to `finish` as it is.
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(MetadataIndex(""), 0, digests)])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the main process, when all ranks have written."""
        digests: dict[str, str] = {}
        for (result,) in results:
            digests |= result.storage_data
        manifest = json.dumps(dict(sorted(digests.items())), indent=2)
        write(self.partial / "manifest.json", [manifest.encode()])
        # The order matters: a power cut leaves either no directory of this name or a whole one.
        sync(self.partial)
        remove(self.final)  # a damaged one of the same step
        self.partial.rename(self.final)
        sync(self.final.parent)
        self.finished()


def _safetensors(items: list[WriteItem], planner: SavePlanner) -> Iterator[bytes | memoryview]:
    """The content of a file with these tensors, or parts of tensors, in pieces.

        8 bytes         length of the header, a little-endian integer
        the header      JSON, filled up by spaces to a multiple of 8 bytes:
            {"model/head.weight": {"dtype": "F32", "shape": [500, 64], "data_offsets": [0, 128000]},
             ...,
             "__metadata__": {"DCP_SHARDING_INFO": ..., "DCP_VERSION": "1.0", "format": "pt"}}
        the tensors     one after the other; offsets count from the end of the header

    Values of the metadata are texts, so the sharding info is JSON within JSON: where in the whole
    tensor each part begins, {"model/head.weight": {"saved_offsets": [500, 0]}}.
    """
    tensors: dict[str, dict[str, object]] = {}
    offsets: dict[str, dict[str, object]] = {}
    end = 0
    # Larger elements first, so that all are aligned.
    items = sorted(items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
    for item in items:
        name = item.index.fqn
        # one part of a tensor on each rank
        assert item.tensor_data is not None and name not in tensors
        chunk = item.tensor_data.chunk
        begin = end
        end += math.prod(chunk.sizes) * _dtype(item).itemsize
        tensors[name] = {
            "dtype": _NAMES[_dtype(item)],
            "shape": list(chunk.sizes),
            "data_offsets": [begin, end],
        }
        offsets[name] = {"saved_offsets": list(chunk.offsets)}
    about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    header = json.dumps({"__metadata__": about, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    # One tensor at a time comes from the device to the host: all of them might not fit there.
    for item in items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write the file and flush it to the disk.

    Returns its SHA-256, computed in another thread meanwhile.
    """
    sha256 = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as thread:
        for piece in pieces:
            # Both let go of the interpreter lock, so that hashing takes no time of its own.
            hashed = thread.submit(sha256.update, piece)
            try:
                file.write(piece)
            finally:
                hashed.result()
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def remove_partial(parent: Path) -> None:
    """Remove unfinished directories."""
    for partial in parent.glob(".partial-*"):
        remove(partial)


def remove(path: Path) -> None:
    """Remove a directory, or a link to one, if there is one.

    A warning says why it can't be removed.
    """
    try:
        if os.path.lexists(path):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)


def damage(path: Path, share: slice) -> str | None:
    """Describe what is wrong with this share of the files of a directory; None if nothing is."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if not isinstance(manifest, dict):
            return "manifest.json is not one"
        if not all(isinstance(digest, str) for digest in manifest.values()):
            return "manifest.json is not one"
        if "state.pt" not in manifest:
            return "manifest.json names no state.pt"
        # torch would read every shard that it finds there.
        if stray := {shard.name for shard in path.glob("*.safetensors")} - manifest.keys():
            return f"{min(stray)} is not in manifest.json"
        for name, digest in sorted(manifest.items())[share]:
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return f"{name} has another sha256 than when it was written"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def sync(path: Path) -> None:
    """Make the content of a file, or renames in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of file systems that can't sync a directory
            raise
    finally:
        os.close(descriptor)
