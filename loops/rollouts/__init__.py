"""Rollouts: samples of the policy, each with the weights that every token was drawn from.

sample                   one completion, its request, and the checks of both
source                   the contract of every source of completions
replay                   stored samples, a source too
local/                   a source: the trainer's own module
vllm/                    a source: vLLM, a server or in this process
scheduler, event_loops   groups for every step, of bounded staleness, none lost and none twice
"""

from typing import TYPE_CHECKING

from ...lazy import lazy_exports

if TYPE_CHECKING:
    from .replay import ReplaySource, read_samples, write_samples
    from .sample import Request, Sample, SamplingParams, VersionSpan, check_sample
    from .scheduler import Ledger, RolloutScheduler
    from .source import RolloutSource, SourceError, SourceLost

__all__ = [
    "Ledger",
    "ReplaySource",
    "Request",
    "RolloutScheduler",
    "RolloutSource",
    "Sample",
    "SamplingParams",
    "SourceError",
    "SourceLost",
    "VersionSpan",
    "check_sample",
    "read_samples",
    "write_samples",
]

__getattr__ = lazy_exports(__name__)
