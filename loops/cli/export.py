"""``burnish export RUN [OUT]``: a checkpoint as a model that transformers and vLLM load.

    OUT/             model, tokenizer and generation configuration, as a run that ends there writes
                     them to model/
    OUT/adapter/     the adapter alone, where adapters were trained
    OUT/values/      value head or critic of ppo

A checkpoint holds what was trained, of any number of ranks; what was frozen is read from the
model's own files.
"""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed

from ..config import Common, Lora
from ..models.backbone import Backbone
from ..models.end_tokens import add_end_tokens, ends_of
from ..models.io import find_images, load_model, load_tokenizer, write_model
from ..recipes.ppo import open_critic, open_value_head, save_values
from ..recipes.prm import keep_separator, load_prm
from ..recipes.reward import load_reward, set_pad_token
from ..recipes.settings import PPO, PRM, SFT, Reward
from ..registry import build
from ..runs import checkpoint
from ..runs.directory import settings_in
from ..runs.report import entries
from ..runs.storage import damage
from ..runs.training import to_lower
from ..train.optimizers import averaged_by, make_optimizer

# A setting that only one kind of model has, and the settings of its recipe; all others train a
# plain causal LM.
_KINDS: dict[str, type[Common]] = {"centering": Reward, "separator": PRM, "value_model": PPO}
# The settings that the model is made by; none of the others says how it is stored.
_OF_MODEL = ("model", "model_revision", "tokenizer", "chat_template", "eos_token", "dtype", "weights_dtype", "lora",
             "quantize", "quantize_kwargs", "seed", "separator", "lowest_score", "highest_score", "bins", "value_model",
             "value_head", "optimizer", "optimizer_kwargs", "learning_rate", "weight_decay", "rounding",
             "offload_optimizer")  # fmt: skip
# how config.yaml describes a model or tokenizer in memory
_OBJECT = re.compile(r"\w+ [0-9a-f]{16}|[\w.]+:[\w.]+")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "burnish export",
        description="Write a checkpoint of a run as a model that transformers and vLLM load.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="directory of a run")
    parser.add_argument(
        "out", metavar="OUT", type=Path, nargs="?", help="unless given, RUN/exported/step-00000100"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="of the checkpoint; unless given, the newest")
    which.add_argument("--best", action="store_true", help="the best by the run's keep_best")
    parser.add_argument("--model", help="the model that the run began with, if it is elsewhere now")
    parser.add_argument("--tokenizer", help="its tokenizer, if that is elsewhere now")
    parser.add_argument(
        "--value_model", help="the model that the critic of ppo began with, likewise"
    )
    return parser


def run(words: Sequence[str]) -> None:
    options = parser().parse_args(words)
    places = {}
    for name in ("model", "tokenizer", "value_model"):
        place = getattr(options, name)
        if place is not None:
            places[name] = place
    step, target = export(
        options.run, options.out, step=options.step, best=options.best, places=places
    )
    print(f"the model of step {step} is in {target}")


def export(
    directory: Path,
    target: Path | None = None,
    *,
    step: int | None = None,
    best: bool = False,
    places: Mapping[str, str] | None = None,
) -> tuple[int, Path]:
    """Write a checkpoint as a model; returns its step, and the directory of the model.

    Args:
        directory: of the run.
        target: of the model, new or empty; unless given, one of this step in the run's.
        step: of the checkpoint; the newest unless given.
        best: take the best by the run's ``keep_best``.
        places: where the ``model``, ``tokenizer`` and ``value_model`` that the run began with are,
            if not where they were.

    Raises:
        ValueError: if there is no such checkpoint, if it is damaged, or if the target holds
            something.
        CheckpointError: if the checkpoint is not that of the configured model.
    """
    settings = settings_in(directory)
    step = _chosen_step(directory, settings, step, best=best)
    path = checkpoint.path_of(directory / "checkpoints", step)
    problem = damage(path, slice(None))
    if problem:
        fix = f"give the --step of another, {_there(directory)}"
        raise ValueError(f"{path} is damaged: {problem}; {fix}")
    if target is None:
        target = directory / "exported" / path.name
    refuse_used(target)

    config = _config_of(settings, places or {})
    tokenizer = load_tokenizer(config)
    set_seed(config.seed)  # some adapters change the frozen weights at random
    policy = _untrained(config, tokenizer)
    policy.reader = find_images(config, tokenizer)
    _load(path, policy, config, tokenizer)
    write_model(policy, tokenizer, target, target / "adapter")
    save_values(
        getattr(policy, "critic", None),
        getattr(policy, "value_head", None),
        tokenizer,
        target / "values",
    )
    return step, target


