"""Functions that judge answers.

judge, statistics    many functions at once, what they could not score, and what a step logs
resolve              the names in a configuration
isolated, trl        a process of its own; functions written for TRL
equivalence, text, length, reasoning, models    what is shipped
"""

from .isolated import isolated
from .judge import Weighted, batched, check_columns, judge
from .resolve import resolve, resolve_names
from .statistics import Watch, judged, reward_metrics
from .trl import from_trl

__all__ = [
    "Watch",
    "Weighted",
    "batched",
    "check_columns",
    "from_trl",
    "isolated",
    "judge",
    "judged",
    "resolve",
    "resolve_names",
    "reward_metrics",
]
