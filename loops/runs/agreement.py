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
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from ..config import Common, Settings
from .ranks import gloo_group

T = TypeVar("T")

# Settings that may differ: what the main process alone uses, and how many processes tokenize.
_FREE = {"dataset_num_proc", "report_to", "project", "run_name"}
_DATA = {"data", "eval_data"}  # whose rows are compared later, see `Training`
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
    # Digests first: of thousands of ranks, the texts would be megabytes on each.
    digests = _of_all_ranks(hashlib.sha256(repr(own).encode()).hexdigest())
    # Every rank has the same digests, so all or none of them exchange the texts.
    if len(set(digests)) > 1:
        raise ValueError(difference(_of_all_ranks(own)))


def _of_all_ranks(mine: T) -> list[T]:
    gathered: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=gloo_group("control"))
    return gathered


def difference(of_ranks: list[Text]) -> str:
    """The message about the first entry that differs from that of rank 0."""
    first = of_ranks[0]
    name, other = _first_difference(of_ranks)
    named = ", ".join(map(str, other[:_NAMED]))
    if len(other) > _NAMED:
        named += f" and {len(other) - _NAMED} more"
    who = f"rank {named} has" if len(other) == 1 else f"ranks {named} have"
    here = first.get(name, "nothing")
    there = of_ranks[other[0]].get(name, "nothing")
    return (
        f"{name}: {who} {there}, rank 0 has {here}; start every rank with the same settings, packages and files, "
        "as of a shared directory"
    )


def _first_difference(of_ranks: list[Text]) -> tuple[str, list[int]]:
    """The first entry that is not the same everywhere, and the ranks where it isn't rank 0's."""
    names = list(dict.fromkeys(chain.from_iterable(of_ranks)))
    for name in names:
        expected = of_ranks[0].get(name)
        other = [rank for rank, texts in enumerate(of_ranks) if texts.get(name) != expected]
        if other:
            return name, other
    raise AssertionError("the ranks agree")


def packages() -> Text:
    """The versions of Python, of the packages that compute, and of burnish with its files."""
    named = {name: f"version {version(name)}" for name in _PACKAGES}
    return {"burnish": _own_version(), "python": f"version {platform.python_version()}", **named}


@cache
def _own_version() -> str:
    # A checkout keeps its version number while its files change.
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
        elif isinstance(value, str) and _names_directory(name) and Path(value).is_dir():
            # Machines may have it under different paths: its files are compared.
            texts[name] = "a directory"
            for file, digest in model_files(Path(value)).items():
                texts[f"{name}: {file}"] = f"digest {digest[:12]}"
        else:
            texts[name] = _text(name, value)
    return texts


def _names_directory(setting: str) -> bool:
    """True for model, ref_model, teacher.model, tokenizer and lora.path."""
    return setting.endswith(("model", "tokenizer", "lora.path"))


def _flat(group: Settings | Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings and entries of mappings, by name."""
    if isinstance(group, Mapping):
        entries = dict(group)
    else:
        entries = {each.name: getattr(group, each.name) for each in fields(group)}
    for key, value in entries.items():
        name = f"{prefix}{key}"
        of_settings = is_dataclass(value) and not isinstance(value, type)
        if name not in _DATA and (of_settings or (isinstance(value, Mapping) and value)):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _kind_of_data(value: object) -> float | str | None:
    """What of the data is no path: that there is some, or how many rows are held out."""
    return value if value is None or isinstance(value, int | float) else "given"


def _text(name: str, value: object) -> str:
    """A value for a comparison, and for a message, in which nothing may be a secret."""
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__} with weights {weights_sample(value)[:12]}"
    if callable(value):
        named: Any = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}:{named.__qualname__}"
    # The text of another object may hold its address, which differs on every rank.
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
    """SHA-256 of a file; of a large one, of its size and some blocks, in which finetunes differ."""
    size = path.stat().st_size
    sha256 = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            sha256.update(file.read())
        else:  # 2 MiB of, say, 5 GB
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
