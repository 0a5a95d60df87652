"""Completions on the stand-in for a GPU, which is registered in this process only, without a wait
for it in any token step.
"""

import asyncio
import os
from contextlib import nullcontext
from unittest.mock import patch

import pytest
from burnish.loops.models.policy import Policy
from burnish.loops.rollouts.local import source
from burnish.loops.rollouts.local.graph_batch import GraphBatch
from burnish.loops.rollouts.local.kv_cache import ContinuousBatch
from burnish.loops.rollouts.local.source import LocalSource
from burnish.loops.rollouts.sample import Request, SamplingParams
from tiny import make_model

SAMPLING = SamplingParams(20, temperature=0.8, top_k=30, stop=(3, 4, 5), repetition_penalty=1.2)


def completions_of(device, **options):
    """Of seven prompts, of which a few are read at a time."""
    policy = Policy(make_model().to(device))
    opened = LocalSource(policy, version=0, cache_bytes=1 << 20, **options)

    async def sampled():
        wanted = [Request(i, [7] * (1 + i % 4), [0, 1, 2], SAMPLING, key=0) for i in range(7)]
        return await asyncio.gather(*map(opened.sample, wanted))

    return [sample for group in asyncio.run(sampled()) for sample in group]


def continuous(runner, cache_bytes, *, cuda_graphs):
    """In place of `choose_batch`, without its probe."""
    return lambda longest: ContinuousBatch(runner, lambda longest: 9)


def be_rank():
    os.environ.pop("ACCELERATE_USE_CPU", None)
    import standin

    steps = []

    def watched(batch, joining, version, original=GraphBatch.advance):
        steps.append(len(joining))
        with nullcontext() if joining else standin.no_waits():
            return original(batch, joining, version)

    def left(batch, original=GraphBatch.drop_finished):
        with standin.no_waits():
            return original(batch)

    expected = completions_of("cpu")
    with (
        patch.object(GraphBatch, "advance", watched),
        patch.object(GraphBatch, "drop_finished", left),
    ):
        samples = completions_of(standin.DEVICE, cuda_graphs=True)
    assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
    assert steps.count(0) > 20 and len({len(sample.tokens) for sample in samples}) > 3

    def of_continuous(batch, original=ContinuousBatch.step):
        with standin.no_waits():
            return original(batch)

    with (
        patch.object(ContinuousBatch, "step", of_continuous),
        patch.object(source, "choose_batch", continuous),
        pytest.raises(RuntimeError, match="would wait for the device"),
    ):
        completions_of(standin.DEVICE)
