"""burnish: post-training objectives as pure functions, on fused log-prob kernels, driven by a
readable loop.

The recipes are functions of a model and its data, which yield after each optimizer step; each takes
the fields of its command, ``burnish dpo --help`` lists them:

    for step in burnish.dpo(model, dataset, beta=0.2):
        print(step.number, step.metrics["loss"])
"""

# ruff: noqa: I001 - "name as name" is how a typed package exports a name; sorted, each would be a
# statement of its own
from typing import TYPE_CHECKING

from .lazy import lazy_exports

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .loops.api import cpo as cpo, distill as distill, dpo as dpo, grpo as grpo, kto as kto
    from .loops.api import (
        online_dpo as online_dpo,
        orpo as orpo,
        ppo as ppo,
        prm as prm,
        reward as reward,
    )
    from .loops.api import rloo as rloo, sft as sft

__getattr__ = lazy_exports(__name__)  # objectives alone need no more than torch
