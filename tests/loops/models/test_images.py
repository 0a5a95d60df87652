"""Vision-language models: log-probs with images equal the model's own forward pass, in every
layout.
"""

import warnings
from functools import cache

import pytest
import torch
import vision
from burnish.data import DataError, Tokenization, encode_preference, example
from burnish.data.images import ImageReader
from burnish.loops.batch import collate
from burnish.loops.models import backbone, probe
from burnish.loops.models.images import ImageInputs
from burnish.loops.models.policy import Policy

FAMILIES = [
    pytest.param(
        family,
        marks=[] if family in ("idefics3", "gemma3", "qwen2_5_vl") else pytest.mark.slow,
    )
    for family in vision.FAMILIES
]
PADDED_ONLY = ("gemma3",)
# Their processors refuse an aspect ratio of 200.
REFUSING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
WIDE, TALL, SMALL = (60, 30), (30, 60), (32, 32)
# One image, two of unlike sizes, none, and one again.
SHOWN = [[WIDE], [TALL, WIDE], [], [SMALL]]


def rows(shown=SHOWN, color="red"):
    answers = [("red", "blue one"), ("two", "none"), ("no", "yes, so"), ("small", "big")]
    made = []
    for sizes, (chosen, rejected) in zip(shown, answers, strict=False):
        made.append(
            {
                "images": [vision.picture(*size, color) for size in sizes],
                "prompt": [{"role": "user", "content": f"what of {len(sizes)}?"}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        )
    return made


@cache
def made(family, dtype=torch.float64):
    vision.skip_unless_available(family)
    model, processor = vision.make(family, dtype=dtype)
    return model, ImageReader(processor)


def policy_of(family, layout="auto", dtype=torch.float64):
    model, reader = made(family, dtype)
    return Policy(model, layout=layout, images=ImageInputs(reader), backend="reference")


def examples_of(reader, given):
    data, _ = encode_preference(given, reader)
    return [example(data, i) for i in range(len(data))]


def own_logprobs(model, reader, given):
    """Log-probs of both completions by the model's own forward pass on its processor's output."""
    values = []
    for row in given:
        for answer in (row["chosen"], row["rejected"]):
            messages = [*row["prompt"], *answer]
            parts = [{"type": "image"}] * len(row["images"])
            parts = [*parts, {"type": "text", "text": messages[0]["content"]}]
            shown = [{"role": "user", "content": parts}, messages[1]]
            template = reader.tokenizer.apply_chat_template
            prompt = template(shown[:1], tokenize=False, add_generation_prompt=True)
            text = template(shown, tokenize=False)
            images = {"images": [row["images"]]} if row["images"] else {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, in GLM's processor
                whole = reader.processor(text=[text], return_tensors="pt", **images)
                start = len(reader.processor(text=[prompt], **images)["input_ids"][0])
            for name, value in whole.items():
                if value.is_floating_point():
                    whole[name] = value.to(model.dtype)
            with torch.no_grad():
                logits = model(**whole, use_cache=False).logits[0].double()
            ids = whole["input_ids"][0]
            logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            values.append(logprobs[start - 1 :])
    return torch.cat(values)


def logprobs(policy, examples):
    with torch.no_grad():
        return policy(collate(examples)).logprob.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_models_own_forward_in_every_layout(family):
    model, reader = made(family)
    given = rows()
    examples = examples_of(reader, given)
    expected = own_logprobs(model, reader, given)
    policy = policy_of(family)
    assert policy.layout == ("padded" if family in PADDED_ONLY else "shared")
    layouts = ["padded"] if family in PADDED_ONLY else ["padded", "packed", "shared"]
    for layout in layouts:
        policy.layout = layout
        torch.testing.assert_close(logprobs(policy, examples), expected, rtol=0, atol=1e-12)
        # each row alone, of which one has no image
        alone = torch.cat([logprobs(policy, [each]) for each in examples])
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_images_of_extreme_sizes_are_exact_or_refused_by_row(family):
    model, reader = made(family)
    given = rows([[(1, 1)], [(1, 5000)], [(5000, 1)], [(1, 1), WIDE]])
    if family in REFUSING:
        refused = r"row 2: the processor refuses the image .* \(1x5000 pixels\): .*aspect ratio"
        with pytest.raises(DataError, match=refused):
            encode_preference(given, reader)
        _, account = encode_preference(given, reader, Tokenization(on_bad_row="skip"))
        assert account.kept == 2 and sum(account.skipped.values()) == 2
        given = [given[0], given[3]]
    found = logprobs(policy_of(family), examples_of(reader, given))
    torch.testing.assert_close(found, own_logprobs(model, reader, given), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_changes_its_own_row_alone(family):
    _, reader = made(family)
    policy = policy_of(family)
    before = examples_of(reader, rows())
    after = [examples_of(reader, rows(color="blue"))[0], *before[1:]]
    assert before[0].prompt == after[0].prompt
    first, second = logprobs(policy, before), logprobs(policy, after)
    own = sum(map(len, before[0].completions))
    assert (first[:own] - second[:own]).abs().max() > 0.1
    assert torch.equal(first[own:], second[own:])


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_within_rounding_of_the_models_own_forward(family):
    model, reader = made(family, torch.float32)
    given = rows()
    expected = own_logprobs(model, reader, given)
    found = logprobs(policy_of(family, dtype=torch.float32), examples_of(reader, given))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_images_still_runs_the_vision_tower(family):
    _, reader = made(family)
    policy = policy_of(family)
    examples = examples_of(reader, rows([[], []]))
    policy.zero_grad()
    policy(collate(examples)).logprob.sum().backward()
    grads = {name: weight.grad for name, weight in policy.named_parameters()}
    tower = [name for name in grads if "vis" in name and grads[name] is not None]
    assert tower and all(not grads[name].any() for name in tower)
    policy.zero_grad()
    (policy(collate([])).logprob.sum() * 0).backward()
    assert {name for name, weight in policy.named_parameters() if weight.grad is not None} >= {
        *tower
    }


# The modules of the tower whose input has an entry for each tile, or for each patch.
TOWERS = {"idefics3": "vision_model", "llava": "vision_tower", "qwen2_5_vl": "visual"}


@pytest.mark.parametrize("family", list(TOWERS))
def test_the_vision_tower_sees_a_shared_prompt_once(family):
    _, reader = made(family)
    policy = policy_of(family)
    examples = examples_of(reader, rows([[WIDE], [SMALL]]))
    once = sum(len(reader.read(each.images).tensors["pixel_values"]) for each in examples)
    if family == "idefics3":  # whose tiles are a second dimension, padded to the most of a row
        once = sum(reader.read(each.images).tensors["pixel_values"].shape[1] for each in examples)
    seen = []
    tower = getattr(policy.plain.base_model, TOWERS[family])
    handle = tower.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len([*args, *kwargs.values()][0])),
        with_kwargs=True,
    )
    for layout in ("shared", "packed", "padded"):
        policy.layout = layout
        logprobs(policy, examples)
    handle.remove()
    assert seen == [once, 2 * once, 2 * once]


def test_a_model_without_a_processor_refuses_examples_with_images():
    model, reader = made("llava")
    policy = Policy(model, backend="reference")
    with pytest.raises(ValueError, match="the batch has images, and the model no processor"):
        policy(collate(examples_of(reader, rows([[WIDE]]))))


def test_positions_of_one_axis_would_be_seen(monkeypatch):
    model, reader = made("qwen2_5_vl")
    given = rows()
    policy = policy_of("qwen2_5_vl")
    monkeypatch.setattr(backbone, "has_axes", lambda plain: False)
    apart = logprobs(policy, examples_of(reader, given)) - own_logprobs(model, reader, given)
    assert apart.abs().max() > 0.01


def test_a_probe_whose_rows_all_show_an_image_would_miss_what_text_sees(monkeypatch):
    _, reader = made("gemma3")

    def alike(images, examples, *shown):
        words = images.as_words(examples)
        return [images.shown(each, image) for each, image in zip(words, shown, strict=True)]

    monkeypatch.setattr(probe, "seen_by", alike)
    policy = policy_of("gemma3")
    assert policy.layout == "packed"
    examples = examples_of(reader, rows())
    batch = collate(examples)
    with torch.no_grad():
        rows_packed = policy.arranged(examples, "packed", one_row=True)
        packed = policy.head(policy.hidden(rows_packed), target=batch.target).logprob
        policy.layout = "padded"
        padded = policy(batch).logprob
    assert (packed - padded).abs().max() > 0.01


def test_a_model_that_sees_its_prompt_both_ways_is_refused(monkeypatch):
    # As PaliGemma: an image lets all tokens of its row see each other.
    model, reader = made("gemma3")
    inputs = ImageInputs(reader)
    whole_row = torch.ones_like
    monkeypatch.setattr(
        Policy,
        "model_input",
        lambda self, rows, original=Policy.model_input: {
            **original(self, rows),
            "token_type_ids": whole_row(rows.input_ids),
        },
    )
    with pytest.raises(ValueError, match="a later token changes the log-probs of those before it"):
        Policy(model, images=inputs, backend="reference")


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_autocast_is_near_float32(family):
    _, reader = made(family, torch.float32)
    policy = policy_of(family, dtype=torch.float32)
    examples = examples_of(reader, rows())
    exact = logprobs(policy, examples)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = logprobs(policy, examples)
    mean = exact.mean()
    assert abs(rounded.mean() - mean) <= 2e-2 * abs(mean)
