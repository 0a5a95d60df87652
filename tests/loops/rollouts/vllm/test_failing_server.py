"""A server that fails at any one of its requests: the run ends as if it had not, or by a message,
and goes on.
"""

import json

import pytest
from forked import run_forked
from grids import slow
from served import FAILURES

DIES, *REST = FAILURES  # at every third request in tests/faults.py


@pytest.mark.parametrize(
    ("name", "every"), [(DIES, 9), slow(DIES, 5), *(slow(name, 7) for name in REST)]
)
def test_a_run_ends_with_the_same_bits_whatever_request_fails(name, every, tmp_path):
    ((status, printed),) = run_forked(1, "served", name, every, str(tmp_path))
    assert status == 0, printed[-3000:]
    paths = [path for path, _ in json.loads(printed.splitlines()[-1])]
    assert len(paths) >= 30 / every and "/inference/v1/generate" in paths
