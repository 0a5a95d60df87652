"""What ranks are sent of a rollout is what was sampled, in few bytes."""

import pickle
import random

import numpy as np
import pytest
from burnish.loops.rollouts.arrays import from_tensors, to_tensors
from burnish.loops.rollouts.sample import Context, Sample, VersionSpan


def context(rng, prompt, length, *, double=False):
    trained = [rng.random() < 0.7 for _ in range(length)]
    logprobs = [float(np.float32(-rng.random())) + double * 1e-12 for _ in range(length)]
    return Context(
        [rng.randrange(1 << 18) for _ in range(prompt)],
        [rng.randrange(1 << 18) for _ in range(length)],
        trained,
        logprobs,
        [VersionSpan(3, 0, length)] if length else [],
    )


def sample(rng, index, *sizes, **options):
    first, *further = (context(rng, *size, **options) for size in sizes)
    return Sample(
        5, index, **vars(first), finish="stop", text="a", rewards={"r": 0.5}, further=further
    )


@pytest.mark.parametrize("double", [False, True])
def test_samples_come_as_they_were(double):
    rng = random.Random(1)
    sizes = [[(3, 9)], [(4, 1), (0, 17), (2, 5)], [(0, 0)], [(1, 8)]]
    sent = [sample(rng, i, *each, double=double) for i, each in enumerate(sizes)]
    before = [each.copy() for each in sent]
    emptied, tensors = to_tensors(sent)
    received = from_tensors(pickle.loads(pickle.dumps(emptied)), tensors)
    assert received == before == sent
    for each in received:
        for one in each.contexts:
            assert {type(drawn) for drawn in one.trained} <= {bool}
            assert {type(token) for token in [*one.prompt, *one.tokens]} <= {int}


def test_no_samples_come_as_none():
    assert from_tensors(*to_tensors([])) == []


def test_a_token_takes_eight_bytes_and_a_bit():
    rng = random.Random(1)
    sent = [sample(rng, i, (10, 1000)) for i in range(32)]
    emptied, tensors = to_tensors(sent)
    size = sum(tensor.nbytes for tensor in tensors.values()) + len(pickle.dumps(emptied))
    assert size / (32 * 1000) < 8.5
