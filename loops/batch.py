"""A micro-batch as objectives see it: ragged, one entry per trained token, no padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..data import Example


@dataclass(frozen=True)
class Batch:
    """Whole examples, and the flat tensors of their trained tokens.

    Trained tokens are ordered by example, then completion, then position, in every layout of the model's input.

    Attributes:
        examples: the examples; `arrange` makes model input of them.
        target: int64 [tokens], the id of each trained token.
        sequence: int64 [tokens], sorted: the completion each trained token belongs to, counted over the batch.
        completion: int64 [sequences], the index of each completion in its example (of a pair: 0 chosen, 1 rejected).
        columns: further tensors by name: per token (reference log-probs), per completion (ranks), per example (margins,
            labels), or one number for the whole step (KTO's z0).
    """

    examples: Sequence[Example]
    target: Tensor
    sequence: Tensor
    completion: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        return len(self.completion)

    @property
    def example(self) -> Tensor:
        """int64 [sequences]: the example that each completion belongs to."""
        return (self.completion == 0).cumsum(0) - 1

    def completions_of(self, of: int | str | None) -> Tensor:
        """Bool [sequences]: of this index in their example, of the examples that a bool column marks, or (None) all."""
        if of is None:
            return torch.ones_like(self.completion, dtype=torch.bool)
        return self.columns[of].bool()[self.example] if isinstance(of, str) else self.completion == of

    def tokens_of(self, of: int | str | None) -> Tensor:
        """Bool [tokens]: trained tokens of those completions."""
        return self.completions_of(of)[self.sequence]


def collate(
    examples: Sequence[Example], columns: Mapping[str, Tensor] | None = None, device: torch.device | str = "cpu"
) -> Batch:
    """Make a batch of examples, with its tensors on ``device``. Without examples it is empty, and can be trained on.

    Raises:
        ValueError: if an example has no prompt, or a column no entry per token, per completion or per example.
    """
    if not all(example.prompt for example in examples):
        raise ValueError("collate: an example has no prompt, so nothing predicts its first token; give it one token")
    completions = [
        [token for token, train in zip(tokens, trained, strict=True) if train]
        for example in examples
        for tokens, trained in zip(example.completions, example.trained, strict=True)
    ]
    target = [token for tokens in completions for token in tokens]
    sequence = [index for index, tokens in enumerate(completions) for _ in tokens]
    completion = [index for example in examples for index in range(len(example.completions))]
    for name, column in (columns or {}).items():
        if column.ndim and len(column) not in (lengths := (len(target), len(completion), len(examples))):
            wanted = "an entry per token, per completion or per example, {}, {} or {}".format(*lengths)
            raise ValueError(f"collate: column {name}: wanted {wanted}, got {len(column)}")
    return Batch(
        examples=examples,
        target=torch.tensor(target, dtype=torch.int64, device=device),
        sequence=torch.tensor(sequence, dtype=torch.int64, device=device),
        completion=torch.tensor(completion, dtype=torch.int64, device=device),
        columns={name: column.to(device) for name, column in (columns or {}).items()},
    )
