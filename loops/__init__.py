"""Losses into optimizer steps: the only room that knows models, ranks, devices and disks.

batch, rows         what objectives see, and what the model is given
backbone, scorer    hidden states of a Hugging Face model; scores of answers and of steps
head, policy        log-probs of its fused head
terms               named losses over one forward pass: composition
weights, optimize   a loss is a dot product; one step; the generator of steps
reference, teacher  log-probs of the frozen reference policy; what a teacher says
checkpoint, run     whole or not there; the run directory
model, feed         models and data in and out
rollouts/, rewards/, environments/    answers that the policy samples, their judges, and what answers back
experience          from sampled answers to micro-batches
recipe              what recipes share: sft, dpo, kto, cpo, reward, prm, distill; copy and edit
online, surrogate   what those share that sample: grpo (and rloo), ppo, online_dpo
config, command     fields, YAML and flags
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .batch import Batch, collate
    from .models.inputs import Rows, arrange
    from .models.policy import Policy
    from .models.scorer import Scorer
    from .runs.reference import adapters_off, frozen_copy
    from .train.losses import Term, compose, policy_tensors, score_tensors, weightings
    from .train.step import Objective, Step, evaluate, optimize, train_step
    from .train.weighting import Weights, completion_mean, fixed_length, pair_mean, sequence_mean, token_mean, weighted

__all__ = [
    "Batch",
    "Objective",
    "Policy",
    "Rows",
    "Scorer",
    "Step",
    "Term",
    "Weights",
    "adapters_off",
    "arrange",
    "collate",
    "completion_mean",
    "compose",
    "evaluate",
    "fixed_length",
    "frozen_copy",
    "optimize",
    "pair_mean",
    "policy_tensors",
    "score_tensors",
    "sequence_mean",
    "token_mean",
    "train_step",
    "weighted",
    "weightings",
]

__getattr__ = lazy_exports(__name__)
