"""Functions that judge answers.

judge, statistics    many functions at once, what they could not score, and what a step logs. A function returns None
                     for an answer that it does not apply to, which leaves it out of the weighted sum; one that fails
                     masks the answer, which is then neither trained on nor compared with others
resolve              the names in a configuration
isolated, trl        a process of its own; functions written for TRL
equivalence, text, length, reasoning, models    what is shipped
"""

from .isolated import isolated
from .metrics import RewardMonitor, judged, reward_metrics
from .resolve import resolve, resolve_names
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
