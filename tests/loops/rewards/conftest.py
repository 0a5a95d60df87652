"""Answers to judge."""

import asyncio
from collections import Counter

import pytest
from burnish.loops.rollouts.sample import Sample, VersionSpan


def make(
    text="", *, task=0, index=0, tokens=None, trained=None, prompt=(1,), finish="stop", **info
):
    tokens = list(range(len(text.split()))) if tokens is None else list(tokens)
    return Sample(
        task=task,
        index=index,
        prompt=list(prompt),
        tokens=tokens,
        trained=[True] * len(tokens) if trained is None else list(trained),
        logprobs=[-1.0] * len(tokens),
        spans=[VersionSpan(0, 0, len(tokens))],
        finish=finish,
        text=text,
        info=info,
    )


@pytest.fixture
def answer():
    return make


@pytest.fixture
def groups():
    """Two tasks of two answers each, and their rows."""
    samples = [make(f"answer {i}", task=i // 2, index=i % 2) for i in range(4)]
    return [{"answer": str(sample.task), "prompt": "?"} for sample in samples], samples


@pytest.fixture
def judging():
    """`score_samples`, run to its end; gives how many answers each function left without a score,
    by reason.
    """
    from burnish.loops.rewards import score_samples

    def judging(rewards, rows, samples):
        asyncio.run(score_samples(rewards, rows, samples))
        return unscored(samples)

    return judging


def unscored(samples):
    found = (
        (name, "none" if value is None else value)
        for sample in samples
        for name, value in sample.rewards.items()
    )
    return Counter((name, value) for name, value in found if isinstance(value, str))
