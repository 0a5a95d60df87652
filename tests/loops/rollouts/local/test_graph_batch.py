"""Token steps of fixed shapes draw what a `ContinuousBatch` draws."""

import asyncio
import copy
import functools

import pytest
import torch
from burnish.loops.models.policy import Policy
from burnish.loops.rollouts.local.graph_batch import GraphBatch
from burnish.loops.rollouts.local.kv_cache import StaticBatch
from burnish.loops.rollouts.local.source import DetachedSource, LocalSource
from burnish.loops.rollouts.sample import Request, SamplingParams
from burnish.loops.rollouts.source import SourceError
from conformance import Conformance, Subject
from forked import run_forked
from grids import grid
from recorded import Recorded
from sharded import assert_same_end, runs_on
from tiny import VOCABULARY, make_model, save_model
from transformers import AutoTokenizer

AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)
CHOICES = {
    "plain": {},
    "hot": {"temperature": 1.3, "top_p": 0.8},
    "cut": {"temperature": 0.7, "top_k": 9, "min_p": 0.05},
    "greedy": {"temperature": 0.0},
    "penalized": {"repetition_penalty": 1.5},
}
FAMILIES = [
    "llama",
    "llama_tied",
    "qwen2",
    "qwen3",
    "mistral_windowed",
    "gemma2",
    "gemma3",
    "gpt2",
    "cohere",
    "granite",
]
WINDOWED = ("mistral_windowed", "gemma2", "gemma3")


class TestEmbedded(Conformance):
    async def open(self):
        model = make_model(seed=1)
        return Subject(
            source=LocalSource(Policy(model), version=1, cuda_graphs=True),
            model=make_model(),
            weights=weights,
            before_publish=model.load_state_dict,
            vocab=VOCABULARY,
            context=256,
            tolerance=1e-9,
            draws=300,
            long=60,
        )


@pytest.mark.slow
class TestDetached(Conformance):
    async def open(self):
        return Subject(
            source=DetachedSource(Policy(make_model(seed=1)), version=1, cuda_graphs=True),
            model=make_model(),
            weights=weights,
            vocab=VOCABULARY,
            context=256,
            tolerance=1e-9,
        )


def weights(version):
    return make_model(seed=version).state_dict()


def make_policy(family="llama", dtype=torch.float32):
    """With windows that all of a test fits into."""
    windowed = {"sliding_window": 64} if family in WINDOWED else {}
    attention = "eager" if family == "gemma2" else "sdpa"
    return Policy(make_model(family, dtype=dtype, attention=attention, **windowed))


def requests(count=5, answers=3, sampling=({},), **common):
    """Of prompts of several lengths, each with the next of these settings."""
    common = {"max_tokens": 12, "stop": tuple(range(6)), **common}
    return [
        Request(
            task,
            [7 + (task * place) % 50 for place in range(1 + 3 * task % 7)],
            range(answers),
            SamplingParams(**{**common, **sampling[task % len(sampling)]}),
            key=0,
        )
        for task in range(count)
    ]


def completions_of(source, wanted):
    async def sampled():
        groups = await asyncio.gather(*map(source.sample, wanted))
        return [sample for group in groups for sample in group]

    return asyncio.run(sampled())


def check_same(got, wanted, tolerance=1e-5):
    assert len(got) == len(wanted)
    for sample, expected in zip(got, wanted, strict=True):
        assert sample.tokens == expected.tokens
        assert (sample.finish, sample.spans) == (expected.finish, expected.spans)
        assert sample.logprobs == pytest.approx(expected.logprobs, rel=0, abs=tolerance)


def check(policy, wanted, tolerance=1e-5, **options):
    """Returns the completions, which both batches draw."""
    expected = completions_of(LocalSource(policy, version=0, **options), wanted)
    source = LocalSource(policy, version=0, cuda_graphs=True, **options)
    assert isinstance(source._make_batch(20), GraphBatch)
    check_same(completions_of(source, wanted), expected, tolerance)
    return expected


@grid(strength=2, family=FAMILIES, choice=CHOICES)
def test_tokens_and_log_probs_are_those_of_a_continuous_batch(family, choice):
    samples = check(make_policy(family), requests(**CHOICES[choice]))
    assert {sample.finish for sample in samples} == {"stop", "length"} or choice == "greedy"


