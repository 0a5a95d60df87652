"""Our objectives against TRL's own loss code on the same tensors: ``burnish bench objectives``.

A shape is answers x tokens, 512x200000 for a step of 512 answers with 200,000 trained tokens among them; half of the
answers are chosen, half rejected. Each side gets the layout its loop gives it, ours flat tokens, TRL's padded rows, and
does what its loop does with them: losses, weights and metrics. The gate: values and gradients against TRL's code in
float64, within twice its own error in float32. The floor is to read the policy's log-probs, another tensor of that
size, and to write the gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import objectives as ob
from . import harness, peer_losses
from .operation import Inputs, Operation, Products, Provider, Settings, needs
from .peer_losses import BETA, HIGH, LIMIT, LOW, Tensors
from .providers import recompiling


class Shape(NamedTuple):
    """Answers, and the tokens of all of them together."""

    answers: int
    tokens: int


NAMED = {
    "tiny": (Shape(8, 100),),
    "small": (Shape(64, 25_000),),
    "large": (Shape(512, 200_000),),
    "grid": (Shape(64, 25_000), Shape(512, 200_000), Shape(4096, 1_600_000)),
}
PASSES = {"forward": (), "train": ("logp", "padded")}


def random_inputs(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    dead_rows: float = 0.0,
    settings: Settings | None = None,
) -> Inputs:
    """Answers of very different lengths, and policies that are near to one another; the same at every call.

    Raises:
        ValueError: if the answers can't be halved, or would have no tokens.
    """
    answers, tokens = shape
    if answers % 2 or tokens < 2 * answers:
        raise ValueError(f"objectives: wanted an even number of answers and 2 tokens for each, got {answers}x{tokens}")
    draw = torch.Generator(device).manual_seed(0)
    share = torch.rand(answers, generator=draw, device=device).add_(0.2)
    length = 1 + (share / share.sum() * (tokens - answers)).long()
    length[0] += tokens - length.sum()
    mask = torch.arange(int(length.max()), device=device) < length[:, None]

    def noise(scale: float, *size: int) -> Tensor:
        return scale * torch.randn(size, generator=draw, device=device)

    old = -noise(1.0, tokens).abs()
    flat = {"logp": old + noise(0.1, tokens), "old": old, "ref": old + noise(0.1, tokens)}
    padded = {f"padded{other}": _padded(flat[name].to(dtype), mask) for name, other in _LAYOUTS.items()}
    ids = torch.zeros(answers, 1 + mask.shape[1], dtype=torch.int64, device=device)
    tensors = Tensors(
        **{name: x.to(dtype) for name, x in flat.items()},
        **padded,
        mask=mask,
        sequence=torch.arange(answers, device=device).repeat_interleave(length),
        length=length,
        advantage=noise(1.0, answers).to(dtype),
        desirable=torch.arange(answers, device=device) < answers // 2,
        mismatched=noise(5.0, answers).to(dtype),
        completion_mask=mask.long(),
        zeros=torch.zeros_like(padded["padded"]),
        ids=ids,
        row_mask=torch.cat([ids[:, :1], mask.long()], 1),
        ref_sum=padded["padded_ref"].sum(1),
        old_sum=padded["padded_old"].sum(1),
    )
    upstream = {name: torch.ones((), device=device) for name in OURS}
    return Inputs(Shape(answers, tokens), tensors._asdict(), (), upstream)


_LAYOUTS = {"logp": "", "old": "_old", "ref": "_ref"}


def _padded(flat: Tensor, mask: Tensor) -> Tensor:
    return flat.new_zeros(mask.shape).masked_scatter_(mask, flat)


def _mean(loss: Tensor, stats: ob.types.Stats) -> Tensor:
    """The loss of a step whose units weigh the same, with the metrics that are logged."""
    for stat in stats.values():
        stat.mean()
    return loss.mean()


def _pairs(t: Tensors, answer: Callable[[Tensor, Tensor, int], Tensor]) -> list[Tensor]:
    """chosen, rejected, ref_chosen, ref_rejected."""
    both = (answer(x, t.sequence, len(t.length)).chunk(2) for x in (t.logp, t.ref))
    return [half for value in both for half in value]


def dpo(t: Tensors) -> Tensor:
    return _mean(*ob.dpo(*_pairs(t, ob.sequence_sum), beta=BETA))


def ipo(t: Tensors) -> Tensor:
    return _mean(*ob.ipo(*_pairs(t, ob.sequence_mean), beta=BETA))


def kto(t: Tensors) -> Tensor:
    logp, ref = (ob.sequence_sum(x, t.sequence, len(t.length)) for x in (t.logp, t.ref))
    kl = ob.kto_kl(t.mismatched, torch.zeros_like(t.mismatched))
    return _mean(*ob.kto(logp, ref, t.desirable, kl, beta=BETA))


def nll(t: Tensors) -> Tensor:
    return _mean(*ob.nll(t.logp[t.desirable[t.sequence]]))


def grpo(t: Tensors) -> Tensor:
    loss, stats = ob.clipped_surrogate(t.logp, t.old, t.advantage[t.sequence], clip_low=LOW, clip_high=HIGH)
    return _weighed(loss, stats, _per_answer(t))


def dapo(t: Tensors) -> Tensor:
    return _mean(*ob.clipped_surrogate(t.logp, t.old, t.advantage[t.sequence], clip_low=LOW, clip_high=HIGH))


def dr_grpo(t: Tensors) -> Tensor:
    loss, stats = ob.clipped_surrogate(t.logp, t.old, t.advantage[t.sequence], clip_low=LOW, clip_high=HIGH)
    return _weighed(loss, stats, torch.full_like(loss, 1 / (len(t.length) * LIMIT)))


def grpo_kl(t: Tensors) -> Tensor:
    kl, stats = ob.kl_estimate(t.logp, t.ref, kind="k3")
    return grpo(t) + BETA * _weighed(kl, stats, _per_answer(t))


def cispo(t: Tensors) -> Tensor:
    return _mean(*ob.cispo(t.logp, t.old, t.advantage[t.sequence], clip_high=HIGH))


def gspo(t: Tensors) -> Tensor:
    return _mean(*ob.gspo(t.logp, t.old, t.advantage, t.sequence, clip_low=LOW, clip_high=HIGH))


def rloo(t: Tensors) -> Tensor:
    logp, old = (ob.sequence_sum(x, t.sequence, len(t.length)) for x in (t.logp, t.old))
    return _mean(*ob.clipped_surrogate(logp, old, t.advantage, clip_low=LOW, clip_high=HIGH))


def _per_answer(t: Tensors) -> Tensor:
    """Every answer weighs the same, and in it every token."""
    return (1 / (len(t.length) * t.length.to(t.logp.dtype)))[t.sequence]


def _weighed(loss: Tensor, stats: ob.types.Stats, weight: Tensor) -> Tensor:
    for stat in stats.values():
        (weight * stat).sum()
    return (weight * loss).sum()


OURS = {f.__name__: f for f in (nll, dpo, ipo, kto, grpo, grpo_kl, dr_grpo, dapo, cispo, gspo, rloo)}


def burnish(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, (name,) = arguments
    return (OURS[name](Tensors(*tensors)),)


def trl(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, (name,) = arguments
    return (peer_losses.LOSSES[name](Tensors(*tensors)),)


def collect(inputs: Inputs, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of padded rows the entries that are tokens: the gradient by flat log-probs, whoever made it."""
    if "d_padded" in gradients:
        return {"d_logp": gradients["d_padded"][inputs.tensors["mask"]]}
    return gradients


