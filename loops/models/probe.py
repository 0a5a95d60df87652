"""Probe with a few tokens which inputs a model supports, instead of keeping a list of
architectures.

In a deep model only the first layers are probed: layers of one kind treat masks, positions and
caches alike.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...data import Example
from ...data.images import ImageRef
from .backbone import Backbone
from .images import ImageInputs, takes_token_types
from .rows import Layout, Rows
from .sharding import local

log = logging.getLogger(__name__)

# Two examples of two completions, short enough for any context and of different lengths.
PROBE = [
    Example([1, 2, 3], [[4, 5, 6, 7], [5, 3, 2]], [[True] * 4, [True] * 3]),
    Example([3, 1], [[2, 6, 4], [7, 7, 1, 5, 2]], [[True] * 3, [True] * 5]),
]


def probe_examples(backbone: Backbone) -> list[Example]:
    """The examples of a probe; for a model that sees images, some of them show one."""
    if backbone.images is None:
        return PROBE
    blank = backbone.images.reader.blank
    return seen_by(backbone.images, PROBE, blank, blank)


def seen_by(
    images: ImageInputs, examples: Sequence[Example], first: ImageRef, second: ImageRef
) -> list[Example]:
    """The two examples of a probe, in ids of words, with an image each, in unlike places, and the
    first one once more, without an image.

    Packed rows of Gemma 3 are wrong only beside text, or where images are in other places: there
    it takes text for images.
    """
    words = images.as_words(examples)
    return [
        images.shown(words[0], first),
        images.shown(words[1], second, after=1),
        words[0],
    ]


_LOOKS_AHEAD = "tokens see later ones"
_BLIND = "an image changes nothing that it computes"
_SIMPLE = (bool, int, float, str, type(None))

# Raised by a model that does not support an input.
REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


def objection(plain: nn.Module, probe: Callable[[], str | None]) -> str | None:
    """The probe's objection to a `transformers` model: None if the first layers pass, else that of
    the whole model.

    A model may refuse to run without its other layers, so only the whole model's refusal counts.
    """
    with shortened(plain) as cut, suppress(*REFUSALS):
        if cut and probe() is None:
            return None
    return probe()


def without_values(plain: nn.Module) -> bool:
    """True for a model in a simulation, whose tensors have shapes alone: nothing can be
    compared.
    """
    return any(isinstance(local(parameter), FakeTensor) for parameter in plain.parameters())


@contextmanager
def shortened(plain: Any) -> Iterator[bool]:
    """Context in which a `transformers` model ends after its first layers, at least two and one of
    every kind.

    Nothing is copied. Yields True if any layer is left out; none is if the list of layers is not
    found, and under FSDP, which records at the first pass which parameters to gather.
    """
    path = layer_list(plain)
    if path is None or any(isinstance(parameter, DTensor) for parameter in plain.parameters()):
        yield False
        return
    layers = plain.get_submodule(path)
    types = getattr(plain.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    kinds = [(kind, _kind(layer)) for kind, layer in zip(types, layers, strict=True)]
    first_with_every_kind = max(kinds.index(kind) + 1 for kind in set(kinds))
    count = min(len(layers), max(2, first_with_every_kind))
    plain.set_submodule(path, layers[:count])
    try:
        yield count < len(layers)
    finally:
        plain.set_submodule(path, layers)


def layer_list(plain: PreTrainedModel) -> str | None:
    """The path of the list of a `transformers` model's layers; None if it is not found."""
    depth = getattr(plain.config.get_text_config(), "num_hidden_layers", None)
    lists = []
    for path, module in plain.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            lists.append(path)
    outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return outermost[0] if len(outermost) == 1 else None


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that compute the same function of their input, but for the values of their
    weights.
    """
    modules = [(path, type(module), _settings(module)) for path, module in layer.named_modules()]
    tensors = [(path, tensor.shape, tensor.dtype) for path, tensor in layer.named_parameters()]
    return *modules, *tensors


def _settings(module: nn.Module) -> frozenset[tuple[str, Any]]:
    """What a module was made with: numbers and names by value, everything else by its type."""
    settings: dict[str, Any] = {}
    for name, value in vars(module).items():
        settings[name] = value if isinstance(value, _SIMPLE) else type(value)
    settings.pop("layer_idx", None)
    return frozenset(settings.items())


def choose_layout(
    backbone: Backbone, wanted: Layout | Literal["auto"], output: Callable[[Rows], Tensor]
) -> Layout:
    """The wanted layout, or the fastest one in which this model's ``output`` keeps sequences apart
    on a probe.

    Raises:
        ValueError: if sequences see each other in the wanted layout, or tokens see later ones of
            their own sequence.
    """
    name = type(backbone.plain).__name__
    worth_trying = _layouts_to_try(backbone.plain.config.get_text_config())
    sees_both_ways = backbone.images is not None and takes_token_types(backbone.plain)
    if sees_both_ways and without_values(backbone.plain):
        worth_trying = ["padded"]  # what a run will find out; here nothing can be compared
    candidates: Sequence[Layout] = ("shared", "packed", "padded") if wanted == "auto" else (wanted,)
    for layout in candidates:
        reason: str | None = "its layers count slots of the row"
        if layout in worth_trying:
            reason = objection(backbone.plain, partial(_find_fault, backbone, layout, output))
        if reason == _LOOKS_AHEAD:
            raise ValueError(
                f"model: {name} is no causal language model: a later token changes the log-probs of those before it; "
                "give one with causal attention (a config of an encoder, such as BERT's, may have is_decoder for that)"
            )
        if layout == "padded" and backbone.images is not None and reason == _BLIND:
            log.warning("%s: %s; is its projector new?", name, reason)
        elif layout == "padded" and backbone.images is not None and reason is not None:
            raise ValueError(f"model: {name} can't be trained on images: {reason}")
        # the row for each sequence that `transformers` documents
        if reason is None or layout == "padded":
            return layout
        log.info("%s: %s rows would mix sequences", name, layout)
    raise ValueError(
        f"policy: layout {wanted!r} lets the sequences of {name} see each other; use 'auto'"
    )


def _layouts_to_try(config: object) -> list[Layout]:
    """The layouts that a probe can judge: windows and recurrences reach further than its few
    tokens.

    Sliding windows count slots of the row, not positions, which in shared rows are not the same.
    """
    if hasattr(config, "layer_types"):
        kinds = set(config.layer_types or ["full_attention"])
        all_see_everything = kinds == {"full_attention"}
    else:
        kinds = {"full_attention"}
        windowed = getattr(config, "sliding_window", None) and getattr(
            config, "use_sliding_window", True
        )
        all_see_everything = not windowed
    layouts: list[Layout] = ["padded"]
    if kinds <= {"full_attention", "sliding_attention"}:
        layouts.append("packed")
    if all_see_everything:
        layouts.append("shared")
    return layouts


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two outputs are equal; False in a simulation, which has no values."""
    return not isinstance(first, FakeTensor) and bool((first.double() == second).all())


