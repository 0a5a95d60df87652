"""What one process of a test session makes, and all of them use."""

import os

from filelock import FileLock


def made_once(tmp_path_factory, name, make):
    """The folder of this name, filled by ``make(folder)`` in the first process of the session that asks for it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with FileLock(root / f"{name}.lock"):
        if not (root / name).exists():
            unfinished = tmp_path_factory.mktemp(name)
            make(unfinished)
            unfinished.rename(root / name)
    return root / name
