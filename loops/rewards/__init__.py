"""Functions that score completions.

scoring      many functions at once, and what they could not score. A function returns None for a completion that it
             does not apply to, which leaves it out of the weighted sum; one that fails masks the completion, which is
             then neither trained on nor compared with others
table        the scores of a rollout, what a step logs of them, and warnings about degenerate ones
resolve      the names in a configuration
sandbox, trl                                       a process of its own; functions written for TRL
math, text, length, reasoning_gym, reward_models   the rewards that are shipped
"""

from typing import TYPE_CHECKING

from ...lazy import lazy_exports

if TYPE_CHECKING:
    from .resolve import resolve_names, resolve_rewards
    from .sandbox import isolated
    from .scoring import RewardError, RewardFunction, batched, check_columns, refuse_broken, score_samples
    from .table import RewardMonitor, RewardTable, reward_metrics, reward_table, score
    from .trl import from_trl

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardMonitor",
    "RewardTable",
    "batched",
    "check_columns",
    "from_trl",
    "isolated",
    "refuse_broken",
    "resolve_names",
    "resolve_rewards",
    "reward_metrics",
    "reward_table",
    "score",
    "score_samples",
]  # fmt: skip

__getattr__ = lazy_exports(__name__)
