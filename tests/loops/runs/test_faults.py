"""A fault at each call of a save, and in each file of a checkpoint: runs go on to the weights of an undisturbed one.

``python tests/faults.py`` runs the same, and prints a table.
"""

import pytest
from faulty import FAULTS, outcomes
from grids import slow

# Faults of each kind, at least: a call more in a save is one fault more.
COUNTS = {"one process": 30, "rank 0 of 2": 20, "rank 1 of 2": 10, "two ranks": 60}
QUICK = ("ENOSPC, one process", "damaged files, one process")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in FAULTS])
def test_a_run_goes_on_to_the_same_weights_after_every_fault(name, tmp_path):
    begins = [begin for _, begin in outcomes(name, tmp_path)]
    assert len(begins) >= COUNTS[name.split(", ")[1]] and begins.count(2) > len(begins) / 2
