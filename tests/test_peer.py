"""The peer's trainers and ours on the same rows in the same order: the same losses and gradients, step by step.

A case is a configuration of the peer's, which the command line translates to ours.
"""

import dataclasses
from importlib import import_module
from itertools import cycle

import burnish
import pytest
import torch
from burnish.benchmarks.peer.sampled import replay, vowels
from burnish.benchmarks.peer.trainers import completions
from burnish.loops.cli import _RECIPES, _load
from burnish.loops.cli.trl import translate
from datasets import Dataset
from tiny import save_model, sums
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

AGREEMENT, STEPS = 1e-5, 4
PAIRS = sums(16)
DESIRABLE = [
    {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
    for pair, kind in zip(PAIRS, cycle(("chosen", "rejected")), strict=False)
]
PROMPTS = [{"prompt": pair["prompt"]} for pair in PAIRS]
MIX = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
# In the way of DAPO: over completions, the first loss would be the sum of advantages, which is 0.
SAMPLED = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "loss_type": "dapo"}
SAMPLED |= {"epsilon_high": 0.28, "num_iterations": 2, "beta": 0.0}
# Both estimate KTO's KL from the completions of other prompts; of two rows there is one choice.
CASES = {
    "sft": ("sft", list(completions(iter(PAIRS))), {}),
    "sft by dft": ("sft", list(completions(iter(PAIRS))), {"loss_type": "dft"}),
    "dpo": ("dpo", PAIRS, {"gradient_accumulation_steps": 2}),
    "dpo by another divergence": (
        *("dpo", PAIRS),
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.75},
    ),
    "dpo by a mix": ("dpo", PAIRS, MIX),
    "dpo by ranks": ("dpo", PAIRS, {"loss_type": ["aot"], "label_smoothing": 0.1}),
    "dpo after a warmup": ("dpo", PAIRS, {"lr_scheduler_type": "cosine", "warmup_steps": 0.3}),
    "kto": ("kto", DESIRABLE, {"per_device_train_batch_size": 2}),
    "reward": ("reward", PAIRS, {"center_rewards_coefficient": 0.01}),
    "grpo": ("grpo", PROMPTS, SAMPLED),
    "grpo by its reference": ("grpo", PROMPTS, {**SAMPLED, "beta": 0.1, "use_bias_correction_kl": True}),
}
COMMON = {"max_steps": STEPS, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "gradient_checkpointing": False}
COMMON |= {"bf16": False, "save_strategy": "no", "report_to": "none", "per_device_train_batch_size": 4}
# Of the peer alone: ours has no such name, or refuses it.
QUIET = {"use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "train_sampling_strategy": "sequential"}


def load(recipe, saved):
    if recipe != "reward":
        return AutoModelForCausalLM.from_pretrained(saved)
    torch.manual_seed(0)  # of the new head
    return AutoModelForSequenceClassification.from_pretrained(saved, num_labels=1, pad_token_id=1)


def translated(recipe, theirs):
    known = {field.name for field in dataclasses.fields(_load("settings", _RECIPES[recipe][0]))}
    translation = translate(recipe, known, theirs)
    assert translation.refused == {}
    return translation.ours


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the peer's own
@pytest.mark.parametrize("case", CASES)
def test_a_configuration_of_the_peer_trains_as_its_trainer_does(case, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    recipe, rows, settings = CASES[case]
    saved = save_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.pad_token = tokenizer.eos_token
    theirs = {**COMMON, **settings}
    ours, name = translated(recipe, theirs), {"sft": "SFT", "reward": "Reward"}.get(recipe, recipe.upper())
    more = {}
    if recipe == "grpo":
        ours |= {"rewards": vowels, "old_logprobs": "recomputed", "max_prompt_length": None}
        theirs |= {"shuffle_dataset": False}
    run = getattr(burnish, recipe)(
        load(recipe, saved), rows, str(tmp_path / "run"), shuffle=False, tokenizer=tokenizer, **ours
    )
    steps = [step.metrics for step in run]
    if recipe == "grpo":
        more = {"reward_funcs": vowels, "rollout_func": replay(tmp_path / "run/samples.jsonl")}
    trl = import_module("trl")
    trainer = getattr(trl, f"{name}Trainer")(
        model=load(recipe, saved),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=getattr(trl, f"{name}Config")(output_dir=str(tmp_path / "trl"), **theirs, **QUIET),
        **more,
    )
    trainer.train()
    peers = [line for line in trainer.state.log_history if "loss" in line]
    losses = [step["loss"] for step in steps]
    assert losses == pytest.approx([line["loss"] for line in peers], abs=AGREEMENT)
    assert max(losses) - min(losses) > 100 * AGREEMENT
    assert [step["grad_norm"] for step in steps] == pytest.approx([line["grad_norm"] for line in peers], rel=1e-3)
