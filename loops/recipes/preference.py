"""Preference training on pairs: DPO, any other preference objective of `burnish.objectives`, or a mix of them.

CPO and ORPO are presets of it, without a reference.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ...data import encode_preference
from ...objectives import f_score, length_desensitized_sum, nll, orpo, sequence_length, sequence_mean
from ..batch import Batch
from ..config import ClosedUnitInterval, NoiseShare, NonNegativeFloat, OfflineConfig, OpenUnitInterval, PositiveFloat
from ..runs.context import open_run
from ..runs.reference import ReferenceKind
from ..runs.teacher import Teacher, open_teacher
from ..train.losses import (
    CHOSEN,
    ENTROPY,
    PAIR_LOGPS,
    PAIR_LOSSES,
    REJECTED,
    STEP_COUPLED,
    Answer,
    Term,
    columns_of,
    needs,
    outputs_for,
    parse,
    policy_tensors,
)


@dataclass(frozen=True)
class Pairs(OfflineConfig):
    """Preference training on pairs of a chosen and a rejected completion of one prompt."""

    learning_rate: float = 1e-6
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference, or scale of the contrast, for every loss that has a beta."""
    label_smoothing: NoiseShare = 0.0
    """Assumed share of pairs labeled the wrong way round, for every loss that knows it."""


@dataclass(frozen=True)
class DPO(Pairs):
    """Preference training on pairs of a chosen and a rejected completion of one prompt."""

    loss: str | dict[str, float | dict[str, Any]] = "dpo"
    """A preference objective of burnish.objectives, or a mix: {dpo: 0.8, bco_pair: 0.2, nll: 1.0}; instead of its
    coefficient, a loss may have {coefficient: 0.8, beta: 0.2, ...}. nll is that of the chosen completions."""
    logprob_reduction: Literal["sum", "mean"] = "sum"
    """Whether the log-prob of a completion is the sum over its tokens, as in the papers, or their mean."""
    ld_alpha: ClosedUnitInterval = 1.0
    """How much of a completion's log-prob beyond the length of the pair's shorter one counts (LD-DPO); 1 is all."""
    pair_weight: Literal["one", "wpo"] = "one"
    """Whether a pair counts by how likely the policy is to generate both of its completions (WPO)."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """The f-divergence from the reference (f-DPO); alpha needs `divergence_alpha`."""
    divergence_alpha: OpenUnitInterval = 0.5
    """Order of the alpha-divergence."""
    reference: ReferenceKind = "auto"
    """Where reference log-probs come from: a frozen copy, the model without its adapters (auto, if it has some), or
    one pass over the data before training, cached in the run directory."""
    teacher: Teacher = field(default_factory=Teacher)
    """A teacher, for the loss `distillation` in a mix."""
    loss_kwargs: dict[str, float] = field(default_factory=dict)
    """Further hyper-parameters by name, such as {gamma: 0.5, tau: 0.05}, for every loss that has one of that name."""


@dataclass(frozen=True)
class CPO(Pairs):
    """Preference training on pairs without a reference: contrast of the two, plus NLL of the chosen completion."""

    loss: Literal["cpo", "simpo", "alpha_po"] = "cpo"
    """What contrasts the two completions: their log-probs (cpo) or those per token (simpo, alpha_po)."""
    beta: PositiveFloat = 0.1
    """Scale of the contrast; SimPO's authors use 2 to 2.5."""
    gamma: NonNegativeFloat = 0.5
    """Target margin of simpo and alpha_po."""
    alpha: float = 0.25
    """Shape of alpha_po's reward; at 0 it is simpo's."""
    nll: float = 1.0
    """Coefficient of the NLL per token of the chosen completions; SimPO and AlphaPO have none (0)."""


@dataclass(frozen=True)
class ORPO(OfflineConfig):
    """Preference training on pairs in one stage: NLL of the chosen completions plus the odds ratio of the two."""

    learning_rate: float = 8e-6
    odds_ratio: float = 0.1
    """Coefficient of the odds-ratio loss, the paper's lambda; the NLL has 1."""


