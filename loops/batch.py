"""A micro-batch as objectives see it, ragged, one entry per trained token, no padding; and the
weights of its units.

A loss is a dot product: the weight of each unit of each named loss is known before the first
forward pass.

    total = Σ_k c_k · Σ_i w_ki · loss_ki / Z_k       over all micro-batches of all ranks

The weights w and the denominators Z depend on masks only, so one collective gives every Z_k of a
whole optimizer step, and the gradient does not depend on how the step was split.

A weighting is a function ``weighting(batch) -> Weights``: one of these, or any other. Those here
take ``of``, to weight only the units of some completions: an index in the example (of a pair, 0 is
chosen and 1 rejected), or the name of a bool column, one entry per example; None weights all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Example
from .registry import nearest


class NamedColumns(dict[str, Tensor]):
    """Tensors by name; a name that is not there is answered with those that are."""

    def __missing__(self, name: str) -> Tensor:
        if not self:
            raise KeyError(f"there is no column {name!r}: the batch has no columns")
        raise KeyError(nearest("there is no column", name, self))


@dataclass(frozen=True)
class Batch:
    """Whole examples, and the flat tensors of their trained tokens.

    Trained tokens are ordered by example, then completion, then position, in every layout of the
    model's input.

    Attributes:
        examples: the examples; `arrange` makes model input of them.
        target: int64 [tokens], the id of each trained token.
        sequence: int64 [tokens], sorted: the completion each trained token belongs to, counted over
            the batch.
        completion: int64 [sequences], the index of each completion in its example (of a pair: 0
            chosen, 1 rejected).
        columns: further tensors by name: per token (reference log-probs), per completion (ranks),
            per example (margins, labels), or one number for the whole step (KTO's z0).
    """

    examples: Sequence[Example]
    target: Tensor
    sequence: Tensor
    completion: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=NamedColumns)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", NamedColumns(self.columns))

    @property
    def sequences(self) -> int:
        return len(self.completion)

    @property
    def example(self) -> Tensor:
        """int64 [sequences]: the example that each completion belongs to."""
        return (self.completion == 0).cumsum(0) - 1

    def completions_of(self, of: int | str | None) -> Tensor:
        """Bool [sequences]: of this index in their example, of the examples that a bool column
        marks, or (None) all.
        """
        if of is None:
            return torch.ones_like(self.completion, dtype=torch.bool)
        if isinstance(of, str):
            return self.columns[of].bool()[self.example]
        return self.completion == of

    def tokens_of(self, of: int | str | None) -> Tensor:
        """Bool [tokens]: trained tokens of those completions."""
        return self.completions_of(of)[self.sequence]


def collate(
    examples: Sequence[Example],
    columns: Mapping[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """Make a batch of examples, with its tensors on ``device``.

    Without examples it is empty, and can be trained on.

    Raises:
        ValueError: if an example has no prompt, or a column no entry per token, per completion or
            per example.
    """
    if not all(example.prompt for example in examples):
        raise ValueError(
            "collate: an example has no prompt, so nothing predicts its first token; give it one token"
        )
    columns = columns or {}
    target: list[int] = []
    sequence: list[int] = []
    completion: list[int] = []
    for example in examples:
        pairs = zip(example.completions, example.trained, strict=True)
        for index, (tokens, trained) in enumerate(pairs):
            kept = [token for token, train in zip(tokens, trained, strict=True) if train]
            target += kept
            sequence += [len(completion)] * len(kept)  # counted over the batch
            completion.append(index)  # counted in the example
    _check_columns(columns, (len(target), len(completion), len(examples)))
    return Batch(
        examples=examples,
        target=torch.tensor(target, dtype=torch.int64, device=device),
        sequence=torch.tensor(sequence, dtype=torch.int64, device=device),
        completion=torch.tensor(completion, dtype=torch.int64, device=device),
        columns={name: column.to(device) for name, column in columns.items()},
    )


def _check_columns(columns: Mapping[str, Tensor], lengths: tuple[int, int, int]) -> None:
    """Raise ValueError for a column without an entry per token, completion or example, or a single
    number for the step.
    """
    for name, column in columns.items():
        if not isinstance(column, Tensor):
            raise ValueError(
                f"collate: column {name}: wanted a tensor, got {type(column).__name__}; make it one, torch.tensor"
            )
        if column.ndim and len(column) not in lengths:
            wanted = "an entry per token, per completion or per example, {}, {} or {}"
            raise ValueError(
                f"collate: column {name}: wanted {wanted.format(*lengths)}, got {len(column)}"
            )


class Weights(NamedTuple):
    """A weight per unit of one micro-batch, and its share of the global denominator."""

    weight: Tensor  # float64 [units]
    share: float


Weighting = Callable[[Batch], Weights]
Weightings = Mapping[str, tuple[float, Weighting]]  # name of a loss -> (coefficient, weighting)


def token_mean(batch: Batch, *, of: int | str | None = None) -> Weights:
    """w = 1, Z = Σ|o|: every token counts the same (SFT; DAPO, Yu et al. 2025,
    arXiv:2503.14476).
    """
    weight = torch.ones_like(batch.sequence[batch.tokens_of(of)], dtype=torch.float64)
    return Weights(weight, float(len(weight)))


def length_normalized(batch: Batch, *, of: int | str | None = None) -> Weights:
    """w = 1/|o_i|, Z = N: every completion counts the same (GRPO, Shao et al. 2024,
    arXiv:2402.03300).
    """
    sequence = batch.sequence[batch.tokens_of(of)]
    length = torch.bincount(sequence, minlength=batch.sequences).double()
    return Weights(1 / length[sequence], float((length > 0).sum()))


def fixed_length(batch: Batch, *, length: int, of: int | str | None = None) -> Weights:
    """w = 1/L, Z = N: a constant instead of the length (Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783).
    """
    sequence = batch.sequence[batch.tokens_of(of)]
    weight = torch.full_like(sequence, 1 / length, dtype=torch.float64)
    return Weights(weight, float(len(torch.unique(sequence))))


def completion_mean(batch: Batch, *, of: int | str | None = None) -> Weights:
    """w = 1, Z = number of completions: for a loss with one entry per completion."""
    weight = torch.ones_like(batch.completion[batch.completions_of(of)], dtype=torch.float64)
    return Weights(weight, float(len(weight)))


def pair_mean(batch: Batch) -> Weights:
    """w = 1, Z = number of pairs: for a loss with one entry per pair, which is an example of
    preference data.
    """
    weight = torch.ones(len(batch.examples), dtype=torch.float64, device=batch.target.device)
    return Weights(weight, float(len(weight)))


def weighted(
    batch: Batch, *, weighting: Weighting, by: str, unit: str, of: int | str | None = None
) -> Weights:
    """w = w' · c, Z = Σ w' · c: a weighting times a column c of the data, such as the importance of
    each example.

    Args:
        weighting: w', any except `fixed_length`, whose Z is not a sum of weights.
        unit: unit of the loss's entries: tokens, sequences or pairs.
    """
    column = batch.columns[by].double()
    if unit == "tokens":
        column = column[batch.example[batch.sequence][batch.tokens_of(of)]]
    elif unit == "sequences":
        column = column[batch.example[batch.completions_of(of)]]
    weight = weighting(batch).weight * column
    return Weights(weight, float(weight.sum()))
