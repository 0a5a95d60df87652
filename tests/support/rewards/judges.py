"""Reward functions that fail, and what they leave behind, for the command line to name:
``judges:math``.
"""

import asyncio

import numpy as np
import torch
from burnish.loops.environments import Step
from online import even


async def math(row, sample):
    """Times out on the first answer to each prompt, and does not apply to the second."""
    if sample.index == 0:
        await asyncio.sleep(60)
    return None if sample.index == 1 else even(row, sample)


def form(row, sample):
    return (1.0, 0.75, 0.5, 0.5)[sample.index]


def broken(row, sample):
    raise KeyError("solution")


def wordy(row, sample):
    return "good"


def not_numbers(row, sample):
    return float("nan") if sample.index else "good"


def too_few(prompts, completions, **columns):
    return [1.0]


def forgets(row, sample):
    even(row, sample)


def of_other_prompts(row, sample):
    """None for the first rollout of four prompts."""
    return None if sample.task < 4 else even(row, sample)


def spoils_ids(completions, completion_ids, **columns):
    """Replace the last token, and leave it out, as clumsy post-processing does."""
    scores = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
    for i, ids in enumerate(completion_ids):
        ids[-1] = 0
        if i % 2:
            ids.pop()
    return scores


def broken_later(row, sample):
    """From the second rollout of four prompts on."""
    return even(row, sample) if sample.task < 4 else broken(row, sample)


def works_once(row, sample):
    return even(row, sample) if (sample.task, sample.index) == (3, 3) else broken(row, sample)


def broken_in_odd_rollouts(row, sample):
    return even(row, sample) if sample.task // 4 % 2 == 0 else broken(row, sample)


def logs_numbers(prompts, completions, completion_ids, log_extra, log_metric, **columns):
    """As a function for TRL may: whatever numpy and torch hold numbers in."""
    lengths = [len(ids) for ids in completion_ids]
    log_extra("float64", list(np.float64(lengths)))
    log_extra("float32", list(np.float32(lengths)))
    log_extra("int64", list(np.int64(lengths)))
    log_extra("tensor", list(torch.tensor(lengths)))
    log_extra("array", [np.arange(2) + n for n in lengths])
    log_metric("mean_length", np.mean(lengths))
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def leaves_a_float64(row, sample):
    """Which JSON takes for a float, and a checkpoint does not."""
    sample.info["entropy"] = np.float64(0.5)
    return even(row, sample)


def leaves_numbers(row, sample):
    sample.info["seen"] = {"by": (np.int64(3), torch.ones(2, dtype=torch.bfloat16))}
    return even(row, sample)


def leaves_an_object(row, sample):
    sample.info["tree"] = object()
    return even(row, sample)


class NeverPays:
    """An environment without a reward."""

    def reset(self, row):
        return row["prompt"]

    def step(self, answer):
        return Step(done=True)
