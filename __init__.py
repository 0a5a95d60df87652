"""burnish: post-training objectives as pure functions, on fused log-prob kernels, driven by a readable loop.

The recipes are functions of a model and its data, which yield after each optimizer step; each takes the fields of its
command, ``burnish dpo --help`` lists them:

    for step in burnish.dpo(model, dataset, beta=0.2):
        print(step.number, step.metrics["loss"])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["cpo", "distill", "dpo", "grpo", "kto", "online_dpo", "orpo", "ppo", "prm", "reward", "rloo", "sft"]

if TYPE_CHECKING:
    from .loops.api import cpo, distill, dpo, grpo, kto, online_dpo, orpo, ppo, prm, reward, rloo, sft
else:

    def __getattr__(name: str) -> Any:  # imported on first use: objectives alone need no more than torch
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(".loops.api", __name__), name)

    def __dir__() -> list[str]:  # what a notebook completes
        return [*__all__, "__version__", "data", "kernels", "loops", "objectives"]
