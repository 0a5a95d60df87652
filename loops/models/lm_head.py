"""The fused output head: hidden states in, log-probs of the targets out, no logits in between.

`fuse` adds calls to a model's output embedding: ``head(hidden, target=...)`` and, for sampling,
``head(hidden, exact_logits=True)``. Both round the same factors (`burnish.kernels`). It stays the
same module with the same parameters under the same names, so hooks of DDP and FSDP fire, tied
weights stay tied, and the model saves, loads and generates as before.

Weights are looked up at every call: peft switches, disables and merges adapters, and FSDP's weights
are whole only within the call.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Split
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ...kernels import (
    Backend,
    Extra,
    Head,
    LogitTransform,
    Shard,
    TopK,
    linear_divergence,
    linear_logits,
    linear_logprob,
    logits_logprob,
)
from ...kernels.backend import autocast_dtype
from ...kernels.reference import head_logits
from ...objectives import Stats, generalized_jsd, with_tail
from .patches import replace_forward
from .sharding import local, whole
from .spans import Spans

log = logging.getLogger(__name__)

# Factors that Hugging Face architectures multiply the logits by, by the name in their config;
# logits_scaling divides. Then some cap them.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

# Logits of a head that are in memory at once, where no kernel computes what is wanted of them.
_LOGITS_AT_ONCE = 2**24

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TENSORS = (Tensor, nn.Parameter, DTensor, FakeTensor)
# subclasses of these compute something else
_LORA = ("peft.tuners.lora.layer", "peft.tuners.lora.bnb")


class CannotFuse(Exception):
    """This head is not a linear map that the kernel knows."""


def logit_transform(config: object) -> LogitTransform:
    """Logit scale and soft cap of an architecture, from its Hugging Face config.

    `Policy` checks them on a probe.
    """
    scale = math.prod(getattr(config, name, None) or 1.0 for name in _MULTIPLIERS)
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    softcap: float | None = None
    for name in reversed(_CAPS):  # the first one counts
        softcap = getattr(config, name, None) or softcap
    return LogitTransform(scale, softcap)


@dataclass(frozen=True)
class TeacherOutputs:
    """A teacher's distributions at the trained tokens of a batch, and their divergence from a
    student's.

    Either ``hidden`` [tokens, D] and ``head``, or ``logits`` [tokens, V], or the ``top_k``
    likeliest tokens: their ids and log-probs, [tokens, k] each, at this temperature.

    Attributes:
        beta: of the generalized Jensen-Shannon divergence.
        objective: another divergence instead, of log-probs of the student and the teacher [tokens,
            V]; see `burnish.objectives.distillation`.
        spans: of a teacher of another tokenizer, the student's tokens of the spans that both share;
            ``hidden`` and ``logits`` then have one row per span.
        log_prefix: [spans] each, of the student and the teacher, see `burnish.loops.models.spans`;
            the teacher's alone until the student's is known.
    """

    beta: float
    temperature: float
    hidden: Tensor | None = None
    head: Head | None = None
    logits: Tensor | None = None
    top_k: tuple[Tensor, Tensor] | None = None
    objective: Callable[[Tensor, Tensor], tuple[Tensor, Stats]] | None = None
    spans: Spans | None = None
    log_prefix: tuple[Tensor, ...] = ()

    def at(self, tokens: Tensor) -> "TeacherOutputs":
        """The outputs at these of the tokens only."""
        names = ("hidden", "logits", "top_k", "log_prefix")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **tree_map_only(Tensor, lambda tensor: tensor[tokens], tensors))

    def divergence(self, logits: Tensor) -> Tensor:
        """[tokens], from a student's logits [tokens, V]."""
        if self.top_k is not None:
            return self.from_top_k(self.log_softmax(logits).gather(1, self.top_k[0]))
        if self.spans is not None:
            spans = self.spans
            logp = self.log_softmax(logits[spans.earlier]).gather(1, spans.target[:, None])[:, 0]
            of_spans = self.after(spans.log_prefix(logp)).divergence(logits[spans.last])
            return spans.scatter(of_spans, len(logits))
        teacher_logits = self.logits
        if teacher_logits is None:
            assert self.hidden is not None and self.head is not None
            teacher_logits = linear_logits(self.hidden, self.head)
        if self.log_prefix:
            student, teacher = self.log_prefix
            logp = self.log_softmax(logits) + student[:, None]
            teacher_logp = self.log_softmax(teacher_logits) + teacher[:, None]
            return self._compare(logp, teacher_logp)
        # further rows of one of the two are padding
        vocab = min(logits.shape[1], teacher_logits.shape[1])
        logp = self.log_softmax(logits[:, :vocab])
        teacher_logp = self.log_softmax(teacher_logits[:, :vocab])
        return self._compare(logp, teacher_logp)

    def after(self, log_prefix: Tensor) -> "TeacherOutputs":
        """The outputs at the last tokens of spans, given what precedes them in the student's."""
        return replace(self, spans=None, log_prefix=(log_prefix, *self.log_prefix))

    def from_top_k(self, logp: Tensor) -> Tensor:
        """[tokens], from a student's log-probs [tokens, k] of the teacher's likeliest tokens."""
        assert self.top_k is not None
        teacher_logp = self.top_k[1].to(logp.dtype)
        return self._compare(with_tail(logp), with_tail(teacher_logp))

    def _compare(self, logp: Tensor, teacher_logp: Tensor) -> Tensor:
        """[tokens], from log-probs of the student and the teacher [tokens, V]."""
        if self.objective is not None:
            return self.objective(logp, teacher_logp)[0]
        return generalized_jsd(logp, teacher_logp, beta=self.beta)[0]

    def log_softmax(self, logits: Tensor) -> Tensor:
        """At the temperature of both sides, in float32 or better."""
        precision = torch.promote_types(logits.dtype, torch.float32)
        return (logits.to(precision) / self.temperature).log_softmax(-1)


