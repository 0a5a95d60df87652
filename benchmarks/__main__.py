"""``burnish bench <benchmark>``, or ``python -m burnish.benchmarks <benchmark>``."""

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches

BENCHMARKS = {  # name -> module, help
    "kernels": (
        "kernels",
        "the language-model head: time, memory and error of every way to its log-probabilities",
    ),
    "divergence": (
        "divergence",
        "student and teacher heads: time, memory and error of every way to their divergence",
    ),
    "objectives": (
        "peer.objectives",
        "our objectives against the peer's own loss code on the same tensors",
    ),
    "gpu": (
        "gpu.run",
        "all of these on a GPU, as many as fit into minutes, and the figures that they are to meet",
    ),
    "loops": (
        "peer.trainers",
        "our recipe against the peer's trainer: losses, time and memory of a step",
    ),
    "memory": (
        "experiments.memory",
        "the peak of memory that `burnish plan` predicts, against that of the run",
    ),
    "ranks": ("experiments.ranks", "what planning, data and messages cost one of 64 ranks"),
    "tokens": (
        "experiments.tokens",
        "processor seconds and memory to encode preference pairs, by processes",
    ),
    "sampling": (
        "experiments.sampling",
        "processor time of a token step of the local source on a CPU, with packed weights and without",
    ),
    "startup": (
        "experiments.startup",
        "seconds until the command line answers, a one-step run, and the demo",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark named first with the arguments that follow; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:10} {line}" for name, (_, line) in BENCHMARKS.items())
        print(
            f"usage: burnish bench <benchmark> [--flag value]\n\n{lines}\n\nEach lists its flags with --help."
        )
        return 0 if arguments else 2
    if arguments[0] not in BENCHMARKS:
        nearest = get_close_matches(arguments[0], BENCHMARKS, n=1, cutoff=0.0)[0]
        print(
            f"burnish bench: no benchmark {arguments[0]!r}, did you mean {nearest!r}?",
            file=sys.stderr,
        )
        return 2
    module = f"{__package__}.{BENCHMARKS[arguments[0]][0]}"
    try:
        benchmark = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):  # the wheel has it not
            print(
                f"burnish bench {arguments[0]}: needs a checkout of the repository", file=sys.stderr
            )
            return 2
        raise
    if hasattr(benchmark, "main"):
        return int(benchmark.main(arguments[1:]))
    from .harness import main as measure

    return measure(benchmark.OPERATION, arguments[1:], benchmark.__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
