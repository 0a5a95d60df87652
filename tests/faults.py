"""What checkpoints have been put to, as a table: python tests/faults.py [directory]

Of each kind of fault, how many there were, and which step the runs went on from. It ends with an error unless all ended
in the weights of an undisturbed run.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from faulty import FAULTS, outcomes


def main():
    total = 0
    print(f"{'fault':28} {'faults':>6}  went on from")
    for name in FAULTS:
        with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as directory:
            begins = Counter(begin for _, begin in outcomes(name, directory))
        total += begins.total()
        steps = ", ".join(f"step {step}: {count}" for step, count in sorted(begins.items()))
        print(f"{name:28} {begins.total():6}  {steps}", flush=True)
    print(f"{total} faults; all ended in the weights of an undisturbed run")


if __name__ == "__main__":
    main()
