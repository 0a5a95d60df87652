"""Functions that score completions.

scoring, metrics     many functions at once, what they could not score, and what a step logs. A function returns None
                     for a completion that it does not apply to, which leaves it out of the weighted sum; one that fails
                     masks the completion, which is then neither trained on nor compared with others
resolve              the names in a configuration
sandbox, trl         a process of its own; functions written for TRL
math, text, length, reasoning_gym, reward_models    the rewards that are shipped
"""

from typing import TYPE_CHECKING

from ...lazy import lazy_exports

if TYPE_CHECKING:
    from .metrics import RewardMonitor, judged, reward_metrics
    from .resolve import resolve, resolve_names
    from .sandbox import isolated
    from .scoring import RewardError, RewardFunction, batched, check_columns, judge, refuse_broken
    from .trl import from_trl

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardMonitor",
    "batched",
    "check_columns",
    "from_trl",
    "isolated",
    "judge",
    "judged",
    "refuse_broken",
    "resolve",
    "resolve_names",
    "reward_metrics",
]

__getattr__ = lazy_exports(__name__)
