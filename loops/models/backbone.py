"""A Hugging Face model below its head: a batch in, one hidden state per trained token out.

No list of architectures decides which layouts keep sequences apart: each is tested on a probe of a few tokens when the
model is wrapped, and one that fails falls back, with one log line, to a slower one.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...data import Example
from .inputs import Layout, Read, Rows, arrange
from .probe import objection

log = logging.getLogger(__name__)

# Two examples of two completions, short enough for any context and of different lengths.
PROBE = [
    Example([1, 2, 3], [[4, 5, 6, 7], [5, 3, 2]], [[True] * 4, [True] * 3]),
    Example([3, 1], [[2, 6, 4], [7, 7, 1, 5, 2]], [[True] * 3, [True] * 5]),
]


class Backbone(nn.Module):
    """A model and the layout of its input; `Policy` and `Scorer` add what becomes of its hidden states.

    Attributes:
        model: a `transformers` model, plain or wrapped by peft.
        read: the position at which trained tokens are read, before or at their own, see `inputs`.
    """

    read: Read = "before"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def plain(self) -> Any:
        """The `transformers` model, without peft's wrapper."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def arranged(self, examples: Sequence[Example], layout: Layout, *, one_row: bool = False) -> Rows:
        # Flash attention tells sequences apart by restarting positions only in a batch of one row.
        flash = "flash" in str(self.plain.config._attn_implementation)
        rows = arrange(examples, layout, read=self.read, one_row=one_row or (flash and layout == "packed"))
        return rows.to(self.device)

    def hidden(self, rows: Rows) -> Tensor:
        """[tokens, D]"""
        states: Tensor = self.plain.base_model(**self.model_input(rows)).last_hidden_state
        return states.flatten(0, 1)[rows.position]

    def model_output(self, rows: Rows) -> Tensor:
        """[tokens, ...], from the model's own head and forward."""
        output: Tensor = self.plain(**self.model_input(rows)).logits
        return output.flatten(0, 1)[rows.position]

    def model_input(self, rows: Rows) -> dict[str, Any]:
        mask = rows.attention_mask
        if mask is not None and mask.ndim == 4 and self.plain.config._attn_implementation == "eager":
            # Eager attention adds its mask to the scores.
            scores = torch.zeros(mask.shape, dtype=self.plain.dtype, device=mask.device)
            mask = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        return {
            "input_ids": rows.input_ids,
            "position_ids": rows.position_ids,
            "attention_mask": mask,
            # With a cache, transformers takes restarting positions for one sequence, and sequences see each other.
            "use_cache": False,
        }

    def choose_layout(self, wanted: Layout | Literal["auto"], output: Callable[[Rows], Tensor]) -> Layout:
        """The wanted layout, or the fastest one in which this model's ``output`` keeps sequences apart on a probe.

        Raises:
            ValueError: if sequences see each other in the wanted layout.
        """
        candidates: Sequence[Layout] = ("shared", "packed", "padded") if wanted == "auto" else (wanted,)
        for layout in candidates:
            if layout == "padded" or (self._may_try(layout) and self._keeps_apart(layout, output)):
                return layout
            log.info("%s: %s rows would mix sequences", type(self.plain).__name__, layout)
        raise ValueError(
            f"policy: layout {wanted!r} lets the sequences of {type(self.plain).__name__} see each other; use 'auto'"
        )

    def _may_try(self, layout: Layout) -> bool:
        """Sliding windows and recurrences reach further than a probe, and count slots of the row, not positions."""
        config = self.plain.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if layout == "shared":
            windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
            return kinds == {"full_attention"} if hasattr(config, "layer_types") else not windowed
        return kinds <= {"full_attention", "sliding_attention"}

    def _keeps_apart(self, layout: Layout, output: Callable[[Rows], Tensor]) -> bool:
        return objection(self.plain, lambda: self._find_mixing(layout, output)) is None

    @torch.no_grad()
    def _find_mixing(self, layout: Layout, output: Callable[[Rows], Tensor]) -> str | None:
        """Returns why this layout can't be used, if so.

        Other tokens in one sequence must not change a single bit of another, and all must agree with the padded run.
        """
        changed = [PROBE[0], PROBE[1]._replace(prompt=[7, 7], completions=[[1, 1, 1], PROBE[1].completions[1]])]
        changed[0] = changed[0]._replace(completions=[[6, 6, 6, 6], PROBE[0].completions[1]])
        with evaluating(self.model):
            try:
                before, after = (
                    output(self.arranged(examples, layout, one_row=layout != "padded")) for examples in (PROBE, changed)
                )
                expected = output(self.arranged(PROBE, "padded"))
            except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:  # the model refuses such input
                log.info("%s refuses %s rows: %s", type(self.plain).__name__, layout, error)
                return str(error)
        untouched = slice(4, 7)  # the second completion of the first example: its prompt is the same in both
        # Layers amplify rounding, half precision's most of all; a wrong position or mask changes half of the norm.
        tolerance = 1e-3 if torch.finfo(before.dtype).eps < 1e-5 else 0.35
        difference = (before.double() - expected.double()).norm() / expected.double().norm()
        kept_apart = torch.equal(before[untouched], after[untouched]) and bool(difference <= tolerance)
        return None if kept_apart else "sequences see each other"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
