"""Our objectives against TRL's own loss code on the same tensors: ``burnish bench objectives``.

A shape is completions x tokens, 512x200000 for a step of 512 completions with 200,000 trained
tokens among them; half of the completions are chosen, half rejected. Each side gets the layout its
loop gives it, ours flat tokens, TRL's padded rows, and does what its loop does with them: losses,
weights and metrics. The gate: values and gradients against TRL's code in float64, within twice its
own error in float32. The floor is to read the policy's log-probs, another tensor of that size, and
to write the gradient.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import objectives as ob
from ..kernels import recompiling
from ..operation import Inputs, Operation, Products, Provider, needs
from . import trl_losses

BETA = 0.1
LOW, HIGH = 0.2, 0.28
LIMIT = 1024  # Dr. GRPO's constant length


SHAPES = {
    "tiny": ((8, 100),),
    "small": ((64, 25_000),),
    "large": ((512, 200_000),),
    "grid": ((64, 25_000), (512, 200_000), (4096, 1_600_000)),
}
PASSES = {"forward": (), "train": ("logp", "padded")}

# Tensors an objective may read, per token, flat and in padded rows, and per completion. The last
# ones are made by TRL's collator and model, and so are no part of its loss code.
Tensors = namedtuple(
    "Tensors",
    "logp old ref padded padded_old padded_ref mask sequence length advantage desirable mismatched "
    "completion_mask zeros ids row_mask ref_sum old_sum",
)


def random_tensors(
    shape: Sequence[int], dtype: torch.dtype, random: torch.Generator
) -> dict[str, Tensor]:
    """Completions of very different lengths, and policies that are near to one another.

    Raises:
        ValueError: if the completions can't be halved, or would have no tokens.
    """
    (count, tokens), device = shape, random.device
    if count % 2 or tokens < 2 * count:
        raise ValueError(
            f"objectives: wanted an even number of completions, 2 tokens for each; got {count}x{tokens}"
        )
    share = torch.rand(count, generator=random, device=device).add_(0.2)
    length = 1 + (share / share.sum() * (tokens - count)).long()
    length[0] += tokens - length.sum()
    mask = torch.arange(int(length.max()), device=device) < length[:, None]

    def noise(scale: float, *size: int) -> Tensor:
        return scale * torch.randn(size, generator=random, device=device)

    old = -noise(1.0, tokens).abs()
    flat = [x.to(dtype) for x in (old + noise(0.1, tokens), old, old + noise(0.1, tokens))]
    padded, padded_old, padded_ref = (
        x.new_zeros(mask.shape).masked_scatter_(mask, x) for x in flat
    )
    advantage, mismatched = noise(1.0, count).to(dtype), noise(5.0, count).to(dtype)
    sequence = torch.arange(count, device=device).repeat_interleave(length)
    desirable = torch.arange(count, device=device) < count // 2
    trl = trl_losses.make_rows(padded, mask)
    theirs = mask.long(), trl.zeros, trl.ids, trl.row_mask, padded_ref.sum(1), padded_old.sum(1)
    per_token = *flat, padded, padded_old, padded_ref, mask, sequence
    return Tensors._make([*per_token, length, advantage, desirable, mismatched, *theirs])._asdict()


def _mean(loss: Tensor, stats: ob.types.Stats) -> Tensor:
    """The loss of a step whose units weigh the same, with the metrics that are logged."""
    for stat in stats.values():
        stat.mean()
    return loss.mean()


def _weighted(loss: Tensor, stats: ob.types.Stats, weight: Tensor) -> Tensor:
    for stat in stats.values():
        (weight * stat).sum()
    return (weight * loss).sum()


def _per_completion(t: Tensors) -> Tensor:
    """Every completion weighs the same, and in it every token."""
    weight: Tensor = 1 / (len(t.length) * t.length.to(t.logp.dtype))
    return weight[t.sequence]


def _pairs(t: Tensors, reduce: Callable[[Tensor, Tensor, int], Tensor]) -> list[Tensor]:
    """chosen, rejected, ref_chosen, ref_rejected."""
    both = (reduce(x, t.sequence, len(t.length)).chunk(2) for x in (t.logp, t.ref))
    return [half for value in both for half in value]


def _clipped(t: Tensors) -> tuple[Tensor, ob.types.Stats]:
    return ob.clipped_surrogate(
        t.logp, t.old, t.advantage[t.sequence], clip_low=LOW, clip_high=HIGH
    )


def _kto(t: Tensors) -> Tensor:
    logp, ref = (ob.sequence_sum(x, t.sequence, len(t.length)) for x in (t.logp, t.ref))
    kl = ob.kto_kl(t.mismatched, torch.zeros_like(t.mismatched))
    return _mean(*ob.kto(logp, ref, t.desirable, kl, beta=BETA))


def _grpo(t: Tensors) -> Tensor:
    return _weighted(*_clipped(t), _per_completion(t))


def _grpo_kl(t: Tensors) -> Tensor:
    return _grpo(t) + BETA * _weighted(
        *ob.kl_estimate(t.logp, t.ref, kind="k3"), _per_completion(t)
    )


def _rloo(t: Tensors) -> Tensor:
    logp, old = (ob.sequence_sum(x, t.sequence, len(t.length)) for x in (t.logp, t.old))
    return _mean(*ob.clipped_surrogate(logp, old, t.advantage, clip_low=LOW, clip_high=HIGH))


OURS: dict[str, Callable[[Tensors], Tensor]] = {
    "nll": lambda t: _mean(*ob.nll(t.logp[t.desirable[t.sequence]])),
    "dpo": lambda t: _mean(*ob.dpo(*_pairs(t, ob.sequence_sum), beta=BETA)),
    "ipo": lambda t: _mean(*ob.ipo(*_pairs(t, ob.sequence_mean), beta=BETA)),
    "kto": _kto,
    "grpo": _grpo,
    "grpo_kl": _grpo_kl,
    "dr_grpo": lambda t: _weighted(
        *_clipped(t), torch.full_like(t.logp, 1 / (len(t.length) * LIMIT))
    ),
    "dapo": lambda t: _mean(*_clipped(t)),
    "cispo": lambda t: _mean(*ob.cispo(t.logp, t.old, t.advantage[t.sequence], clip_high=HIGH)),
    "gspo": lambda t: _mean(
        *ob.gspo(t.logp, t.old, t.advantage, t.sequence, clip_low=LOW, clip_high=HIGH)
    ),
    "rloo": _rloo,
}


def _rows(t: Tensors) -> trl_losses.Rows:
    return trl_losses.Rows(t.padded, t.mask, t.zeros, t.ids, t.row_mask)


def _trl_dpo(loss_type: str, t: Tensors) -> Tensor:
    return trl_losses.dpo_loss(_rows(t), t.ref_sum, loss_types=[loss_type], beta=BETA)


def _trl_kto(t: Tensors) -> Tensor:
    mismatched = t.mismatched, torch.zeros_like(t.mismatched)
    return trl_losses.kto_loss(
        _rows(t), t.ref_sum, t.desirable, mismatched, loss_type="kto", beta=BETA
    )[0]


def _trl_policy(t: Tensors, trainer: str = "GRPOTrainer", **settings: Any) -> Tensor:
    import trl

    inputs = {
        "completion_mask": t.completion_mask,
        "advantages": t.advantage,
        "old_per_token_logps": t.padded_old,
        "old_logps": t.old_sum,
        "ref_per_token_logps": t.padded_ref,
        "num_items_in_batch": t.length.sum(),
    }
    settings = {"max_completion_length": LIMIT, "epsilon_low": LOW, "epsilon_high": HIGH} | settings
    return trl_losses.policy_loss(getattr(trl, trainer), _rows(t), inputs, **settings)[0]


THEIRS: dict[str, Callable[[Tensors], Tensor]] = {
    "nll": partial(_trl_dpo, "sft"),
    "dpo": partial(_trl_dpo, "sigmoid"),
    "ipo": partial(_trl_dpo, "ipo"),
    "kto": _trl_kto,
    "grpo": _trl_policy,
    "grpo_kl": partial(_trl_policy, beta=BETA),
    "dr_grpo": partial(_trl_policy, loss_type="dr_grpo"),
    "dapo": partial(_trl_policy, loss_type="dapo"),
    "cispo": partial(_trl_policy, loss_type="cispo", epsilon_high=1 + HIGH),
    "gspo": partial(_trl_policy, importance_sampling_level="sequence"),
    "rloo": partial(_trl_policy, trainer="RLOOTrainer"),
}


def burnish(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, (name,) = arguments
    return (OURS[name](Tensors(*tensors)),)


def trl(*arguments: Any) -> tuple[Tensor, ...]:
    *tensors, (name,) = arguments
    return (THEIRS[name](Tensors(*tensors)),)


def collect(inputs: Inputs, outcome: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the gradient by flat log-probs: of padded rows the entries that are tokens."""
    if (gradient := outcome.pop("d_padded", None)) is not None:
        outcome["d_logp"] = gradient[inputs.tensors["mask"]]
    return outcome


def products(inputs: Inputs, kind: str, dtype: torch.dtype) -> Products:
    """Two reads and a write of the size of the log-probs; forward, one read."""
    logp, old = inputs.tensors["logp"], inputs.tensors["old"]
    difference = torch.empty_like(logp)
    steps = {
        "read": lambda _: logp.sum(),
        "read+write": lambda _: torch.sub(logp, old, out=difference),
    }
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
    baseline="trl",
    outputs=_NAMES,
    alone=_NAMES,
    default_outputs=_NAMES,
    mean=("", 0),
    passes=PASSES,
    shapes=SHAPES,
    sizes="completions x tokens",
    shape=lambda completions, tokens: (completions, tokens),
    inputs={"random": random_tensors},
    per_row=(),
    products=products,
    collect=collect,
)
