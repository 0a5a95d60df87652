"""Images as input of a vision-language model: the tensors of a batch, and positions in three axes.

What an image becomes is said by the processor (`burnish.data.images`); here its tensors are joined
over the conversations of a batch, in the order in which the rows show them.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...data import Example
from ...data.images import ImageReader, ImageRef


class ImageInputs:
    """What a model sees of examples with images.

    Attributes:
        reader: the processor of the model.
        word: an id that is no special token.
        blank: an example that shows one blank image and has no trained token, for batches without
            images: every rank of DDP or FSDP runs the same modules.
    """

    def __init__(self, reader: ImageReader) -> None:
        self.reader = reader
        self.word = self._words(1)[0]
        self.blank = self.shown(Example([self.word], [[]], [[]]), reader.blank)

    @property
    def token(self) -> int:
        return self.reader.token

    def shown(self, example: Example, image: ImageRef, *, after: int = 0) -> Example:
        """The example with an image after so many tokens of its prompt."""
        (text,) = self.reader.read([image]).texts
        ids = list(self.reader.tokenizer(text, add_special_tokens=False)["input_ids"])
        places = [place for place, token in enumerate(ids) if token == self.token]
        length = places[-1] + 1 - places[0]
        located = image._replace(start=after + places[0], length=length)
        prompt = [*example.prompt[:after], *ids, *example.prompt[after:]]
        return example._replace(prompt=prompt, images=(located,))

    def _words(self, count: int) -> list[int]:
        """The first ids that are no special tokens."""
        special = self.reader.tokenizer.added_tokens_decoder
        return [token for token in range(count + len(special)) if token not in special][:count]

    def as_words(self, examples: Sequence[Example]) -> list[Example]:
        """Examples of small ids, in the ids of words: a special token may stand for an image."""
        largest = max(max(map(max, (e.prompt, *e.completions))) for e in examples)
        words = self._words(largest + 1)

        def in_words(ids: Sequence[int]) -> list[int]:
            return [words[token] for token in ids]

        replaced = []
        for example in examples:
            completions = [in_words(ids) for ids in example.completions]
            replaced.append(
                example._replace(prompt=in_words(example.prompt), completions=completions)
            )
        return replaced

    def tensors(
        self, shown: Sequence[tuple[ImageRef, ...]], dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        """The model's inputs for the images of some sequences, in the order of their rows.

        Args:
            shown: the images of each sequence; of most, none or one.
            dtype: of pixels.
        """
        parts = [self.reader.read(images).tensors for images in shown if images]
        return {
            name: _joined([part[name] for part in parts]).to(device, _dtype(parts[0][name], dtype))
            for name in parts[0]
        }

    def axes(self, plain: Any, ids: list[int], images: Sequence[ImageRef]) -> list[list[int]]:
        """Positions [3, tokens] of a sequence, by the model's own rule: images take a plane of them
        (M-RoPE).
        """
        if not images:
            return [list(range(len(ids))) for _ in range(3)]
        tokens = torch.tensor([ids])
        given = {
            "input_ids": tokens,
            "mm_token_type_ids": (tokens == self.token).int(),
            "attention_mask": torch.ones_like(tokens),
        }
        for name, value in self.reader.read(images).tensors.items():
            if name.endswith("_thw"):  # the grid of patches of each image
                given[name] = value
        rule = plain.base_model.get_rope_index
        accepted = inspect.signature(rule).parameters
        positions, _ = rule(**{name: each for name, each in given.items() if name in accepted})
        axes: list[list[int]] = positions[:, 0].tolist()
        return axes


def has_axes(plain: nn.Module) -> bool:
    """True for a model whose positions are in three axes where it sees images."""
    return hasattr(getattr(plain, "base_model", None), "get_rope_index")


def takes_token_types(plain: PreTrainedModel) -> bool:
    """True for a model that is told which tokens are images' (Gemma 3 lets them see each other)."""
    return "token_type_ids" in inspect.signature(type(plain.base_model).forward).parameters


def _dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one after another; smaller ones get zeros at the end of their later dimensions, as
    processors pad the tiles of images of unlike sizes.
    """
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        padding: list[int] = []
        for size, wanted in zip(reversed(part.shape[1:]), reversed(largest), strict=True):
            padding += [0, wanted - size]
        padded.append(nn.functional.pad(part, padding) if any(padding) else part)
    return torch.cat(padded)
