"""Check, before anything is trained, that the ranks of a run agree on its settings, packages and
models.

Ranks that differ would train on: a shard would be moved at another learning rate, or one rank would
wait in a collective that the others never enter. They come about by a file that is stale on one
machine, another checkout, a variable of the environment, or a launcher that quotes badly.

What may differ: paths of data, as the rows themselves are compared; paths of models and of files,
as their content is compared; what only the main process uses for display; and the number of
processes that tokenize.
"""

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from ..config import Common
from .ranks import gloo_group

_FREE = {"dataset_num_proc", "report_to", "project", "run_name"}
_DATA = {"data", "eval_data"}
_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.json", "*.jinja", "*.model", "*.txt", "*.py")
_WHOLE = 4 << 20  # bytes of a file up to which all of it is compared
_BLOCKS, _BLOCK = 32, 1 << 16  # of a larger one: its first and last bytes, and some between them
_SAMPLED = 64  # elements of each weight of a model in memory
_PACKAGES = ("torch", "transformers", "accelerate", "peft")
_NAMED = 8  # ranks in a message

Text = dict[str, str]


def check_agreement(config: Common, accelerator: Accelerator) -> None:
    """Compare the settings, packages and models of all ranks. Every rank calls it.

    Raises:
        ValueError: on every rank, names the first setting, package or file that differs, the ranks,
            and both values.
    """
    if accelerator.num_processes == 1:
        return
    own = {**packages(), **settings(config)}
    digests = _of_all_ranks(hashlib.sha256(repr(own).encode()).hexdigest())
    if len(set(digests)) > 1:
        raise ValueError(difference(_of_all_ranks(own)))


def _of_all_ranks(mine: object) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=gloo_group("control"))
    return gathered


def difference(of_ranks: list[Text]) -> str:
    """The message about the first entry that differs from that of rank 0."""
    first = of_ranks[0]
    names = list(dict.fromkeys(name for texts in of_ranks for name in texts))
    name = next(
        name for name in names if any(texts.get(name) != first.get(name) for texts in of_ranks)
    )
    other = [rank for rank, texts in enumerate(of_ranks) if texts.get(name) != first.get(name)]
    named = ", ".join(map(str, other[:_NAMED])) + (
        f" and {len(other) - _NAMED} more" if len(other) > _NAMED else ""
    )
    who = f"rank {named} has" if len(other) == 1 else f"ranks {named} have"
    here, there = first.get(name, "nothing"), of_ranks[other[0]].get(name, "nothing")
    return (
        f"{name}: {who} {there}, rank 0 has {here}; start every rank with the same settings, packages and files, "
        "as of a shared directory"
    )


def packages() -> Text:
    """The versions of Python and of the packages that compute, and of burnish a digest of its files
    too.
    """
    named = {name: f"version {version(name)}" for name in _PACKAGES}
    return {"burnish": _own_version(), "python": f"version {platform.python_version()}", **named}


@cache
def _own_version() -> str:
    root = Path(__file__).parents[2]
    sha256 = hashlib.sha256()
    for room in ("objectives", "kernels", "data", "loops"):
        for path in sorted((root / room).rglob("*.py")):
            sha256.update(str(path.relative_to(root)).encode())
            sha256.update(path.read_bytes())
    return f"version {version('burnish')} with files {sha256.hexdigest()[:12]}"


def settings(config: Common) -> Text:
    """Each setting that must be the same on every rank, as text, by the name of its flag."""
    texts: Text = {}
    for name, value in _flat(config):
        if name in _FREE:
            continue
        if name.partition(".")[0] in _DATA and not (config.streaming and name.startswith("data")):
            value = _kind_of_data(value)
        if name == "output" and value is not None:
            value = os.path.abspath(value)
        if isinstance(value, str) and Path(value).is_file():
            texts[name] = f"a file with digest {file_digest(Path(value))[:12]}"
        elif (
            isinstance(value, str)
            and name.endswith(("model", "tokenizer", "lora.path"))
            and Path(value).is_dir()
        ):
            texts[name] = "a directory"
            texts |= {
                f"{name}: {file}": f"digest {digest[:12]}"
                for file, digest in model_files(Path(value)).items()
            }
        else:
            texts[name] = _text(name, value)
    return texts


def _flat(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings and entries of mappings, by name."""
    entries = (
        {each.name: getattr(group, each.name) for each in fields(group)}
        if is_dataclass(group)
        else dict(group)
    )
    for key, value in entries.items():
        name = f"{prefix}{key}"
        of_settings = is_dataclass(value) and not isinstance(value, type)
        if name not in _DATA and (of_settings or (isinstance(value, Mapping) and value)):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _kind_of_data(value: object) -> Any:
    """What of the data is no path: that there is some, or how many rows are held out."""
    return value if value is None or isinstance(value, int | float) else "given"


def _text(name: str, value: object) -> str:
    """A value for a comparison, and for a message, in which nothing is shown that may be a
    secret.
    """
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__} with weights {weights_sample(value)[:12]}"
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}:{named.__qualname__}"
    if not isinstance(value, bool | int | float | str | list | tuple | Mapping | None):
        return type(value).__name__
    # entries of vllm.environment, a URL with a password
    if isinstance(value, str) and ("." in name or "@" in value):
        return f"a text with digest {hashlib.sha256(value.encode()).hexdigest()[:8]}"
    return repr(value)


def model_files(directory: Path) -> Text:
    """Digests of the files of a model and its tokenizer, by name."""
    paths = {path for pattern in _FILES for path in directory.glob(pattern)}
    return {path.name: file_digest(path) for path in sorted(paths)}


def file_digest(path: Path) -> str:
    """SHA-256 of a file; of one that is large its size and some of its blocks, which two finetunes
    don't share.
    """
    size = path.stat().st_size
    sha256 = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            sha256.update(file.read())
        else:
            for i in range(_BLOCKS):
                file.seek((size - _BLOCK) * i // (_BLOCKS - 1))
                sha256.update(file.read(_BLOCK))
    return sha256.hexdigest()


@torch.no_grad()
def weights_sample(model: nn.Module) -> str:
    """SHA-256 of the names, shapes and some elements of all weights of a model in memory."""
    sha256 = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().flatten()
        some = flat[:: max(1, len(flat) // _SAMPLED)]
        sha256.update(some.cpu().contiguous().view(torch.uint8).numpy())
    return sha256.hexdigest()
