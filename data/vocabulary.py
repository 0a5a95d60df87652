"""Whether two tokenizers have the same vocabulary, so that their models' probabilities are of the same tokens."""

from typing import TYPE_CHECKING

from .records import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_same_vocabulary(student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase") -> None:
    """Refuse a teacher whose tokens are not the student's.

    Only ids that both have are compared: what one of them has beyond, and rows that pad an embedding, are no token of
    the other's.

    Raises:
        DataError: naming the first id that stands for different tokens.
    """
    ours, theirs = ({index: token for token, index in one.get_vocab().items()} for one in (student, teacher))
    for index in sorted(ours.keys() & theirs.keys()):
        if ours[index] != theirs[index]:
            raise DataError(
                f"teacher: token {index} is {theirs[index]!r}, and {ours[index]!r} for the student, so their "
                "probabilities are of different things; choose a teacher and a student that share a tokenizer"
            )
