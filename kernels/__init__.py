"""Vocabulary-sized things into token-sized things: log-probabilities that never hold ``[tokens, vocabulary]``."""

# From the repository's root, transformers finds this folder when it looks for Hugging Face's package of the name
# `kernels`. What it then imports stays empty: operators must not be registered a second time.
if __name__ != "kernels":
    from .backend import Backend
    from .head import Head, Shard
    from .linear_divergence import linear_divergence
    from .linear_logits import linear_logits
    from .linear_logprob import linear_gather_logprob, linear_logprob
    from .logits_logprob import logits_logprob
    from .reference import Extra, Logprobs, MoreLogprobs, TopK

    __all__ = [
        "Backend",
        "Extra",
        "Head",
        "Logprobs",
        "MoreLogprobs",
        "Shard",
        "TopK",
        "linear_divergence",
        "linear_gather_logprob",
        "linear_logits",
        "linear_logprob",
        "logits_logprob",
    ]
