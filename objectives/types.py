"""The shapes and ranges that signatures of objectives state. At run time they cost nothing: the test suite has
jaxtyping enforce the shapes, and recipes check hyper-parameters before they load anything."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

PerToken = Float[Tensor, "*tokens"]  # token objectives are elementwise: any shape, usually flat [tokens]
PerSequence = Float[Tensor, " sequences"]
PerPair = Float[Tensor, " pairs"]

FlatTokens = Float[Tensor, " tokens"]  # one entry per trained token, the sequences one after the other
SequenceIds = Int[Tensor, " tokens"]  # int64, sorted: the sequence each token belongs to
SequenceLengths = Int[Tensor, " sequences"]  # int64, in trained tokens

Stats = dict[str, Tensor]  # detached, each of the loss's shape


class Range(NamedTuple):
    """Values that a hyper-parameter may have: in words, and as a test of it among all of its function."""

    words: str
    holds: Callable[[float, Mapping[str, float]], bool]


Share = Annotated[float, Range("in [0, 1]", lambda x, _: 0 <= x <= 1)]
Positive = Annotated[float, Range("> 0", lambda x, _: 0 < x < math.inf)]
Margin = Annotated[float, Range(">= 0", lambda x, _: 0 <= x < math.inf)]
Bound = Annotated[float, Range(">= 0", lambda x, _: x >= 0)]  # of a clip; infinity is none
Noise = Annotated[float, Range("in [0, 0.5)", lambda x, _: 0 <= x < 0.5)]  # share of labels that are wrong
