"""Supervised fine-tuning: raise the log-prob of the completions in the data."""

from dataclasses import dataclass
from typing import Any, Literal

from ...data import encode_supervised
from ..config import OfflineConfig
from ..runs.context import open_run
from ..train.losses import ENTROPY, TOKEN_LOSSES, WEIGHTINGS, Term, columns_of, outputs_for, parse, policy_tensors


@dataclass(frozen=True)
class SFT(OfflineConfig):
    """Supervised fine-tuning on messages, text, or prompts with completions."""

    learning_rate: float = 2e-5
    loss: str | dict[str, float | dict[str, Any]] = "nll"
    """A token objective of burnish.objectives.supervised, or a mix: {nll: 1.0, z_loss: 1.0e-4}; label smoothing is
    {label_smoothed_nll: {label_smoothing: 0.1}}."""
    weighting: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Whether every token or every completion counts the same, in every loss that has no weighting of its own."""
    train_on: Literal["auto", "assistant", "completion", "all"] = "auto"
    """Tokens that carry loss: auto is assistant for messages, completion after a prompt, and all of a plain text."""


def run_sft(config: SFT) -> dict[str, float]:
    """Train; returns the metrics of the last step."""
    losses = sft_losses(config)
    context = open_run(config, encode_supervised, train_on=config.train_on)
    return context.train(losses, policy_tensors(outputs=outputs_for(losses)), columns=columns_of(losses))


def sft_losses(config: SFT) -> dict[str, Term]:
    return {**parse(config.loss, {}, TOKEN_LOSSES, weighting=WEIGHTINGS[config.weighting]), **ENTROPY}
