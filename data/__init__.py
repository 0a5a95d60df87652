"""Data: records -> tokens and masks -> ragged batches by step number."""

from .accounting import Accounting
from .batches import Batches, token_cost
from .encode import (
    encode_feedback,
    encode_preference,
    encode_prompts,
    encode_ranking,
    encode_scores,
    encode_steps,
    encode_supervised,
    example,
    step_example,
)
from .example import Example
from .records import DataError, Records, load
from .vocabulary import check_same_vocabulary

__all__ = [
    "Accounting",
    "Batches",
    "DataError",
    "Example",
    "Records",
    "check_same_vocabulary",
    "encode_feedback",
    "encode_preference",
    "encode_prompts",
    "encode_ranking",
    "encode_scores",
    "encode_steps",
    "encode_supervised",
    "example",
    "load",
    "step_example",
    "token_cost",
]
