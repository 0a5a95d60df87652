"""A GRPO run whose server fails at one request, which may be any: it ends as if it had not, or by a
message.
"""

import itertools
import json
import os
from pathlib import Path
from unittest.mock import patch

from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rl.settings import VLLM
from burnish.loops.rollouts.source import SourceError
from killed import assert_undisturbed
from online import prepare
from transformers import AutoTokenizer
from vllm_fake import Fake, error

TIMEOUT, PATIENCE = 0.7, 20.0

# What is answered instead: (status, JSON or text); without a status the connection is closed after
# so many seconds.
FAILURES = {
    "a server that dies and comes back without weights": (None, 0.001),
    "a server that is slow": (None, 3 * TIMEOUT),
    "a server that answers status 500": error(500, "it is out of memory"),
    "a server that answers status 429": error(429, "it is busy"),
    "a server that answers a page": (200, "<html>Bad gateway</html>"),
    "a server that answers other JSON": (200, {"other": "thing"}),
}


class Failing(Fake):
    """Attributes:
    number: of the request, counted from 1, that fails.
    """

    number, failure = 0, None

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.paths_asked, self.counter = [], itertools.count(1)

    def answer(self, method, path, body):
        self.paths_asked.append(path)
        if next(self.counter) != self.number:
            return super().answer(method, path, body)
        if self.failure == FAILURES["a server that dies and comes back without weights"]:
            self.label, self.active, self.paused, self.adapters = "default", False, False, []
        return self.failure


def train(fields, failure=None, number=0, **changes):
    """The paths that the server was asked for; raises what ends the run."""
    server = Failing(AutoTokenizer.from_pretrained(fields["model"]))
    server.root, server.config["model_config"]["max_model_len"] = fields["model"], 256
    server.failure, server.number = failure, number
    vllm = VLLM(url=server.url, timeout=TIMEOUT, patience=PATIENCE)
    fields = {**fields, "max_logp_difference": float("inf")}  # the stand-in's log-probs are made up
    try:
        open_grpo(GRPO(**{**fields, **changes, "source": "vllm", "vllm": vllm})).train()
    finally:
        server.close()
    return server.paths_asked


def be_rank(name, every, directory):
    """Print, for every so-many-th request that fails in this way, its path and how the run
    ended.
    """
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    fields = {
        **prepare(Path(directory)),
        "prompts_per_rollout": 2,
        "group_size": 2,
        "steps": 3,
        "save_every": 1,
    }
    undisturbed = str(Path(directory, "run-undisturbed"))
    outcomes = []
    with patch("burnish.loops.runs.training.draw_curves"):
        paths = train({**fields, "output": undisturbed})
        for number in range(1, len(paths) + 1, every):
            output = str(Path(directory, f"run{number}"))
            Path(f"{output}-undisturbed").symlink_to(undisturbed)
            config, ended = {**fields, "output": output}, "the same bits"
            try:
                train(config, FAILURES[name], number)
            except (SourceError, ValueError) as refusal:
                assert str(refusal).startswith("vllm: "), refusal
                ended = "a message, and the same bits resumed"
                train(config, resume=True)
            assert_undisturbed(config)
            outcomes.append([paths[number - 1], ended])
    print(json.dumps(outcomes))