# How far two runs may be apart, as a share of the norm of what they compute. Layers amplify
# rounding, half precision's most of all; a wrong position or mask changes half of the norm or more,
# so anything well below that tells the two apart. The same tokens in rows of another layout meet
# products of other shapes, and round otherwise than the same rows with other neighbors do.
_SAME_ROWS = 1e-4
_SAME_ROWS_IN_HALVES = 0.05
_OTHER_ROWS = 1e-3
_OTHER_ROWS_IN_HALVES = 0.35


class _Rounding(NamedTuple):
    """Tells rounding from a wrong position or mask.

    In half precision rounding may be as large as what a randomly initialized model computes from
    other tokens at all, so there it must also be less than half of that.

    Attributes:
        expected: outputs of the padded run.
        moved: the same with another token at the start of each prompt.
        exact: whether the model computes in float32 or float64 throughout.
    """

    expected: Tensor
    moved: Tensor
    exact: bool

    def explains(
        self, first: Tensor, second: Tensor, tokens: slice | list[int], *, same_rows: bool
    ) -> bool:
        """Whether the outputs of these tokens in two runs differ by no more than rounding.

        Args:
            same_rows: whether the tokens are in the same places of the same rows in both runs.
        """
        if self.exact:
            share = _SAME_ROWS if same_rows else _OTHER_ROWS
        else:
            share = _SAME_ROWS_IN_HALVES if same_rows else _OTHER_ROWS_IN_HALVES
        limit = share * self.expected[tokens].norm()
        if not self.exact:
            limit = torch.minimum(limit, (self.moved - self.expected)[tokens].norm() / 2)
        return bool((first - second).norm() <= limit)


