"""Log-probs under the frozen reference policy: from a copy, or from the policy without its adapters.

A reference is a function ``reference(batch) -> log-probs [tokens]``. `RunContext.reference` makes the one that a
configuration names, which may also have been computed before training.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from ..batch import Batch
from ..models.policy import Policy

Reference = Callable[[Batch], Tensor]


def frozen_copy(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The policy as it is now, copied and frozen: as much memory again as its weights.

    Args:
        temperature: of its softmax; the policy's own where log-probs of samples are compared.
    """
    frozen: Any = copy.deepcopy(policy, {id(policy.critic): None}).requires_grad_(False).eval()  # without a critic
    return torch.no_grad()(lambda batch: frozen(batch, temperature=temperature).logprob)


def adapters_off(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The base model under the policy's own adapters: no memory, and no copy that could drift.

    Raises:
        ValueError: if the policy has no adapters, or their start changed the base model.
    """
    model: Any = policy.model
    if not hasattr(model, "disable_adapter"):
        raise ValueError("adapters_off: wanted a model wrapped by peft; without adapters use frozen_copy")
    start = model.peft_config["default"].init_lora_weights
    if start not in (True, False, "gaussian"):
        raise ValueError(
            f"adapters_off: init_lora_weights={start} changed the base model; use auto, a copy of adapters"
        )

    @torch.no_grad()
    def reference(batch: Batch) -> Tensor:
        with model.disable_adapter():
            logprob: Tensor = policy(batch, temperature=temperature).logprob
        return logprob

    return reference


def adapters_copy(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The policy with its adapters as they are now: as much memory again as those, and no copy of the base model."""
    model: Any = policy.model
    weights = {name: weight.clone() for name, weight in get_peft_model_state_dict(model).items()}
    settings: Any = copy.deepcopy(model.peft_config["default"])
    settings.init_lora_weights, settings.inference_mode = True, True  # other starts change the base model
    model.add_adapter("reference", settings)
    set_peft_model_state_dict(model, weights, adapter_name="reference")
    model.set_adapter("default")

    @torch.no_grad()
    def reference(batch: Batch) -> Tensor:
        model.set_adapter("reference")
        try:
            logprob: Tensor = policy(batch, temperature=temperature).logprob
        finally:
            model.set_adapter("default")
        return logprob

    return reference


def column(name: str) -> Reference:
    """Log-probs that were computed before and travel with the batch."""
    return lambda batch: batch.columns[name]
