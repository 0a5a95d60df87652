"""One or two ranks that train a small vision-language model, of whose rows few have images."""

import json
from unittest.mock import patch

from burnish.loops.config import Parallel, Teacher
from burnish.loops.recipes import opener, settings


def letters(completion, images):
    """A reward that sees pictures."""
    size = images[0].width if images else 10
    return sum(map(ord, completion)) % size / size


_SAMPLED = {
    "prompts_per_rollout": 2,
    "group_size": 3,
    "max_tokens": 6,
    "show_every": 0,
    "rewards": {letters: 1.0},
}
_ON_POLICY = {"loss": "sampled_reverse_kl", "on_policy": 1.0, "max_tokens": 6, "show_every": 0}
RUNS = {
    "sft": ("sft", {"batch_size": 2}),
    "dpo": ("dpo", {"batch_size": 2}),
    "kto": ("kto", {"batch_size": 2}),
    "reward": ("reward", {"batch_size": 2}),
    "prm": ("prm", {"batch_size": 2}),
    "distill": ("distill", {"batch_size": 2, "teacher": "teacher"}),
    "distill on policy": ("distill", {"batch_size": 2, "teacher": "teacher", **_ON_POLICY}),
    "grpo": ("grpo", _SAMPLED),
    "rloo": ("rloo", _SAMPLED),
    "ppo": ("ppo", {**_SAMPLED, "epochs_per_rollout": 1}),
    "ppo with a critic": ("ppo", {**_SAMPLED, "epochs_per_rollout": 1, "value_model": "model"}),
    "online_dpo": ("online_dpo", _SAMPLED),
}
"""Of each name, the recipe and what it needs; models are named by their folders."""
# Each imports its recipe: of what is imported here, forked ranks import nothing again.
_RECIPES = {
    "sft": (opener("sft"), settings.SFT),
    "dpo": (opener("dpo"), settings.DPO),
    "kto": (opener("kto"), settings.KTO),
    "reward": (opener("reward"), settings.Reward),
    "prm": (opener("prm"), settings.PRM),
    "distill": (opener("distill"), settings.Distill),
    "grpo": (opener("grpo"), settings.GRPO),
    "rloo": (opener("rloo"), settings.RLOO),
    "ppo": (opener("ppo"), settings.PPO),
    "online_dpo": (opener("online_dpo"), settings.OnlineDPO),
}


def be_rank(name, folder, data, output, shards, dtype="float64"):
    """Take three steps, and print the metrics of each."""
    recipe, own = RUNS[name]
    own = dict(own)
    if "teacher" in own:
        own["teacher"] = Teacher(model=f"{folder}/teacher")
    if "value_model" in own:
        own["value_model"] = f"{folder}/model"
    open_run, of_recipe = _RECIPES[recipe]
    config = of_recipe(
        model=f"{folder}/model",
        data=data,
        output=output,
        steps=3,
        shuffle=False,
        learning_rate=1e-3,
        optimizer="sgd",
        dtype=dtype,
        report_to="none",
        parallel=Parallel(dp_shard_size=shards),
        hang_seconds=60.0,
        **own,
    )
    with patch("burnish.loops.runs.training.draw_curves"):
        steps = [dict(step.metrics) for step in open_run(config)]
    print(json.dumps(steps))
