"""Preference training on pairs: DPO, other preference objectives, or a mix of them.

CPO and ORPO are presets of it, without a reference.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...data import Encode, encode_preference, encode_triples
from ...objectives import (
    f_divergence_score,
    length_desensitized_sum,
    nll,
    orpo,
    sequence_length,
    sequence_mean,
)
from ..batch import Batch
from ..runs.context import open_run
from ..runs.teacher import open_teacher
from ..runs.training import Training
from ..train.losses import (
    CHOSEN,
    GOLD,
    PAIR_METRICS,
    REJECTED,
    Term,
    columns_of,
    logit_metrics,
    needs_teacher,
    outputs_for,
    policy_tensors,
    tensors_needed,
    token_accuracy,
)
from ..train.mix import PAIR_LOSSES, STEP_COUPLED, parse_losses
from .settings import CPO, DPO, ORPO

_TOKEN_LEVEL = {"tdpo1", "tdpo2"}  # losses whose teacher is the reference


def open_dpo(config: DPO) -> Training:
    """Open a run that is ready to train."""
    losses = dpo_losses(config)
    needed = tensors_needed(losses)
    score = None
    if config.divergence != "reverse_kl":
        score = partial(
            f_divergence_score, divergence=config.divergence, alpha=config.divergence_alpha
        )
    context = open_run(config, encoder(config))
    needs_reference = any(name.startswith("ref_") for name in needed)
    reference, precomputed = context.reference(config.reference, needed=needs_reference)
    teacher, stored = open_teacher(context, config.teacher, needed=needs_teacher(losses))
    outputs = outputs_for(losses)
    read = policy_tensors(
        reference=reference,
        reduce=completion_logprob(config),
        score=score,
        teacher=teacher,
        outputs=outputs,
        pairs=True,
    )
    return context.train(losses, read, columns=columns_of(losses), per_token=(precomputed, stored))


def open_cpo(config: CPO) -> Training:
    """Open a run that is ready to train."""
    shared = {name: getattr(config, name) for name in ("beta", "label_smoothing", "gamma", "alpha")}
    mix: dict[str, float] = {config.loss: 1.0}
    if config.nll:
        mix["nll"] = config.nll
    of = GOLD if config.nll_of == "reference" else CHOSEN
    return _open(config, parse_losses(mix, shared, PAIR_LOSSES, of=of))


def open_orpo(config: ORPO) -> Training:
    """Open a run that is ready to train."""
    return _open(config, {"nll": Term(nll, of=CHOSEN), "orpo": Term(orpo, config.odds_ratio)})


def _open(config: CPO | ORPO, losses: dict[str, Term]) -> Training:
    context = open_run(config, encoder(config))
    measured = {**losses, **_metrics(config)}
    return context.train(measured, policy_tensors(outputs=outputs_for(measured), pairs=True))


def _metrics(config: DPO | CPO | ORPO) -> dict[str, Term]:
    """What is measured beside the losses."""
    return {
        **PAIR_METRICS,
        **logit_metrics(CHOSEN, REJECTED),
        **token_accuracy(config.backend, of=CHOSEN),
    }


def encoder(config: DPO | CPO | ORPO) -> Encode:
    """The encoder of pairs, or of pairs with a third completion."""
    if isinstance(config, CPO) and config.nll_of == "reference":
        return encode_triples
    return encode_preference


def dpo_losses(config: DPO) -> dict[str, Term]:
    """The losses and what is measured beside them; ValueError if settings contradict each other."""
    shared = {"beta": config.beta, "label_smoothing": config.label_smoothing, **config.loss_kwargs}
    losses = parse_losses(config.loss, shared, PAIR_LOSSES, of=CHOSEN, given=config.loss_kwargs)
    config.teacher.check(needed=needs_teacher(losses))
    if _TOKEN_LEVEL & losses.keys() and config.teacher.divergence != "forward_kl":
        raise ValueError(
            f"teacher.divergence: TDPO sums KL(reference||policy), wanted forward_kl, got {config.teacher.divergence}"
        )
    coupled = sorted(STEP_COUPLED & losses.keys())
    if config.pair_weight == "wpo" and coupled:
        raise ValueError(
            f"pair_weight: {coupled[0]} sorts the pairs of a step, so its entries have no pair's weight"
        )
    for name, loss in losses.items():
        if loss.unit != "pairs":
            continue
        has_reference = "ref_chosen" in tensors_needed({name: loss})
        if config.divergence != "reverse_kl" and not has_reference:
            problem = f"{name} has no reference to diverge from"
            raise ValueError(f"divergence: {problem}; leave it out, or use reverse_kl")
        if config.pair_weight == "wpo":
            losses[name] = replace(loss, factor="wpo")
    return {**losses, **_metrics(config)}


def completion_logprob(config: DPO) -> Callable[[Tensor, Batch], Tensor] | None:
    """How the log-probs of tokens make that of a completion, where it is not their plain sum."""
    if config.logprob_reduction == "mean":
        return lambda x, batch: sequence_mean(x, batch.sequence, batch.sequences)
    if config.ld_alpha != 1:
        return partial(_desensitized, alpha=config.ld_alpha)
    return None


def _desensitized(x: Tensor, batch: Batch, *, alpha: float) -> Tensor:
    """Sum log-probs with less weight on tokens beyond the shorter completion of the pair."""
    length = sequence_length(batch.sequence, batch.sequences)
    public = torch.minimum(length[batch.completion == CHOSEN], length[batch.completion == REJECTED])
    return length_desensitized_sum(x, batch.sequence, public[batch.example], alpha=alpha)
