"""Completions of prompts with images by the policy itself."""

import asyncio
import warnings
from functools import partial

import pytest
import torch
import vision
from burnish.data import encode_prompts, example
from burnish.data.images import ImageReader
from burnish.loops.batch import collate
from burnish.loops.models.images import ImageInputs
from burnish.loops.models.io import named_weights
from burnish.loops.models.policy import Policy
from burnish.loops.rollouts.local import source as source_module
from burnish.loops.rollouts.local.kv_cache import ContinuousBatch, StaticBatch
from burnish.loops.rollouts.local.source import DetachedSource, LocalSource
from burnish.loops.rollouts.sample import Request, SamplingParams

FAST = ("idefics3", "gemma3", "qwen2_5_vl")
FAMILIES = [
    pytest.param(family, marks=[] if family in FAST else pytest.mark.slow)
    for family in vision.FAMILIES
]
WIDE, TALL, SMALL = (60, 30), (30, 60), (32, 32)
# One image, two of unlike sizes, none, and one again.
SHOWN = [[WIDE], [TALL, WIDE], [], [SMALL]]


def prompts(reader, color="red"):
    rows = []
    for sizes in SHOWN:
        rows.append(
            {
                "images": [vision.picture(*size, color) for size in sizes],
                "prompt": [{"role": "user", "content": f"what of {len(sizes)}?"}],
            }
        )
    data, _ = encode_prompts(rows, reader)
    return rows, [example(data, i) for i in range(len(data))]


def policy_of(family, dtype=torch.float64):
    vision.skip_unless_available(family)
    model, processor = vision.make(family, dtype=dtype)
    return Policy(model, images=ImageInputs(ImageReader(processor)), backend="reference")


def sampled(source, given, *, count=1, **sampling):
    """The completions of each prompt, all of which are asked for at once."""
    requests = [
        Request(task, each.prompt, range(count), SamplingParams(**sampling), 7, images=each.images)
        for task, each in enumerate(given)
    ]

    async def all_of_them():
        return await asyncio.gather(*map(source.sample, requests))

    return asyncio.run(all_of_them())


