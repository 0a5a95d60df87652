"""The shapes objectives speak of. The test suite has jaxtyping enforce them; at run time they cost nothing."""

from jaxtyping import Float, Int
from torch import Tensor

PerToken = Float[Tensor, "*tokens"]  # token objectives are elementwise: any shape, usually flat [tokens]
PerSequence = Float[Tensor, " sequences"]
PerPair = Float[Tensor, " pairs"]

FlatTokens = Float[Tensor, " tokens"]  # one entry per trained token, the sequences one after the other
SequenceIds = Int[Tensor, " tokens"]  # int64, sorted: the sequence each token belongs to
SequenceLengths = Int[Tensor, " sequences"]  # int64, in trained tokens

Stats = dict[str, Tensor]  # detached, each of the loss's shape
