"""A Hugging Face classifier as objectives see it: a batch in, one score per marked token out.

A reward model reads an answer where it ends, a process reward model each step where it ends: both are a head on the
hidden states of the tokens that `Example.trained` marks. Trained so, `transformers` loads them as a sequence classifier
or a token classifier, and computes the same scores.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...data import Example
from ..batch import Batch
from .backbone import Backbone, evaluating
from .inputs import Layout, Read, Rows


class Scores(NamedTuple):
    """What one forward pass says of every marked token."""

    score: Tensor  # [tokens]: the logit of one class, or that of the second of two over the first


class Scorer(Backbone):
    """A classifier with one output, or with two of which the second says "right", and the rows that it is given.

    Args:
        model: a `transformers` model for sequence or token classification, plain or wrapped by peft.
        layout: ``"auto"`` takes the first of shared, packed and padded rows that this model is shown to keep apart.

    Raises:
        ValueError: if the model has no linear head of one or two outputs on its last hidden states, or if a named
            layout lets its sequences see each other.
    """

    read: Read = "at"

    def __init__(self, model: nn.Module, *, layout: Layout | Literal["auto"] = "auto") -> None:
        super().__init__(model)
        self._check_head()
        self.layout: Layout = self.choose_layout(layout, self.hidden)

    @property
    def head(self) -> nn.Module:
        labels = self.plain.config.num_labels
        heads = [child for child in self.plain.children() if _outputs(child) == labels]
        if len(heads) != 1 or labels not in (1, 2):
            raise ValueError(
                f"scorer: {type(self.plain).__name__} has no linear head of one or two outputs on its hidden states; "
                "wanted a model for sequence or token classification with num_labels 1 or 2"
            )
        head: nn.Module = heads[0]
        return head

    def forward(self, batch: Batch) -> Scores:
        return Scores(self._score(self.arranged(batch.examples, self.layout)))

    def _score(self, rows: Rows) -> Tensor:
        hidden = self.hidden(rows)
        output: Tensor = self.head(hidden.to(next(self.head.parameters()).dtype))
        return output[:, 0] if output.shape[1] == 1 else output[:, 1] - output[:, 0]

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare with the model's own forward on one short text: is it this head, and these hidden states?"""
        first, *rest = (token for token in range(2, 7) if token != self.plain.config.pad_token_id)
        text = [Example([first], [rest], [[token == rest[-1] for token in rest]])]
        with evaluating(self.model):
            ours = self._score(self.arranged(text, "padded"))
            logits: Tensor = self.plain(torch.tensor([[first, *rest]], device=self.device), use_cache=False).logits
        theirs = logits.flatten(0, -2)[-1]
        expected = theirs[0] if len(theirs) == 1 else theirs[1] - theirs[0]
        tolerance = 1e-4 if torch.finfo(logits.dtype).eps < 1e-5 else 0.1
        if not torch.isclose(ours[0].double(), expected.double(), rtol=tolerance, atol=tolerance):
            raise ValueError(f"scorer: {type(self.plain).__name__} scores are not its head on its last hidden states")


class Critic(Scorer):
    """Values of states: a scorer that reads each trained token where it is chosen, one position before it stands."""

    def __init__(self, model: nn.Module, *, layout: Layout | Literal["auto"] = "auto") -> None:
        super().__init__(model, layout=layout)  # the head is checked where transformers reads it
        self.read = "before"


def ends_marked(example: Example, pad: int | None) -> Example:
    """The example with one mark per completion: on the token where `transformers` reads a sequence classifier.

    That is the last token other than the padding token, which for many models is also the one that ends an answer.
    """
    marks = []
    for completion in example.completions:
        end = max((t for t, token in enumerate(completion) if token != pad), default=len(completion) - 1)
        marks.append([t == end for t in range(len(completion))])
    return Example(example.prompt, example.completions, marks)


@torch.no_grad()
def scores(scorer: Scorer, batches: Sequence[Batch]) -> Tensor:
    """The score of every marked token of the batches, [tokens], without training."""
    with evaluating(scorer.model):
        return torch.cat([scorer(batch).score for batch in batches])


def _outputs(module: Any) -> int | None:
    """Outputs of a linear layer, under peft's wrappers."""
    original = getattr(module, "original_module", module)
    return original.out_features if isinstance(original, nn.Linear) else None