class _Changed(NamedTuple):
    """The examples of a probe, each time with one thing changed.

    Attributes:
        tokens: the first completions, and the second example's prompt and image, are others.
        prompts: another token begins each prompt.
        image: the first example shows another image; empty for a model of text.
    """

    tokens: list[Example]
    prompts: list[Example]
    image: list[Example]


def _changed_examples(backbone: Backbone) -> _Changed:
    tokens = [
        PROBE[0]._replace(completions=[[6, 6, 6, 6], PROBE[0].completions[1]]),
        PROBE[1]._replace(prompt=[7, 7], completions=[[1, 1, 1], PROBE[1].completions[1]]),
    ]
    prompts = [example._replace(prompt=[5, *example.prompt[1:]]) for example in PROBE]
    images = backbone.images
    if images is None:
        return _Changed(tokens, prompts, [])
    blank = images.reader.blank
    dark = images.reader.dark
    return _Changed(
        # With another image in the second example, the first one must stay as it is.
        tokens=seen_by(images, tokens, blank, dark),
        prompts=seen_by(images, prompts, blank, blank),
        image=seen_by(images, PROBE, dark, blank),
    )


@torch.no_grad()
def _find_fault(backbone: Backbone, layout: Layout, output: Callable[[Rows], Tensor]) -> str | None:
    """Return the reason if this layout can't be used.

    The token before two completions to one prompt must not see them, other tokens in one sequence
    must not change another, and all must agree with the padded run, up to `_Rounding`.
    """
    probed = probe_examples(backbone)
    other = _changed_examples(backbone)
    runs: list[Tensor] = []
    with backbone.probing() as exact:
        try:
            if layout != "padded":
                for examples in (probed, other.tokens):
                    runs.append(output(backbone.arranged(examples, layout, one_row=True)))
            expected = output(backbone.arranged(probed, "padded")).double()
            if other.image and _same(output(backbone.arranged(other.image, "padded")), expected):
                return _BLIND
            moved = output(backbone.arranged(other.prompts, "padded")).double()
        except REFUSALS as error:  # the model does not support such input
            log.info("%s refuses %s rows: %s", type(backbone.plain).__name__, layout, error)
            return str(error)
    exact = exact and torch.finfo(backbone.plain.dtype).eps < 1e-5
    rounding = _Rounding(expected, moved, exact)
    if backbone.read == "before" and _looks_ahead(expected, rounding):
        return _LOOKS_AHEAD
    if not runs:
        return None
    before, after = (run.double() for run in runs)
    # the second completion of the first example: its prompt is the same in both
    untouched = slice(4, 7)
    kept_apart = rounding.explains(before[untouched], after[untouched], untouched, same_rows=True)
    as_padded = rounding.explains(before, expected, slice(None), same_rows=False)
    return None if kept_apart and as_padded else "sequences see each other"


def _looks_ahead(expected: Tensor, rounding: _Rounding) -> bool:
    """Whether a prompt's end, read before its two completions, depends on which one follows."""
    # The rounding of experts depends on how many tokens they get, so the two may differ by it.
    first = expected[[0, 7]]
    second = expected[[4, 10]]
    if first.isnan().any():
        return False
    return not rounding.explains(first, second, [0, 7], same_rows=True)
