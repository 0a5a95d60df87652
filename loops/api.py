"""The recipes as functions of Python objects: ``for step in burnish.dpo(model, dataset, beta=0.2): ...``

Each takes the fields of its settings, in `recipes.settings`, which are those of the command line, and returns a
`Training`: iterate over it, or call its ``train``. A field that names a model, a tokenizer, data, a loss, a reward, an
optimizer, a teacher or a tracker may hold the object itself:

    model       trained in place, as the command would train it: converted to ``dtype``, its dropout turned off; one
                with adapters, or quantized, keeps its precision
    output      without a directory no files are written, and what needs one (checkpoints, a precomputed reference, a
                vLLM server) is refused
    resume      wants the settings of the run: functions by module and name, a model by a digest of the weights that it
                began with, which the reference is a copy of, data by a digest of its tokens
"""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec

from .recipes.settings import CPO, DPO, GRPO, KTO, ORPO, PPO, PRM, RLOO, SFT, Distill, OnlineDPO, Reward
from .registry import build

if TYPE_CHECKING:
    from .runs.training import Training

P = ParamSpec("P")


def _recipe(name: str, settings: Callable[P, Any], opened_by: str) -> "Callable[P, Training]":
    """The recipe opened by ``module:open_...``, as a function with the signature of its settings."""
    module, _, function = opened_by.partition(":")

    def recipe(*args: P.args, **kwargs: P.kwargs) -> "Training":
        values = inspect.signature(settings).bind_partial(*args).arguments | kwargs
        config = build(name, settings, values)
        opened: Training = getattr(import_module(f".recipes.{module}", __package__), function)(config)
        return opened

    update_wrapper(recipe, settings, assigned=("__doc__",), updated=())
    recipe.__name__ = recipe.__qualname__ = name
    vars(recipe)["__signature__"] = inspect.signature(settings)
    return recipe


sft = _recipe("sft", SFT, "sft:open_sft")
dpo = _recipe("dpo", DPO, "preference:open_dpo")
cpo = _recipe("cpo", CPO, "preference:open_cpo")
orpo = _recipe("orpo", ORPO, "preference:open_orpo")
kto = _recipe("kto", KTO, "kto:open_kto")
reward = _recipe("reward", Reward, "reward:open_reward")
prm = _recipe("prm", PRM, "prm:open_prm")
distill = _recipe("distill", Distill, "distill:open_distill")
grpo = _recipe("grpo", GRPO, "grpo:open_grpo")
rloo = _recipe("rloo", RLOO, "grpo:open_grpo")
ppo = _recipe("ppo", PPO, "ppo:open_ppo")
online_dpo = _recipe("online_dpo", OnlineDPO, "online_dpo:open_online_dpo")
