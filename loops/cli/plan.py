"""``burnish plan <recipe> [--gpus 8x80GB]``, and ``--dry_run`` of a recipe.

Do everything of a run that comes before its first step, but on models without weights: read the
configuration and the data, encode it, find rewards, teacher and environment. Then simulate a step
from shapes alone, and print the memory of each rank at its peak. Nothing is left in the run
directory; encoded data stays in the cache of datasets, where the run finds it.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..config import Common
from ..recipes import opener
from .rehearsal import Rehearsal, rehearse

# bytes that CUDA, its libraries and NCCL take on a GPU before the first tensor
CONTEXT = 1_000_000_000
USABLE = 0.95  # of the rest; fragments between allocations take some


def show(recipe: str, config: Common, gpus: str | None) -> bool:
    """Print the plan of a run and, if it does not fit, what each setting would save.

    Returns:
        True if it fits, or no GPU says how much would.

    Raises:
        ValueError: what is wrong with the run.
    """
    if int(os.environ.get("RANK") or 0):
        return True  # the first one plans for all
    ranks: int | None = None
    capacity: int | None = None
    if gpus:
        ranks, capacity = gpus_of(gpus)
    elif torch.cuda.is_available():
        capacity = torch.cuda.get_device_properties(0).total_memory
    planned = rehearse(opener(recipe), config, ranks, capacity)
    print(table(planned))
    if capacity is None:
        return True
    usable = USABLE * (capacity - CONTEXT)
    room = f"{_gb(usable)} GB of {_gb(capacity)} can be used."
    if planned.total <= usable:
        print(f"It fits: {room}")
        return True
    print(f"It does NOT FIT: {room} Each of these would change it:")
    for setting, changed in alternatives(config, planned.ranks):
        try:
            total = rehearse(opener(recipe), changed, planned.ranks, capacity).total
        except ValueError as error:
            print(f"  --{setting:30} {error}")
            continue
        saved = f"{_gb(planned.total - total)} GB less, {_gb(total)} GB"
        verdict = "fits" if total <= usable else "does not fit"
        print(f"  --{setting:30} {saved}: {verdict}")
    return False


def gpus_of(text: str) -> tuple[int, int]:
    """Number of the GPUs in ``8x80GB`` or ``24GiB``, and bytes of each.

    Raises:
        ValueError: if it is something else.
    """
    size = re.fullmatch(r"(?:([1-9]\d*)x)?(\d*[1-9]\d*(?:\.\d+)?)(GB|GiB)", text, re.IGNORECASE)
    if size is None:
        raise ValueError(f"gpus: wanted number and memory, such as 8x80GB, got {text!r}")
    unit = 1 << 30 if size[3].lower() == "gib" else 10**9
    return int(size[1] or 1), int(float(size[2]) * unit)


def alternatives(config: Common, ranks: int) -> Iterator[tuple[str, Common]]:
    """Settings that reduce memory, the cheapest first, and the configuration with each. Each agrees
    with the other settings.
    """
    for name, value in _cheaper(config, ranks).items():
        field, dot, inner = name.partition(".")
        if not hasattr(config, field):  # not of this recipe
            continue
        setting: Any = value
        if dot:
            group: Any = getattr(config, field)
            setting = replace(group, **{inner: value})
        try:
            changed = replace(config, **{field: setting})
            changed.refuse_contradictions()
        except ValueError:  # this recipe takes other values, or its other settings stand against it
            continue
        written = "true" if value is True else value  # as on the command line
        yield f"{name} {written}", changed


def _cheaper(config: Common, ranks: int) -> dict[str, object]:
    """A value that takes less memory for each setting that has one, the cheapest change first."""
    whole = not (config.lora.enabled or config.quantize)
    shards = ranks // config.parallel.ranks_per_batch
    tokens = config.micro_tokens or 8192
    values: dict[str, object] = {}
    if config.dtype not in ("bfloat16", "float16"):
        values["dtype"] = "bfloat16"
    if config.parallel.dp_shard_size < shards:
        values["parallel.dp_shard_size"] = shards
    if not config.gradient_checkpointing:
        values["gradient_checkpointing"] = True
    if tokens > 1024:
        values["micro_tokens"] = tokens // 4
    if whole and getattr(config, "reference", None) in ("auto", "copy"):
        values["reference"] = "precompute"
    if whole and config.optimizer == "adamw":
        values["optimizer"] = "adamw_8bit"
    if whole and config.dtype == "bfloat16" and config.weights_dtype == "float32":
        values["weights_dtype"] = "bfloat16"
    if whole:
        values["lora.r"] = 16
    elif not config.quantize:
        values["quantize"] = "4bit"
    return values


def table(planned: Rehearsal) -> str:
    """Plain text: the run, and the memory of a rank by what it is for."""
    parameters = f"{planned.parameters:,}, {planned.trained:,} of them trained"
    ranks = "1 rank" if planned.ranks == 1 else f"{planned.ranks} ranks"
    batches = "one micro-batch"
    if planned.micro_batches > 1:
        batches = f"{planned.micro_batches} micro-batches"
    step = f"{planned.tokens:,.0f} tokens, on {ranks}, {batches} each"
    lines = [
        f"parameters     {parameters}; rows are {planned.layout}",
        f"steps          {planned.steps:,} of {step} of at most {planned.largest:,} tokens",
        "",
        "memory of a rank at its peak, GB",
    ]
    for label, size in planned.memory.most_common():
        if size >= 5e5:  # less would be printed as 0.000
            lines.append(f"  {label:30}{_gb(size):>9}")
    lines.append(f"  {'total':30}{_gb(planned.total):>9}")
    return "\n".join(lines)


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"
