"""From tokens to completions: sums, means and weights of per-token values over whole sequences.

Tokens lie flat, the sequences one after the other; ``sequence`` says which one each token belongs
to: int64, sorted, with values in ``[0, sequences)``. Only trained tokens are there, so lengths are
counted in them. A sequence without a token has sum 0, mean 0 and weight 1, and passes no gradient.
"""

import torch

from .types import (
    FlatTokens,
    IntPerSequence,
    PerSequence,
    SequenceIds,
    Share,
    flat,
    same_shape,
    within,
)


def sequence_length(sequence: SequenceIds, sequences: int) -> IntPerSequence:
    """|y|, the number of tokens of each sequence."""
    return sequence.new_zeros(sequences).index_add(0, sequence, torch.ones_like(sequence))


def sequence_sum(x: FlatTokens, sequence: SequenceIds, sequences: int) -> PerSequence:
    """Σ_t x_t over each sequence; of log-probabilities, log π(y|x) of the whole completion."""
    same_shape("sequence_sum", x=x, sequence=sequence)
    flat("sequence_sum", x=x)
    # Token after token, a float32 sum over a completion of hundreds loses digits that a ratio of
    # policies would show.
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    return x.new_zeros(sequences, dtype=exact).index_add(0, sequence, x.to(exact)).to(x.dtype)


def sequence_mean(x: FlatTokens, sequence: SequenceIds, sequences: int) -> PerSequence:
    """(1/|y|) Σ_t x_t over each sequence."""
    same_shape("sequence_mean", x=x, sequence=sequence)
    flat("sequence_mean", x=x)
    return sequence_sum(x, sequence, sequences) / sequence_length(sequence, sequences).clamp(min=1)


def length_desensitized_sum(
    x: FlatTokens, sequence: SequenceIds, public_length: IntPerSequence, *, alpha: float
) -> PerSequence:
    """LD-DPO's log-likelihood: what a completion says beyond the length of the other one of its
    pair counts α.

        Σ_{t ≤ l} x_t + α Σ_{t > l} x_t

    Args:
        x: per-token log-probabilities, of the policy and, in a second call, of the reference.
        public_length: l = min(|y_w|, |y_l|), for both sequences of a pair: ``torch.minimum`` of
            `sequence_length`.
        alpha: α in [0, 1]; 1 is plain `sequence_sum`, 0 cuts both completions to one length.

    Raises:
        ValueError: if x and sequence differ in shape or α is out of range.

    Paper: Liu et al. 2024, arXiv:2409.06411.
    """
    same_shape("length_desensitized_sum", x=x, sequence=sequence)
    flat("length_desensitized_sum", x=x)
    within("length_desensitized_sum", Share, alpha=alpha)
    sequences = public_length.shape[0]
    length = sequence_length(sequence, sequences)
    start = length.cumsum(0) - length
    position = torch.arange(x.shape[0], device=x.device) - start[sequence]
    return sequence_sum(
        torch.where(position < public_length[sequence], x, alpha * x), sequence, sequences
    )


def wpo_weight(
    logp: FlatTokens, log_sum_squares: FlatTokens, sequence: SequenceIds, sequences: int
) -> PerSequence:
    """WPO's weight of a completion: how likely the policy is to say it, relative to what it says
    itself.

        w(x, y) = exp( (1/|y|) Σ_t [log p(y_t) − log Σ_v p(v)²] ),  detached

    Σ_v p(v)² is the probability the policy expects of its own next token ("sampled alignment"), so
    its own completions weigh about 1. A pair's loss is multiplied by w(x, y_w) · w(x, y_l).

    Args:
        log_sum_squares: log Σ_v p(v)² at each token.

    Raises:
        ValueError: if the shapes differ.

    Paper: Zhou et al. 2024, arXiv:2406.11827.
    """
    same_shape("wpo_weight", logp=logp, log_sum_squares=log_sum_squares, sequence=sequence)
    return sequence_mean(logp - log_sum_squares, sequence, sequences).exp().detach()
