"""Supervised fine-tuning: raise the log-prob of the completions in the data."""

from functools import partial

from ...data import Encode, encode_supervised
from ..runs.context import open_run
from ..runs.training import Training
from ..train.losses import ENTROPY, columns_of, outputs_for, policy_tensors, token_accuracy
from ..train.mix import TOKEN_LOSSES, WEIGHTINGS, parse_losses
from .settings import SFT


def open_sft(config: SFT) -> Training:
    """Open a run that is ready to train."""
    losses = {
        **parse_losses(config.loss, {}, TOKEN_LOSSES, weighting=WEIGHTINGS[config.weighting]),
        **ENTROPY,
        **token_accuracy(config.backend),
    }
    context = open_run(config, encoder(config))
    read = policy_tensors(outputs=outputs_for(losses))
    return context.train(losses, read, columns=columns_of(losses))


def encoder(config: SFT) -> Encode:
    """The encoder of demonstrations; it marks the tokens that ``train_on`` names."""
    return partial(encode_supervised, train_on=config.train_on)