def run_dpo(config: DPO) -> dict[str, float]:
    """Train; returns the metrics of the last step."""
    losses = dpo_losses(config)
    score = None
    if config.divergence != "reverse_kl":
        score = partial(f_score, divergence=config.divergence, alpha=config.divergence_alpha)
    reduce = completion_logprob(config)
    has_teacher = "divergence" in needs(losses)
    config.teacher.check(needed=has_teacher)
    context = open_run(config, encode_preference)
    reference, precomputed = context.reference(config.reference, needed="ref_chosen" in needs(losses))
    teacher, stored = open_teacher(context, config.teacher, needed=has_teacher)
    read = policy_tensors(
        reference=reference, answer=reduce, score=score, teaching=teacher, outputs=outputs_for(losses), pairs=True
    )
    return context.train(losses, read, columns=columns_of(losses), per_token=(precomputed, stored))


def run_cpo(config: CPO) -> dict[str, float]:
    """Train; returns the metrics of the last step."""
    names = ("beta", "label_smoothing", "gamma", "alpha")
    mix = {config.loss: 1.0} | ({"nll": config.nll} if config.nll else {})
    return _run(config, parse(mix, {name: getattr(config, name) for name in names}, PAIR_LOSSES, of=CHOSEN))


def run_orpo(config: ORPO) -> dict[str, float]:
    """Train; returns the metrics of the last step."""
    return _run(config, {"nll": Term(nll, of=CHOSEN), "orpo": Term(orpo, config.odds_ratio)})


def _run(config: CPO | ORPO, losses: dict[str, Term]) -> dict[str, float]:
    context = open_run(config, encode_preference)
    return context.train({**losses, **PAIR_LOGPS, **ENTROPY}, policy_tensors(pairs=True))


def dpo_losses(config: DPO) -> dict[str, Term]:
    """The losses of this configuration, and what is measured beside them.

    Raises:
        ValueError: if settings contradict each other.
    """
    shared = {"beta": config.beta, "label_smoothing": config.label_smoothing, **config.loss_kwargs}
    losses = parse(config.loss, shared, PAIR_LOSSES, of=CHOSEN, given=config.loss_kwargs)
    of_pairs = [name for name, loss in losses.items() if loss.unit == "pairs"]
    if config.pair_weight == "wpo":
        if coupled := sorted(STEP_COUPLED & losses.keys()):
            raise ValueError(
                f"pair_weight: {coupled[0]} sorts the pairs of a step, so its entries have no pair's weight"
            )
        losses |= {name: replace(losses[name], factor="wpo") for name in of_pairs}
    if config.divergence != "reverse_kl":
        for name in of_pairs:
            if "ref_chosen" not in needs({name: losses[name]}):
                raise ValueError(
                    f"divergence: {name} has no reference to diverge from; leave it out, or use reverse_kl"
                )
    return {**losses, **PAIR_LOGPS, **ENTROPY}


def completion_logprob(config: DPO) -> Answer | None:
    """How the log-probs of tokens make that of a completion, where it is not their plain sum."""
    if config.logprob_reduction == "mean":
        if config.ld_alpha != 1:
            raise ValueError(
                "ld_alpha: is about sums over completions of different length; leave logprob_reduction at 'sum'"
            )
        return lambda x, batch: sequence_mean(x, batch.sequence, batch.sequences)
    return None if config.ld_alpha == 1 else partial(_desensitized, alpha=config.ld_alpha)


def _desensitized(x: Tensor, batch: Batch, *, alpha: float) -> Tensor:
    length = sequence_length(batch.sequence, batch.sequences)
    public = torch.minimum(length[batch.completion == CHOSEN], length[batch.completion == REJECTED])
    return length_desensitized_sum(x, batch.sequence, public[batch.example], alpha=alpha)
