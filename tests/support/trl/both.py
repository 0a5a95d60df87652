"""A configuration of the peer's, trained by its trainer and by ours, on the same rows in the same
order.
"""

import dataclasses
import json
import os
import pkgutil
import random
import zlib
from collections import defaultdict, deque
from itertools import cycle
from pathlib import Path

import burnish
import pytest
import torch
from burnish.benchmarks.peer.sampled import replay, vowels
from burnish.loops.cli.trl import translate
from burnish.loops.config import Teacher
from burnish.loops.recipes import settings_of
from datasets import Dataset
from peer import replayed
from tiny import sums
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

AGREEMENT, STEPS = 1e-5, 4
PEERS = {
    "sft": "trl:SFT",
    "reward": "trl:Reward",
    "cpo": "trl.experimental.cpo:CPO",
    "distill": "trl.experimental.gkd:GKD",
    "online_dpo": "trl.experimental.online_dpo:OnlineDPO",
}
COMMON = {
    "max_steps": STEPS,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
}
COMMON |= {
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
    "per_device_train_batch_size": 4,
}
# Of the peer alone: ours has no such name, or refuses it.
QUIET = {
    "use_cpu": True,
    "logging_steps": 1,
    "disable_tqdm": True,
    "train_sampling_strategy": "sequential",
}


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


def uneven_pairs(count, seed=3):
    """Plain pairs, some of whose parts are many times as long as others."""
    rng = random.Random(seed)

    def words(most):
        return " ".join(rng.choice(["ab", "cde", "f", "ghij"]) for _ in range(rng.randint(1, most)))

    return [
        {"prompt": f"{words(6)} ", "chosen": words(30), "rejected": words(30)} for _ in range(count)
    ]


def halves(pairs):
    """One completion of each pair, with its label."""
    kinds = zip(pairs, cycle(("chosen", "rejected")), strict=False)
    return [
        {"prompt": p["prompt"], "completion": p[kind], "label": kind == "chosen"}
        for p, kind in kinds
    ]


def answers(pairs):
    return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]


def replay_on_ranks(samples):
    """`replay` for a rank that asks for a part of the prompts, and for all completions of each."""
    drawn = defaultdict(deque)
    for sample in map(json.loads, samples.read_text().splitlines()):
        drawn[tuple(sample["prompt"])].append(sample)

    def rollout(prompts, trainer):
        asked = trainer.processing_class.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=True
        )
        found = [drawn[tuple(ids)].popleft() for ids in asked["input_ids"]]
        names = {"prompt_ids": "prompt", "completion_ids": "tokens", "logprobs": "logprobs"}
        return {theirs: [sample[ours] for sample in found] for theirs, ours in names.items()}

    return rollout


def train_both(
    recipe,
    rows,
    settings,
    saved,
    folder,
    *,
    peer=None,
    rows_of_peer=None,
    changes=None,
    held_out=None,
    teacher=None,
):
    """The metrics of our steps, the peer's log, and the directory of our run.

    Args:
        settings: in the peer's names.
        saved: directory of the model.
        peer: the trainer, or its name without Trainer.
        changes: of our fields.
        held_out: rows to evaluate on.
        teacher: directory of the teacher; that of the model by default.
    """
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.pad_token = tokenizer.eos_token
    theirs, more, ranks = {**COMMON, **settings}, {}, int(os.environ.get("WORLD_SIZE", 1))
    translation = translate(
        recipe, {field.name for field in dataclasses.fields(settings_of(recipe))}, theirs
    )
    assert translation.refused == {}
    ours = {**translation.ours, **(changes or {})}
    if not isinstance(peer, type):
        peer = pkgutil.resolve_name(
            f"{peer or PEERS.get(recipe) or f'trl:{recipe.upper()}'}Trainer"
        )
    config = pkgutil.resolve_name(
        f"{peer.__module__}:{peer.__name__.removesuffix('Trainer')}Config"
    )
    if recipe == "distill":
        more = {"teacher_model": make_teacher(teacher or saved)}
        options = {name: ours.pop(name) for name in [*ours] if name.startswith("teacher.")}
        options = {name.removeprefix("teacher."): value for name, value in options.items()}
        ours |= {"teacher": Teacher(model=make_teacher(teacher or saved), **options)}
    if recipe in ("grpo", "rloo", "online_dpo"):
        more = {"reward_funcs": distinct if recipe == "online_dpo" else vowels}
        ours |= {"rewards": more["reward_funcs"], "max_prompt_length": None}
    if recipe in ("grpo", "rloo"):
        ours |= {"old_logprobs": "recomputed"}
    if held_out:
        ours |= {"eval_data": held_out}
        more |= {"eval_dataset": Dataset.from_list(held_out)}
    run = getattr(burnish, recipe)(
        load(recipe, saved), rows, str(folder / "run"), shuffle=False, tokenizer=tokenizer, **ours
    )
    steps = [step.metrics for step in run]
    samples = folder / "run/samples.jsonl"
    if recipe == "grpo":
        more |= {"rollout_func": (replay if ranks == 1 else replay_on_ranks)(samples)}
    elif samples.exists():
        peer = replayed(peer, samples)
    if samples.exists() and recipe != "online_dpo":
        theirs |= {"shuffle_dataset": False}
    if samples.exists() and recipe == "distill":
        del theirs["lmbda"]
    trainer = peer(
        model=load(recipe, saved),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows_of_peer or rows),
        args=config(output_dir=str(folder / "trl"), **theirs, **QUIET),
        **more,
    )
    trainer.train()
    return steps, trainer.state.log_history


