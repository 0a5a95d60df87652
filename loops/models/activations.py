"""Activation checkpointing, no dropout, NEFTune."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from .patches import always_evaluate

_aten: Any = torch.ops.aten
# Products of matrices and attention: most of the time of a forward pass, and less than half of its
# activations.
_PRODUCTS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def checkpoint_activations(
    model: PreTrainedModel, keep: Literal[True, "selective", "offload"]
) -> None:
    """Recompute the activations of each layer in backward: gradients stay the same, bit for bit.

    Args:
        keep: per layer, its input (True), its input in host memory ("offload"), or input and matrix
            products ("selective").

    Raises:
        ValueError: to offload, if there is no accelerator, or this version of transformers can't.
    """
    # transformers renamed it in 5.2x and warns about the old name.
    renamed = hasattr(model, "activation_checkpointing_enable")
    if keep == "offload" and not (renamed and torch.accelerator.is_available()):
        raise ValueError(
            "gradient_checkpointing: offload needs an accelerator, and transformers 5.23 or newer"
        )
    enable: Any = (
        model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    )
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if keep == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _PRODUCTS)
    if keep == "offload":
        enable(kwargs, offload=True)
    else:
        enable(kwargs)
    # Frozen embeddings under adapters would cut the graph at its start.
    model.enable_input_require_grads()  # type: ignore[no-untyped-call]


def without_randomness(model: nn.Module) -> None:
    """Let training mode compute what evaluation does: policy and reference must differ only in
    their weights.

    The dropout of adapters stays: the reference has none.
    """
    for path, module in model.named_modules():
        if "lora_dropout" in path:
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        # a router, that may sample experts as well
        if any("jitter" in name for name in vars(module)):
            always_evaluate(module)


def add_noise(model: PreTrainedModel, alpha: float) -> None:
    """Add uniform noise in ±α/√(L·d) to the embedded tokens wherever gradients are computed in
    training mode.

    L is the number of input tokens of the sequence, for a shared prompt with the longest of its
    completions; d is the embedding size. Evaluations, references and sampling have no noise.

    Paper: Jain et al. 2023, "NEFTune", arXiv:2310.05914, Algorithm 1.
    """
    # of the rows under way, which the embedding itself is not given
    position_ids: list[Tensor] = []

    def remember(module: nn.Module, args: object, kwargs: dict[str, Tensor]) -> None:
        position_ids[:] = [kwargs["position_ids"]]

    def noisy(module: nn.Module, args: object, embedded: Tensor) -> Tensor | None:
        if not (module.training and torch.is_grad_enabled() and position_ids):
            return None
        bound = alpha / (sequence_lengths(position_ids[0]) * embedded.shape[-1]).sqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * bound[..., None].to(embedded.dtype)

    model.base_model.register_forward_pre_hook(remember, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(noisy)


def sequence_lengths(position_ids: Tensor) -> Tensor:
    """Tokens of the sequence that each slot [..., rows, width] belongs to: one begins where the
    position is 0.
    """
    begun = (position_ids == 0).cumsum(-1)
    sequence = begun - begun[..., :1]
    longest = torch.zeros_like(position_ids).scatter_reduce(-1, sequence, position_ids + 1, "amax")
    return longest.gather(-1, sequence)