def products(inputs: Inputs, kind: str, dtype: torch.dtype) -> Products:
    """Two reads and a write of the size of the log-probs; forward, one read."""
    logp, old = inputs.tensors["logp"], inputs.tensors["old"]
    to = torch.empty_like(logp)
    steps = {"read": lambda _: logp.sum(), "read+write": lambda _: torch.sub(logp, old, out=to)}
    name = "read+write" if PASSES[kind] else "read"
    return Products({name: steps[name]}, {}, {name: {name: 1}})


_NAMES = tuple(OURS)

PROVIDERS = {
    "trl": Provider("trl", trl, _NAMES, needs("trl", gpu=False)),
    "burnish": Provider("burnish", burnish, _NAMES),
    "burnish-compiled": Provider("burnish-compiled", recompiling(burnish), _NAMES),
}

OPERATION = Operation(
    name="objectives",
    providers=PROVIDERS,
    definition=trl,
    baseline="trl",
    needed="trl",
    outputs=_NAMES,
    alone=_NAMES,
    asked=lambda gpu: list(_NAMES),
    mean=("", 0),
    passes=PASSES,
    shapes=NAMED,
    sizes="answers x tokens",
    shape=lambda sizes: Shape(*sizes),
    inputs={"random": random_inputs},
    products=products,
    collect=collect,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(OPERATION, arguments, __doc__)