def assert_alike(steps, log, told=AGREEMENT):
    """Equal losses, which change, and equal norms of gradients."""
    ours, peers = (
        [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
        for lines in (steps, log)
    )
    (losses, norms), (their_losses, their_norms) = zip(*ours, strict=True), zip(*peers, strict=True)
    assert losses == pytest.approx(their_losses, abs=told), (
        f"losses {losses}, the peer's {their_losses}"
    )
    assert max(losses) - min(losses) > 100 * AGREEMENT, f"losses {losses}"
    assert norms == pytest.approx(their_norms, rel=1e-3), f"norms {norms}, the peer's {their_norms}"


# TRL averages the means and the extremes of micro-batches, however many tokens each has; ours are of
# the whole step.
OTHERWISE_MEANT = {
    *("mean_token_accuracy", "logits/chosen", "logits/rejected"),
    *("min_reward", "max_reward"),
}


def shared_metrics(steps, log):
    """The lines of both, each with the metrics that both have, and mean alike."""
    peers = [line for line in log if "loss" in line]
    names = steps[0].keys() & peers[0].keys() - {"loss", "grad_norm"} - OTHERWISE_MEANT
    return *(
        [{name: line[name] for name in names} for line in lines] for lines in (steps, peers)
    ), names


UNEVEN, PROMPTS = uneven_pairs(24), [{"prompt": pair["prompt"]} for pair in sums(16)]
# On two ranks, where a step has 2 or 4 micro-batches.
HALF = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
DRAWN = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "num_iterations": 2,
}
ON_RANKS = {
    "sft": ("sft", answers(UNEVEN), HALF),
    "sft, clipped": ("sft", answers(UNEVEN), {**HALF, "max_grad_norm": 0.5, "learning_rate": 1e-2}),
    "dpo": ("dpo", UNEVEN, HALF),
    "dpo, clipped": ("dpo", UNEVEN, {"per_device_train_batch_size": 6, "max_grad_norm": 0.05}),
    "kto": ("kto", halves(UNEVEN), {**HALF, "loss_type": "apo_zero_unpaired"}),
    "reward": ("reward", UNEVEN, HALF),
    "grpo": (
        "grpo",
        PROMPTS,
        {**DRAWN, "loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    ),
    "dapo": (
        "grpo",
        PROMPTS,
        {**DRAWN, "loss_type": "dapo", "scale_rewards": "batch", "beta": 0.0},
    ),
    "dr_grpo": (
        "grpo",
        PROMPTS,
        {**DRAWN, "loss_type": "dr_grpo", "gradient_accumulation_steps": 2, "beta": 0.0},
    ),
}


def be_rank(saved, folder):
    os.environ |= {"ACCELERATE_USE_CPU": "true", "TRL_EXPERIMENTAL_SILENCE": "1"}
    for name, (recipe, rows, settings) in ON_RANKS.items():
        try:
            steps, log = train_both(recipe, rows, settings, saved, Path(folder) / name)
            assert_alike(steps, log)
            if recipe != "grpo":  # whose peer logs a rollout once
                ours, peers, names = shared_metrics(steps, log)
                assert len(names) > 1
                assert ours == [pytest.approx(line, rel=1e-3, abs=1e-4) for line in peers]
        except AssertionError as error:
            raise AssertionError(name) from error
    torch.distributed.destroy_process_group()
