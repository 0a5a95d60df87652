"""Samples on their way from one rank to the others: token ids as int32, log-probs as float32, masks
as bits, 8 bytes and a bit for each token; they are not pickled.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .sample import Context, Sample


def to_tensors(samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, Tensor]]:
    """The samples without their tokens, log-probs and masks, and these of all contexts in one tensor
    each.

    Log-probs that float32 does not hold exactly stay float64.
    """
    contexts = [context for sample in samples for context in sample.contexts]
    logprobs = torch.tensor(
        list(chain.from_iterable(c.logprobs for c in contexts)), dtype=torch.float64
    )
    if torch.equal(logprobs.float().double(), logprobs):
        logprobs = logprobs.float()
    trained = np.fromiter(chain.from_iterable(c.trained for c in contexts), dtype=np.bool_)
    tensors = {
        "prompt_lengths": _int32(len(context.prompt) for context in contexts),
        "lengths": _int32(len(context.tokens) for context in contexts),
        "prompts": _int32(chain.from_iterable(context.prompt for context in contexts)),
        "tokens": _int32(chain.from_iterable(context.tokens for context in contexts)),
        "logprobs": logprobs,
        "trained": torch.from_numpy(np.packbits(trained)),
    }
    return list(map(_emptied, samples)), tensors


def from_tensors(emptied: Sequence[Sample], tensors: dict[str, Tensor]) -> list[Sample]:
    """The inverse of `to_tensors`."""
    lengths = tensors["lengths"].tolist()
    trained = np.unpackbits(tensors["trained"].numpy(), count=sum(lengths)).astype(np.bool_)
    prompts = _split(tensors["prompts"], tensors["prompt_lengths"].tolist())
    tokens = _split(tensors["tokens"], lengths)
    masks = _split(torch.from_numpy(trained), lengths)
    logprobs = _split(tensors["logprobs"], lengths)

    def filled(context: Context) -> Context:
        return Context(next(prompts), next(tokens), next(masks), next(logprobs), context.spans)

    samples = []
    for sample in emptied:
        first, *further = map(filled, sample.contexts)
        samples.append(replace(sample, **vars(first), further=further))
    return samples


def _emptied(sample: Sample) -> Sample:
    first, *further = (Context([], [], [], [], context.spans) for context in sample.contexts)
    return replace(sample, **vars(first), further=further)


def _int32(values: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=np.int32))


def _split(values: Tensor, lengths: list[int]) -> Iterator[list[Any]]:
    return (part.tolist() for part in torch.split(values, lengths))
