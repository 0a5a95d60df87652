"""Preference training: DPO, or any other preference objective of `burnish.objectives`, or a weighted mix of them."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...data import encode_preference
from ...objectives import (
    f_divergence_score,
    length_desensitized_sum,
    preference,
    reference_free,
    sequence_length,
    sequence_mean,
)
from ..batch import Batch
from ..models.policy import Policy
from ..runs.context import PerToken, Recipe, open_recipe, open_reference
from ..runs.teacher import distillation, open_teacher
from ..train.losses import (
    CHOSEN,
    ENTROPY,
    PAIR_LOGPS,
    REJECTED,
    Answer,
    Loss,
    Losses,
    Reader,
    columns_of,
    compose,
    losses_of,
    needs,
    outputs_for,
    parse,
    policy_tensors,
    weightings,
)
from .settings import DPO
from .sft import TOKEN_LOSSES

_STEP_COUPLED = {"aot", "aot_unpaired"}

# Every objective on the log-probs of the answers of a pair, and those on tokens.
PAIR_LOSSES: dict[str, Loss] = {
    **losses_of(preference),
    **losses_of(reference_free),
    **TOKEN_LOSSES,
    "distillation": distillation,
}


def dpo(config: DPO) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    shared = {"beta": config.beta, "label_smoothing": config.label_smoothing, **config.loss_kwargs}
    terms = parse(config.loss, shared, PAIR_LOSSES, of=CHOSEN, given=config.loss_kwargs)
    answer, score = answer_of(config), None
    if config.weight == "wpo":
        if coupled := sorted(_STEP_COUPLED & terms.keys()):
            raise ValueError(f"weight: {coupled[0]} sorts the pairs of a step, so no weight is that of its entries")
        terms = {k: replace(term, factor="wpo") if term.unit == "pairs" else term for k, term in terms.items()}
    if config.divergence != "reverse_kl":
        for name, term in terms.items():
            if term.unit == "pairs" and "ref_chosen" not in needs({name: term}):
                raise ValueError(
                    f"divergence: {name} has no reference to diverge from; leave it out, or use reverse_kl"
                )
        score = partial(f_divergence_score, divergence=config.divergence, alpha=config.divergence_alpha)
    config.teacher.check(needed="divergence" in needs(terms))
    recipe = open_recipe(config, encode_preference)
    refuse_split_steps(terms, recipe)
    reference, before = open_reference(recipe, config.reference, needed="ref_chosen" in needs(terms))
    teaching, told = open_teacher(recipe, config.teacher, needed="divergence" in needs(terms))
    how: dict[str, Any] = {"answer": answer, "score": score, "outputs": outputs_for(terms), "pairs": True}
    read = policy_tensors(reference=reference, teaching=teaching, **how)
    return train_pairs(recipe, terms, read, lambda data: {**before(data), **told(data)})


def train_pairs(
    recipe: Recipe[Policy], terms: Losses, read: Reader, per_token: PerToken = lambda data: {}
) -> dict[str, float]:
    """Train on pairs, and log entropy and log-probs beside the losses."""
    logged = {**terms, **PAIR_LOGPS, **ENTROPY}
    return recipe.train(compose(logged, read), weightings(logged), columns=columns_of(terms), per_token=per_token)


def answer_of(config: DPO) -> Answer | None:
    """From the log-probs of tokens to that of an answer, where it is not their plain sum."""
    if not 0 <= config.ld_alpha <= 1:
        raise ValueError(f"ld_alpha: must be in [0, 1], got {config.ld_alpha}")
    if config.answer == "mean":
        if config.ld_alpha != 1:
            raise ValueError("ld_alpha: is about sums over answers of different length; leave answer at 'sum'")
        return lambda x, batch: sequence_mean(x, batch.sequence, batch.sequences)
    return None if config.ld_alpha == 1 else partial(_desensitized, alpha=config.ld_alpha)


def _desensitized(x: Tensor, batch: Batch, *, alpha: float) -> Tensor:
    length = sequence_length(batch.sequence, batch.sequences)
    public = torch.minimum(length[batch.completion == CHOSEN], length[batch.completion == REJECTED])
    return length_desensitized_sum(x, batch.sequence, public[batch.example], alpha=alpha)


def refuse_split_steps(terms: Losses, recipe: Recipe[Policy]) -> None:
    """Raises if a loss couples all pairs of a step, and they are not all in one micro-batch on one rank."""
    coupled = sorted(_STEP_COUPLED & terms.keys())
    if coupled and (recipe.run.config.micro_tokens is not None or recipe.run.accelerator.num_processes > 1):
        raise ValueError(
            f"{coupled[0]}: couples all pairs of a step, so they must be in one micro-batch on one rank; "
            "pass --micro_tokens null and run one process"
        )
