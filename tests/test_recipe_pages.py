"""docs/recipes, settings.md and metrics.md: their made parts are what the code says, their rows
train, and their metrics are those that a run logs.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import burnish
import pytest
from burnish.benchmarks.docs import curves, recipes
from burnish.loops.recipes import RECIPES
from burnish.loops.runs.trackers import RENAMED
from tiny import save_model

DOCS = Path(__file__).parents[1] / "docs"
FROM_TRL = DOCS / "from-trl.md"
NAMES = [name for name in RECIPES if name != "demo"]
ONLINE = ("grpo", "rloo", "ppo", "online_dpo")
SAMPLED = {"max_tokens": 4, "prompts_per_rollout": 2, "group_size": 2, "show_every": 0}


def scored(completion, answer):
    return len(completion) / 10


# What the data of a page's blocks need, one entry a block.
OF_BLOCK = {
    "reward": [
        {},
        {"loss": "bradley_terry_ties", "tie_threshold": 1.0},
        {"loss": "score_regression"},
        {"loss": "hl_gauss", "lowest_score": 0.0, "highest_score": 1.0},
        {"loss": "plackett_luce"},
    ],
}


def its_own_prompt(row, samples):
    return [row["prompt"]] * len(samples)


# Further runs on the first block, for metrics that a setting brings.
VARIANTS = {
    "grpo": [{"beta": 0.1}, {"variant": "cispo"}, {"variant": "vespo"}],
    "distill": [
        {"on_policy": 1.0, "max_tokens": 4, "show_every": 0},
        {"on_policy": 1.0, "max_tokens": 4, "show_every": 0, "reprompt": its_own_prompt},
        {"divergence": "gold"},
    ],
}


def section(page, heading):
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, flags=re.S | re.M)
    assert found, heading
    return found[1]


def listed(text):
    """The names in the first column of the tables of a text."""
    return set(re.findall(r"^\| `([\w/]+)` \|", text, flags=re.M))


def blocks_of(recipe):
    """The rows of each block of data on a page."""
    data = section((DOCS / f"recipes/{recipe}.md").read_text(), "Data")
    blocks = re.findall(r"^```json\n(.*?)^```", data, flags=re.S | re.M)
    return [[json.loads(line) for line in block.splitlines()] for block in blocks]


def settings(recipe, model):
    if recipe in ONLINE:
        return {"rewards": scored, **SAMPLED, **({"group_size": 1} if recipe == "ppo" else {})}
    if recipe == "distill":
        return {"batch_size": 2, "teacher": {"model": model}}
    return {"batch_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


def logged(recipe, model, rows, **others):
    """The names that a run of two steps logs, with NAME for that of the reward."""
    options = {**settings(recipe, model), **others}
    for name in {"reprompt", "divergence"} & options.keys():
        options["teacher"] = {**options["teacher"], name: options.pop(name)}
    run = getattr(burnish, recipe)(model, rows, steps=2, eval_data=rows, eval_every=1, **options)
    names = {"step"}.union(*(step.metrics for step in run))
    return {re.sub(r"^(eval/)?(.*)", r"\2", name).replace("scored/", "NAME/", 1) for name in names}


def shared_metrics(recipe):
    page = (DOCS / "metrics.md").read_text()
    names = listed(section(page, "Every recipe"))
    if recipe not in ("reward", "prm"):
        names |= listed(section(page, "Recipes with log-probs"))
    if recipe in ONLINE:
        names |= listed(section(page, "Online recipes").partition("Only where")[0])
    if recipe in ("grpo", "rloo", "ppo"):
        names |= listed(section(page, "Policy gradients"))
    return names


@pytest.mark.parametrize("name", sorted(recipes.pages()))
def test_the_made_parts_of_a_page_are_what_the_code_says(name):
    made = recipes.pages()[name]
    assert (DOCS / name).read_text() == made, f"run: {recipes.COMMAND}"


def test_a_page_lists_the_settings_that_its_recipe_alone_has():
    page = (DOCS / "recipes/kto.md").read_text()
    assert "- **`desirable_weight`** (a number > 0; default `1.0`)" in page
    assert "`micro_tokens`" not in page
    assert "- **`micro_tokens`** (a whole number > 0 or null" in (DOCS / "settings.md").read_text()


@pytest.mark.parametrize("recipe", NAMES)
def test_the_metrics_of_a_page_are_those_that_a_run_logs(recipe, model):
    blocks = blocks_of(recipe)
    needs = OF_BLOCK.get(recipe, [{}] * len(blocks))
    found = [logged(recipe, model, rows, **each) for rows, each in zip(blocks, needs, strict=True)]
    always = set.intersection(*found)
    found += [logged(recipe, model, blocks[0], **each) for each in VARIANTS.get(recipe, [])]

    page = (DOCS / f"recipes/{recipe}.md").read_text()
    own = listed(section(page, "Metrics"))
    shared = shared_metrics(recipe)
    assert shared <= always, "a metric of docs/metrics.md is not logged"
    assert not own & shared, "one metric is explained twice"
    if recipe == "distill":  # the part of an online recipe in it
        shared |= shared_metrics("grpo")
    assert own <= set.union(*found), "a metric of the page is not logged"
    assert set.union(*found) <= own | shared, "a metric is on no page"


# The modules of TRL whose metrics a recipe logs.
OF_TRL = {
    "sft": "trainer.sft_trainer",
    "dpo": "trainer.dpo_trainer",
    "kto": "trainer.kto_trainer",
    "reward": "trainer.reward_trainer",
    "grpo": "trainer.grpo_trainer",
    "rloo": "trainer.rloo_trainer",
    "distill": "trainer.distillation_trainer",
    "cpo": "experimental.cpo.cpo_trainer",
    "orpo": "experimental.orpo.orpo_trainer",
    "online_dpo": "experimental.online_dpo.online_dpo_trainer",
}
IN_TRACKERS_ALONE = {"epoch", "num_tokens"}


def metrics_of_trl(recipe):
    """The names in the assignments of a trainer of TRL to its metrics."""
    root = Path(find_spec("trl").origin).parent
    source = root.joinpath(*OF_TRL[recipe].split(".")).with_suffix(".py").read_text()
    assigned = r'(?:_metrics\[mode\]|\bmetrics|\bstats|\blogs)\[f?"([\w/{}]+)"\](?:\.append|\s*=)'
    names = {name.removeprefix("{prefix}") for name in re.findall(assigned, source)}
    return {re.sub(r"\{\w+\}", "NAME", name) for name in names if not name.startswith("eval_")}


@pytest.mark.parametrize("recipe", OF_TRL)
def test_every_metric_of_trl_is_logged_or_has_its_row(recipe):
    names = metrics_of_trl(recipe)
    assert len(names) > 2
    page = (DOCS / f"recipes/{recipe}.md").read_text()
    ours = listed(section(page, "Metrics")) | shared_metrics(recipe)
    ours |= listed((DOCS / "metrics.md").read_text()) if recipe in (*ONLINE, "distill") else set()
    named = {RENAMED.get(name, name) for name in ours} | IN_TRACKERS_ALONE
    told = set(re.findall(r"^\| `([\w/]+)`", section(FROM_TRL.read_text(), "Metrics"), flags=re.M))
    assert names <= named | told, names - named - told


def test_every_recipe_has_its_page_and_its_curves():
    assert sorted(path.stem for path in (DOCS / "recipes").iterdir()) == sorted(NAMES)
    assert curves.PANELS.keys() == curves.SETTINGS.keys() == set(NAMES)
    for name in NAMES:
        assert (DOCS / f"pictures/{name}.png").exists(), f"run: {curves.COMMAND} {name}"


def test_the_choice_of_a_recipe_names_all_of_them():
    page = (DOCS / "which-recipe.md").read_text()
    assert {f"recipes/{name}.md" for name in NAMES} <= set(re.findall(r"\]\(([\w/.]+)\)", page))
