"""Log-probs under the frozen reference policy: from a copy, or from the policy without its adapters.

A reference is a function ``reference(batch) -> log-probs [tokens]``. `RunContext.reference` makes the one that a
configuration names, which may also have been computed before training.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..models.policy import Policy

Reference = Callable[[Batch], Tensor]


def frozen_copy(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The policy as it is now, copied and frozen: as much memory again as its weights.

    Args:
        temperature: of its softmax; the policy's own where log-probs of samples are compared.
    """
    return frozen(copy.deepcopy(policy, {id(policy.critic): None}), temperature=temperature)  # without a critic


def frozen(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """A policy that is nothing else from now on."""
    model: Any = policy.requires_grad_(False).eval()
    return torch.no_grad()(lambda batch: model(batch, temperature=temperature).logprob)


def adapters_off(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The base model under the policy's own adapters: no memory, and no copy that could drift.

    Raises:
        ValueError: if the policy has no adapters.
    """
    model: Any = policy.model
    if not hasattr(model, "disable_adapter"):
        raise ValueError("adapters_off: wanted a model wrapped by peft; without adapters use frozen_copy")

    @torch.no_grad()
    def reference(batch: Batch) -> Tensor:
        with model.disable_adapter():
            logprob: Tensor = policy(batch, temperature=temperature).logprob
        return logprob

    return reference


def column(name: str) -> Reference:
    """Log-probs that were computed before and travel with the batch."""
    return lambda batch: batch.columns[name]