def refuse_used(target: Path) -> None:
    """Raise ValueError if a directory to be written holds something."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} holds something already; remove it, or name another directory")


def _chosen_step(
    directory: Path, settings: Mapping[str, Any], step: int | None, *, best: bool
) -> int:
    """The step of the checkpoint to export; ValueError if there is none."""
    steps = checkpoint.steps_in(directory / "checkpoints")
    if not steps:
        hint = "a run writes them by save_every, and at its end"
        raise ValueError(f"{directory}: there is no checkpoint; {hint}")
    if best:
        return _best_step(directory, settings, steps)
    if step is None:
        return steps[0]
    if step not in steps:
        raise ValueError(f"{directory}: there is no checkpoint of step {step}; {_there(directory)}")
    return step


def _there(directory: Path) -> str:
    steps = checkpoint.steps_in(directory / "checkpoints")
    return f"there are {', '.join(map(str, sorted(steps)))}"


def _best_step(directory: Path, settings: Mapping[str, Any], steps: Sequence[int]) -> int:
    keep_best = settings.get("keep_best")
    if not keep_best:
        problem = "no checkpoint is the best, as the run had no keep_best"
        raise ValueError(f"{directory}: {problem}; {_there(directory)}")
    values: dict[int, float] = {}
    for entry in entries(directory / "metrics.jsonl"):
        if entry["step"] in steps:  # which a resumed run may have measured twice
            values[int(entry["step"])] = to_lower(keep_best, entry)
    finite = {step: value for step, value in values.items() if value < math.inf}  # nan is left out
    if not finite:
        problem = f"{keep_best} was measured at no step with a checkpoint"
        raise ValueError(f"{directory}: {problem}; {_there(directory)}")
    return min(finite, key=finite.__getitem__)


def _config_of(settings: Mapping[str, Any], places: Mapping[str, str]) -> Any:
    """The settings by which the run made its model, as those of a recipe with such a model."""
    kind: type[Common] = SFT
    for name, class_of_kind in _KINDS.items():
        if name in settings:
            kind = class_of_kind
            break
    known = {each.name for each in fields(kind)} & settings.keys()
    given = {name: settings[name] for name in _OF_MODEL if name in known}
    given |= places
    for name in ("model", "tokenizer", "value_model"):
        if _OBJECT.fullmatch(str(given.get(name) or "")) and not Path(given[name]).exists():
            raise ValueError(
                f"{name}: the run was given it as an object ({given[name]}); give --{name} with the name or directory "
                "that it was loaded from"
            )
    given["lora"] = build("lora", Lora, settings.get("lora") or {})
    return build("config.yaml", kind, {**given, "data": "none"})


def _untrained(config: Any, tokenizer: Any) -> Backbone:
    """The model of a run as it was before the first step, by the names of its checkpoints."""
    if isinstance(config, Reward):
        policy = Backbone(load_reward(config))
        set_pad_token(policy.plain, tokenizer)
        return policy
    if isinstance(config, PRM):
        policy = Backbone(load_prm(config))
        keep_separator(policy.plain, config)
        return policy
    policy = Backbone(load_model(config))
    if isinstance(config, PPO) and config.value_model is not None:
        policy.critic = open_critic(config)
    elif isinstance(config, PPO):
        policy.value_head = open_value_head(policy.model, config)
    return policy


def _load(path: Path, policy: Backbone, config: Any, tokenizer: Any) -> None:
    """Give the policy a checkpoint's weights, and the tokens that it had learned to end with."""
    optimizer: Any = make_optimizer(config, policy) if averaged_by(config) else None
    state = checkpoint.load_weights(path, policy, optimizer)
    if optimizer is not None:
        optimizer.eval()
    tokens = state.get("end_tokens")
    if tokens is None:  # of an earlier version, which kept them only at the end of the run
        saved = path.parent.parent / "model"
        tokens = []
        if saved.exists():
            tokens = ends_of(policy.plain.generation_config.from_pretrained(saved))
    line = add_end_tokens(policy.plain, tokens, tokenizer)
    if line:
        print(line)
