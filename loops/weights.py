"""A loss is a dot product: what weight each unit of each named loss gets, known before the first forward pass.

    total = Σ_k c_k · Σ_i w_ki · loss_ki / Z_k       over all micro-batches of all ranks

The weights w and the denominators Z depend on masks only, so one collective finds every Z_k for a whole optimizer step,
and the gradient does not depend on how the step was split.

A weighting is a function ``weighting(batch) -> Weights``. Those here take ``of``, the index of a completion in its
example, to weigh the units of that completion alone: of a pair, 0 is the chosen answer and 1 the rejected one.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .batch import Batch


class Weights(NamedTuple):
    """What one micro-batch brings: a weight per unit, and its share of the global denominator."""

    weight: Tensor  # float64 [units]
    share: float


Weighting = Callable[[Batch], Weights]
Expression = Mapping[str, tuple[float, Weighting]]  # name of a loss -> (coefficient, weighting)


def token_mean(batch: Batch, *, of: int | None = None) -> Weights:
    """w = 1, Z = Σ|o|: every token counts the same (SFT; DAPO, Yu et al. 2025, arXiv:2503.14476)."""
    return _each(len(_sequence(batch, of)), batch)


def sequence_mean(batch: Batch, *, of: int | None = None) -> Weights:
    """w = 1/|o_i|, Z = N: every answer counts the same, however long (GRPO, Shao et al. 2024, arXiv:2402.03300)."""
    sequence = _sequence(batch, of)
    length = torch.bincount(sequence, minlength=batch.sequences).double()
    return Weights(1 / length[sequence], float((length > 0).sum()))


def fixed_length(batch: Batch, *, length: int, of: int | None = None) -> Weights:
    """w = 1/L, Z = N: a constant instead of the length (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""
    sequence = _sequence(batch, of)
    answers = float(len(torch.unique(sequence)))
    return Weights(torch.full_like(sequence, 1 / length, dtype=torch.float64), answers)


def example_mean(batch: Batch) -> Weights:
    """w = 1, Z = number of examples: for a loss with one entry per example."""
    return _each(len(batch.examples), batch)


pair_mean = example_mean  # an example of preference data is a pair


def _sequence(batch: Batch, of: int | None) -> Tensor:
    return batch.sequence if of is None else batch.sequence[batch.tokens_of(of)]


def _each(units: int, batch: Batch) -> Weights:
    return Weights(torch.ones(units, dtype=torch.float64, device=batch.sequence.device), float(units))
