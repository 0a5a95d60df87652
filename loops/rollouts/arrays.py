"""Samples in arrays: packed in memory, and in tensors on their way from one rank to the others,
where they are not pickled. Both take 8 bytes and a bit for each token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .packed import Packed, PackedMask, logprobs_array, mask_array, tokens_array
from .sample import Context, Sample


def packed(sample: Sample) -> Sample:
    """The sample with its tokens, log-probs and masks packed, of all contexts."""
    first, *further = map(_packed_context, sample.contexts)
    return replace(sample, **vars(first), further=further)


def _packed_context(context: Context) -> Context:
    return Context(
        Packed(tokens_array(context.prompt)),
        Packed(tokens_array(context.tokens)),
        PackedMask(mask_array(context.trained)),
        Packed(logprobs_array(context.logprobs)),
        context.spans,
    )


def to_tensors(samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, Tensor]]:
    """The samples without their tokens, log-probs and masks, and these of all contexts in one tensor
    each.

    Numbers that 32 bits don't hold exactly stay in 64.
    """
    contexts = [context for sample in samples for context in sample.contexts]
    trained = _joined(mask_array, (context.trained for context in contexts), np.bool_)
    arrays = {
        "prompt_lengths": np.array([len(context.prompt) for context in contexts], np.int32),
        "lengths": np.array([len(context.tokens) for context in contexts], np.int32),
        "prompts": _joined(tokens_array, (context.prompt for context in contexts), np.int32),
        "tokens": _joined(tokens_array, (context.tokens for context in contexts), np.int32),
        "logprobs": _joined(logprobs_array, (each.logprobs for each in contexts), np.float32),
        "trained": np.packbits(trained),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return list(map(_emptied, samples)), tensors


def from_tensors(emptied: Sequence[Sample], tensors: dict[str, Tensor]) -> list[Sample]:
    """The inverse of `to_tensors`; the samples are packed."""
    lengths = tensors["lengths"].tolist()
    trained = np.unpackbits(tensors["trained"].numpy(), count=sum(lengths)).astype(np.bool_)
    prompts = _split(tensors["prompts"].numpy(), tensors["prompt_lengths"].tolist())
    tokens = _split(tensors["tokens"].numpy(), lengths)
    masks = _split(trained, lengths)
    logprobs = _split(tensors["logprobs"].numpy(), lengths)

    def filled(context: Context) -> Context:
        return Context(
            Packed(next(prompts)),
            Packed(next(tokens)),
            PackedMask(next(masks)),
            Packed(next(logprobs)),
            context.spans,
        )

    samples = []
    for sample in emptied:
        first, *further = map(filled, sample.contexts)
        samples.append(replace(sample, **vars(first), further=further))
    return samples


def _emptied(sample: Sample) -> Sample:
    first, *further = (Context([], [], [], [], context.spans) for context in sample.contexts)
    return replace(sample, **vars(first), further=further)


def _joined(
    as_array: Callable[[Any], npt.NDArray[Any]], parts: Iterable[Sequence[Any]], dtype: type
) -> npt.NDArray[Any]:
    """The arrays of all parts in one, of the widest type that one of them needs."""
    return np.concatenate([np.empty(0, dtype), *map(as_array, parts)])


def _split(values: npt.NDArray[Any], lengths: list[int]) -> Iterator[npt.NDArray[Any]]:
    start = 0
    for length in lengths:
        yield values[start : start + length]
        start += length
