"""Supervised fine-tuning: raise the log-prob of the answers in the data."""

from collections.abc import Mapping
from typing import Any, Literal

from ...data import encode_supervised
from ...objectives import supervised
from ..runs.context import open_recipe
from ..train.losses import (
    ENTROPY,
    Loss,
    Term,
    columns_of,
    compose,
    losses_of,
    outputs_for,
    parse,
    policy_tensors,
    weightings,
)
from ..train.weighting import sequence_mean, token_mean
from .settings import SFT

# Losses of one token, which every recipe on text can add to its own.
TOKEN_LOSSES: dict[str, Loss] = losses_of(supervised)
WEIGHTINGS = {"token_mean": token_mean, "sequence_mean": sequence_mean}


def sft_terms(
    loss: str | Mapping[str, float | Mapping[str, Any]], weighting: Literal["token_mean", "sequence_mean"]
) -> dict[str, Term]:
    return {**parse(loss, {}, TOKEN_LOSSES, weighting=WEIGHTINGS[weighting]), **ENTROPY}


def sft(config: SFT) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    terms = sft_terms(config.loss, config.weighting)
    recipe = open_recipe(config, encode_supervised, train_on=config.train_on)
    read = policy_tensors(outputs=outputs_for(terms))
    return recipe.train(compose(terms, read), weightings(terms), columns=columns_of(terms))
