"""Vocabulary-sized things into token-sized things: log-probabilities that never hold ``[tokens, vocabulary]``."""

from .linear_logprob import linear_logprob
from .logits_logprob import logits_logprob
from .reference import Logprobs

__all__ = ["Logprobs", "linear_logprob", "logits_logprob"]
