"""The settings and the losses on the pages of the recipes.

    python -m burnish.benchmarks.docs.recipes

writes docs/settings.md, and on each page under docs/recipes the parts between ``<!-- made: NAME -->``
and ``<!-- end -->``. The words come from the classes of settings and from the docstrings of
objectives.
"""

import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ...loops import config
from ...loops.api import field_docs
from ...loops.config import wording
from ...loops.recipes import RECIPES, settings_of
from ...loops.recipes.distill import LOSSES as DISTILL_LOSSES
from ...loops.recipes.kto import FEEDBACK_LOSSES
from ...loops.recipes.online_dpo import NEEDING_A_TEACHER
from ...loops.recipes.reward import LOSSES as REWARD_LOSSES
from ...loops.recipes.settings import CPO
from ...loops.rl import settings as online
from ...loops.rl.policy_gradient import POLICY_LOSSES
from ...loops.train.mix import PAIR_LOSSES, TOKEN_LOSSES
from .gallery import Entry, entries
from .markdown import wrapped

HOME = Path(__file__).parents[2] / "docs"
COMMAND = "python -m burnish.benchmarks.docs.recipes"

# Classes whose fields several recipes have: their heading on the page of shared settings.
SHARED = {
    config.Common: "Every recipe",
    config.Lora: "Adapters: lora",
    config.Parallel: "Several ranks: parallel",
    config.Hub: "Uploads: hub",
    config.OfflineConfig: "Recipes that train on the completions of the data",
    config.Routed: "Recipes that can balance experts",
    config.Referenced: "Recipes with a reference policy",
    config.Bema: "An averaged reference: bema",
    config.Teacher: "A teacher",
    online.SamplingConfig: "Recipes that sample completions",
    online.VLLM: "vLLM",
    online.OnlineConfig: "Online recipes",
    config.Limits: "Conversations: limits",
    online.PolicyGradientConfig: "Policy gradients: grpo, rloo, ppo",
}
# The losses that recipes know by name.
NAMES_OF_LOSSES: dict[str, Iterable[str]] = {
    "sft": TOKEN_LOSSES,
    "dpo": PAIR_LOSSES,
    "kto": FEEDBACK_LOSSES,
    "cpo": [*get_args(get_type_hints(CPO)["loss"]), "nll"],
    "orpo": ["orpo", "nll"],
    "reward": [*REWARD_LOSSES, "centering"],
    "prm": ["step_loss"],
    "distill": DISTILL_LOSSES,
    "grpo": POLICY_LOSSES,
    "rloo": POLICY_LOSSES,
    "ppo": [*POLICY_LOSSES, "value_loss"],
    "online_dpo": [name for name in PAIR_LOSSES if name not in NEEDING_A_TEACHER],
}


def pages() -> dict[str, str]:
    """The text of each page that has a made part, by its path under docs/."""
    made = {"settings.md": shared_settings()}
    for recipe in RECIPES:
        if recipe != "demo":
            name = f"recipes/{recipe}.md"
            made[name] = filled(recipe, (HOME / name).read_text())
    return made


def filled(recipe: str, page: str) -> str:
    """The page of a recipe with its made parts as the code has them today."""
    parts = {"settings": own_settings(recipe), "losses": losses_of_recipe(recipe)}

    def part(found: re.Match[str]) -> str:
        return f"<!-- made: {found[1]} -->\n\n{wrapped(parts[found[1]])}\n<!-- end -->"

    return re.sub(r"<!-- made: (\w+) -->.*?<!-- end -->", part, page, flags=re.S)


def shared_settings() -> str:
    """The page of the settings that several recipes have."""
    head = f"""# Settings of all recipes

Each is a key of a YAML file, a flag of the command line and an argument in Python:
`lora: {{r: 16}}`, `--lora.r 16`, `lora={{"r": 16}}`. `burnish dpo --help` prints those of a recipe,
and `--print_config` those of a run. What a recipe has besides stands on its page. This page is made
from the classes of settings by `{COMMAND}`.
"""
    sections = [
        f"## {title}\n\n{_one_line(kind.__doc__)}\n\n{_listed(kind, _own_fields(kind))}\n"
        for kind, title in SHARED.items()
    ]
    return wrapped("\n".join([head, *sections]))


def own_settings(recipe: str) -> str:
    """The settings that a recipe has beside the shared ones, its own defaults of shared ones, and
    links to the groups that it shares.
    """
    kind = settings_of(recipe)
    own = [
        name
        for base in reversed(kind.__mro__)
        if is_dataclass(base) and base not in SHARED
        for name in _own_fields(base)
    ]
    nested = {type(_default(each)) for each in fields(kind)}
    groups = [
        f"[{title}](../settings.md#{_anchor(title)})"
        for base, title in SHARED.items()
        if issubclass(kind, base) or base in nested
    ]
    listed = _listed(kind, list(dict.fromkeys(own)), page="../settings.md")
    return f"{listed}\n\nAnd those of: {', '.join(groups)}."


def losses_of_recipe(recipe: str) -> str:
    """A line for each objective that a recipe knows by name, with its paper."""
    described = {entry.name: entry for room in entries().values() for entry in room}
    return "\n".join(
        _loss_line(described[name]) for name in NAMES_OF_LOSSES[recipe] if name in described
    )


def _loss_line(entry: Entry) -> str:
    paper = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[\g<0>](https://arxiv.org/abs/\1)", entry.paper)
    purpose = re.sub(r"(?<!`)`(\w+)`(?!`)", r"[`\1`](../objectives.md#\1)", entry.purpose)
    return f"- [`{entry.name}`](../objectives.md#{entry.name}): {purpose} {paper}".rstrip()


def _own_fields(kind: Any) -> list[str]:
    """The names of the fields that a class itself declares."""
    every = {each.name for each in fields(kind)}
    return [name for name in vars(kind).get("__annotations__", {}) if name in every]


def _listed(kind: Any, names: list[str], page: str = "") -> str:
    """A list item for each of these fields: its name, what it takes, its default, what it does."""
    every = {each.name: each for each in fields(kind)}
    hints = get_type_hints(kind)
    texts = field_docs(kind)
    prefix = getattr(kind, "prefix", "")
    return "\n".join(
        f"- **`{prefix}{name}`** ({_taken(every[name], hints[name], page)}). {texts.get(name, '')}"
        for name in names
    )


def _taken(field: Field[Any], hint: Any, page: str) -> str:
    default = _default(field)
    if is_dataclass(default):
        title = SHARED[type(default)]
        return f"a mapping, see [{title}]({page}#{_anchor(title)})"
    if default is MISSING:
        return f"{wording(hint)}; required"
    return f"{wording(hint)}; default `{_yaml(default)}`"


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def main() -> None:
    for name, text in pages().items():
        (HOME / name).write_text(text)


if __name__ == "__main__":
    main()
