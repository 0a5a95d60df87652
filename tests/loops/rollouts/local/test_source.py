"""Answers from the trainer's own module."""

import asyncio
import copy
import functools
import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from burnish.data import Example
from burnish.loops.batch import collate
from burnish.loops.models.io import named_weights
from burnish.loops.models.policy import Policy
from burnish.loops.rollouts.local.decode import ModelRunner
from burnish.loops.rollouts.local.kv_cache import ContinuousBatch, StaticBatch, cache_fit
from burnish.loops.rollouts.local.source import DetachedSource, LocalSource, free_share
from burnish.loops.rollouts.source import SourceError
from conformance import Conformance, Subject, ask
from grids import grid
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, VOCABULARY, make_model
from transformers import AutoModelForCausalLM, LlamaModel, MambaConfig

AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)
PRECISIONS = {
    "float32": (torch.float32, nullcontext),
    "autocast": (torch.float32, AUTOCAST),
    "bfloat16": (torch.bfloat16, nullcontext),
    "bfloat16_autocast": (torch.bfloat16, AUTOCAST),
}
in_every_precision = pytest.mark.parametrize("precision", PRECISIONS)
SIXTEEN_BITS = [name for name in PRECISIONS if name != "float32"]
in_16_bits = pytest.mark.parametrize("precision", SIXTEEN_BITS)


@functools.cache
def weights(version, dtype=torch.float64):
    """By name: a model of its own for every version."""
    return {
        name: tensor.to(dtype) for name, tensor in make_model(seed=version).state_dict().items()
    }


class TestEmbedded(Conformance):
    async def open(self):
        model = make_model(seed=1)
        return Subject(
            source=LocalSource(Policy(model), version=1),
            model=make_model(),
            weights=weights,
            before_publish=model.load_state_dict,
            vocab=VOCABULARY,
            context=256,
            tolerance=1e-9,
        )


class TestDetached(Conformance):
    async def open(self):
        return Subject(
            source=DetachedSource(Policy(make_model(seed=1)), version=1),
            model=make_model(),
            weights=weights,
            vocab=VOCABULARY,
            context=256,
            tolerance=1e-9,
        )


class TestOnePromptAtATime(Conformance):
    """What models with windows and recurrences fall back to must keep the same promises."""

    async def open(self):
        model = make_model(seed=1)
        source = LocalSource(Policy(model), version=1)
        source._make_batch = lambda longest: StaticBatch(
            source.runner, lambda longest: 4096 // longest, cached=True
        )
        return Subject(
            source=source,
            model=make_model(),
            weights=weights,
            before_publish=model.load_state_dict,
            vocab=VOCABULARY,
            context=256,
            tolerance=1e-9,
            draws=300,
            long=60,
        )


EPS = torch.finfo(torch.bfloat16).eps
# The logits of these models are about 2 at most. A logit is off by one eps of that: half by its own
# rounding, and as much by that of the states before it. A log-prob is off by two such, its logit's
# and the others'; a cumulative probability, to which errors of either sign add up, by less than
# half an eps.
ROUNDED = {"tolerance": 4 * EPS, "rounding": EPS / 2}


def in_autocast(source_of, model):
    """Float32 weights, which autocast multiplies in bfloat16, against the same in float64."""
    return Subject(
        source=source_of(Policy(model), version=1, context=AUTOCAST),
        model=make_model(),
        weights=weights,
        vocab=VOCABULARY,
        context=256,
        draws=500,
        long=60,
        **ROUNDED,
    )


class TestEmbeddedUnderAutocast(Conformance):
    async def open(self):
        model = make_model(seed=1).float()
        return replace(in_autocast(LocalSource, model), before_publish=model.load_state_dict)


@pytest.mark.slow
class TestDetachedUnderAutocast(Conformance):
    async def open(self):
        return in_autocast(DetachedSource, make_model(seed=1).float())


