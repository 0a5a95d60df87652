"""Data: records -> tokens and masks -> ragged batches by step number."""

from .accounting import Accounting
from .batches import Batches, token_cost
from .encode import encode_preference, encode_supervised, example
from .example import Example
from .records import DataError, Records, load

__all__ = [
    "Accounting",
    "Batches",
    "DataError",
    "Example",
    "Records",
    "encode_preference",
    "encode_supervised",
    "example",
    "load",
    "token_cost",
]
