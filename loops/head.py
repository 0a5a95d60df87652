"""The fused output head: hidden states in, log-probs of the targets out, no logits in between.

`fuse` gives a model's output embedding two more ways to be called, ``head(hidden, target=...)`` and
``head(hidden, lesson=...)``. It stays the same module with the same parameters under the same names, so hooks of DDP
and FSDP fire, tied weights stay tied, and the model saves, loads and generates as before.
"""

import types
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..kernels import Head, linear_divergence, linear_gather_logprob, linear_logprob
from ..objectives import generalized_jsd, with_tail

Backend = Literal["auto", "tiled", "reference"]
Extra = Literal["mean_logprob", "log_sum_squares"]

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

    def __call__(self, logits: Tensor) -> Tensor:
        logits = self.scale * logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    @classmethod
    def of(cls, config: Any) -> "Transform":
        """Read a Hugging Face config. Whether it was read rightly is checked on a probe, see `Policy`."""
        scale = 1.0
        for name in _MULTIPLIERS:
            scale *= getattr(config, name, None) or 1.0
        for name in _DIVISORS:
            scale /= getattr(config, name, None) or 1.0
        return cls(scale, getattr(config, "final_logit_softcapping", None) or None)


@dataclass(frozen=True)
class Lesson:
    """What a teacher predicts for the trained tokens of a batch, and how a student is compared with it.

    Either ``hidden`` [tokens, D] and ``head``, or ``logits`` [tokens, V], or the ``top_k`` likeliest tokens: their ids
    and log-probs, [tokens, k] each, at this temperature.
    """

    beta: float
    temperature: float
    hidden: Tensor | None = None
    head: Head | None = None
    logits: Tensor | None = None
    top_k: tuple[Tensor, Tensor] | None = None

    def divergence(self, logits: Tensor) -> Tensor:
        """[tokens], for a student whose logits [tokens, V] are at hand."""
        if self.top_k is not None:
            return self.from_top_k(self._log_softmax(logits).gather(1, self.top_k[0]))
        assert self.logits is not None
        vocab = min(logits.shape[1], self.logits.shape[1])  # what one of the two has beyond is padding
        logp, teacher = (self._log_softmax(x[:, :vocab]) for x in (logits, self.logits))
        return generalized_jsd(logp, teacher, beta=self.beta)[0]

    def from_top_k(self, logp: Tensor) -> Tensor:
        """[tokens], for a student whose log-probs [tokens, k] of the teacher's likeliest tokens are at hand."""
        assert self.top_k is not None
        return generalized_jsd(with_tail(logp), with_tail(self.top_k[1].to(logp.dtype)), beta=self.beta)[0]

    def _log_softmax(self, logits: Tensor) -> Tensor:
        precision = torch.promote_types(logits.dtype, torch.float32)
        return (logits.to(precision) / self.temperature).log_softmax(-1)


def fuse(head: nn.Module, transform: Transform, backend: Backend) -> None:
    """Teach ``head`` to answer ``head(hidden, target=..., temperature=...)`` with `Logprobs`, and
    ``head(hidden, lesson=...)`` with the divergence [tokens] from a teacher.

    Raises:
        CannotFuse: if the head is not a linear layer, plain or wrapped by peft.
    """
    _linear(head)

    def forward(
        self: nn.Module,
        hidden: Tensor,
        *args: Any,
        target: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        outputs: tuple[Extra, ...] = (),
        lesson: Lesson | None = None,
    ) -> Any:
        if target is not None:
            compute: Any = linear_logprob  # its overloads can't be told apart here
            how = {"temperature": temperature, "outputs": outputs, "backend": backend}
            return compute(hidden, target=target, **how, **operands(self, transform)._asdict())
        if lesson is not None:
            return _divergence(hidden, operands(self, transform), lesson, backend)
        # Through the type, not a captured method: a deep copy must not call the original.
        return type(self).forward(self, hidden, *args)

    head.forward = types.MethodType(forward, head)


def operands(head: nn.Module, transform: Transform) -> Head:
    """The head as the kernels are given it."""
    layer, adapter = _linear(head)
    assert isinstance(layer.weight, Tensor)
    bias = layer.bias if isinstance(layer.bias, Tensor) else None
    return Head(layer.weight, bias, transform.scale, transform.softcap, adapter)


def _divergence(hidden: Tensor, head: Head, lesson: Lesson, backend: Backend) -> Tensor:
    if lesson.top_k is not None:
        ids, _ = lesson.top_k
        logp = linear_gather_logprob(hidden, head, ids, temperature=lesson.temperature, backend=backend)
        return lesson.from_top_k(logp)
    assert lesson.hidden is not None and lesson.head is not None
    return linear_divergence(
        hidden,
        head,
        lesson.hidden,
        lesson.head,
        beta=lesson.beta,
        temperature=lesson.temperature,
        backend=backend,
    )


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