@pytest.mark.slow
class TestOnePromptAtATimeUnderAutocast(Conformance):
    async def open(self):
        model = make_model(seed=1).float()
        subject = replace(
            in_autocast(LocalSource, model), before_publish=model.load_state_dict, draws=300
        )
        source = subject.source
        source._make_batch = lambda longest: StaticBatch(
            source.runner, lambda longest: 4096 // longest, cached=True
        )
        return subject


@pytest.mark.slow
class TestEmbeddedInBfloat16(Conformance):
    """Weights of bfloat16, against the same ones in float64."""

    async def open(self):
        model = make_model(seed=1).bfloat16()
        return Subject(
            source=LocalSource(Policy(model), version=1),
            model=make_model(),
            weights=functools.partial(weights, dtype=torch.bfloat16),
            before_publish=model.load_state_dict,
            vocab=VOCABULARY,
            context=256,
            draws=500,
            long=60,
            **ROUNDED,
        )


def requests(count=4, answers=3, **sampling):
    """Prompts of several lengths."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(1 + 3 * i % 7)] for i in range(count)]
    return [
        ask(i, prompt=prompt, indices=range(answers), **sampling)
        for i, prompt in enumerate(prompts)
    ]


def completions_of(source, wanted):
    async def all_of_them():
        groups = await asyncio.gather(*map(source.sample, wanted))
        return [sample for group in groups for sample in group]

    return asyncio.run(all_of_them())


@torch.no_grad()
def check_log_probs(model, samples, tolerance, temperature=1.0, vocab=VOCABULARY):
    for sample in samples:
        logits = (
            model(torch.tensor([sample.prompt + sample.tokens]), use_cache=False)
            .logits[0, :, :vocab]
            .double()
        )
        logprob = (logits / temperature).log_softmax(-1)[len(sample.prompt) - 1 : -1]
        expected = logprob.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        got = torch.tensor(sample.logprobs, dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in ("llama", "gemma2")]
)
def test_log_probs_are_those_of_every_family(family, caplog):
    """Windows of 4 are shorter than what is read here: such a model goes one prompt at a time, and
    says so.
    """
    model = make_model(family)
    samples = completions_of(LocalSource(Policy(model), version=0), requests(max_tokens=9))
    check_log_probs(model, samples, 1e-9)
    windowed = family in ("mistral_windowed", "gemma3", "cohere2")
    assert ("more than its window of 4: one prompt at a time" in caplog.text) == windowed


def test_within_its_window_a_model_attends_to_all(caplog):
    model = make_model("mistral_windowed")
    source = LocalSource(Policy(model), version=0)
    check_log_probs(
        model,
        completions_of(source, [ask(i, prompt=[i + 3], max_tokens=3) for i in range(3)]),
        1e-9,
    )
    assert not caplog.text


def test_eager_attention_of_gemma_2(caplog):
    model = make_model("gemma2", attention="eager", dtype=torch.float32)
    check_log_probs(
        model, completions_of(LocalSource(Policy(model), version=0), requests(max_tokens=9)), 1e-4
    )


def make_mamba():
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim == 2 else None
    return model


def test_a_recurrence_goes_one_prompt_at_a_time_and_says_so(caplog):
    model = make_mamba()
    source = LocalSource(Policy(model, layout="padded"), version=0)
    assert "completions are generated one prompt at a time, with its own cache" in caplog.text
    check_log_probs(model, completions_of(source, requests()), 1e-4)


def make_wide(family, dtype=torch.float64):
    """With windows that all of a test fits into."""
    config = FAMILIES[family]
    windowed = {"sliding_window": 64} if getattr(config, "sliding_window", None) else {}
    attention = "eager" if family == "gemma2" else "sdpa"
    return make_model(family, dtype=dtype, attention=attention, **windowed)


def mean_error(got, wanted):
    return sum(abs(a - b) for a, b in zip(got, wanted, strict=True)) / len(wanted)


@torch.no_grad()
def log_probs_of(model, samples):
    found = []
    for sample in samples:
        logits = (
            model(torch.tensor([sample.prompt + sample.tokens]), use_cache=False).logits[0].double()
        )
        logprob = logits.log_softmax(-1)[len(sample.prompt) - 1 : -1]
        found += logprob.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0].tolist()
    return found


def check_precision(policy, samples, context):
    """The sampler is as near to float64 as the model's own forward pass is in its precision, which
    rounds its logits.

    Against float64, a mean error of at most twice that of this pass; hence against the trainer's
    pass, which rounds no more than this one, at most three times that.
    """
    got = [logprob for sample in samples for logprob in sample.logprobs]
    exact = log_probs_of(copy.deepcopy(policy.model).double(), samples)
    with context():
        rounding = mean_error(log_probs_of(policy.model, samples), exact)
        examples = [Example(sample.prompt, [sample.tokens], [sample.trained]) for sample in samples]
        with torch.no_grad():
            trained = policy(collate(examples)).logprob.double().tolist()
    assert mean_error(got, exact) <= 2 * rounding + 1e-6
    assert mean_error(got, trained) <= 3 * rounding + 1e-6


WIDE = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral_windowed",
    "gemma2",
    "gemma3",
    "granite",
    "gpt2",
    "cohere",
]


@grid(strength=1, precision=PRECISIONS, family=WIDE)
def test_log_probs_are_as_exact_as_the_forward_pass_in_every_precision(family, precision, caplog):
    dtype, context = PRECISIONS[precision]
    policy = Policy(make_wide(family).to(dtype))
    samples = completions_of(
        LocalSource(policy, version=0, context=context), requests(8, max_tokens=12)
    )
    check_precision(policy, samples, context)
    assert not caplog.text


@grid(strength=1, precision=PRECISIONS, family=WIDE)
def test_eight_prompts_of_eight_answers_take_one_forward_pass_a_token(family, precision):
    dtype, context = PRECISIONS[precision]
    policy = Policy(make_wide(family).to(dtype))
    source = LocalSource(policy, version=0, context=context)
    seen = Counting(policy.plain)
    completions_of(source, requests(8, answers=8, max_tokens=6))
    assert [tuple(shape) for shape in seen.shapes] == [(8, 7)] + [(64, 1)] * 5


@in_16_bits
def test_answers_that_join_cost_one_forward_pass_more(precision):
    dtype, context = PRECISIONS[precision]
    policy = Policy(make_wide("llama").to(dtype))
    source = LocalSource(policy, version=0, context=context)
    seen = Counting(policy.plain)

    async def body():
        first, second = (
            ask(i, prompt=[5 + i] * 3, indices=range(8), max_tokens=12) for i in range(2)
        )
        under_way = asyncio.create_task(source.sample(first))
        while len(seen.shapes) < 4:
            await asyncio.sleep(0)
        return await source.sample(second), await under_way

    asyncio.run(body())
    rows = [shape[0] for shape in seen.shapes if shape[1] == 1]
    alone = rows.index(16)
    assert 3 <= alone <= 5 and rows == [8] * alone + [16] * (11 - alone) + [8] * alone
    assert len(seen.shapes) == len(rows) + 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@in_every_precision
def test_keys_values_and_mask_are_held_in_what_attention_multiplies(
    precision, attention, monkeypatch
):
    dtype, context = PRECISIONS[precision]
    held = []
    states = ModelRunner.states

    def watched(self, at=None, *, cache=None, **inputs):
        if isinstance(cache, ContinuousBatch):
            held.append({store.dtype for store in cache.stores} | {inputs["attention_mask"].dtype})
        return states(self, at, cache=cache, **inputs)

    monkeypatch.setattr(ModelRunner, "states", watched)
    policy = Policy(make_model(dtype=dtype, attention=attention))
    completions_of(LocalSource(policy, version=0, context=context), requests())
    assert set.union(*held) == {torch.float32 if precision == "float32" else torch.bfloat16}


@grid(strength=1, source_of=[LocalSource, DetachedSource], precision=SIXTEEN_BITS)
def test_adapters_on_weights_of_16_bits(precision, source_of):
    dtype, context = PRECISIONS[precision]
    torch.manual_seed(0)
    model = get_peft_model(make_model().to(dtype), LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3) if "lora_B" in name else None
    policy = Policy(model)
    source = source_of(policy, version=0, context=context)
    assert isinstance(source._make_batch(20), ContinuousBatch)
    samples = completions_of(source, requests(8, max_tokens=12))
    check_precision(source.policy if source_of is DetachedSource else policy, samples, context)


@in_16_bits
def test_a_recurrence_in_16_bits(precision):
    dtype, context = PRECISIONS[precision]
    policy = Policy(make_mamba().to(dtype), layout="padded")
    source = LocalSource(policy, version=0, context=context)
    assert isinstance(source._make_batch(20), StaticBatch) and source._make_batch(20).cached
    check_precision(policy, completions_of(source, requests(8, max_tokens=12)), context)


@grid(strength=1, family=["llama", "gemma2", "cohere"], precision=SIXTEEN_BITS)
def test_kernels_that_round_otherwise_are_not_taken_for_a_wrong_mask_or_position(family, precision):
    """Batches of another shape get other kernels; here, each product is rounded once more, at
    random.
    """
    dtype, context = PRECISIONS[precision]
    policy = Policy(make_wide(family).to(dtype))
    rng = torch.Generator().manual_seed(0)

    def rounded(module, given, out):
        return out * (1 + EPS / 4 * torch.randn(out.shape, generator=rng)).to(out.dtype)

    for module in policy.plain.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(rounded)
    source = LocalSource(policy, version=0, context=context)
    assert isinstance(source._make_batch(20), ContinuousBatch)


def seen_too_much(positions, mask):
    return positions, torch.zeros_like(mask)


def seen_too_little(positions, mask):
    return positions, mask.clone().index_fill_(-1, torch.tensor([0]), torch.finfo(mask.dtype).min)


def too_late(positions, mask):
    return positions + 1, mask


def too_early(positions, mask):
    return positions - 1, mask


def as_the_longest(positions, mask):
    return torch.full_like(positions, int(positions.max())), mask


@grid(
    strength=2,
    precision=["float32", "autocast", "bfloat16"],
    family=["llama", "gemma2", "gpt2", "cohere"],
    wrong=[seen_too_much, seen_too_little, too_late, too_early, as_the_longest],
)
def test_a_mask_or_position_that_is_wrong_is_found_out(
    wrong, family, precision, monkeypatch, caplog
):
    """Some change the states by 1 %, less than 16 bits do in a deep model."""
    dtype, context = PRECISIONS[precision]
    states = ModelRunner.states

    def wronged(self, at=None, *, cache=None, **inputs):
        if isinstance(cache, ContinuousBatch):
            names = "position_ids", "attention_mask"
            inputs |= dict(zip(names, wrong(*map(inputs.get, names)), strict=True))
        return states(self, at, cache=cache, **inputs)

    policy = Policy(make_wide(family).to(dtype))
    monkeypatch.setattr(ModelRunner, "states", wronged)
    source = LocalSource(policy, version=0, context=context)
    assert isinstance(source._make_batch(20), StaticBatch)
    assert "one prompt at a time, with its own cache: its states " in caplog.text


class Counting:
    """Rows and tokens that the model reads, one entry per forward pass."""

    def __init__(self, model):
        self.shapes = []
        model.get_input_embeddings().register_forward_hook(
            lambda module, given, out: self.shapes.append(given[0].shape)
        )


def test_a_prompt_is_read_once_for_all_of_its_answers():
    policy = Policy(make_model())
    source = LocalSource(policy, version=0)
    seen = Counting(policy.plain)
    completions_of(source, [ask(prompt=[5] * 40, indices=range(6), max_tokens=10)])
    assert [tuple(shape) for shape in seen.shapes] == [(1, 40)] + [(6, 1)] * 9


def test_finished_answers_leave_and_others_take_their_place():
    policy = Policy(make_model())
    plain = completions_of(
        LocalSource(policy, version=0), requests(6, max_tokens=20, stop=tuple(range(6)))
    )
    assert {sample.finish for sample in plain} == {"stop", "length"} or len(
        {len(s.tokens) for s in plain}
    ) > 2
    seen = Counting(policy.plain)
    limit = 4 * 27  # tokens: three or four answers of a prompt up to 7 and an answer of 20
    tight = LocalSource(policy, version=0, cache_bytes=limit * 2 * 2 * 2 * 8 * 8)
    seen.shapes.clear()
    streamed = completions_of(tight, requests(6, max_tokens=20, stop=tuple(range(6))))
    assert max(rows for rows, tokens in seen.shapes if tokens == 1) <= 5
    for a, b in zip(plain, streamed, strict=True):
        assert a.tokens == b.tokens and a.finish == b.finish
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-12)
    steps = [rows for rows, tokens in seen.shapes if tokens == 1]
    assert len(steps) < 6 * 19, "answers were waited for that had left room for others"


@grid(strength=1, family=["llama", "gpt2"], precision=PRECISIONS)
def test_what_is_cached_never_takes_more_than_cache_bytes(family, precision, monkeypatch):
    """Short answers leave wide batches, and long ones long rows: neither may stay when the others
    come.
    """
    dtype, context = PRECISIONS[precision]
    held = []
    reserve = ContinuousBatch._reserve

    def watched(self, columns):
        reserve(self, columns)
        held.append(sum(store.nbytes for store in self.stores))

    policy = Policy(make_model(family).to(dtype))
    config = policy.plain.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    token = (
        2 * 2 * heads * (32 // config.num_attention_heads) * (4 if precision == "float32" else 2)
    )
    source = LocalSource(policy, version=0, context=context, cache_bytes=400 * token)
    monkeypatch.setattr(ContinuousBatch, "_reserve", watched)
    lengths = [3] * 17 + [20] + [90] * 2 + [4] * 80 + [60] * 2
    completions_of(
        source,
        [ask(i, prompt=[5, 3 + i % 9], indices=[0], max_tokens=n) for i, n in enumerate(lengths)],
    )
    assert 300 * token < max(held) <= 400 * token


@in_every_precision
def test_a_cache_of_the_models_own_is_counted_as_it_is(precision):
    """Attention keeps something of every token, a recurrence as much whatever it has read."""
    dtype, context = PRECISIONS[precision]
    for model in (make_model().to(dtype), make_mamba().to(dtype)):
        policy = Policy(model, layout="padded")
        runner = ModelRunner(policy, VOCABULARY, context)
        fit = cache_fit(runner, 1 << 20, continuous=False)
        with runner.inference():
            cache = runner.states(input_ids=runner.ids([[5] * 50]), use_cache=True)[1]
        tensors = [value for layer in cache.layers for value in vars(layer).values()]
        tensors = [
            x for value in tensors for x in (value.values() if isinstance(value, dict) else [value])
        ]
        assert fit(50) == (1 << 20) // sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


def test_a_quarter_of_a_gpus_free_memory_is_for_the_cache(monkeypatch):
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * gib)
    # of 37 that are free, or torch's and unused
    assert free_share(torch.device("cuda", 0)) == 9 * gib
    assert free_share(torch.device("cpu")) == 2 * gib
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * gib)
    assert free_share(torch.device("cuda", 0)) == gib // 4


def test_one_answer_that_is_larger_than_the_budget_is_let_in_alone():
    source = LocalSource(Policy(make_model()), version=0, cache_bytes=1)
    assert [len(sample.tokens) for sample in completions_of(source, requests(2))] == [8] * 6


def test_who_asked_first_does_not_change_a_single_bit():
    model = make_model(dtype=torch.float32)
    source = LocalSource(Policy(model), version=0, cache_bytes=60_000)
    wanted = requests(8, max_tokens=20)
    first = completions_of(source, wanted)
    order = list(range(8))
    random.Random(1).shuffle(order)
    shuffled = completions_of(source, [wanted[i] for i in order])
    assert sorted(shuffled, key=lambda s: (s.task, s.index)) == first


def test_the_model_trains_on_as_it_did_between_two_tokens():
    """With dropout and gradient checkpointing on: neither is on while tokens are drawn, both are
    right after.
    """
    torch.manual_seed(0)
    model = get_peft_model(
        make_model(dtype=torch.float32),
        LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear"),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3) if "lora_B" in name else None
    policy = Policy(model)
    getattr(
        policy.plain, "activation_checkpointing_enable", policy.plain.gradient_checkpointing_enable
    )()
    policy.train()
    modes = {name: module.training for name, module in policy.named_modules()}
    source = LocalSource(policy, version=0)

    async def body():
        under_way = asyncio.create_task(source.sample(ask(indices=range(4), max_tokens=30)))
        while not under_way.done():
            assert {name: module.training for name, module in policy.named_modules()} == modes
            assert torch.is_grad_enabled()
            await asyncio.sleep(0)
        return await under_way

    samples = asyncio.run(body())
    check_log_probs(model.eval(), samples, 1e-4)


def test_drawing_leaves_no_graph_and_does_not_touch_the_global_generator():
    policy = Policy(make_model())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    completions_of(LocalSource(policy, version=0), requests())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_rows_that_only_pad_the_vocabulary_are_never_drawn():
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[10:] *= 20  # what is beyond would be likely
    samples = completions_of(
        LocalSource(Policy(model), version=0, vocab=10), [ask(indices=range(40), max_tokens=3)]
    )
    assert max(token for sample in samples for token in sample.tokens) < 10
    check_log_probs(model, samples, 1e-9, vocab=10)


def test_only_tokens_of_the_tokenizer_are_drawn_and_its_text_has_no_special_ones(tmp_path):
    from tiny import save_model
    from transformers import AutoTokenizer

    save_model(tmp_path)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    )
    model.resize_token_embeddings(len(tokenizer) + 7)
    source = LocalSource(model, tokenizer, version=0)
    samples = completions_of(
        source, [ask(indices=range(60), max_tokens=20, prompt=[40, 41], stop=(1,))]
    )
    assert source.vocab == len(tokenizer)
    for sample in samples:
        assert sample.text == tokenizer.decode(sample.tokens, skip_special_tokens=True)
        assert "<|end|>" not in sample.text
    assert "stop" in {sample.finish for sample in samples}


def test_a_head_that_cannot_be_fused_is_read_from_logits():
    class Squared(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) - super().forward(hidden) ** 2 / 50

    model = make_model()
    head = Squared(32, VOCABULARY, bias=False, dtype=torch.float64)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head
    policy = Policy(model)
    assert not policy.fused
    check_log_probs(model, completions_of(LocalSource(policy, version=0), requests()), 1e-9)


def test_weights_without_a_finite_log_prob_are_named_and_the_source_lives_on():
    policy = Policy(make_model())
    source = LocalSource(policy, version=0)
    sound = copy.deepcopy(policy.plain.state_dict())
    before = completions_of(source, requests())
    with torch.no_grad():
        policy.plain.lm_head.weight.fill_(torch.nan)
    with pytest.raises(SourceError, match=r"the weights of version 0 give log-probs of nan"):
        completions_of(source, requests())
    policy.plain.load_state_dict(sound)
    assert completions_of(source, requests()) == before


def test_no_answers_before_weights_are_published():
    source = LocalSource(Policy(make_model()))
    with pytest.raises(SourceError, match="publish a version"):
        completions_of(source, requests(1))
    asyncio.run(source.publish(iter(()), 4))
    assert {tuple(sample.spans[0]) for sample in completions_of(source, requests(1))} == {(4, 0, 8)}


def test_a_detached_source_does_not_follow_the_trainer_until_weights_are_published():
    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules="all-linear"))
    policy = Policy(model)
    source = DetachedSource(policy, version=0)
    before = completions_of(source, requests())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    assert completions_of(source, requests()) == before
    asyncio.run(source.publish(named_weights(model), 1))
    after = completions_of(source, requests())
    check_log_probs(model, after, 1e-9)
    assert [sample.tokens for sample in after] != [sample.tokens for sample in before]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda named: {**named, "base_model.x": torch.zeros(2)},
            r"base_model.x \[2\] is no parameter of this model",
        ),
        (lambda named: {k: v for k, v in named.items() if "norm" not in k}, "came without .*norm"),
    ],
)
def test_weights_of_another_model_are_refused(change, says):
    source = DetachedSource(Policy(make_model()), version=0)
    with pytest.raises(SourceError, match=says):
        asyncio.run(source.publish(change(dict(make_model().named_parameters())).items(), 1))


def test_without_any_cache_all_is_read_anew():
    model = make_model()
    source = LocalSource(Policy(model), version=0)
    expected = completions_of(source, requests())
    source._make_batch = lambda longest: StaticBatch(
        source.runner, lambda longest: 4096 // longest, cached=False
    )
    assert [sample.tokens for sample in completions_of(source, requests())] == [
        sample.tokens for sample in expected
    ]


@pytest.mark.parametrize("broken", ["step", "join", "drop_finished"])
def test_a_memory_that_goes_wrong_with_a_model_is_found_out(broken, monkeypatch, caplog):
    original = getattr(ContinuousBatch, broken)

    def wrong(self, *arguments):
        if broken == "drop_finished":  # rows leave, but their cache stays
            self.sequences = [sequence for sequence in self.sequences if sequence.finish is None]
            return None
        states = original(self, *arguments)
        return states.flip(0) if broken == "join" else states + 0.1

    monkeypatch.setattr(ContinuousBatch, broken, wrong)
    model = make_model()
    source = LocalSource(Policy(model), version=0)
    assert "one prompt at a time, with its own cache" in caplog.text
    check_log_probs(model, completions_of(source, requests()), 1e-9)


def test_the_reason_for_going_one_prompt_at_a_time_is_named_once(monkeypatch, caplog):
    def refuse(self, *arguments):
        raise RuntimeError("no such cache")

    monkeypatch.setattr(ContinuousBatch, "step", refuse)
    policy = Policy(make_model())
    for _ in range(2):
        LocalSource(policy, version=0)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.message == (
        "LlamaForCausalLM: completions are generated one prompt at a time, with its own cache: "
        "RuntimeError: no such cache"
    )


class OlderModel(LlamaModel):
    """Takes its cache by the name of transformers before 5.24."""

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=None,
        **_,
    ):
        return super().forward(
            input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache
        )


def test_a_model_gets_its_cache_by_the_name_that_its_code_has_for_it(caplog):
    model = make_model()
    model.model.__class__ = OlderModel
    source = LocalSource(Policy(model), version=0)
    assert isinstance(source._make_batch(200), ContinuousBatch)
    check_log_probs(make_model(), completions_of(source, requests()), 1e-9)
    assert not caplog.records


def test_plain_models_generate_all_prompts_at_once():
    source = LocalSource(Policy(make_model()), version=0)
    assert isinstance(source._make_batch(200), ContinuousBatch)
