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
    from .replay import ReplaySource as ReplaySource
    from .replay import read_samples as read_samples
    from .replay import write_samples as write_samples
    from .sample import Request as Request
    from .sample import Sample as Sample
    from .sample import SamplingParams as SamplingParams
    from .sample import VersionSpan as VersionSpan
    from .sample import check_sample as check_sample
    from .scheduler import RolloutScheduler as RolloutScheduler
    from .source import RolloutSource as RolloutSource
    from .source import SourceError as SourceError
    from .source import SourceLost as SourceLost

__getattr__ = lazy_exports(__name__)
