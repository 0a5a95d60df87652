"""Supervised fine-tuning: raise the log-prob of the answers in the data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from .. import objectives
from ..data import encode_supervised
from .batch import Batch
from .config import Common
from .optimize import Objective, Stats
from .recipe import open_recipe
from .weights import Expression, sequence_mean, token_mean

_WEIGHTINGS = {"token_mean": token_mean, "sequence_mean": sequence_mean}


@dataclass(frozen=True)
class SFT(Common):
    """Supervised fine-tuning on messages, text, or prompts with completions."""

    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    loss: Literal["nll", "dft"] = "nll"
    """Per-token objective of burnish.objectives.supervised."""
    weighting: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Whether every token or every answer counts the same."""
    train_on: Literal["auto", "assistant", "completion", "all"] = "auto"
    """Tokens that carry loss: auto is assistant for messages, completion after a prompt, and all of a plain text."""


def sft_objective(loss: str) -> Objective:
    """``{loss: ...}`` per trained token, with the entropy beside it."""
    function = getattr(objectives, loss)

    def objective(policy: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Stats]]:
        logprob, entropy, _ = policy(batch)
        value, stats = function(logprob)
        return {loss: (value, {**stats, "entropy": entropy.detach()})}

    return objective


def sft(config: SFT) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    expression: Expression = {config.loss: (1.0, _WEIGHTINGS[config.weighting])}
    recipe = open_recipe(config, encode_supervised, train_on=config.train_on)
    return recipe.train(sft_objective(config.loss), expression)
