"""The fused output head: hidden states in, log-probs of the targets out, no logits in between.

`fuse` gives a model's output embedding a second way to be called, ``head(hidden, target=...)``. It stays the same
module with the same parameters under the same names, so hooks of DDP and FSDP fire, tied weights stay tied, and the
model saves, loads and generates as before.
"""

import types
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..kernels import linear_logprob

Backend = Literal["auto", "tiled", "reference"]

# Factors that Hugging Face architectures apply to the logits, by the name in their config: logits * c or logits / c.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)


class CannotFuse(Exception):
    """This head is not a linear map that the kernel knows."""


@dataclass(frozen=True)
class Transform:
    """What an architecture does to its logits after the linear map: ``softcap * tanh(scale * logits / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> "Transform":
        """Read a Hugging Face config. Whether it was read rightly is checked on a probe, see `Policy`."""
        scale = 1.0
        for name in _MULTIPLIERS:
            scale *= getattr(config, name, None) or 1.0
        for name in _DIVISORS:
            scale /= getattr(config, name, None) or 1.0
        return cls(scale, getattr(config, "final_logit_softcapping", None) or None)


def fuse(head: nn.Module, transform: Transform, backend: Backend) -> None:
    """Teach ``head`` to answer ``head(hidden, target=..., temperature=...)`` with `Logprobs`.

    Raises:
        CannotFuse: if the head is not a linear layer, plain or wrapped by peft.
    """
    _linear(head)

    def forward(
        self: nn.Module, hidden: Tensor, *args: Any, target: Tensor | None = None, temperature: float | Tensor = 1.0
    ) -> Any:
        if target is None:  # through the type, not a captured method: a deep copy must not call the original
            return type(self).forward(self, hidden, *args)
        layer, adapter = _linear(self)
        assert isinstance(layer.weight, Tensor)
        return linear_logprob(
            hidden,
            layer.weight,
            target,
            bias=layer.bias if isinstance(layer.bias, Tensor) else None,
            temperature=temperature,
            softcap=transform.softcap,
            scale=transform.scale,
            adapter=adapter,
            backend=backend,
        )

    head.forward = types.MethodType(forward, head)


def _linear(head: Any) -> tuple[nn.Module, tuple[Tensor, Tensor, float] | None]:
    """The linear layer that is active now under peft's wrappers, and its LoRA factors, if any."""
    if hasattr(head, "modules_to_save"):
        active = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
        return _linear(active)
    if hasattr(head, "base_layer"):
        return _lora(head)
    if not isinstance(head, nn.Linear) or head.weight.dtype not in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ):
        raise CannotFuse(f"output head is {type(head).__name__}")
    return head, None


def _lora(head: Any) -> tuple[nn.Module, tuple[Tensor, Tensor, float] | None]:
    layer, _ = _linear(head.base_layer)
    if head.disable_adapters or head.merged:
        return layer, None
    name, *others = head.active_adapters
    plain = name in getattr(head, "lora_A", {}) and not others and isinstance(head.lora_dropout[name], nn.Identity)
    if not plain or getattr(head, "lora_variant", {}).get(name) is not None:
        raise CannotFuse("output head carries an adapter other than one plain LoRA without dropout")
    return layer, (head.lora_A[name].weight, head.lora_B[name].weight, head.scaling[name])