class Outputs(NamedTuple):
    """Result of one forward pass: `burnish.kernels.Logprobs` of the trained tokens and two more,
    each [tokens].
    """

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor
    mean_logprob: Tensor | None = None
    log_sum_squares: Tensor | None = None
    top1: Tensor | None = None
    rank: Tensor | None = None
    top_k: TopK | None = None
    divergence: Tensor | None = None  # from the teacher's distribution
    # of the state that the token is chosen in, by the value head or the critic
    value: Tensor | None = None
    router_logits: Tensor | None = None  # [tokens, layers, experts]


# With the parts of DTensor that torch's `ColwiseParallel` applies to a head's output, which leave
# it unchanged.
_AS_DTENSOR = {
    "placements": None,
    "redistribute": lambda self, **layout: self,
    "to_local": lambda self: self,
}
_Replicated = type("_Replicated", (Outputs,), _AS_DTENSOR)


def from_logits(
    logits: Tensor, target: Tensor, teacher: TeacherOutputs | None, **options: Any
) -> Outputs:
    """The outputs of a head that is no linear map, with the ``options`` of
    `burnish.kernels.logits_logprob`.
    """
    divergence = None if teacher is None else teacher.divergence(logits)
    return Outputs(*logits_logprob(logits, target, **options), divergence=divergence)


class _Kernel(NamedTuple):
    """How the kernels compute; see `burnish.kernels.linear_logprob`."""

    backend: Backend
    keep_bytes: int | None


def fuse(
    head: nn.Module, transform: LogitTransform, backend: Backend, keep_bytes: int | None = None
) -> None:
    """Make ``head(hidden, target=..., temperature=..., teacher=...)`` return `Outputs`, and
    ``head(hidden, exact_logits=True)`` logits [N, V] in float32.

    If its vocabulary is split over ranks, by torch's `ColwiseParallel` or the tensor parallelism of
    transformers, every rank gets the result for the whole vocabulary.

    Args:
        backend, keep_bytes: of the kernels.

    Raises:
        CannotFuse: if the head is not a linear layer, plain or wrapped by peft or bitsandbytes.
    """
    _parts(head)
    replace_forward(head, _forward, transform, _Kernel(backend, keep_bytes))


