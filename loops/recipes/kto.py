"""Training on single completions, each marked desirable or undesirable: KTO and its relatives."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from ...data import Encode, Example, encode_unpaired
from ...objectives import PerSequence, Stats, feedback, kto_kl, sequence_sum
from ..batch import Batch, collate
from ..models.backbone import evaluating
from ..models.policy import Policy
from ..models.sharding import ranks_together
from ..runs.context import open_run
from ..runs.feed import Feed
from ..runs.reference import Reference
from ..runs.teacher import open_teacher
from ..runs.training import Training
from ..train.losses import (
    ENTROPY,
    Term,
    columns_of,
    logit_metrics,
    outputs_for,
    policy_tensors,
    tensors_needed,
)
from ..train.mix import TOKEN_LOSSES, distillation, losses_of, parse_losses
from ..train.step import sum_over_ranks
from .settings import KTO

FEEDBACK_LOSSES = {**losses_of(feedback), **TOKEN_LOSSES, "distillation": distillation}
del FEEDBACK_LOSSES["dro"]  # it learns from ratings, and needs the value of each prompt


def open_kto(config: KTO) -> Training:
    """Open a run that is ready to train."""
    losses = kto_losses(config)
    context = open_run(config, encoder(config))
    reference, precomputed = context.reference(config.reference)
    assert reference is not None
    teacher, stored = open_teacher(
        context, config.teacher, needed="divergence" in tensors_needed(losses)
    )
    rewards = RunningMean()
    return context.train(
        losses,
        policy_tensors(reference=reference, teacher=teacher, outputs=outputs_for(losses)),
        columns=sorted({"desirable", *columns_of(losses)} - {"undesirable"}),
        per_token=(precomputed, stored),
        prepare=partial(
            prepare_feedback,
            losses,
            rewards,
            context.model,
            reference,
            context.accelerator,
            config.max_length,
        ),
        memory=rewards if "bco" in losses else None,
    )


def encoder(config: KTO) -> Encode:
    """The encoder of completions that are labeled good or bad."""
    return encode_unpaired


def kto_losses(config: KTO) -> dict[str, Term]:
    """The losses and what is measured beside them; ValueError if settings contradict each other."""
    weights = {
        "desirable_weight": config.desirable_weight,
        "undesirable_weight": config.undesirable_weight,
    }
    shared = {"beta": config.beta, **weights, **config.loss_kwargs}
    # settings that some loss has to take
    given = set(config.loss_kwargs)
    given.update(name for name, weight in weights.items() if weight != 1)
    losses = parse_losses(config.loss, shared, FEEDBACK_LOSSES, of="desirable", given=given)
    config.teacher.check(needed="divergence" in tensors_needed(losses))
    logits = logit_metrics("desirable", "undesirable")
    return {**losses, **feedback_metrics(config.beta), **logits, **ENTROPY}


@dataclass
class RunningMean:
    """BCO's δ: the mean reward of all completions of the earlier steps; 0 at first, as rewards."""

    total: float = 0.0
    steps: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(self.steps, 1)

    def observe(self, metrics: Mapping[str, float]) -> None:
        self.total += metrics["rewards"]
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def prepare_feedback(
    losses: Mapping[str, Term],
    rewards: RunningMean,
    policy: Policy,
    reference: Reference,
    accelerator: Accelerator,
    max_length: int | None,
    feed: Feed,
    step: int,
    micro_batches: list[Batch],
) -> list[Batch]:
    """Add what losses compare a completion with, measured over a whole step before it begins.

    That is the columns ``delta`` (BCO) and, where a loss takes it, ``kl`` (KTO); and
    ``undesirable``, for the metrics.
    """
    dtype = torch.get_default_dtype()
    delta = torch.tensor(rewards.mean, device=accelerator.device, dtype=dtype)
    added = {"delta": delta}
    if "kl" in tensors_needed(losses):
        added["kl"] = kl_of_mismatched(feed, step, policy, reference, accelerator, max_length)
    prepared = []
    for batch in micro_batches:
        undesirable = ~batch.columns["desirable"]
        columns = {**batch.columns, "undesirable": undesirable, **added}
        prepared.append(replace(batch, columns=columns))
    return prepared


@torch.no_grad()
def kl_of_mismatched(
    feed: Feed,
    step: int,
    policy: Policy,
    reference: Reference,
    accelerator: Accelerator,
    max_length: int | None = None,
) -> torch.Tensor:
    """KTO's z₀ of a step, one number for all ranks: a KL estimate from others' completions.

    Each prompt of the step is paired with the completion half a step further on, so that ranks and
    micro-batches don't matter, and the two completions of a pair are not matched. A completion ends
    where it exceeds ``max_length`` after this prompt, or the positions of the model. A step of one
    example has z₀ = 0.
    """
    positions = getattr(policy.plain.config.get_text_config(), "max_position_embeddings", None)
    limit = min(filter(None, (max_length, positions)), default=None)

    def mismatched(index: int) -> Example:
        asked = feed.example(index)
        answered = feed.example(other[index])
        room = limit and limit - len(asked.prompt)
        completions = [ids[:room] for ids in answered.completions]
        trained = [mask[:room] for mask in answered.trained]
        return asked._replace(completions=completions, trained=trained)

    indices = feed.batches.indices(step)
    half = len(indices) // 2
    other = dict(zip(indices, indices[half:] + indices[:half], strict=True))
    ratios = []
    with evaluating(policy.model), accelerator.autocast():
        for part in feed.plan(step) if half else []:
            batch = collate([mismatched(index) for index in part], device=accelerator.device)
            log_ratio = policy(batch).logprob - reference(batch)
            ratios.append(sequence_sum(log_ratio, batch.sequence, batch.sequences).double())
    local = {
        "sum": sum(float(ratio.sum()) for ratio in ratios),
        "count": float(sum(map(len, ratios))),
    }
    total = sum_over_ranks(accelerator, local, copies=ranks_together(policy))
    ratio = total["sum"] / max(total["count"], 1.0)
    mean = torch.tensor([ratio], device=accelerator.device, dtype=torch.float64)
    dtype = torch.promote_types(policy.plain.dtype, torch.float32)
    return kto_kl(mean, torch.zeros_like(mean)).to(dtype)


def feedback_metrics(beta: float) -> dict[str, Term]:
    """Mean reward and log-prob of desirable completions (chosen) and others (rejected), as TRL's."""

    def measured(
        logp: PerSequence, ref_logp: PerSequence, *, kind: str
    ) -> tuple[PerSequence, Stats]:
        return beta * (logp - ref_logp).detach(), {f"logps/{kind}": logp.detach()}

    return {
        f"rewards/{kind}": Term(partial(measured, kind=kind), 0.0, of=of)
        for kind, of in (("chosen", "desirable"), ("rejected", "undesirable"))
    }
