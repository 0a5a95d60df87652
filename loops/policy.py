"""A Hugging Face causal model as objectives see it: a batch in, one log-prob per trained token out.

Nothing about an architecture is believed: whether its head fuses and which rows keep its sequences apart is tried out
on a probe of a few tokens when the policy is made, and what fails the trial falls back, with one log line, to what is
slower.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..data import Example
from ..kernels import Logprobs, logits_logprob
from .batch import Batch
from .head import Backend, CannotFuse, Transform, fuse
from .rows import Layout, Rows, arrange

log = logging.getLogger(__name__)

# Two examples of two completions, short enough for any context and of different lengths.
_PROBE = [
    Example([1, 2, 3], [[4, 5, 6, 7], [5, 3, 2]], [[True] * 4, [True] * 3]),
    Example([3, 1], [[2, 6, 4], [7, 7, 1, 5, 2]], [[True] * 3, [True] * 5]),
]


class Policy(nn.Module):
    """The model, its fused head, and the rows that it is given.

    Args:
        model: a `transformers` causal language model, plain or wrapped by peft. Its head is taught to fuse in place;
            its parameters, their names and its own ``forward`` stay as they are.
        layout: ``"auto"`` takes the first of shared, packed and padded rows that this model is shown to keep apart.
        backend: of `burnish.kernels.linear_logprob`.

    Raises:
        ValueError: if a named layout lets this model's sequences see each other.
    """

    def __init__(
        self, model: nn.Module, *, layout: Layout | Literal["auto"] = "auto", backend: Backend = "auto"
    ) -> None:
        super().__init__()
        self.model = model
        self.fused = self._try_fusing(backend)
        self.layout: Layout = self._choose_layout(layout)

    @property
    def causal(self) -> Any:
        """The `transformers` model, without peft's wrapper."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, batch: Batch, *, temperature: float | Tensor = 1.0) -> Logprobs:
        """Log-prob, entropy and logsumexp of every trained token of the batch, each [tokens]."""
        rows = self._arrange(batch.examples, self.layout)
        if not self.fused:
            logits = self._own_logits(rows).flatten(0, 1)[rows.predictor]
            return logits_logprob(logits, batch.target, temperature=temperature)
        hidden = self._hidden(rows).flatten(0, 1)[rows.predictor]
        head = self.causal.get_output_embeddings()
        logprobs: Logprobs = head(hidden, target=batch.target, temperature=temperature)
        return logprobs

    def _arrange(self, examples: Sequence[Example], layout: Layout) -> Rows:
        # Flash attention reads restarting positions as sequences only where there is one row.
        flash = "flash" in str(self.causal.config._attn_implementation)
        return arrange(examples, layout, one_row=flash and layout == "packed").to(self.device)

    def _hidden(self, rows: Rows) -> Tensor:
        hidden: Tensor = self.causal.base_model(**self._model_input(rows)).last_hidden_state
        return hidden

    def _own_logits(self, rows: Rows) -> Tensor:
        logits: Tensor = self.causal(**self._model_input(rows)).logits
        return logits

    def _model_input(self, rows: Rows) -> dict[str, Any]:
        mask = rows.attention_mask
        if mask is not None and mask.ndim == 4 and self.causal.config._attn_implementation == "eager":
            hidden = torch.zeros(mask.shape, dtype=self.causal.dtype, device=mask.device)  # it adds masks to scores
            mask = hidden.masked_fill_(~mask, torch.finfo(hidden.dtype).min)
        return {
            "input_ids": rows.input_ids,
            "position_ids": rows.position_ids,
            "attention_mask": mask,
            # With a cache, transformers reads restarting positions as one sequence, and sequences see each other.
            "use_cache": False,
        }

    @torch.no_grad()
    def _try_fusing(self, backend: Backend) -> bool:
        rows = self._arrange(_PROBE[:1], "padded")
        target = torch.tensor([4, 5, 6, 7, 5, 3, 2], device=self.device)
        try:
            head = self.causal.get_output_embeddings()
            if head is None:
                raise CannotFuse("it has no output embedding")
            with _evaluating(self.model):
                logits = self._own_logits(rows).flatten(0, 1)[rows.predictor]
                fuse(head, Transform.of(self.causal.config.get_text_config()), backend)
                fused = head(self._hidden(rows).flatten(0, 1)[rows.predictor], target=target).logprob
            expected = logits.double().log_softmax(-1).gather(1, target[:, None])[:, 0]
            # Rounding of the logits to their own dtype is the only difference there may be.
            tolerance = 8 * torch.finfo(logits.dtype).eps * logits.abs().max().double().clamp(min=1.0) + 1e-5
            if not torch.all((fused.double() - expected).abs() <= tolerance):
                raise CannotFuse("its logits are not a known function of its last hidden state")
        except CannotFuse as reason:
            log.warning("%s: log-probs are taken from full logits: %s", type(self.causal).__name__, reason)
            return False
        return True

    def _choose_layout(self, wanted: Layout | Literal["auto"]) -> Layout:
        candidates: Sequence[Layout] = ("shared", "packed", "padded") if wanted == "auto" else (wanted,)
        for layout in candidates:
            if layout == "padded" or (self._may_share(layout) and self._keeps_apart(layout)):
                return layout
            log.info("%s: %s rows would mix sequences", type(self.causal).__name__, layout)
        raise ValueError(
            f"policy: layout {wanted!r} lets the sequences of {type(self.causal).__name__} see each other; use 'auto'"
        )

    def _may_share(self, layout: Layout) -> bool:
        """Sliding windows and recurrences reach further than a probe: they count slots of the row, not positions."""
        config = self.causal.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if layout == "shared":
            windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
            return kinds == {"full_attention"} if hasattr(config, "layer_types") else not windowed
        return kinds <= {"full_attention", "sliding_attention"}

    @torch.no_grad()
    def _keeps_apart(self, layout: Layout) -> bool:
        """Other tokens in one sequence must not change a single bit of another, and must agree with the padded run."""
        changed = [_PROBE[0], _PROBE[1]._replace(prompt=[7, 7], completions=[[1, 1, 1], _PROBE[1].completions[1]])]
        changed[0] = changed[0]._replace(completions=[[6, 6, 6, 6], _PROBE[0].completions[1]])
        with _evaluating(self.model):
            try:
                before, after = (self._predictors(examples, layout) for examples in (_PROBE, changed))
                expected = self._predictors(_PROBE, "padded")
            except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:  # the model refuses such input
                log.info("%s refuses %s rows: %s", type(self.causal).__name__, layout, error)
                return False
        untouched = slice(4, 7)  # the second completion of the first example: its prompt is the same in both
        # Layers amplify rounding, half precision's most of all; a wrong position or mask changes half of the norm.
        tolerance = 1e-3 if torch.finfo(before.dtype).eps < 1e-5 else 0.35
        difference = (before.double() - expected.double()).norm() / expected.double().norm()
        return torch.equal(before[untouched], after[untouched]) and bool(difference <= tolerance)

    def _predictors(self, examples: Sequence[Example], layout: Layout) -> Tensor:
        rows = arrange(examples, layout, one_row=layout != "padded").to(self.device)
        output = self._hidden(rows) if self.fused else self._own_logits(rows)
        return output.flatten(0, 1)[rows.predictor]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
