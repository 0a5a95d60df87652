"""The recipes by name. Nothing is imported before it is used."""

from importlib import import_module
from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """Where the parts of a recipe are, by ``module:name``.

    Attributes:
        settings: the class in `settings`, whose docstring is the recipe's purpose.
        opener: the function that opens a run of these settings.
        encoder: the function that gives the encoder of the data, for these settings; "" for none.
    """

    settings: str
    opener: str
    encoder: str


_PROMPTS = "..rl.context:encoder"
RECIPES = {
    "sft": Recipe("SFT", ".sft:open_sft", ".sft:encoder"),
    "dpo": Recipe("DPO", ".preference:open_dpo", ".preference:encoder"),
    "kto": Recipe("KTO", ".kto:open_kto", ".kto:encoder"),
    "orpo": Recipe("ORPO", ".preference:open_orpo", ".preference:encoder"),
    "cpo": Recipe("CPO", ".preference:open_cpo", ".preference:encoder"),
    "reward": Recipe("Reward", ".reward:open_reward", ".reward:encoder"),
    "prm": Recipe("PRM", ".prm:open_prm", ".prm:encoder"),
    "distill": Recipe("Distill", ".distill:open_distill", ".distill:encoder"),
    "grpo": Recipe("GRPO", ".grpo:open_grpo", _PROMPTS),
    "rloo": Recipe("RLOO", ".grpo:open_grpo", _PROMPTS),
    "ppo": Recipe("PPO", ".ppo:open_ppo", _PROMPTS),
    "online_dpo": Recipe("OnlineDPO", ".online_dpo:open_online_dpo", _PROMPTS),
    "demo": Recipe("Demo", ".demo:demo", ""),  # opens none: it trains, on data that it makes
}


def settings_of(recipe: str) -> Any:
    """The class of the recipe's settings; torch is not imported for it."""
    return getattr(import_module(".settings", __name__), RECIPES[recipe].settings)


def opener(recipe: str) -> Any:
    """The function that opens a run of the recipe, on all ranks or on none."""
    from ..runs.ranks import opening

    return opening()(_named(RECIPES[recipe].opener))


def encoder_of(recipe: str, config: Any) -> Any:
    """The function ``encode(records, tokenizer, options)`` of the recipe with these settings."""
    return _named(RECIPES[recipe].encoder)(config)


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module, __name__), name)
