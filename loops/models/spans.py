"""Spans of a text that two tokenizers share, where the distributions of both can be compared.

A span is a few tokens of the one and a few of the other that write the same text. By the chain rule
the tokens before its last make its last distribution less likely, on either side:

    log S(v) = Σ_i log S(x_i | x_<i) + log S(v | x_<last),  i over the span's tokens but the last

so that S(v) for the last token itself is the probability of the span, and Σ_v S(v) that of what
precedes the last token. Of a span of one token, S is its distribution.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """The spans of a batch, in the tokens of one of the tokenizers.

    Attributes:
        last: int64 [spans], where the last token of each is among the trained tokens of the batch.
        earlier: int64 [n], where all their other tokens are.
        span: int64 [n], the span that each of those belongs to.
        target: int64 [n], the ids of those.
    """

    last: Tensor
    earlier: Tensor
    span: Tensor
    target: Tensor

    def log_prefix(self, logp: Tensor) -> Tensor:
        """[spans], in nats, from the log-probs [n] of the tokens that are not their span's last."""
        return logp.new_zeros(len(self.last)).index_add(0, self.span, logp)

    def scatter(self, of_spans: Tensor, tokens: int) -> Tensor:
        """[tokens], from one value per span: at its last token, and 0 elsewhere."""
        return of_spans.new_zeros(tokens).index_put((self.last,), of_spans)
