"""Hashes of what rows say: rows with one hash say the same, and show the same images."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from .columns import IMAGE_COLUMNS, LAYOUT_COLUMNS
from .images import ImageError, ImageRef, digest_of, found, reference
from .records import Records

# What tells an image of a folder from others, such as its name or its digest.
Identity: TypeAlias = Callable[[ImageRef, str], object]


def row_hashes(records: Records, seed: int, identity: Identity) -> npt.NDArray[np.uint64]:
    """A hash of what each row says, in the columns that recipes read; of all if it has none.

    Args:
        identity: what an image counts as.
    """
    dataset = records.dataset
    known = LAYOUT_COLUMNS.union(IMAGE_COLUMNS)
    names = [name for name in dataset.column_names if name in known]
    read = dataset.select_columns(names or dataset.column_names)
    hashes = bytearray()
    for rows in _batches(read):
        columns = []
        for name, column in rows.items():
            columns.append([_said(name, value, records.folder, identity) for value in column])
        for values in zip(*columns, strict=True):
            # half a pair of surrogates, which JSON may have, is no UTF-8
            text = repr((seed, values)).encode(errors="surrogatepass")
            hashes += hashlib.blake2b(text, digest_size=8).digest()
    return np.frombuffer(bytes(hashes), dtype="<u8")


def _batches(dataset: Dataset) -> Iterator[dict[str, list[object]]]:
    """The columns of a thousand rows at a time."""
    # the type of values that are of several types, such as parts of text and of images
    if "Json(" in str(dataset.features):
        yield from dataset.iter(1000)
        return
    # Arrow's own conversion: `datasets` decodes the features of each row, which takes longer
    for rows in dataset.with_format("arrow").iter(1000):
        yield rows.to_pydict()


def by_name(image: ImageRef, folder: str) -> object:
    """The name of a file as the row has it, which stays where all is moved to another folder."""
    return digest_of(image.content) if image.content is not None else image.path


def by_size(image: ImageRef, folder: str) -> object:
    """The bytes of its file: those of one image are as many wherever it is."""
    if image.content is not None:
        return len(image.content)
    path = os.path.join(folder, image.path)
    return os.path.getsize(path) if os.path.isfile(path) else path


def by_digest(image: ImageRef, folder: str) -> object:
    """The digest of its file, which is read."""
    if image.content is not None:
        return digest_of(image.content)
    try:
        return found(image, folder).digest
    except ImageError:  # there is no such file, which is told of when the row is read
        return os.path.join(folder, image.path)


def _said(column: str, value: object, folder: str, identity: Identity) -> object:
    """The value of a column, with what tells them from others in place of its images."""
    if column in IMAGE_COLUMNS:
        several = value if isinstance(value, list) else [value]
        return [_identified(image, folder, identity) for image in several]
    if not isinstance(value, list):
        return value
    return [_message(each, folder, identity) for each in value]


def _message(message: object, folder: str, identity: Identity) -> object:
    """A message of a conversation, with its images likewise; any other value as it is."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = [_part(part, folder, identity) for part in message["content"]]
    return {**message, "content": parts}


def _part(part: object, folder: str, identity: Identity) -> object:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
        return part
    named = [value for name, value in part.items() if name != "type" and value is not None]
    return ["image", *(_identified(image, folder, identity) for image in named)]


def _identified(image: object, folder: str, identity: Identity) -> object:
    try:
        return identity(reference(image), folder)
    except ImageError:
        return image
