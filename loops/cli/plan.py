"""``burnish plan <recipe> [--config file.yaml] [--any.field value] [--gpus 8x80GB]``, and ``--dry_run`` of a recipe."""

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rehearsal import Rehearsal

_DESCRIPTION = """\
Do everything of a run that comes before its first step, but on models without weights: read the configuration and the
data, encode it, find rewards, teacher and environment. Then simulate a step from shapes alone, and print the memory of
each rank at its peak. Nothing is left in the run directory; encoded data stays in the cache of
datasets, where the run finds it. `burnish <recipe> --dry_run` is the same."""

CONTEXT = 1_000_000_000  # bytes that CUDA, its libraries and NCCL take on a GPU before the first tensor
USABLE = 0.95  # of the rest; fragments between allocations take some
_KEPT = 4 << 30  # logits that the head keeps on a GPU: a thirty-second of its memory, at most these


@dataclasses.dataclass(frozen=True)
class Gpus:
    """Number of the GPUs of a run, and bytes of each."""

    count: int
    capacity: int

    @classmethod
    def parse(cls, text: str) -> "Gpus":
        """Read ``8x80GB``, ``24GiB``.

        Raises:
            ValueError: if it is something else.
        """
        size = re.fullmatch(r"(?:([1-9]\d*)x)?(\d*[1-9]\d*(?:\.\d+)?)(GB|GiB)", text, re.IGNORECASE)
        if size is None:
            raise ValueError(f"gpus: wanted number and memory, such as 8x80GB, got {text!r}")
        unit = 1 << 30 if size[3].lower() == "gib" else 10**9
        return cls(int(size[1] or 1), int(float(size[2]) * unit))

    @property
    def usable(self) -> float:
        """Bytes of each GPU that are left for tensors."""
        return USABLE * (self.capacity - CONTEXT)


def options_of(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of a plan, and the arguments that are the recipe's."""
    usage = "burnish plan <recipe> [--config file.yaml] [--any.field value] [--gpus 8x80GB]"
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("burnish plan", usage, _DESCRIPTION, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--gpus", help="number and memory, such as 8x80GB; those there are, unless given")
    parser.add_argument("--dry_run", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_known_args(arguments)


def print_plan(recipe: Callable[[Any], Any], config: Any, options: argparse.Namespace) -> bool:
    """Print the plan of a run and, if it does not fit, the savings of each setting; returns True if it fits.

    Raises:
        ValueError: what is wrong with the run.
    """
    if int(os.environ.get("RANK") or 0):
        return True  # the first one plans for all
    import torch

    gpus = Gpus.parse(options.gpus) if options.gpus else None
    if gpus is None and torch.cuda.is_available():
        gpus = Gpus(_started(config), torch.cuda.get_device_properties(0).total_memory)
    planned = plan(recipe, config, gpus)
    print(table(planned))
    if gpus is None:
        return True
    fits, room = planned.total <= gpus.usable, f"{_gb(gpus.usable)} GB of {_gb(gpus.capacity)} can be used."
    print(f"It fits: {room}" if fits else f"It does NOT FIT: {room} Each of these would change it:")
    for setting, changed in () if fits else alternatives(config, gpus):
        try:
            total = plan(recipe, changed, gpus).total
        except ValueError as error:
            print(f"  --{setting:30} {error}")
        else:
            verdict = "fits" if total <= gpus.usable else "does not fit"
            print(f"  --{setting:30} {_gb(planned.total - total)} GB less, {_gb(total)} GB: {verdict}")
    return fits


def plan(recipe: Callable[[Any], Any], config: Any, gpus: Gpus | None = None) -> "Rehearsal":
    """Take a recipe to its first step without weights, and simulate that; everything before it is done and checked.

    Args:
        recipe: such as `run_dpo`, with its configuration.
        gpus: that it would run on; without, the ranks that were started, or that hold one copy of the model, of unknown
            memory.

    Raises:
        ValueError: what the recipe raises before its first step.
    """
    from .rehearsal import rehearse

    if gpus is None:
        return rehearse(recipe, config, ranks=_started(config))
    if config.keep_bytes is None:
        config = dataclasses.replace(config, keep_bytes=min(gpus.capacity >> 5, _KEPT))
    return rehearse(recipe, config, ranks=gpus.count, capacity=gpus.capacity)


def _started(config: Any) -> int:
    return int(os.environ.get("WORLD_SIZE") or config.parallel.copy_size)


def alternatives(config: Any, gpus: Gpus) -> Iterator[tuple[str, Any]]:
    """Settings that reduce memory, the cheapest first, and the configuration with each."""
    whole, bfloat16 = not (config.lora.enabled or config.quantize), config.dtype == "bfloat16"
    shards = gpus.count // config.parallel.together
    changes: dict[str, Any] = {
        "dtype": None if bfloat16 else "bfloat16",
        "parallel.dp_shard_size": shards if config.parallel.dp_shard_size < shards else None,
        "gradient_checkpointing": None if config.gradient_checkpointing else True,
        "micro_tokens": (config.micro_tokens or 8192) // 4 if (config.micro_tokens or 8192) > 1024 else None,
        "reference": "precompute" if whole and getattr(config, "reference", None) in ("auto", "copy") else None,
        "optimizer": "adamw_8bit" if whole and config.optimizer == "adamw" else None,
        "weights_dtype": "bfloat16" if whole and bfloat16 and config.weights_dtype == "float32" else None,
        "lora.r": 16 if whole else None,
        "quantize": None if whole or config.quantize else "4bit",
    }
    for name, value in changes.items():
        group, dot, field = name.partition(".")
        if value is None or not hasattr(config, group):
            continue
        setting = dataclasses.replace(getattr(config, group), **{field: value}) if dot else value
        try:
            changed = dataclasses.replace(config, **{group: setting})
        except ValueError:  # not of this recipe
            continue
        yield f"{name} {str(value).lower() if value is True else value}", changed


def table(planned: "Rehearsal") -> str:
    """Plain text: the run, and the memory of a rank by what it is for."""
    batches = f"{planned.micro_batches} micro-batches" if planned.micro_batches > 1 else "one micro-batch"
    lines = [
        f"parameters     {planned.parameters:,}, {planned.trained:,} of them trained; rows are {planned.layout}",
        f"steps          {planned.steps:,} of {planned.tokens:,.0f} tokens, on {planned.ranks} "
        f"rank{'s' * (planned.ranks > 1)}, {batches} each of at most {planned.largest:,} tokens",
    ]
    lines += ["", "memory of a rank at its peak, GB"]
    lines += [f"  {label:30}{_gb(size):>9}" for label, size in planned.memory.most_common() if size >= 5e5]
    return "\n".join([*lines, f"  {'total':30}{_gb(planned.total):>9}"])


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"
