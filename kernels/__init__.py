"""Log-probabilities and divergences of language-model heads, without ``[tokens, vocabulary]`` in
memory.
"""

# From the repository's root, transformers finds this folder when it looks for Hugging Face's
# package of the name `kernels`. What it then imports stays empty: operators must not be registered
# a second time.
if __name__ != "kernels":
    from .backend import Backend
    from .head import Head, Shard
    from .linear_divergence import linear_divergence
    from .linear_logprob import linear_logprob
    from .logits_logprob import linear_logits, logits_logprob
    from .reference import Extra, Logprobs, TopK
    from .softmax import LogitTransform

    __all__ = [
        "Backend",
        "Extra",
        "Head",
        "LogitTransform",
        "Logprobs",
        "Shard",
        "TopK",
        "linear_divergence",
        "linear_logits",
        "linear_logprob",
        "logits_logprob",
    ]