def test_rows_of_one_step_may_want_different_things():
    check(make_policy(), requests(9, sampling=list(CHOICES.values())))


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_completions_that_end_at_once(max_tokens):
    check(make_policy(), requests(max_tokens=max_tokens))
    check(make_policy(), requests(max_tokens=max_tokens, stop=tuple(range(VOCABULARY))))


def test_a_stop_word_is_found_a_step_late_and_ends_the_completion_where_it_should(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_model(tmp_path))
    policy = Policy(make_model().float())
    wanted = requests(12, stop_words=("A", "7", "n"), stop=(), max_tokens=20)
    samples = check(policy, wanted, tokenizer=tokenizer, vocab=VOCABULARY)
    assert len({len(sample.tokens) for sample in samples}) > 5


@pytest.mark.parametrize("bytes_of", [20, 70])
def test_rows_join_and_leave_within_cache_bytes(bytes_of, monkeypatch):
    """Of 45 sequences, as many are read at once as fit in the columns of the shape."""
    reserve = GraphBatch._reserve
    held = []

    def watched(self, rows, columns):
        reserve(self, rows, columns)
        held.append((sum(store.nbytes for store in self.stores), len(self.held.token)))

    monkeypatch.setattr(GraphBatch, "_reserve", watched)
    row = 2 * 2 * 2 * 8 * 4 * 256  # layers, keys and values, heads, d, bytes, columns
    samples = check(make_policy(), requests(15), cache_bytes=bytes_of * row)
    assert max(taken for taken, _ in held) <= bytes_of * row
    assert max(rows for _, rows in held) == min(bytes_of, 64)
    assert len({len(sample.tokens) for sample in samples}) > 5


def test_a_long_completion_that_joins_short_ones_gets_more_columns():
    model = make_model(max_position_embeddings=600).float()
    wanted = [
        *requests(4, max_tokens=10, stop=()),
        *requests(6, answers=1, max_tokens=300, stop=())[4:],
    ]

    def sampled(**options):
        source = LocalSource(Policy(model), version=0, **options)

        async def one_after_the_other():
            first = asyncio.gather(*map(source.sample, wanted[:4]))
            for _ in range(6):
                await asyncio.sleep(0)
            later = asyncio.gather(*map(source.sample, wanted[4:]))
            return [sample for group in [*await first, *await later] for sample in group]

        return asyncio.run(one_after_the_other())

    check_same(sampled(cuda_graphs=True), sampled())


@torch.no_grad()
def mean_error(model, samples):
    """Of log-probs, from those of this model."""
    gaps = []
    for sample in samples:
        logits = model(torch.tensor([sample.prompt + sample.tokens]), use_cache=False).logits[0]
        rows = logits.log_softmax(-1)[len(sample.prompt) - 1 : -1]
        exact = rows.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0].tolist()
        gaps += [abs(a - b) for a, b in zip(sample.logprobs, exact, strict=True)]
    return sum(gaps) / len(gaps)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_under_autocast_log_probs_are_as_exact_as_those_of_a_continuous_batch(family):
    """Kernels of another shape round otherwise, so that now and then a token differs."""
    policy = make_policy(family, torch.float64)
    exact = copy.deepcopy(policy.plain)
    policy.model.float()
    errors = []
    for cuda_graphs in (True, False):
        source = LocalSource(policy, version=0, context=AUTOCAST, cuda_graphs=cuda_graphs)
        errors.append(mean_error(exact, completions_of(source, requests(8))))
    assert 1e-4 < errors[0] <= 2 * errors[1]


