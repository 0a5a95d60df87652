"""Conversations of several contexts: each is a sequence that trains, and the conversation counts
once.
"""

import random
from dataclasses import replace

import pytest
import torch
from burnish.loops.recipes.grpo import advantages
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rewards import RewardFunction
from burnish.loops.rl.buffer import RolloutBuffer
from burnish.loops.rollouts.sample import Context, Sample, VersionSpan

REWARDS = [RewardFunction("right", None)]
TASKS, SIZE = 3, 2


def context(draw, prompt=None):
    """One of random tokens, the last of which is drawn."""
    length = draw.randint(1, 6)
    trained = [draw.random() < 0.6 for _ in range(length - 1)] + [True]
    return Context(
        prompt or [draw.randrange(3, 60) for _ in range(draw.randint(1, 5))],
        [draw.randrange(3, 60) for _ in range(length)],
        trained,
        [-draw.uniform(1, 3) for _ in range(length)],
        [VersionSpan(draw.randrange(3), 0, length)],
    )


def conversation(task, index, contexts, reward=0.0):
    first, *further = contexts
    return Sample(
        task, index, **vars(first), finish="stop", rewards={"right": reward}, further=further
    )


@pytest.fixture
def conversations():
    """Of one to three contexts, which begin alike in a group, or do not."""
    draw = random.Random(0)
    samples = []
    for task in range(TASKS):
        start = context(draw).prompt
        for index in range(SIZE):
            first = context(draw, start if task else None)
            others = [context(draw) for _ in range((task + index) % 3)]
            samples.append(conversation(task, index, [first, *others], float(index + task)))
    return samples


def rollout_of(samples, **options):
    rollout = RolloutBuffer(samples, dtype=torch.float64, **options)
    rollout.score(REWARDS)
    return rollout


def sequences(batches):
    """(prompt, tokens, drawn, log-probs) of each sequence that is trained."""
    found = []
    for batch in batches:
        number = 0
        for example in batch.examples:
            for tokens, trained in zip(example.completions, example.trained, strict=True):
                logprobs = batch.columns["sampled_logp"][batch.sequence == number].tolist()
                found.append((example.prompt, tokens, trained, logprobs))
                number += 1
    return found


def drawn(context):
    logprobs = [p for p, drawn in zip(context.logprobs, context.trained, strict=True) if drawn]
    return context.prompt, context.tokens, context.trained, logprobs


@pytest.mark.parametrize("limit", [None, 12, 1])
def test_each_context_is_trained_once_as_a_sequence_of_its_own(limit, conversations):
    batches = rollout_of(conversations).micro_batches(limit)
    wanted = [drawn(context) for sample in conversations for context in sample.contexts]
    assert len(wanted) == 12
    assert sorted(sequences(batches)) == sorted(wanted)


def test_contexts_of_one_prompt_share_an_example_and_others_do_not(conversations):
    rollout = rollout_of(conversations)
    first, *others = rollout.split_groups()
    assert first == [[0], [1], [2]]  # the conversations of task 0 begin differently
    for group in others:
        shared = [example for example in group if len(example) > 1]
        (starts,) = shared
        assert {rollout.contexts[i].prompt is conversations[0].prompt for i in starts} == {False}
        assert len({tuple(rollout.contexts[i].prompt) for i in starts}) == 1
    examples = [i for group in (first, *others) for example in group for i in example]
    assert sorted(examples) == list(range(12))


def test_a_plan_names_the_task_of_every_example(conversations):
    """Also where two tasks have the same prompt, in one list."""
    conversations[2].prompt = conversations[4].prompt
    rollout = rollout_of(conversations)
    (micro_batch,) = rollout.plan()
    tasks = [rollout.task_of(contexts[0]) for contexts in micro_batch]
    assert tasks == sorted(tasks) and set(tasks) == {0, 1, 2}
    (batch,) = rollout.micro_batches()
    assert len(batch.examples) == len(tasks)


def test_a_value_of_a_conversation_is_that_of_the_tokens_of_all_its_contexts(conversations):
    rollout = rollout_of(conversations)
    lengths = [sample.length for sample in conversations]
    assert rollout.lengths.tolist() == lengths
    of_conversations = torch.arange(len(rollout), dtype=torch.float64)
    rollout["number"] = of_conversations[rollout.sequence]
    sums = [number * length for number, length in enumerate(lengths)]
    assert rollout.sum(rollout["number"]).tolist() == sums


def test_the_age_of_a_token_is_that_of_its_context(conversations):
    rollout = rollout_of(conversations, version=4)
    for number, context in enumerate(rollout.contexts):
        ages = rollout["age"][rollout.context == number]
        assert ages.tolist() == [4.0 - context.spans[0].version] * sum(context.trained)
    assert rollout_of(conversations).version == 2


def test_masking_a_conversation_masks_all_of_its_contexts(conversations):
    masked = conversations[3]
    masked.finish = "aborted"
    rollout = rollout_of(conversations)
    assert len(masked.contexts) == 3
    others = [sample for sample in conversations if sample is not masked]
    wanted = [drawn(context) for sample in others for context in sample.contexts]
    assert sorted(sequences(rollout.micro_batches())) == sorted(wanted)


NAMES = ("group", "rloo", "opo", "gpg", "maxrl", "max_at_k", "reinforce_plus_plus_baseline")


@pytest.mark.parametrize("name", NAMES)
def test_an_advantage_counts_a_conversation_once(name):
    """It is that of one sequence with as many tokens, whatever contexts they are in."""
    draw = random.Random(1)
    several = []
    joined = []
    for task in range(2):
        for index in range(4):
            contexts = [context(draw) for _ in range(1 + index % 3)]
            sample = conversation(task, index, contexts, draw.choice([0.0, 0.3, 1.0]))
            whole = replace(sample, further=[])
            for part in sample.further:
                whole.spans = [*whole.spans, *_after(part.spans, len(whole.tokens))]
                for field in ("tokens", "trained", "logprobs"):
                    setattr(whole, field, getattr(whole, field) + getattr(part, field))
            several.append(sample)
            joined.append(whole)
    config = GRPO(model="", data="", output="", group_size=4, advantage=name)
    of_several, of_joined = (rollout_of(samples) for samples in (several, joined))
    assert len(of_several.contexts) > len(of_joined.contexts)
    given = advantages(of_several, config=config)["advantage"]
    assert torch.equal(given, advantages(of_joined, config=config)["advantage"])
    assert given.abs().max() > 0


def _after(spans, start):
    return [VersionSpan(version, start + first, start + end) for version, first, end in spans]
