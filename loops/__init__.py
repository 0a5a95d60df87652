"""Losses into optimizer steps: the only room that knows models, ranks, devices and disks.

batch, rows         what objectives see, and what the model is given
head, policy        a Hugging Face model with a fused head
weights, optimize   a loss is a dot product; one step; the generator of steps
reference           log-probs of the frozen reference policy
checkpoint, run     whole or not there; the run directory
model, feed         models and data in and out
recipe, sft, dpo    what the command line runs; copy and edit
config, command     fields, YAML and flags
"""

from .batch import Batch, collate
from .optimize import Objective, Step, evaluate, optimize, train_step
from .policy import Policy
from .reference import adapters_off, frozen_copy
from .rows import Rows, arrange
from .weights import Weights, fixed_length, pair_mean, sequence_mean, token_mean

__all__ = [
    "Batch",
    "Objective",
    "Policy",
    "Rows",
    "Step",
    "Weights",
    "adapters_off",
    "arrange",
    "collate",
    "evaluate",
    "fixed_length",
    "frozen_copy",
    "optimize",
    "pair_mean",
    "sequence_mean",
    "token_mean",
    "train_step",
]
