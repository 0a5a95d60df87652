"""What one process of a test session makes, and all of them use."""

import json
import os

from filelock import FileLock
from forked import run_forked


def made_once(tmp_path_factory, name, make):
    """The folder of this name, filled by ``make(folder)`` in the first process of the session that
    asks for it.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with FileLock(root / f"{name}.lock"):
        if not (root / name).exists():
            unfinished = tmp_path_factory.mktemp(name)
            make(unfinished)
            unfinished.rename(root / name)
    return root / name


def found_by_ranks(tmp_path_factory, ranks, module, *names):
    """What so many ranks write that call ``module.be_rank(file, *names)``, once for all tests."""

    def make(folder):
        outcomes = run_forked(ranks, module, str(folder / "results.json"), *names)
        assert all(status == 0 for status, _ in outcomes), outcomes[0][1][-3000:]

    return json.loads(
        (
            made_once(tmp_path_factory, "-".join([module, *(each[0] for each in names)]), make)
            / "results.json"
        ).read_text()
    )
