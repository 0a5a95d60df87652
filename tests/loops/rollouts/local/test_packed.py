"""Weights packed for the token steps of a CPU: the same completions, in less time."""

import asyncio
import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from burnish.loops.models.policy import Policy
from burnish.loops.rollouts.local import packed
from burnish.loops.rollouts.local.packed import PackedWeights
from burnish.loops.rollouts.local.source import DetachedSource, LocalSource
from conformance import Conformance, Subject, ask
from peft import LoraConfig, get_peft_model
from tiny import VOCABULARY, make_model
from torch import nn

AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)
PRECISIONS = {
    "float32": (torch.float32, nullcontext),
    "autocast": (torch.float32, AUTOCAST),
    "bfloat16": (torch.bfloat16, nullcontext),
}
EPS = torch.finfo(torch.bfloat16).eps
ROUNDED = {"tolerance": 4 * EPS, "rounding": EPS / 2}  # as test_source.py explains


@functools.cache
def weights(version, dtype=torch.float64):
    """By name: a model of its own for every version."""
    model = make_model(seed=version)
    return {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}


@pytest.fixture
def small_ones_too(monkeypatch):
    """Pack weights of any size, and use them for any number of rows."""
    monkeypatch.setattr(packed, "SMALLEST", 0)
    any_number = range(1, 1000)
    rows = {torch.float32: any_number, torch.bfloat16: any_number}
    monkeypatch.setattr(packed, "_ROWS", rows)


@pytest.fixture
def products(monkeypatch):
    """The shapes of the weights of all packed products."""
    shapes = []
    multiply = packed._product

    def noted(rows, weight, bias):
        shapes.append(tuple(weight.shape))
        return multiply(rows, weight, bias)

    monkeypatch.setattr(packed, "_product", noted)
    return shapes


def model_in(dtype, **changes):
    return make_model(seed=1, **changes).to(dtype)


def completions(source, count=3, **sampling):
    request = ask(0, prompt=[3, 4, 5], indices=range(count), **sampling)
    return asyncio.run(source.sample(request))


@pytest.mark.usefixtures("small_ones_too")
class TestPacked(Conformance):
    """It keeps every promise of a source, in float32."""

    async def open(self):
        model = model_in(torch.float32)
        return Subject(
            source=LocalSource(Policy(model), version=1),
            model=make_model(),
            weights=weights,
            before_publish=model.load_state_dict,
            vocab=VOCABULARY,
            context=256,
            tolerance=1e-5,
            rounding=1e-5,
        )


