"""Supervised fine-tuning: raise the log-prob of the completions in the data."""

from ...data import encode_supervised
from ..runs.context import open_run
from ..train.losses import ENTROPY, Term, columns_of, outputs_for, policy_tensors
from ..train.mix import TOKEN_LOSSES, WEIGHTINGS, parse_losses
from .settings import SFT


def run_sft(config: SFT) -> dict[str, float]:
    """Train; returns the metrics of the last step."""
    losses = sft_losses(config)
    context = open_run(config, encode_supervised, train_on=config.train_on)
    return context.train(losses, policy_tensors(outputs=outputs_for(losses)), columns=columns_of(losses))


def sft_losses(config: SFT) -> dict[str, Term]:
    return {**parse_losses(config.loss, {}, TOKEN_LOSSES, weighting=WEIGHTINGS[config.weighting]), **ENTROPY}
