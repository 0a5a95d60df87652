"""Log-probs under the frozen reference policy: from a copy, from the policy without its adapters, or computed once.

A reference is a function ``reference(batch) -> log-probs [tokens]``, see `RunContext.reference`.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..batch import Batch
from ..models.policy import Policy

Reference = Callable[[Batch], Tensor]
ReferenceKind = Literal["auto", "copy", "adapters_off", "precompute"]
OnlineReference = Literal["auto", "copy", "adapters_off"]  # completions that are yet to be sampled: no precomputation


def frozen_copy(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The policy as it is now, copied and frozen: as much memory again as its weights. Its softmax has the temperature
    of the policy that it is compared with."""
    no_critic = {id(policy.critic): None}
    frozen = copy.deepcopy(policy, no_critic).requires_grad_(False).eval()

    def reference(batch: Batch) -> Tensor:
        with torch.no_grad():
            logprob: Tensor = frozen(batch, temperature=temperature).logprob
        return logprob

    return reference


def adapters_off(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The base model under the policy's own adapters: no memory, and no copy that could drift.

    Raises:
        ValueError: if the policy has no adapters.
    """
    model: Any = policy.model
    if not hasattr(model, "disable_adapter"):
        raise ValueError("adapters_off: wanted a model wrapped by peft; without adapters use frozen_copy")

    def reference(batch: Batch) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            logprob: Tensor = policy(batch, temperature=temperature).logprob
        return logprob

    return reference


def column(name: str = "ref_logprob") -> Reference:
    """Log-probs that were computed before training and travel with the batch."""
    return lambda batch: batch.columns[name]


def precompute(
    reference: Reference,
    batches: Iterable[tuple[Sequence[int], Batch]],
    examples: int,
    cache: Path,
    accelerator: Accelerator,
) -> list[Tensor]:
    """The reference log-probs of every example, [tokens of the example] each, read from ``cache`` where it exists.

    Args:
        batches: this rank's part of the data, each batch with the indices of its examples.
        examples: how many examples there are over all ranks.
        cache: a safetensors file whose name identifies model and data; written atomically by the main process.
    """
    if not cache.exists():
        mine: list[tuple[int, Tensor]] = []
        for indices, batch in batches:
            trained = [sum(map(sum, example.trained)) for example in batch.examples]
            mine += zip(indices, torch.split(reference(batch).cpu(), trained), strict=True)
        everyone = dict(gather_object(mine))
        if accelerator.is_main_process:
            cache.parent.mkdir(parents=True, exist_ok=True)
            ordered = [everyone[i] for i in range(examples)]
            lengths = torch.tensor([len(logprob) for logprob in ordered])
            partial = cache.with_suffix(".partial")
            save_file({"logprob": torch.cat(ordered), "length": lengths}, partial)
            partial.replace(cache)
        accelerator.wait_for_everyone()
    stored = load_file(cache)
    return list(torch.split(stored["logprob"], stored["length"].tolist()))
