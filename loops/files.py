"""Files that are there whole, or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside this one to write to, which takes its name when the block ends well."""
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    partial.replace(path)
