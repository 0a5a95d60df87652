"""Reinforcement learning from Python, without a recipe: its loop, in one process or as one rank of
several.
"""

import json

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from burnish.loops import (
    LocalSource,
    Policy,
    RolloutBuffer,
    RolloutScheduler,
    SamplingParams,
    from_main,
    length_normalized,
    train_step,
)
from burnish.objectives import clipped_surrogate, group_advantage
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(6)]
STEPS, GROUPS, COMPLETIONS, TOKENS = 3, 4, 4, 6


def even(completion, answer):
    """A reward of text: it is given the completion, and columns of the row by their names."""
    return sum(ord(letter) % 2 == 0 for letter in completion) / (len(completion) + len(answer))


def objective(policy, batch):
    logp, old = policy(batch).logprob, batch.columns["sampled_logp"]
    return {
        "grpo": clipped_surrogate(
            logp, old, batch.columns["advantage"], clip_low=0.2, clip_high=0.2
        )
    }


def train(directory, make_source, *, rewards=(even,), steps=STEPS, precision="no"):
    """The loop; returns the metrics of every step, and the policy."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    policy = Policy(AutoModelForCausalLM.from_pretrained(directory).train())
    # as recipes have it
    adamw = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    prepared, optimizer = accelerator.prepare(policy, adamw)
    main = accelerator.is_main_process
    source = make_source(policy, tokenizer) if main else None
    sampling = SamplingParams(TOKENS)
    scheduler = (
        RolloutScheduler(source, PROMPTS, group_size=COMPLETIONS, sampling=sampling)
        if main
        else None
    )
    metrics = []

    def sample():
        scheduler.publish(policy)
        return scheduler.take(GROUPS)

    for _ in range(steps):
        rollout = RolloutBuffer(from_main(accelerator, sample))
        scores = rollout.score(rewards)
        rollout["advantage"] = group_advantage(scores.total, scores.group)[rollout.sequence]
        batches = rollout.micro_batches(64, layout=policy.layout)
        weightings = {"grpo": (1.0, length_normalized)}
        step = train_step(
            accelerator, prepared, optimizer, batches, objective, weightings, max_grad_norm=1.0
        )
        metrics.append({**step, "reward": scores.total.mean().item(), "samples": rollout.samples})
    if main:
        scheduler.close()
    return metrics, policy


def be_rank(directory):
    steps, _ = train(directory, LocalSource)
    print(
        json.dumps(
            [
                {name: step[name] for name in ("loss", "grad_norm", "reward", "tokens")}
                for step in steps
            ]
        )
    )
