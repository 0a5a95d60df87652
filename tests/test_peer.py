"""The peer's trainers and ours on the same rows in the same order: the same losses and gradients, step by step.

A case is a configuration of the peer's, which the command line translates to ours.
"""

import dataclasses
import pkgutil
import zlib
from itertools import cycle

import burnish
import pytest
import torch
from burnish.benchmarks.peer.sampled import replay, vowels
from burnish.benchmarks.peer.trainers import completions
from burnish.loops.cli.trl import translate
from burnish.loops.config import Teacher
from burnish.loops.recipes import settings_of
from datasets import Dataset
from peer import replayed
from tiny import save_model, sums
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

AGREEMENT, STEPS = 1e-5, 4
PAIRS = sums(16)
DESIRABLE = [
    {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
    for pair, kind in zip(PAIRS, cycle(("chosen", "rejected")), strict=False)
]
PROMPTS = [{"prompt": pair["prompt"]} for pair in PAIRS]
COMPLETIONS = list(completions(iter(PAIRS)))
PLAIN = [
    {"prompt": f"{p['prompt'][0]['content']} ", **{k: p[k][0]["content"] for k in ("chosen", "rejected")}}
    for p in PAIRS
]
MIX = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
# In the way of DAPO: over completions, the first loss would be the sum of advantages, which is 0.
SAMPLED = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "loss_type": "dapo"}
SAMPLED |= {"epsilon_high": 0.28, "num_iterations": 2, "beta": 0.0}
UNCLIPPED = {name: SAMPLED[name] for name in SAMPLED if name != "loss_type"}
# Its loss is of log-probs at temperature 1, of pairs without ties; its gradient, of one micro-batch.
ONLINE = {"temperature": 1.0, "max_new_tokens": 12}
# Both estimate KTO's KL from the completions of other prompts; of two rows there is one choice.
CASES = {
    "sft": ("sft", COMPLETIONS, {}),
    "sft by dft": ("sft", COMPLETIONS, {"loss_type": "dft"}),
    "sft with smooth labels": ("sft", COMPLETIONS, {"loss_type": "chunked_nll", "label_smoothing_factor": 0.1}),
    "dpo": ("dpo", PAIRS, {"gradient_accumulation_steps": 2}),
    "dpo by another divergence": (
        *("dpo", PAIRS),
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.75},
    ),
    "dpo by a mix": ("dpo", PAIRS, MIX),
    "dpo by ranks": ("dpo", PAIRS, {"loss_type": ["aot"], "label_smoothing": 0.1}),
    "dpo after a warmup": ("dpo", PAIRS, {"lr_scheduler_type": "cosine", "warmup_steps": 0.3}),
    "dpo at a constant rate": ("dpo", PAIRS, {"warmup_steps": 2}),
    "cpo": ("cpo", PLAIN, {"label_smoothing": 0.1}),
    "cpo by alphapo": ("cpo", PLAIN, {"loss_type": "alphapo", "alpha": 0.3}),
    "distill": ("distill", COMPLETIONS, {"lmbda": 0.0, "beta": 0.3, "temperature": 0.9}),
    "distill on-policy": ("distill", COMPLETIONS, {"lmbda": 1.0, "beta": 0.3, "max_completion_length": 8}),
    "kto": ("kto", DESIRABLE, {"per_device_train_batch_size": 2}),
    "reward": ("reward", PAIRS, {"center_rewards_coefficient": 0.01}),
    "grpo": ("grpo", PROMPTS, SAMPLED),
    "grpo by its reference": ("grpo", PROMPTS, {**SAMPLED, "beta": 0.1, "use_bias_correction_kl": True}),
    "rloo": ("rloo", PROMPTS, {**UNCLIPPED, "beta": 0.05, "normalize_advantages": True}),
    "online_dpo": ("online_dpo", PROMPTS, ONLINE),
}
PEERS = {
    "sft": "trl:SFT",
    "reward": "trl:Reward",
    "cpo": "trl.experimental.cpo:CPO",
    "distill": "trl.experimental.gkd:GKD",
}
PEERS |= {"online_dpo": "trl.experimental.online_dpo:OnlineDPO", "distill on-policy": "trl:Distillation"}
# The peer has conversations, or prompts, where ours reads their parts.
ROWS_OF_PEERS = {"distill": [{"messages": row["prompt"] + row["completion"]} for row in COMPLETIONS]}
ROWS_OF_PEERS |= {"distill on-policy": PROMPTS}
COMMON = {"max_steps": STEPS, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "gradient_checkpointing": False}
COMMON |= {"bf16": False, "save_strategy": "no", "report_to": "none", "per_device_train_batch_size": 4}
# Of the peer alone: ours has no such name, or refuses it.
QUIET = {"use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "train_sampling_strategy": "sequential"}


def load(recipe, saved):
    if recipe != "reward":
        return AutoModelForCausalLM.from_pretrained(saved)
    torch.manual_seed(0)  # of the new head
    return AutoModelForSequenceClassification.from_pretrained(saved, num_labels=1, pad_token_id=1)


def make_teacher(saved):
    teacher, generator = load("distill", saved), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return teacher


def distinct(completions, **columns):
    """A reward without ties."""
    return [zlib.crc32(completion[0]["content"].encode()) / 2**32 for completion in completions]


def translated(recipe, theirs):
    known = {field.name for field in dataclasses.fields(settings_of(recipe))}
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
    ours, more = translated(recipe, theirs), {}
    peer = pkgutil.resolve_name(f"{PEERS.get(case) or PEERS.get(recipe) or f'trl:{recipe.upper()}'}Trainer")
    config = pkgutil.resolve_name(f"{peer.__module__}:{peer.__name__.removesuffix('Trainer')}Config")
    if recipe == "distill":
        more = {"teacher_model": make_teacher(saved)}
        options = {name: ours.pop(name) for name in [*ours] if name.startswith("teacher.")}
        options = {name.removeprefix("teacher."): value for name, value in options.items()}
        ours |= {"teacher": Teacher(model=make_teacher(saved), **options)}
    if recipe in ("grpo", "rloo", "online_dpo"):
        more = {"reward_funcs": distinct if recipe == "online_dpo" else vowels}
        ours |= {"rewards": more["reward_funcs"], "max_prompt_length": None}
    if recipe in ("grpo", "rloo"):
        ours |= {"old_logprobs": "recomputed"}
    run = getattr(burnish, recipe)(
        load(recipe, saved), rows, str(tmp_path / "run"), shuffle=False, tokenizer=tokenizer, **ours
    )
    steps = [step.metrics for step in run]
    samples = tmp_path / "run/samples.jsonl"
    if recipe == "grpo":
        more |= {"rollout_func": replay(samples)}
    elif samples.exists():
        peer = replayed(peer, samples)
    if samples.exists() and recipe != "online_dpo":
        theirs |= {"shuffle_dataset": False}
    if case == "distill on-policy":
        del theirs["lmbda"]
    trainer = peer(
        model=load(recipe, saved),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(ROWS_OF_PEERS.get(case, rows)),
        args=config(output_dir=str(tmp_path / "trl"), **theirs, **QUIET),
        **more,
    )
    trainer.train()
    peers = [line for line in trainer.state.log_history if "loss" in line]
    losses = [step["loss"] for step in steps]
    told = AGREEMENT if recipe != "online_dpo" else 1e-4  # of which the peer tells four decimals
    assert losses == pytest.approx([line["loss"] for line in peers], abs=told)
    assert max(losses) - min(losses) > 100 * AGREEMENT
    assert [step["grad_norm"] for step in steps] == pytest.approx([line["grad_norm"] for line in peers], rel=1e-3)