def _forward(
    head: nn.Module,
    transform: LogitTransform,
    kernel: _Kernel,
    original: Callable[..., Tensor],
    hidden: Tensor,
    *args: object,
    target: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    outputs: tuple[Extra, ...] = (),
    teacher: TeacherOutputs | None = None,
    exact_logits: bool = False,
) -> Any:
    """In place of the head's own ``forward``, which it is where neither targets nor exact logits
    are asked for.
    """
    if target is None and not exact_logits:  # of ``generate``, or anybody else's
        return original(hidden, *args)
    try:
        factors = operands(head, transform, hidden, gather=target is None)
    except CannotFuse as reason:  # peft has switched to another adapter since the head was fused
        _warn(str(reason))
        logits = transform(original(hidden, *args))
        if target is None:
            return logits
        return from_logits(logits, target, teacher, temperature=temperature, outputs=outputs)
    states = hidden.to_local() if isinstance(hidden, DTensor) else hidden
    if target is None:
        return linear_logits(states, factors)
    logprob, *others = linear_logprob(
        states,
        factors,
        target,
        temperature=temperature,
        outputs=outputs,
        backend=kernel.backend,
        keep_bytes=kernel.keep_bytes,
    )
    divergence: Tensor | None = None
    if teacher is not None and teacher.top_k is not None:
        divergence = _top_k_divergence(states, factors, teacher, kernel)
    elif teacher is not None and teacher.hidden is not None:
        # whole: the divergence needs all of the vocabulary on each rank
        student = operands(head, transform, hidden)
        divergence = _full_divergence(states, student, teacher, kernel)
    elif teacher is not None:  # its head is no linear map: only logits can be compared
        divergence = teacher.divergence(transform(whole(original(hidden, *args))))
    # The log-prob is a view, which FSDP warns about; and torch 2.11 can't compile `_replace`.
    kind = Outputs if states is hidden else _Replicated
    return kind(logprob.clone(), *others, divergence)


def _top_k_divergence(
    states: Tensor, factors: Head, teacher: TeacherOutputs, kernel: _Kernel
) -> Tensor:
    """The divergence from a teacher of which the likeliest tokens are known."""
    assert teacher.top_k is not None
    ids, _ = teacher.top_k
    logp = linear_logprob(
        states, factors, ids, temperature=teacher.temperature, backend=kernel.backend
    ).logprob
    return teacher.from_top_k(logp)


def _full_divergence(
    states: Tensor, student: Head, teacher: TeacherOutputs, kernel: _Kernel
) -> Tensor:
    """The divergence from a teacher whose hidden states and head are known."""
    assert teacher.hidden is not None and teacher.head is not None
    if teacher.spans is not None:
        return _divergence_of_spans(states, student, teacher, teacher.spans, kernel)
    if teacher.objective is not None:
        return _objective_of_rows(states, student, teacher)
    return linear_divergence(
        states,
        student,
        teacher.hidden,
        teacher.head,
        beta=teacher.beta,
        temperature=teacher.temperature,
        backend=kernel.backend,
        keep_bytes=kernel.keep_bytes,
    )


def _divergence_of_spans(
    states: Tensor, student: Head, teacher: TeacherOutputs, spans: Spans, kernel: _Kernel
) -> Tensor:
    """[tokens], from a teacher of another tokenizer: that of a span at its last token, 0 elsewhere."""
    logp = states.new_zeros(0, dtype=torch.promote_types(states.dtype, torch.float32))
    if len(spans.earlier):
        logp = linear_logprob(
            states[spans.earlier],
            student,
            spans.target,
            temperature=teacher.temperature,
            backend=kernel.backend,
        ).logprob
    part = teacher.after(spans.log_prefix(logp))
    return spans.scatter(_objective_of_rows(states[spans.last], student, part), len(states))


