"""What `burnish bench tokens` says of memory."""

import os
import sys

from burnish.benchmarks.experiments.tokens import _watched


def test_memory_is_listed_by_process_and_tenth_of_the_time_and_shared_pages_count_once() -> None:
    program = "import os, time; held = b'x' * 80_000_000; time.sleep(2); os.fork(); time.sleep(2); print('done')"
    output, memory = _watched([sys.executable, "-c", program], os.environ)
    assert output.split() == ["done"] * 2
    kinds = {
        f"{name}, {kind}" for name in ("parent", "process 1") for kind in ("resident", "private")
    }
    assert set(memory) == kinds | {"all, private"}
    assert all(len(tenths) == 10 for tenths in memory.values())
    assert memory["process 1, private"][0] == 0
    assert min(max(memory["process 1, private"]), max(memory["parent, private"])) > 76
    assert 76 < max(memory["all, private"]) < 120
