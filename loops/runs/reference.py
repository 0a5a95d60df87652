"""Log-probs under the frozen reference policy: from a copy, from the policy without its adapters, or computed once.

A reference is a function ``reference(batch) -> log-probs [tokens]``, see `RunContext.reference`.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..batch import Batch
from ..models.policy import Policy
from .token_cache import BatchPlan, load_tokens, store_tokens

Reference = Callable[[Batch], Tensor]


def frozen_copy(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The policy as it is now, copied and frozen: as much memory again as its weights.

    Args:
        temperature: of its softmax; the policy's own where log-probs of samples are compared.
    """
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


def precompute(reference: Reference, plan: BatchPlan, path: Path, accelerator: Accelerator) -> list[Tensor]:
    """The reference log-probs of every example, [tokens of the example] each, read from ``path`` where it exists.

    Args:
        plan: see `token_cache`.
        path: a safetensors file whose name identifies model and data.
    """
    if not path.exists():
        store_tokens(path, lambda batch: {"logprob": reference(batch)}, plan, accelerator)
    return load_tokens(path)[0]["logprob"]
