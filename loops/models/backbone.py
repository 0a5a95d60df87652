"""A Hugging Face model below its head: examples in, one hidden state per trained token out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...data import Example
from ...data.images import ImageReader, ImageRef
from .columns import Columns
from .images import ImageInputs, has_axes, takes_token_types
from .patches import never_attend_by_cudnn, never_repack
from .rotary import rotate_by_sequence
from .rows import Axes, Layout, Rows, arrange

T = TypeVar("T")


class Backbone(nn.Module):
    """A model and the layout of its input.

    `Policy` and `Scorer` add what is computed from its hidden states.

    Attributes:
        model: a `transformers` model, plain or wrapped by peft.
        layout: of the rows of a batch; chosen by a probe.
        read: where trained tokens are read: at the position before their own, or at their own.
        mesh, param_dtype: of its shards, see `shard`; None if every rank has all of it.
        same_rotary: see `rotate_by_sequence`.
        columns: those of rows that this rank computes, see `context_parallel`; None for all.
        images: reads the images of examples; None for a model that sees none.
        reader: the processor that is saved with the model, if it has one; `open_run` sets it.
    """

    read: Literal["before", "at"] = "before"
    layout: Layout
    columns: Columns | None = None
    reader: ImageReader | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: DeviceMesh | None = None,
        param_dtype: torch.dtype | None = None,
        images: ImageInputs | None = None,
    ) -> None:
        who = type(self).__name__
        if isinstance(model, Backbone):
            raise ValueError(
                f"{who}: wanted a model of transformers or peft, got a {type(model).__name__} of one"
            )
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"{who}: wanted a model, got {model!r:.80}; load it by its from_pretrained"
            )
        super().__init__()
        self.model = model
        self.mesh = mesh
        self.param_dtype = param_dtype
        self.images = images
        never_repack(model)
        never_attend_by_cudnn()
        self.same_rotary = rotate_by_sequence(model)

    @property
    def plain(self) -> Any:
        """The `transformers` model, without peft's wrapper."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def arranged(
        self, examples: Sequence[Example], layout: Layout, *, one_row: bool = False
    ) -> Rows:
        """The examples laid out as input of this model, and of this rank's columns where rows are
        split.

        Raises:
            ValueError: if an example has images and the model sees none.
        """
        if self.images is None and any(example.images for example in examples):
            raise ValueError(
                f"{type(self).__name__}: the batch has images, and the model no processor to read them; give "
                "images=ImageInputs(ImageReader(processor))"
            )
        if self.images is not None and not any(example.images for example in examples):
            examples = [*examples, self.images.blank]
        if layout == "shared" and self.same_rotary is not None:
            longest = max((_length(example) for example in examples), default=0)
            if longest > self.same_rotary:
                layout = "packed"  # two completions may turn their prompt by different frequencies
        # Flash attention tells sequences apart by restarting positions only in a batch of one row.
        attention = str(self.plain.config._attn_implementation)
        if "flash" in attention and layout == "packed":
            one_row = True
        rows = arrange(
            examples,
            layout,
            read=self.read,
            one_row=one_row,
            blocks=attention == "flex_attention",
            multiple_of=1 if self.columns is None else self.columns.size,
            axes=self._axes,
            image_token=None if self.images is None else self.images.token,
            device=self.device,
        )
        return rows if self.columns is None else self.columns.reads(rows)

    @property
    def _axes(self) -> Axes | None:
        """The rule of positions in several axes, for a model that has them and sees images."""
        if self.images is None or not has_axes(self.plain):
            return None
        return partial(self.images.axes, self.plain)

    def gathered(self, values: T, rows: Rows) -> T:
        """Tensors of the trained tokens that this rank reads, as those of all of them."""
        return values if self.columns is None else self.columns.gather(values, rows)

    def hidden(self, rows: Rows) -> Tensor:
        """[tokens, D], of those that this rank reads"""
        states: Tensor = self.plain.base_model(**self.model_input(rows)).last_hidden_state
        return states.flatten(0, 1)[rows.position]

    def routed(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """``hidden``, and the logits of the routers that it came through [tokens, layers,
        experts].
        """
        output = self.plain.base_model(**self.model_input(rows), output_router_logits=True)
        states: Tensor = output.last_hidden_state.flatten(0, 1)[rows.position]
        logits = [each.flatten(0, -2)[rows.position] for each in output.router_logits]
        return states, torch.stack(logits, 1)

    def model_output(self, rows: Rows) -> Tensor:
        """[tokens, ...], of those that this rank reads, from the model's own head and forward."""
        output: Tensor = self.plain(**self.model_input(rows)).logits
        return output.flatten(0, 1)[rows.position]

    def model_input(self, rows: Rows) -> dict[str, Any]:
        """The arguments of a forward pass of `transformers`."""
        mask = rows.attention_mask
        if (
            isinstance(mask, Tensor)
            and mask.ndim == 4
            and self.plain.config._attn_implementation == "eager"
        ):
            # Eager attention adds its mask to the scores.
            scores = torch.zeros(mask.shape, dtype=self.plain.dtype, device=mask.device)
            mask = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        return {
            **self.image_input(rows.input_ids, rows.shown),
            "input_ids": rows.input_ids,
            "position_ids": rows.position_ids,
            "attention_mask": mask,
            # With a cache, transformers treats restarting positions as one sequence, and sequences
            # see each other.
            "use_cache": False,
        }

    def image_input(
        self, input_ids: Tensor, shown: Sequence[tuple[ImageRef, ...]]
    ) -> dict[str, Any]:
        """The arguments of a forward pass over these tokens that are about images.

        Args:
            shown: the images of each sequence, in the order in which the flattened rows show them;
                one of them at least has some, if the model sees images.
        """
        if self.images is None:
            return {}
        seen: dict[str, Any] = self.images.tensors(shown, self.plain.dtype, self.device)
        if takes_token_types(self.plain):
            seen["token_type_ids"] = (input_ids == self.images.token).long()
        return seen

    @contextmanager
    def probing(self) -> Iterator[bool]:
        """Context of a probe: without dropout, and under autocast if the weights are of two
        precisions. Yields True if products are not rounded by autocast."""
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        if self.param_dtype is not None:
            dtypes.add(self.param_dtype)
        kind = self.device.type
        halves = dtypes & {torch.bfloat16, torch.float16}
        mixed = bool(halves) and torch.float32 in dtypes
        # Otherwise the caller's autocast, if any, holds.
        precision = torch.autocast(kind, halves.pop()) if mixed else nullcontext()
        with evaluating(self.model), precision:
            yield not torch.is_autocast_enabled(kind)


def _length(example: Example) -> int:
    """Tokens of the longest sequence of an example."""
    return len(example.prompt) + max(map(len, example.completions))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context with a model in evaluation mode.

    Every module comes back in the mode that it was in.
    """
    # a policy may be, and its model not
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
