"""What the tests of online recipes share: a small model on disk, prompts, judges, and runs that
stop in the middle.

Run on its own, with the fields of `GRPO` as JSON, it is one rank of several.
"""

import itertools
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
from accelerate.state import AcceleratorState
from burnish.loops.environments import Limits, Step
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rl.settings import VLLM
from tiny import save_model, sums, write_rows

_starts = itertools.count()


def even(row, sample):
    """The share of even token ids: every random model knows how to do better."""
    return sum(token % 2 == 0 for token in sample.tokens) / len(sample.tokens)


def alike(row, sample):
    return 1.0


def told(row, samples):
    """A prompt about each completion that has an even token, with its share of them in it."""
    asked = row["messages"][0]["content"]
    shares = [even(row, sample) for sample in samples]
    return [
        [{"role": "user", "content": f"{share:.1f} was right. {asked}"}] if share else None
        for share in shares
    ]


def unknown(row, sample):
    """Nothing is known but of one completion, which is compared with none."""
    return 1.0 if (sample.task, sample.index) == (0, 0) else None


def alike_in_the_end(row, sample):
    """All of a group the same from the third rollout of four prompts on."""
    return even(row, sample) if sample.task < 8 else 1.0


def worst_first(history):
    """Rows whose completions have the fewest even tokens; the main process alone may call it."""
    assert os.environ.get("RANK", "0") == "0"
    return np.argsort(np.nan_to_num(history.reward, nan=0.5), kind="stable")


class Echo:
    """An environment that goes on for ever, and likes even tokens."""

    def reset(self, row):
        return row["prompt"]

    def step(self, answer):
        return Step("and?", reward=even({}, answer))


class Elsewhere(Echo):
    """Every conversation begins somewhere else."""

    def reset(self, row):
        return f"from {next(_starts)}"


def prepare(directory):
    """Fields of a configuration that names a model and data in this directory."""
    model = save_model(directory / "start")
    rows = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in sums(20)]
    return {
        "model": str(model),
        "data": str(write_rows(directory / "prompts.jsonl", rows)),
        "rewards": {"online:even": 1.0},
        "prompts_per_rollout": 4,
        "group_size": 4,
        "max_tokens": 6,
        "steps": 2,
        "learning_rate": 1e-3,
        "show_every": 0,
    }


def under_torchrun(count, fields, timeout):
    """The process of ``fields`` on so many ranks over gloo, after its end."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={count}",
        __file__,
    ]
    places = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path]))
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": places}
    return subprocess.run(
        [*command, json.dumps(fields)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def stored(directory):
    return [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """In place of SIGKILL, so that many deaths fit into one process."""


@contextmanager
def dying_in_step(number):
    """The process dies when the answers of this step (from 1) are drawn and written, and it has not
    been taken.
    """
    module = sys.modules["burnish.loops.train.step"]  # the package has a function of that name
    step, taken = module.train_step, 0

    def die(*arguments, **options):
        nonlocal taken
        taken += 1
        if taken == number:
            raise Killed
        return step(*arguments, **options)

    with patch.object(module, "train_step", die):
        yield


class Loaded:
    """A reward that leaves a note of where it was made: the rank, the device, and whether the run
    was open by then.
    """

    def __init__(self, note, device):
        state = AcceleratorState._shared_state
        Path(f"{note}-{os.environ.get('RANK', '0')}.txt").write_text(
            f"{device} {'device' in state}"
        )

    def __call__(self, row, sample):
        return even(row, sample)


def be_rank(fields):
    """Train as one rank of several; what ends it is written beside the run's directory, too."""
    fields["vllm"] = VLLM(**fields.pop("vllm", {}))
    fields["limits"] = Limits(**fields.pop("limits", {}))
    try:
        with patch("burnish.loops.runs.training.draw_curves"):
            training = open_grpo(GRPO(**fields))
            training.train()
    except Exception as error:
        Path(f"{fields['output']}-rank{os.environ['RANK']}.txt").write_text(str(error))
        raise
    curriculum = training.feed.context.curriculum
    if curriculum is not None:
        Path(f"{fields['output']}-rows{os.environ['RANK']}.json").write_text(
            json.dumps(curriculum.rows)
        )


if __name__ == "__main__":
    be_rank(json.loads(sys.argv[1]))
