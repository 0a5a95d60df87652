"""``burnish bench <benchmark>``, or ``python -m burnish.benchmarks <benchmark>``."""

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches

LINES = {
    "kernels": "the language-model head: time, memory and error of every way to its log-probabilities",
    "divergence": "student and teacher heads: time, memory and error of every way to their divergence",
    "objectives": "our objectives against the peer's own loss code on the same tensors",
    "gpu": "all of these on a GPU, as many as fit into minutes, and the figures that they are to meet",
    "loops": "our recipe against the peer's trainer: losses, time and memory of a step",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The benchmark named first, with the arguments that follow; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:10} {line}" for name, line in LINES.items())
        print(f"usage: burnish bench <benchmark> [--flag value]\n\n{lines}\n\nEach lists its flags with --help.")
        return 0 if given else 2
    if given[0] not in LINES:
        nearest = get_close_matches(given[0], LINES, n=1, cutoff=0.0)[0]
        print(f"burnish bench: no benchmark {given[0]!r}, did you mean {nearest!r}?", file=sys.stderr)
        return 2
    benchmark = importlib.import_module(f".{given[0]}", __package__)
    return int(benchmark.main(given[1:]))


if __name__ == "__main__":
    raise SystemExit(main())