def _objective_of_rows(states: Tensor, student: Head, teacher: TeacherOutputs) -> Tensor:
    """A divergence that no kernel has: logits of a few rows at a time, made again in backward."""
    widest = len(student.weight)
    if teacher.head is not None:
        widest = max(widest, len(teacher.head.weight))
    rows = max(1, _LOGITS_AT_ONCE // widest)
    factors = autocast_dtype(states)

    def divergence(states: Tensor, part: TeacherOutputs) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            dtype = torch.promote_types(states.dtype, torch.float32)
            logits = head_logits(states, student, len(student.weight), dtype, factors)
            return part.divergence(logits)

    parts = []
    # one part even of no rows, so that the result is on the graph
    for start in range(0, max(len(states), 1), rows):
        tokens = torch.arange(start, min(start + rows, len(states)), device=states.device)
        inputs = states[tokens], teacher.at(tokens)
        parts.append(checkpoint(divergence, *inputs, use_reentrant=False))
    return torch.cat(parts)


@functools.cache
def _warn(reason: str) -> None:
    log.warning("log-probs are taken from full logits: %s", reason)


def operands(
    head: nn.Module, transform: LogitTransform, hidden: Tensor | None = None, *, gather: bool = True
) -> Head:
    """The head as the kernels take it.

    Args:
        hidden: the states that the head is applied to; checked to match how the head is split over
            ranks.
        gather: a split head from all ranks, or take this rank's part.

    Raises:
        CannotFuse: if the head is not a linear map now.
        ValueError: if the weight is split and ranks may have different hidden states, or the other
            way round.
    """
    parts = _parts(head)
    shard: Shard | None = None
    if hidden is not None and (isinstance(parts.weight, DTensor) or isinstance(hidden, DTensor)):
        shard = _shard(head, parts.weight, hidden)
    if gather:
        shard = None
    held: Head = tree_map_only(DTensor, whole if gather else local, parts)
    return Head(held.weight, held.bias, transform.scale, transform.softcap, held.adapter, shard)


def _shard(head: nn.Module, weight: Tensor, hidden: Tensor) -> Shard | None:
    """This rank's part of a split vocabulary; None if it is not split.

    Raises:
        ValueError: if ranks may have different hidden states, or the weight is split in another
            way.
    """
    split = weight.placements if isinstance(weight, DTensor) else ()
    is_whole = all(placement.is_replicate() for placement in split)
    by_vocabulary = split == (Split(0),)
    if not (is_whole or by_vocabulary) or not _same_on_ranks(
        head, weight, hidden, is_whole=is_whole
    ):
        weights = getattr(weight, "placements", "plain")
        states = getattr(hidden, "placements", "plain")
        raise ValueError(
            f"head: the weight is {weights} and hidden states are {states}. If FSDP sharded the weight, call what "
            "fully_shard was given (the policy): its hooks gather it. If the vocabulary is split (tensor parallelism), "
            "give hidden states as a DTensor that is replicated on the same mesh"
        )
    if is_whole:
        return None
    assert isinstance(weight, DTensor)
    # As torch splits a dimension: equal pieces, rounded up, and what is left for the last ranks.
    mesh = weight.device_mesh
    rows = -(-len(weight) // mesh.size())
    return Shard(mesh.get_group(), min(mesh.get_local_rank() * rows, len(weight)))


def _same_on_ranks(head: nn.Module, weight: Tensor, hidden: Tensor, *, is_whole: bool) -> bool:
    """True if hidden states are the same on all ranks that hold a part of the weight."""
    if not isinstance(hidden, DTensor):
        # transformers' tensor parallelism marks its modules so: their hidden states are the same on
        # all ranks.
        return is_whole or any(hasattr(part, "_is_hooked") for part in head.modules())
    meshes = {tensor.device_mesh for tensor in (weight, hidden) if isinstance(tensor, DTensor)}
    return len(meshes) == 1 and all(placement.is_replicate() for placement in hidden.placements)


def _parts(head: Any) -> Head:
    """Weight, bias and LoRA factors that are active now, without the wrappers of peft and
    bitsandbytes.

    Raises:
        CannotFuse: if the head is not a linear map.
    """
    if isinstance(head, ModulesToSaveWrapper):
        return _parts(_active_copy(head))
    forward = type(head).forward  # of the class: the module's own may be ours, see `fuse`
    if forward.__module__ in _LORA:
        return _lora(head)
    if (
        forward.__module__ == "bitsandbytes.nn.modules"
        and forward.__qualname__ == "Linear4bit.forward"
    ):
        return Head(_dequantized(head), head.bias)
    # A subclass, or another type of tensor, may compute something else.
    if forward is not nn.Linear.forward or type(head.weight) not in _TENSORS:
        raise CannotFuse(f"output head is {type(head).__name__}")
    if head.weight.dtype not in _FLOATS or head.weight.is_meta:
        raise CannotFuse(
            f"weights of the output head are {head.weight.dtype} on {head.weight.device}"
        )
    return Head(head.weight, head.bias)


def _active_copy(head: ModulesToSaveWrapper) -> nn.Module:
    """The copy of the head that trains with the active adapter, or the original."""
    names = head.active_adapters
    active = (
        names and not head.disable_adapters and all(name in head.modules_to_save for name in names)
    )
    copy: nn.Module = head.modules_to_save[names[0]] if active else head.original_module
    return copy


def _lora(head: Any) -> Head:
    """The layer under peft's wrapper, and its active adapters as one.

    Raises:
        CannotFuse: if an adapter is other than plain LoRA, or has dropout.
    """
    if head.disable_adapters and head.merged:  # as peft's forward does
        head.unmerge()
    base = _parts(head.base_layer)
    if head.disable_adapters or head.merged:
        return base
    names = [name for name in head.active_adapters if name in head.lora_A]
    if not all(_is_plain_lora(head, name) for name in names):
        raise CannotFuse("output head carries an adapter other than plain LoRA without dropout")
    if not names:
        return base
    return Head(base.weight, _lora_bias(head, names, base.bias), adapter=_lora_factors(head, names))


def _is_plain_lora(head: Any, name: str) -> bool:
    dropout = getattr(head.lora_dropout[name], "p", 0.0)
    return name not in head.lora_variant and not dropout > 0


def _lora_bias(head: Any, names: Sequence[str], bias: Tensor | None) -> Tensor | None:
    """The layer's bias with the biases of its adapters."""
    for name in names:
        if head.lora_B[name].bias is not None:
            added = head.scaling[name] * head.lora_B[name].bias
            bias = added if bias is None else bias + added
    return bias


def _lora_factors(head: Any, names: Sequence[str]) -> tuple[Tensor, Tensor, float]:
    """A, B and scaling of an adapter; several, concatenated, form one of higher rank."""
    if len(names) == 1:
        name = names[0]
        return head.lora_A[name].weight, head.lora_B[name].weight, head.scaling[name]
    down = torch.cat([head.scaling[name] * head.lora_A[name].weight for name in names])
    up = torch.cat([head.lora_B[name].weight for name in names], 1)
    return down, up, 1.0


def _dequantized(layer: Any) -> Tensor:
    """The weight that the 4-bit layer multiplies by."""
    from bitsandbytes.functional import dequantize_4bit

    # FSDP makes new parameters without it
    state = getattr(layer.weight, "quant_state", None) or layer.quant_state
    repacked = getattr(state, "packing_format_for_cpu", False)  # which evaluation does on some CPUs
    if state is None or repacked:
        raise CannotFuse("weights of the output head are 4-bit, packed in a way that can't be read")
    weight: Tensor = dequantize_4bit(layer.weight, state)
    return weight if layer.compute_dtype is None else weight.to(layer.compute_dtype)
