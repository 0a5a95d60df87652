"""Per-token tensors of a whole data set, computed by all ranks once and kept in a file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..batch import Batch


def store_tokens(
    path: Path,
    compute: Callable[[Batch], Mapping[str, Tensor]],
    plan: Iterable[tuple[Sequence[int], Batch]],
    accelerator: Accelerator,
    metadata: dict[str, str] | None = None,
) -> None:
    """Compute tensors of every trained token of the data, and write them by example. Every rank calls it.

    Args:
        path: a safetensors file, written atomically by the main process: each tensor, over the tokens of all examples
            in their order, and ``length``, the number of tokens of each example.
        compute: ``compute(batch)`` gives tensors [tokens, ...] by name.
        plan: this rank's batches with the indices of their examples; every example is in one batch of one rank.
    """
    computed: list[tuple[int, dict[str, Tensor]]] = []
    for indices, batch in plan:
        lengths = [sum(map(sum, example.trained)) for example in batch.examples]
        parts = {name: torch.split(tensor.cpu(), lengths) for name, tensor in compute(batch).items()}
        computed += [(index, {name: part[i] for name, part in parts.items()}) for i, index in enumerate(indices)]
    examples = [tensors for _, tensors in sorted(gather_object(computed), key=lambda pair: pair[0])]
    if accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.cat([example[name] for example in examples]) for name in examples[0]}
        tensors["length"] = torch.tensor([len(next(iter(example.values()))) for example in examples])
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata=metadata)
        partial.replace(path)
    accelerator.wait_for_everyone()


def load_tokens(path: Path) -> tuple[dict[str, list[Tensor]], dict[str, str]]:
    """Read what `store_tokens` wrote: by name one tensor per example, and the metadata."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    lengths = tensors.pop("length").tolist()
    return {name: list(torch.split(tensor, lengths)) for name, tensor in tensors.items()}, metadata
