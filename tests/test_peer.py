"""The peer's trainers and ours on the same rows in the same order: the same losses, step by step."""

from itertools import cycle

import burnish
import pytest
import torch
import trl
from burnish.benchmarks.peer.sampled import replay, vowels
from burnish.benchmarks.peer.trainers import completions
from datasets import Dataset
from tiny import save_model, sums
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

AGREEMENT, STEPS = 1e-5, 4
PAIRS = sums(16)
DESIRABLE = [
    {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
    for pair, kind in zip(PAIRS, cycle(("chosen", "rejected")), strict=False)
]
# Rows, our settings and theirs. Both estimate KTO's KL from the completions of other prompts; of two rows there is one
# choice. GRPO in the way of DAPO: over completions, the first loss would be the sum of advantages, which is 0.
SAMPLED = {"prompts_per_rollout": 2, "group_size": 4, "max_tokens": 8, "epochs_per_rollout": 2, "rewards": vowels}
SAMPLED |= {"variant": "dapo", "dynamic_sampling": False, "old_logprobs": "recomputed", "max_prompt_length": None}
THEIRS = {"num_generations": 4, "max_completion_length": 8, "num_iterations": 2, "loss_type": "dapo", "beta": 0.0}
THEIRS |= {"epsilon_high": 0.28, "shuffle_dataset": False, "per_device_train_batch_size": 8, "steps_per_generation": 1}
RECIPES = {
    "sft": (list(completions(iter(PAIRS))), {}, {}),
    "dpo": (PAIRS, {"reference": "copy"}, {"beta": 0.1}),
    "kto": (DESIRABLE, {"batch_size": 2}, {"beta": 0.1, "per_device_train_batch_size": 2}),
    "reward": (PAIRS, {"centering": 0.01}, {"center_rewards_coefficient": 0.01}),
    "grpo": ([{"prompt": pair["prompt"]} for pair in PAIRS], SAMPLED, THEIRS),
}
QUIET = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "gradient_checkpointing": False}
QUIET |= {"bf16": False, "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
QUIET |= {"adam_epsilon": 1e-8, "disable_tqdm": True}


def load(recipe, saved):
    if recipe != "reward":
        return AutoModelForCausalLM.from_pretrained(saved)
    torch.manual_seed(0)  # of the new head
    return AutoModelForSequenceClassification.from_pretrained(saved, num_labels=1, pad_token_id=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the peer's own
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_equal_those_of_the_peers_trainer(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rows, ours, theirs = RECIPES[recipe]
    saved, rate = save_model(tmp_path / "model"), 3e-3  # at which losses move far more than they may differ
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.pad_token = tokenizer.eos_token
    fixed = {"steps": STEPS, "learning_rate": rate, "schedule": "constant", "shuffle": False, "tokenizer": tokenizer}
    fixed |= {} if recipe == "grpo" else {"batch_size": 4}
    run = getattr(burnish, recipe)(load(recipe, saved), rows, str(tmp_path / "run"), **{**fixed, **ours})
    losses = [step.metrics["loss"] for step in run]

    name = {"sft": "SFT", "reward": "Reward"}.get(recipe, recipe.upper())
    arguments = {"output_dir": str(tmp_path / "trl"), "max_steps": STEPS, "learning_rate": rate, **QUIET}
    more = {}
    if recipe == "grpo":
        more = {"reward_funcs": vowels, "rollout_func": replay(tmp_path / "run/samples.jsonl")}
    trainer = getattr(trl, f"{name}Trainer")(
        model=load(recipe, saved),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=getattr(trl, f"{name}Config")(**{"per_device_train_batch_size": 4, **arguments, **theirs}),
        **more,
    )
    trainer.train()
    peers = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses == pytest.approx(peers, abs=AGREEMENT)
    assert max(losses) - min(losses) > 100 * AGREEMENT
