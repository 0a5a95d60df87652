"""The numbers of samples in few bytes: token ids as int32, log-probs as float32, masks as bits.

In Python's lists a token takes 80 bytes, in these 8 and a bit. Numbers that 32 bits don't hold
exactly stay in 64: a sample is recorded and trained on as it came.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

T = TypeVar("T")


class Packed(Sequence[T]):
    """Numbers in an array, which read like a list: by index, slice and iteration they are Python's.

    It equals a list of the same numbers, and what is added to it makes one; it can't be changed.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    @property
    def array(self) -> npt.NDArray[Any]:
        return self._array

    def tolist(self) -> list[T]:
        numbers: list[T] = self.array.tolist()
        return numbers

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        numbers: T | list[T] = self.array[index].tolist()
        return numbers

    def __iter__(self) -> Iterator[T]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | Packed):
            return NotImplemented
        return self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(self.tolist())


class PackedMask(Packed[bool]):
    """Booleans as bits."""

    def __init__(self, array: npt.NDArray[np.bool_]) -> None:
        super().__init__(np.packbits(array))
        self._length = len(array)

    @property
    def array(self) -> npt.NDArray[np.bool_]:
        return np.unpackbits(self._array, count=self._length).astype(np.bool_)

    def __len__(self) -> int:
        return self._length


def tokens_array(tokens: Sequence[int]) -> npt.NDArray[Any]:
    """int32, or int64 where it must be."""
    return _array(tokens, np.int64, np.int32)


def logprobs_array(logprobs: Sequence[float]) -> npt.NDArray[Any]:
    """float32, or float64 where it must be."""
    return _array(logprobs, np.float64, np.float32)


def mask_array(trained: Sequence[bool]) -> npt.NDArray[np.bool_]:
    """One byte for each."""
    if isinstance(trained, Packed):
        return trained.array
    return np.array(trained, dtype=np.bool_)


def _array(numbers: Sequence[float], wide: type, narrow: type) -> npt.NDArray[Any]:
    if isinstance(numbers, Packed):
        return numbers.array
    exact: npt.NDArray[Any] = np.array(numbers, dtype=wide)
    with np.errstate(over="ignore"):  # beyond float32 it is infinite, and so another number
        rounded: npt.NDArray[Any] = exact.astype(narrow)
    return rounded if np.array_equal(rounded, exact) else exact