@pytest.mark.slow
@pytest.mark.usefixtures("small_ones_too")
class TestPackedCopyUnderAutocast(Conformance):
    async def open(self):
        return Subject(
            source=DetachedSource(Policy(model_in(torch.float32)), version=1, context=AUTOCAST),
            model=make_model(),
            weights=weights,
            vocab=VOCABULARY,
            context=256,
            draws=500,
            long=60,
            **ROUNDED,
        )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_every_large_layer_and_the_head_use_the_copies(small_ones_too, products, precision, tied):
    dtype, context = PRECISIONS[precision]
    model = model_in(dtype, tie_word_embeddings=tied)
    linear = [module.weight.shape for module in model.modules() if type(module) is nn.Linear]
    completions(LocalSource(Policy(model), version=1, context=context), max_tokens=20)
    steps = 19  # the first of the 20 tokens comes of reading the prompt, whose rows are tokens
    for shape in set(linear):
        assert products.count(tuple(shape)) >= steps * linear.count(shape)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_weights_give_the_log_probs_that_the_weights_give(
    small_ones_too, monkeypatch, precision
):
    dtype, context = PRECISIONS[precision]
    config = {"intermediate_size": 64, "attention_bias": True}
    with_copies = completions(
        LocalSource(Policy(model_in(dtype, **config)), version=1, context=context), max_tokens=24
    )
    monkeypatch.setattr(packed, "SMALLEST", 1 << 40)
    without = completions(
        LocalSource(Policy(model_in(dtype, **config)), version=1, context=context), max_tokens=24
    )
    tolerance = 1e-5 if precision == "float32" else ROUNDED["tolerance"]
    for ours, theirs in zip(with_copies, without, strict=True):
        alike = [a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
        same = alike.index(False) if False in alike else len(alike)
        assert same > 2  # a tie, by rounding, ends what can be compared
        torch.testing.assert_close(
            torch.tensor(ours.logprobs[:same]),
            torch.tensor(theirs.logprobs[:same]),
            atol=tolerance,
            rtol=0,
        )


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_scaled_and_capped_logits_stay_so(small_ones_too, products, family):
    model = make_model(family, attention="eager").float()
    runner_of = LocalSource(Policy(model), version=1).runner
    states = torch.randn(3, model.config.hidden_size)
    with runner_of.inference():
        wanted = runner_of.logits(states)
        assert not products
        runner_of.packed.pack()
        computed = runner_of.logits(states)
    assert products
    torch.testing.assert_close(computed, wanted, atol=1e-5, rtol=0)


def test_adapters_are_added_to_packed_layers(small_ones_too, products):
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(model_in(torch.float32), lora)
    merged = copy.deepcopy(model).merge_and_unload()
    ours = completions(LocalSource(Policy(model), version=1), max_tokens=20)
    count = len(products)
    theirs = completions(LocalSource(Policy(merged), version=1), max_tokens=20)
    assert count > 0
    assert [sample.tokens for sample in ours] == [sample.tokens for sample in theirs]


def test_copies_are_gone_and_layers_as_before_when_completions_are_done(small_ones_too, products):
    model = model_in(torch.float32)
    source = LocalSource(Policy(model), version=1)
    completions(source, max_tokens=20)
    assert products and not source.runner.packed
    below_head = model.model.modules()
    assert not any("forward" in vars(m) for m in below_head if isinstance(m, nn.Linear))


def test_copies_are_of_the_weights_of_their_version(small_ones_too):
    model = model_in(torch.float32)
    source = LocalSource(Policy(model), version=1)
    before = completions(source, max_tokens=20)
    changed = weights(2, torch.float32)
    model.load_state_dict(changed)
    asyncio.run(source.publish(iter(()), 2))
    after = completions(source, max_tokens=20)
    other = make_model()
    other.load_state_dict(changed)
    fresh = completions(LocalSource(Policy(other.float()), version=2), max_tokens=20)
    assert [sample.tokens for sample in after] == [sample.tokens for sample in fresh]
    assert [sample.tokens for sample in after] != [sample.tokens for sample in before]


def test_a_few_tokens_or_rows_are_not_worth_packing(monkeypatch, products):
    monkeypatch.setattr(packed, "SMALLEST", 0)
    packs = []
    pack = PackedWeights.pack
    monkeypatch.setattr(PackedWeights, "pack", lambda self: packs.append(pack(self)))
    source = LocalSource(Policy(model_in(torch.float32)), version=1)
    completions(source, count=4, max_tokens=15)
    completions(source, count=3, max_tokens=16)
    completions(source, count=33, max_tokens=16)
    assert not packs and not products
    completions(source, count=4, max_tokens=16)
    assert packs and products


def test_small_float64_and_wrapped_weights_stay_as_they_are():
    class Other(nn.Linear):
        pass

    wide = 1 << 10
    layers = nn.ModuleDict(
        {
            "large": nn.Linear(wide, wide),
            "small": nn.Linear(16, 16),
            "float64": nn.Linear(wide, wide, dtype=torch.float64),
            "subclass": Other(wide, wide),
            "meta": nn.Linear(wide, wide, device="meta"),
        }
    )
    weights_of = PackedWeights(layers, None)
    assert weights_of.layers() == [layers["large"]]
    assert weights_of.size() == 4 * wide * wide
    assert not weights_of
    weights_of.pack()
    assert weights_of
    rows = torch.randn(8, wide)
    wanted = layers["large"](rows)
    with weights_of.in_use():
        computed = layers["large"](rows)
    torch.testing.assert_close(computed, wanted, atol=1e-5, rtol=0)
    weights_of.clear()
    assert not weights_of
