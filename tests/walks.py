"""Print which files and functions of the library a reader meets who follows one tensor.

    python tests/walks.py       both walks, a line for each file with the functions that ran in it

A DPO micro-batch is followed through `train_step`; a GRPO sample from the request for a rollout
until `train_step` begins, where the policy's own module samples. Counted are functions, methods and
properties, but not comprehensions and lambdas, in the second step, when caches are filled. Helpers
of arguments and dtypes count as much as the rest.
"""

import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import burnish

ROOT = Path(burnish.__file__).parent
ROOMS = ("objectives", "kernels", "data", "loops")


@contextmanager
def followed(met):
    """Add the library's functions that are called meanwhile, in any thread, to ``met``: {file:
    {function}}.
    """

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if (
            event == "call"
            and path.is_relative_to(ROOT)
            and not frame.f_code.co_name.startswith("<")
        ):
            path = path.relative_to(ROOT)
            if path.parts[0] in ROOMS:
                met[str(path)].add(frame.f_code.co_qualname)

    threading.setprofile(note)  # of threads that begin from now on
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def second_call(function, met):
    """The function, whose second call is followed."""
    calls = []

    def call(*arguments, **named):
        calls.append(1)
        if len(calls) != 2:
            return function(*arguments, **named)
        with followed(met):
            return function(*arguments, **named)

    return call


def dpo(directory):
    from burnish.loops.recipes.preference import open_dpo
    from burnish.loops.recipes.settings import DPO
    from burnish.loops.train import step
    from tiny import save_model, sums, write_rows

    met = defaultdict(set)
    model, data = save_model(directory / "start"), write_rows(directory / "pairs.jsonl", sums(8))
    training = open_dpo(
        DPO(model=str(model), data=str(data), output=str(directory / "run"), batch_size=4, steps=2)
    )
    with patch.object(step, "train_step", second_call(step.train_step, met)):
        training.train()
    return met


def grpo(directory):
    from burnish.loops.recipes.grpo import open_grpo
    from burnish.loops.recipes.settings import GRPO
    from burnish.loops.rl.feed import RolloutFeed
    from online import prepare

    met = defaultdict(set)
    training = open_grpo(
        GRPO(**{**prepare(directory), "output": str(directory / "run"), "steps": 2})
    )
    with patch.object(RolloutFeed, "__call__", second_call(RolloutFeed.__call__, met)):
        training.train()
    return met


if __name__ == "__main__":
    sys.path.extend(map(str, (Path(__file__).parent / "support").iterdir()))
    for walk in (dpo, grpo):
        with tempfile.TemporaryDirectory() as name:
            met = walk(Path(name))
        print(f"\n{walk.__name__}: {len(met)} files, {sum(map(len, met.values()))} functions")
        for path, functions in sorted(met.items()):
            print(f"  {path:36} {len(functions):3}  {', '.join(sorted(functions))}")
