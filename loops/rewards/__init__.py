"""Functions that score completions. A reward of your own, in a file of the working directory,
my_rewards.py:

    def right(completion, answer):
        return float(completion.strip() == answer)

    class Short:
        def __init__(self, longest=100):
            self.longest = longest

        def __call__(self, row, sample):
            return min(0.0, self.longest - len(sample.tokens)) / self.longest

and in the configuration:
``rewards: {my_rewards:right: 1.0, my_rewards:Short: {weight: 0.1, longest: 50}}``. Parameters are
passed by name: ``completion`` is the text, and others are columns of the data; or as
``(row, sample)`` by position, where `Sample` has tokens, text and the reason it ended; both are
copies. A function of TRL, ``(completions, **columns)``, works too. The score is a number, the
higher the better; None where the function does not apply. A call that raises, exceeds its
``timeout``, or returns anything else masks the completion; a first rollout of nothing but failures,
or without any score, ends the run. See docs/rewards-and-environments.md.

scoring      many functions at once, and their failures
table        the scores of a rollout, what a step logs of them, and warnings about degenerate ones
resolve      the names in a configuration
isolation    a process of its own
watchdog     a process that names a reward which stops the run
math, text, code, length, reasoning_gym, reward_models   the rewards that are shipped
"""

# ruff: noqa: I001 - "name as name" is how a typed package exports a name
from typing import TYPE_CHECKING

from ...lazy import lazy_exports

if TYPE_CHECKING:
    from .resolve import resolve_rewards as resolve_rewards
    from .isolation import isolated as isolated
    from .scoring import RewardFunction as RewardFunction, batched as batched
    from .scoring import (
        check_columns as check_columns,
        refuse_broken as refuse_broken,
        score_samples as score_samples,
    )
    from .table import (
        RewardMonitor as RewardMonitor,
        RewardTable as RewardTable,
        reward_metrics as reward_metrics,
    )
    from .table import score as score

__getattr__ = lazy_exports(__name__)
