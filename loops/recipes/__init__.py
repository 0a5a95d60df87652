"""The recipes by name. Nothing is imported before it is used."""

from importlib import import_module
from typing import Any

# The class in `settings`, whose docstring is the purpose, and the function that opens a run of it.
RECIPES = {
    "sft": ("SFT", "sft:open_sft"),
    "dpo": ("DPO", "preference:open_dpo"),
    "kto": ("KTO", "kto:open_kto"),
    "orpo": ("ORPO", "preference:open_orpo"),
    "cpo": ("CPO", "preference:open_cpo"),
    "reward": ("Reward", "reward:open_reward"),
    "prm": ("PRM", "prm:open_prm"),
    "distill": ("Distill", "distill:open_distill"),
    "grpo": ("GRPO", "grpo:open_grpo"),
    "rloo": ("RLOO", "grpo:open_grpo"),
    "ppo": ("PPO", "ppo:open_ppo"),
    "online_dpo": ("OnlineDPO", "online_dpo:open_online_dpo"),
    "demo": ("Demo", "demo:demo"),  # opens none: it trains
}


def settings_of(recipe: str) -> Any:
    return getattr(import_module(".settings", __name__), RECIPES[recipe][0])


def opener(recipe: str) -> Any:
    """The function that opens a run of the recipe, on all ranks or on none."""
    from ..runs.ranks import opening

    module, _, function = RECIPES[recipe][1].partition(":")
    return opening()(getattr(import_module(f".{module}", __name__), function))
