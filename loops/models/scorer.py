"""A Hugging Face classifier for objectives: a batch in, one score per marked token out.

Of a histogram the score is its mean. The labels of such a model are the middles of its bins.

A reward model scores a completion at its last token, a process reward model each step at its last
token: both are a head on the hidden states of the tokens that `Example.trained` marks.
`transformers` loads such a model as a sequence or token classifier, and computes the same scores.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...data import Example
from ..batch import Batch
from .backbone import Backbone, evaluating
from .context_parallel import split_columns
from .images import ImageInputs
from .probe import choose_layout
from .rows import Layout, Rows
from .sharding import shard


class Scorer(Backbone):
    """A classifier with one output, with two of which the second means "right", or with the bins of
    a histogram; and the layout of its input.

    Args:
        model: a `transformers` model for sequence or token classification, plain or wrapped by
            peft.
        layout: ``"auto"`` takes the first of shared, packed and padded in which this model keeps
            sequences apart.
        read: where each marked token is read; "before", in the state it is chosen in, makes a value
            function.
        mesh, param_dtype: see `shard`. All ranks of the mesh make the scorer and call it together.
        images: reads the images of examples, for a vision-language model.

    Raises:
        ValueError: if the model has no linear head of one or two outputs, or of a histogram, on its
            last hidden states, or if sequences see each other in a layout that was named.

    Attributes:
        middles: float64 [bins], of the bins of a histogram; None for another head.
    """

    read: Literal["before", "at"] = "at"

    def __init__(
        self,
        model: nn.Module,
        *,
        layout: Layout | Literal["auto"] = "auto",
        read: Literal["before", "at"] = "at",
        mesh: DeviceMesh | None = None,
        param_dtype: torch.dtype | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        super().__init__(model, mesh=mesh, param_dtype=param_dtype, images=images)
        self.middles = bin_middles(self.plain.config.id2label)
        if mesh is not None:
            shard(self, mesh, ("hidden", "_check_head"), param_dtype=param_dtype)
        self._check_head()
        self.read = read  # the head is checked where transformers reads
        self.layout: Layout = choose_layout(self, layout, self.hidden)
        split_columns(self, self.hidden)

    @property
    def head(self) -> nn.Module:
        labels = self.plain.config.num_labels
        heads = []
        for child in self.plain.children():
            inner = getattr(child, "original_module", child)  # under peft
            if isinstance(inner, nn.Linear) and inner.out_features == labels:
                heads.append(child)
        if len(heads) != 1 or (labels not in (1, 2) and self.middles is None):
            raise ValueError(
                f"scorer: {type(self.plain).__name__} has no linear head of one or two outputs on its hidden states; "
                "wanted a model for sequence or token classification with num_labels 1 or 2, or with the middles of "
                "bins as labels, in rising order"
            )
        head: nn.Module = heads[0]
        return head

    def forward(self, batch: Batch, *, histogram: bool = False) -> Tensor:
        """[tokens], one per marked token: the logit of one class, of the second of two minus the
        first, or the mean of the histogram.

        Args:
            histogram: give log-probs [tokens, bins] instead.
        """
        rows = self.arranged(batch.examples, self.layout)
        output = self._output(rows)
        value = output.log_softmax(-1) if histogram else self._score_of(output)
        return self.gathered(value, rows)

    def _score_of(self, output: Tensor) -> Tensor:
        """[tokens], of the outputs of the head."""
        if self.middles is not None:
            return output.softmax(-1) @ self.middles.to(output)
        if output.shape[1] == 1:
            return output[:, 0].clone()  # FSDP warns of views
        return output[:, 1] - output[:, 0]

    def _output(self, rows: Rows) -> Tensor:
        """[tokens, outputs], of the head."""
        hidden = super().hidden(rows)
        # losses compare scores, which bfloat16 makes equal
        with torch.autocast(hidden.device.type, enabled=False):
            weight = list(self.head.parameters())[-1]  # under peft the copy that trains comes last
            output: Tensor = self.head(hidden.to(weight.dtype))
        return output

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare with the model's own forward pass on a short text."""
        pad = self.plain.config.get_text_config().pad_token_id
        first, *rest = (token for token in range(2, 7) if token != pad)
        only_last = [token == rest[-1] for token in rest]
        text = [Example([first], [rest], [only_last])]
        if self.images is not None:
            text = self.images.as_words(text)
        ids = torch.tensor([[*text[0].prompt, *text[0].completions[0]]], device=self.device)
        with self.probing():
            score = self._score_of(self._output(self.arranged(text, "padded")))
            logits: Tensor = self.plain(ids, use_cache=False).logits
        expected = self._score_of(logits.flatten(0, -2)[-1:])[0]
        # rounding, in half precision amplified
        tolerance = 1e-4 if torch.finfo(logits.dtype).eps < 1e-5 else 0.1
        if not torch.isclose(score[0].double(), expected.double(), rtol=tolerance, atol=tolerance):
            raise ValueError(
                f"scorer: {type(self.plain).__name__} scores are not its head on its last hidden states"
            )


def bin_middles(labels: Mapping[int, str]) -> Tensor | None:
    """float64 [bins], if these are the labels of a histogram: three numbers or more that rise."""
    try:
        middles = torch.tensor([float(labels[i]) for i in range(len(labels))], dtype=torch.float64)
    except ValueError:
        return None
    return middles if len(labels) > 2 and bool((middles.diff() > 0).all()) else None


def ends_marked(example: Example, pad: int | None) -> Example:
    """Mark one token per completion, the one at which `transformers` reads a sequence classifier.

    It is the last one other than the padding token, which for many models is also the token that
    ends a completion.
    """
    marks = []
    for completion in example.completions:
        last = len(completion) - 1
        end = max((t for t, token in enumerate(completion) if token != pad), default=last)
        marks.append([t == end for t in range(len(completion))])
    return example._replace(trained=marks)


@torch.no_grad()
def scores(scorer: Scorer, batches: Sequence[Batch]) -> Tensor:
    """The score of every marked token of the batches, [tokens], without training."""
    with evaluating(scorer.model):
        return torch.cat([scorer(batch) for batch in batches])
