"""Files of JSON lines, read though some lines are damaged: no log may keep a run from going on."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_LONGEST = 64 << 20  # bytes of a line; what is longer is damaged, and is not read at once


def parse(line: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        ValueError: if it is none.
    """
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"wanted a JSON object, got {type(value).__name__}")
    return value


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, one at a time, without half a line at the end: its writer was killed."""
    with path.open("rb") as file:
        while line := file.readline(_LONGEST):
            # too long is damaged, which `sift` has to see
            if line.endswith(b"\n") or len(line) == _LONGEST:
                yield line


def sift(path: Path, keep: Callable[[bytes], bool]) -> int:
    """Rewrite a file with the lines that are kept, and add unreadable ones to ``<name>.damaged``.

    A file that is not there is left so, and what can't be read at all, such as a directory of this
    name, is moved out of the way.

    Args:
        keep: called with each line; returns whether it stays, and raises ValueError if it is
            unreadable.

    Returns:
        The number of unreadable lines, or 1 for a file that can't be read.
    """
    if not os.path.lexists(path):
        return 0
    partial = path.with_suffix(".partial")
    damaged: list[bytes] = []
    count = 0
    try:
        lines = lines_of(path)
        with partial.open("wb") as whole:
            for line in lines:
                try:
                    kept = keep(line)
                except ValueError:
                    damaged.append(line)
                    count += 1
                    if len(damaged) == 1000:  # memory is bounded, whatever the file is
                        _set_aside(path, damaged)
                else:
                    if kept:
                        whole.write(line)
            # on the disk before the old file is replaced
            whole.flush()
            os.fsync(whole.fileno())
    except (IsADirectoryError, PermissionError):
        partial.unlink(missing_ok=True)
        move_aside(path)
        return 1
    _set_aside(path, damaged)
    partial.replace(path)
    return count


def damaged_of(path: Path) -> Path:
    """The file that unreadable lines of a file are moved to."""
    return path.with_name(f"{path.name}.damaged")


def move_aside(path: Path) -> Path:
    """Move a file that can't be read to a free place, and return that."""
    place = _free(path)
    path.rename(place)
    return place


def _set_aside(path: Path, damaged: list[bytes]) -> None:
    """Add lines to the file of damaged ones, and empty the list."""
    if damaged:
        with damaged_of(path).open("ab") as file:
            file.writelines(damaged)
    damaged.clear()


def _free(path: Path) -> Path:
    """A name for a file that is moved out of the way."""
    place, number = damaged_of(path), 1
    while os.path.lexists(place):
        number += 1
        place = path.with_name(f"{path.name}.damaged-{number}")
    return place
