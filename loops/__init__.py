"""From losses to optimizer steps: the only package that knows models, ranks, devices and disks.

batch               what objectives see
models/             rows, hidden states, log-probs and scores of Hugging Face models
train/              named losses over one forward pass; one step, and the generator of steps
runs/               an open run (`RunContext`): its directory, data, reference, teacher, checkpoints,
                    steps (`Training`)
rollouts/           completions that the policy samples, by itself or on a vLLM server; the scheduler
                    of a trainer
rewards/            functions that score completions; one table of scores per rollout
environments/       multi-turn environments
agents/             agents that ask the policy over OpenAI's Chat Completions
rl/                 rollout buffer, the context of online runs, and what policy-gradient recipes
                    share
recipes/            settings, losses and, online, advantages: copy one and edit it
config, cli, api    settings checked by their types; the command, and the recipes as functions,
                    `burnish.dpo` and others
"""

# ruff: noqa: I001 - "name as name" is how a typed package exports a name; sorted, each would be a
# statement of its own
from typing import TYPE_CHECKING

from ..lazy import lazy_exports
from .quiet import hold_back

if TYPE_CHECKING:
    from .batch import Batch as Batch, collate as collate
    from .models.policy import Policy as Policy
    from .models.rows import Rows as Rows, arrange as arrange
    from .models.scorer import Scorer as Scorer
    from .rewards.scoring import RewardFunction as RewardFunction
    from .rewards.table import RewardTable as RewardTable, score as score
    from .rl.buffer import RolloutBuffer as RolloutBuffer
    from .rl.context import RLContext as RLContext, open_rl as open_rl
    from .rollouts.local.source import DetachedSource as DetachedSource, LocalSource as LocalSource
    from .rollouts.sample import Sample as Sample, SamplingParams as SamplingParams
    from .rollouts.scheduler import RolloutScheduler as RolloutScheduler
    from .rollouts.vllm.server import VLLMServer as VLLMServer
    from .rollouts.vllm.weights import Adapters as Adapters, Files as Files
    from .runs.context import RunContext as RunContext, open_run as open_run
    from .runs.ranks import from_main as from_main
    from .runs.reference import adapters_off as adapters_off, frozen_copy as frozen_copy
    from .runs.stop import Stopped as Stopped
    from .runs.training import Training as Training
    from .train.losses import Term as Term, compose as compose, policy_tensors as policy_tensors
    from .train.losses import score_tensors as score_tensors, weightings as weightings
    from .train.step import Objective as Objective, StepResult as StepResult, evaluate as evaluate
    from .train.step import optimize as optimize, train_step as train_step
    from .batch import (
        Weights as Weights,
        completion_mean as completion_mean,
        fixed_length as fixed_length,
    )
    from .batch import (
        length_normalized as length_normalized,
        pair_mean as pair_mean,
        token_mean as token_mean,
    )
    from .batch import weighted as weighted

hold_back()  # before anything imports peft
__getattr__ = lazy_exports(__name__)
