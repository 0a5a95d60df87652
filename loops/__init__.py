"""Losses into optimizer steps: the only room that knows models, ranks, devices and disks.

batch               what objectives see
models/             rows, hidden states, log-probs and scores of Hugging Face models
train/              named losses over one forward pass; one step, and the generator of steps
runs/               an open run (`RunContext`): its directory, data, reference, teacher, checkpoints
rollouts/           completions that the policy samples, by itself or on a vLLM server; the scheduler of a trainer
rewards/            functions that score completions; one table of scores per rollout
environments/       multi-turn environments
rl/                 rollout buffer, the context of online runs, and what policy-gradient recipes share
recipes/            settings, losses and, online, advantages: copy one and edit it
config, cli         settings checked by their types; the command
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .batch import Batch, collate
    from .models.backbone import Rows, arrange
    from .models.policy import Policy
    from .models.scorer import Scorer
    from .rewards.scoring import RewardFunction
    from .rewards.table import RewardTable, score
    from .rl.buffer import RolloutBuffer
    from .rl.context import RLContext, open_rl
    from .rollouts.local.source import DetachedSource, LocalSource
    from .rollouts.sample import Sample, SamplingParams
    from .rollouts.scheduler import RolloutScheduler
    from .rollouts.vllm.server import VLLMServer
    from .rollouts.vllm.weights import Adapters, Files
    from .runs.context import RunContext, open_run
    from .runs.ranks import from_main
    from .runs.reference import adapters_off, frozen_copy
    from .train.losses import Term, compose, policy_tensors, score_tensors, weightings
    from .train.step import Objective, StepResult, evaluate, optimize, train_step
    from .train.weighting import Weights, completion_mean, fixed_length, pair_mean, sequence_mean, token_mean, weighted

__all__ = [
    "Adapters",
    "Batch",
    "DetachedSource",
    "Files",
    "LocalSource",
    "Objective",
    "Policy",
    "RLContext",
    "RewardFunction",
    "RewardTable",
    "RolloutBuffer",
    "RolloutScheduler",
    "Rows",
    "RunContext",
    "Sample",
    "SamplingParams",
    "Scorer",
    "StepResult",
    "Term",
    "VLLMServer",
    "Weights",
    "adapters_off",
    "arrange",
    "collate",
    "completion_mean",
    "compose",
    "evaluate",
    "fixed_length",
    "from_main",
    "frozen_copy",
    "open_rl",
    "open_run",
    "optimize",
    "pair_mean",
    "policy_tensors",
    "score",
    "score_tensors",
    "sequence_mean",
    "token_mean",
    "train_step",
    "weighted",
    "weightings",
]

__getattr__ = lazy_exports(__name__)