class Device:
    """Records on a CPU what a `GraphBatch` would have CUDA record."""

    def __init__(self, monkeypatch):
        self.graphs = []

        def record(batch, shape):
            graph = Recorded()
            with graph.recording([*batch.stores, *batch.held.tensors()]):
                batch._token_step(shape)
            self.graphs.append((shape, graph))
            return graph

        monkeypatch.setattr(GraphBatch, "_recordable", lambda batch: True)
        monkeypatch.setattr(GraphBatch, "_record", record)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_recorded_step_is_good_for_all_later_ones(family, choice, monkeypatch):
    """Nothing that changes from step to step was known to the host when it was recorded."""
    device = Device(monkeypatch)
    check(make_policy(family), requests(9, max_tokens=20, **CHOICES[choice]))
    shapes = [shape for shape, _ in device.graphs]
    assert len(set(shapes)) == len(shapes) and {shape.rows for shape in shapes} >= {32}
    assert sum(graph.replays for _, graph in device.graphs) > 10


def test_recorded_steps_of_a_batch_whose_rows_and_columns_grow(monkeypatch):
    device = Device(monkeypatch)
    test_a_long_completion_that_joins_short_ones_gets_more_columns()
    assert {shape.columns for shape, _ in device.graphs} == {256, 512}


def test_a_step_that_asks_for_a_number_can_not_be_recorded(monkeypatch):
    Device(monkeypatch)
    step = GraphBatch._token_step

    def waiting(batch, shape):
        step(batch, shape)
        batch.held.token[0].item()

    monkeypatch.setattr(GraphBatch, "_token_step", waiting)
    source = LocalSource(make_policy(), version=0, cuda_graphs=True)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        completions_of(source, requests())


def test_a_step_that_cuda_can_not_record_is_told_in_one_sentence(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("not permitted")

    monkeypatch.setattr(GraphBatch, "_recordable", lambda batch: True)
    for name, fake in (
        ("graph_pool_handle", lambda: (0, 1)),
        ("CUDAGraph", object),
        ("graph", refuse),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    source = LocalSource(make_policy(), version=0, cuda_graphs=True)
    with pytest.raises(SourceError) as told:
        completions_of(source, requests())
    assert str(told.value) == (
        "local: CUDA can't record a token step of LlamaForCausalLM; leave out cuda_graphs (not permitted)"
    )


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])],
)
def test_a_step_compiles_as_one_graph(family, monkeypatch):
    """`torch.compile(fullgraph=True)` refuses what waits for a tensor's value, as CUDA does."""
    torch._dynamo.reset()
    step = GraphBatch._token_step
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False)
    wanted = requests(2, max_tokens=6, **CHOICES["cut"], repetition_penalty=1.5)
    policy = make_policy(family)
    expected = completions_of(LocalSource(policy, version=0), wanted)
    monkeypatch.setattr(GraphBatch, "_token_step", lambda batch, shape: compiled(batch, shape))
    check_same(
        completions_of(LocalSource(policy, version=0, cuda_graphs=True), wanted), expected, 1e-4
    )
    torch._dynamo.reset()


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="this torch can't register devices from Python"
)
def test_no_token_step_waits_for_the_device():
    ((status, printed),) = run_forked(1, "rank_drawing")
    assert status == 0, printed


def test_a_model_with_a_short_window_goes_one_prompt_at_a_time(caplog):
    policy = Policy(make_model("gemma2", attention="eager").float())
    source = LocalSource(policy, version=0, cuda_graphs=True)
    assert isinstance(source._make_batch(20), StaticBatch)
    assert isinstance(source._make_batch(3), GraphBatch)
    assert "20 tokens are more than its window of 4" in caplog.text


def test_weights_that_give_nan_are_told(monkeypatch):
    policy = make_policy()
    source = LocalSource(policy, version=3, cuda_graphs=True)
    with torch.no_grad():
        policy.plain.lm_head.weight.fill_(float("nan"))
    with pytest.raises(SourceError, match="the weights of version 3 give log-probs of nan"):
        completions_of(source, requests())


@pytest.mark.parametrize(
    "world",
    [
        pytest.param((1, 1), id="one"),
        pytest.param((2, 1), marks=pytest.mark.slow, id="two"),
        pytest.param((2, 2), marks=pytest.mark.slow, id="shards"),
    ],
)
def test_a_run_ends_where_it_does_without(world, tmp_path_factory):
    expected = runs_on(tmp_path_factory, ("grpo",), *world)
    runs = runs_on(tmp_path_factory, ("grpo",), *world, cuda_graphs=True)
    assert_same_end(expected / "grpo", runs / "grpo")
