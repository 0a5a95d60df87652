"""Rollouts: completions that a policy samples, and the versions of the weights that sampled each token.

sample, source           a completion, a request, and the contract of every source
local/                   the trainer's own module samples
vllm/                    vLLM over HTTP, or in this process
replay, record           stored samples
scheduler, event_loops   groups for every step, of bounded age, none lost and none twice
"""

from typing import TYPE_CHECKING

from ...lazy import lazy_exports

if TYPE_CHECKING:
    from .local.source import DetachedSource, LocalSource
    from .replay import ReplaySource, SampleWriter, read_samples
    from .sample import Request, Sample, SamplingParams, VersionSpan, check_sample
    from .scheduler import Ledger, RolloutScheduler
    from .source import RolloutSource, SourceError, SourceLost
    from .vllm.engine import VLLMEngine, start_engine
    from .vllm.launch import launch
    from .vllm.server import VLLMServer
    from .vllm.weights import Adapters, Files, Nccl

__all__ = [
    "Adapters",
    "DetachedSource",
    "Files",
    "Ledger",
    "LocalSource",
    "Nccl",
    "ReplaySource",
    "Request",
    "RolloutScheduler",
    "RolloutSource",
    "Sample",
    "SampleWriter",
    "SamplingParams",
    "SourceError",
    "SourceLost",
    "VLLMEngine",
    "VLLMServer",
    "VersionSpan",
    "check_sample",
    "launch",
    "read_samples",
    "start_engine",
]

__getattr__ = lazy_exports(__name__)
