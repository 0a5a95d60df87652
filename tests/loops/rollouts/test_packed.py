"""Packed samples read like those in lists, in few bytes."""

import copy
import gc
import json
import pickle
import random
import tracemalloc

import numpy as np
import pytest
from burnish.loops.rollouts.arrays import packed
from burnish.loops.rollouts.packed import Packed, PackedMask
from burnish.loops.rollouts.replay import ReplaySource, read_samples, write_samples
from burnish.loops.rollouts.sample import Context, Sample, VersionSpan, check_sample, to_record
from scripted import B, G, Scripted, Trainer

TOKENS = [5, 151_000, 0, 7, 2**31 - 1]
LOGPROBS = [-0.5, float(np.float32(-0.1)), 0.0, -17.25, -1e-30]
MASK = [True, False, True, True, False, True, True, False, False, True]
AS_PACKED = [
    (TOKENS, Packed(np.array(TOKENS, np.int32))),
    (LOGPROBS, Packed(np.array(LOGPROBS, np.float64))),
    (MASK, PackedMask(np.array(MASK))),
    ([], Packed(np.array([], np.int32))),
    ([], PackedMask(np.array([], np.bool_))),
]


def sample(index=0, length=40, *, logprob=lambda rng: float(np.float32(-rng.random()))):
    rng = random.Random(index)

    def context(prompt):
        return Context(
            [rng.randrange(300, 150_000) for _ in range(prompt)],
            [rng.randrange(300, 150_000) for _ in range(length)],
            [True, *(rng.random() < 0.7 for _ in range(length - 1))],
            [logprob(rng) for _ in range(length)],
            [VersionSpan(3, 0, length)],
        )

    return Sample(5, index, **vars(context(7)), finish="stop", text="a", further=[context(9)])


@pytest.mark.parametrize("numbers, read", AS_PACKED)
def test_packed_numbers_read_like_a_list(numbers, read):
    assert read == numbers and numbers == read and read == copy.deepcopy(read)
    assert read != [*numbers, 1] and read != "text"
    assert len(read) == len(numbers) and bool(read) == bool(numbers) and sum(read) == sum(numbers)
    assert list(read) == numbers and repr(read) == repr(numbers)
    for part in (slice(1, 3), slice(None), slice(None, None, -1), slice(-2, None)):
        assert read[part] == numbers[part] and type(read[part]) is list
    for place in range(-len(numbers), len(numbers)):
        assert read[place] == numbers[place] and type(read[place]) is type(numbers[place])
    assert {type(number) for number in read} == {type(number) for number in numbers}
    assert pickle.loads(pickle.dumps(read)) == numbers
    with pytest.raises(IndexError):
        read[len(numbers)]
    with pytest.raises(TypeError):
        read[0] = 1


def test_what_is_added_to_packed_numbers_makes_a_list():
    numbers, read = AS_PACKED[0]
    more = [1, 2]
    assert read + more == numbers + more and more + read == more + numbers
    read += more
    more += AS_PACKED[0][1]
    assert type(read) is type(more) is list
    assert read == [*numbers, 1, 2] and more == [1, 2, *numbers]


@pytest.mark.parametrize(
    "logprob", [lambda rng: float(np.float32(-rng.random())), lambda rng: -rng.random()]
)
def test_a_packed_sample_is_recorded_as_it_came(logprob, tmp_path):
    came = sample(logprob=logprob)
    held = packed(came)
    check_sample(held, vocab=150_000)
    assert held == came and held.length == came.length
    assert json.dumps(to_record(held)) == json.dumps(to_record(came))
    write_samples(tmp_path / "samples.jsonl", [held])
    write_samples(tmp_path / "samples.parquet", [held])
    assert [*read_samples(tmp_path / "samples.jsonl")] == [came]
    assert [*read_samples(tmp_path / "samples.parquet")] == [came]


def test_numbers_that_32_bits_do_not_hold_stay_as_they_are():
    came = sample()
    came.tokens[3], came.logprobs[3] = 2**40, -1e300
    assert packed(came) == came


def test_a_users_function_gets_lists():
    own = packed(sample()).copy()
    for context in own.contexts:
        for numbers in (context.prompt, context.tokens, context.trained, context.logprobs):
            assert type(numbers) is list


class Long(Scripted):
    """A source of completions of 2,000 tokens."""

    def _answer(self, request, index, spans):
        drawn = sample(request.task * G + index, length=2000)
        spans = [VersionSpan(spans[0].version, 0, 2000)]
        return Sample(
            request.task,
            index,
            list(request.prompt),
            drawn.tokens,
            [True] * 2000,
            drawn.logprobs,
            spans,
            "stop",
        )


def bytes_a_token(make, tokens):
    """What is held of a value, by the memory that Python and numpy have allocated."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        held = make()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held
    return (after - before) / tokens


def test_a_token_of_a_rollout_takes_at_most_20_bytes():
    source = Long()
    trainer = Trainer(source)
    with trainer.scheduler:
        trainer.scheduler.publish()
        assert bytes_a_token(trainer.scheduler.take, B * G * 2000) < 20


def test_a_token_of_stored_samples_takes_at_most_20_bytes(tmp_path):
    count = 8
    write_samples(tmp_path / "s.jsonl", (sample(index, length=2000) for index in range(count)))
    stored = bytes_a_token(
        lambda: ReplaySource(read_samples(tmp_path / "s.jsonl")), 2 * 2000 * count
    )
    assert stored < 20
