"""Supervised fine-tuning: raise the log-prob of the answers in the data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...data import encode_supervised
from ...objectives import supervised
from ..config import Common
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

# Losses of one token, which every recipe on text can add to its own.
TOKEN_LOSSES: dict[str, Loss] = losses_of(supervised)
WEIGHTINGS = {"token_mean": token_mean, "sequence_mean": sequence_mean}


@dataclass(frozen=True)
class SFT(Common):
    """Supervised fine-tuning on messages, text, or prompts with completions."""

    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    loss: str | dict[str, float | dict[str, Any]] = "nll"
    """A token objective of burnish.objectives.supervised, or a mix: {nll: 1.0, z_loss: 1.0e-4}; label smoothing is
    {label_smoothed_nll: {label_smoothing: 0.1}}."""
    weighting: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Whether every token or every answer counts the same, in every loss that has no weighting of its own."""
    train_on: Literal["auto", "assistant", "completion", "all"] = "auto"
    """Tokens that carry loss: auto is assistant for messages, completion after a prompt, and all of a plain text."""


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