def generated(policy, row, length):
    """The greedy completion of the prompt of a row by transformers."""
    reader = policy.images.reader
    parts = [{"type": "image"}] * len(row["images"])
    parts = [*parts, {"type": "text", "text": row["prompt"][0]["content"]}]
    text = reader.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    images = {"images": [row["images"]]} if row["images"] else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, in GLM's processor
        inputs = reader.processor(text=[text], return_tensors="pt", **images)
    for name, value in inputs.items():
        if value.is_floating_point():
            inputs[name] = value.to(policy.plain.dtype)
    ends = sorted(reader.stop_tokens)
    with torch.no_grad():
        written = policy.plain.generate(
            **inputs, max_new_tokens=length, do_sample=False, eos_token_id=ends
        )
    return written[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_completions_are_those_of_generate(family):
    policy = policy_of(family)
    rows, given = prompts(policy.images.reader)
    source = LocalSource(policy, version=1)
    batch = StaticBatch if family == "gemma3" else ContinuousBatch  # of Gemma's window
    assert isinstance(source._make_batch(200), batch)
    groups = sampled(source, given, max_tokens=12, temperature=0.0)
    for row, (found,) in zip(rows, groups, strict=True):
        assert found.tokens == generated(policy, row, 12)


def trainers_logprobs(policy, given, groups):
    """Log-probs of sampled tokens as the policy trains on them, a group in an example."""
    examples = []
    for each, group in zip(given, groups, strict=True):
        completions = [sample.tokens for sample in group]
        trained = [sample.trained for sample in group]
        examples.append(each._replace(completions=completions, trained=trained))
    with torch.no_grad():
        return policy(collate(examples)).logprob


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [LocalSource, DetachedSource])
def test_logprobs_of_samples_are_the_trainers(kind, family):
    policy = policy_of(family)
    _, given = prompts(policy.images.reader)
    groups = sampled(kind(policy, version=1), given, count=3, max_tokens=8)
    found = [value for group in groups for sample in group for value in sample.logprobs]
    expected = trainers_logprobs(policy, given, groups)
    found = torch.tensor(found, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", FAST)
def test_under_autocast_logprobs_are_near_the_trainers(family):
    policy = policy_of(family, torch.float32)
    _, given = prompts(policy.images.reader)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    source = LocalSource(policy, version=1, context=autocast)
    groups = sampled(source, given, count=3, max_tokens=8)
    found = [value for group in groups for sample in group for value in sample.logprobs]
    with autocast():
        expected = trainers_logprobs(policy, given, groups)
    assert (torch.tensor(found) - expected).abs().mean() < 2e-2 * expected.abs().mean()


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_prompts_of_the_same_tokens_see_images_of_their_own(family):
    policy = policy_of(family)
    reader = policy.images.reader
    _, red = prompts(reader)
    _, blue = prompts(reader, "blue")
    assert red[0].prompt == blue[0].prompt
    source = LocalSource(policy, version=1)
    together = sampled(source, [red[0], blue[0]], count=2, max_tokens=6)
    # the seed of a completion tells of its task
    (first,) = sampled(source, red[:1], count=2, max_tokens=6)
    _, second = sampled(source, [blue[2], blue[0]], count=2, max_tokens=6)
    for group, alone in zip(together, [first, second], strict=True):
        assert [each.tokens for each in group] == [each.tokens for each in alone]
        found = torch.tensor([each.logprobs for each in group])
        expected = torch.tensor([each.logprobs for each in alone])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert together[0][0].logprobs[0] != together[1][0].logprobs[0]


def test_an_image_token_that_is_drawn_ends_its_completion(monkeypatch):
    policy = policy_of("idefics3")
    reader = policy.images.reader
    _, given = prompts(reader)
    drawn = iter([100, 101, reader.token, *[102] * 8])

    def draw(logits, *arguments):
        return torch.full((len(logits),), next(drawn)), torch.full((len(logits),), -1.0)

    monkeypatch.setattr(source_module, "draw", draw)
    ((sample,),) = sampled(LocalSource(policy, version=1), given[:1], max_tokens=8)
    assert (sample.tokens, sample.finish) == ([100, 101, reader.token], "stop")


def test_the_vision_tower_runs_once_for_the_completions_of_a_prompt():
    policy = policy_of("idefics3")
    _, given = prompts(policy.images.reader)
    source = LocalSource(policy, version=1)
    images = []
    handle = policy.plain.base_model.vision_model.register_forward_pre_hook(
        lambda module, args, kwargs: images.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    sampled(source, given[:1], count=1, max_tokens=4)
    sampled(source, given[:1], count=5, max_tokens=4)
    handle.remove()
    alone, together = images
    assert alone == together


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_new_weights_read_the_images_of_unfinished_completions_again(family):
    policy = policy_of(family)
    other, _ = vision.make(family, seed=1)
    _, given = prompts(policy.images.reader)
    source = DetachedSource(policy, version=1)
    request = Request(0, given[0].prompt, [0, 1], SamplingParams(6), 1, images=given[0].images)

    async def publish_between_two_tokens():
        asked = asyncio.create_task(source.sample(request))
        while not source._awaited:
            await asyncio.sleep(0)
        while not all(each.tokens for of in source._awaited.values() for each in of):
            await asyncio.sleep(0)
        await source.publish(named_weights(Policy(other, backend="reference")), 2)
        return await asked

    samples = asyncio.run(publish_between_two_tokens())
    policy.plain.load_state_dict(other.state_dict())
    expected = trainers_logprobs(policy, given[:1], [samples])
    found, versions = [], []
    for sample in samples:
        found += sample.logprobs
        for span in sample.spans:
            versions += [span.version] * (span.end - span.start)
    apart = (torch.tensor(found, dtype=torch.float64) - expected).abs()
    new = torch.tensor(versions) == 2
    assert new.any() and not new.all()
    assert apart[new].max() < 1e-9 < 0.01 < apart[~new].max()


def test_a_policy_without_a_processor_refuses_prompts_with_images():
    policy = policy_of("llava")
    _, given = prompts(policy.images.reader)
    blind = LocalSource(Policy(policy.plain, backend="reference"), version=1)
    with pytest.raises(ValueError, match="task 0: its prompt shows images, and the policy has no"):
        sampled(blind, given, max_tokens=4)
