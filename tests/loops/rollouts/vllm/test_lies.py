"""A server that lies: each lie ends in an error that names the server, in time, and in little
memory.
"""

import asyncio
import gzip
import json
import resource
import time
import types
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from burnish.loops.cli import main
from burnish.loops.rollouts.sample import Request, SamplingParams
from burnish.loops.rollouts.source import SourceError
from burnish.loops.rollouts.vllm.server import VLLMServer
from burnish.loops.rollouts.vllm.weights import Files
from grids import exhaustive, slow
from online import prepare
from tiny import save_model
from transformers import AutoTokenizer, PretrainedConfig
from vllm_fake import Fake, choice, error

PATIENCE = 3.0  # seconds
STOP = 9
GENERATE = "/inference/v1/generate"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Unknown(PretrainedConfig):
    """A model that transformers has no class for, so that any tensors pass for its weights."""

    model_type = "unknown"
    vocab_size = 258


def drip(before=b"", byte=b" "):
    """An answer that comes at a byte every tenth of a second, for ever."""

    def write(connection):
        connection.sendall(before)
        while True:
            connection.sendall(byte)
            time.sleep(0.1)

    return lambda body: (None, write)


def endless(part, head=HEAD + b"\r\n"):
    def write(connection):
        connection.sendall(head)
        while True:
            connection.sendall(part)

    return lambda body: (None, write)


def raw(content):
    return lambda body: (None, lambda connection: connection.sendall(content))


def gzip_bomb(body):
    bomb = gzip.compress(bytes(1 << 26)) * 16  # 1 GB
    return None, lambda connection: connection.sendall(
        HEAD + b"Content-Encoding: gzip\r\n\r\n" + bomb
    )


def text(answer, status=200):
    return lambda body: (status, answer)


def completion(tokens=(1, 2, 3), **changes):
    """A completion of the published weights, with these changes."""

    def lie(body, label):
        return 200, {"choices": [choice(list(tokens), label, **changes)]}

    return lie


def logprobs(*values):
    return completion(
        logprobs={
            "content": [
                {"token_id": t, "logprob": p} for t, p in zip((1, 2, 3), values, strict=False)
            ]
        }
    )


def labeled(*spans):
    """A completion whose tokens are from these versions: functions of the label that was published
    last.
    """

    def lie(body, label):
        versions = [
            {"version": make(label), "start": start, "end": end} for make, start, end in spans
        ]
        return 200, {"choices": [choice([1, 2, 3], label, weight_versions=versions)]}

    return lie


def same(label):
    return label


COMPLETIONS = {
    "a log-prob that stands for NaN": (logprobs(-1.0, -9999.0, -1.0), "look for NaN"),
    "a log-prob of NaN": (logprobs(-1.0, float("nan"), -1.0), "look for NaN"),
    "a log-prob of infinity": (logprobs(-1.0, float("inf"), -1.0), "between -150 and 0, got inf"),
    "a positive log-prob": (logprobs(-1.0, 0.5, -1.0), "between -150 and 0, got 0.5"),
    "a log-prob that nothing drawn has": (
        logprobs(-1.0, -5000.0, -1.0),
        "between -150 and 0, got -5000",
    ),
    "a log-prob that is text": (logprobs(-1.0, "-1", -1.0), "log-prob: wanted float, got '-1'"),
    "a log-prob that is a boolean": (logprobs(-1.0, False, -1.0), "log-prob: wanted float"),
    "a log-prob that is null": (logprobs(-1.0, None, -1.0), "log-prob: wanted float"),
    "a log-prob less": (logprobs(-1.0, -1.0), "2 log-probs for 3 tokens"),
    "no log-probs": (completion(logprobs=None), "is not understood"),
    "log-probs in a mapping": (completion(logprobs={"content": {"a": 1}}), "content: wanted list"),
    "a token outside the vocabulary": (
        completion((1, 258, 3)),
        "completion token 258 is outside the vocabulary of 258",
    ),
    "a negative token": (completion((1, -1, 3)), "completion token -1 is outside the vocabulary"),
    "a token of 71 bits": (completion((1, 1 << 70, 3)), "outside the vocabulary"),
    "a token of 5,000 digits": (
        text('{"choices": [{"token_ids": [' + "9" * 5000 + "]}]}"),
        "is not understood",
    ),
    "a token with a fraction": (completion((1, 1.5, 3)), "token: wanted int, got '1.5'"),
    "a token that is text": (completion((1, "2", 3)), "token: wanted int, got '2'"),
    "a token that is a boolean": (completion((1, True, 3)), "token: wanted int, got 'True'"),
    "tokens that are text": (completion(token_ids="123"), "token_ids: wanted list"),
    "more tokens than asked for": (completion((1,) * 9), "asked for at most 3 tokens, got 9"),
    "the prompt before the completion": (
        completion((5, 6, 1, 2, 3)),
        "asked for at most 3 tokens, got 5",
    ),
    "an unknown end": (completion(finish_reason="mystery"), "is not understood"),
    "an end that is a list": (completion(finish_reason=["stop"]), "is not understood"),
    "no end": (completion(finish_reason=None), "is not understood"),
    "a stop without a stop token": (completion(finish_reason="stop"), "but its last one is 3"),
    "a stop token in the middle": (completion((1, STOP, 3)), "goes on after stop token 9"),
    "a stop token that is no stop": (completion((1, 2, STOP)), "ends with stop token 9"),
    "a cut before the limit": (completion((1,)), "cut off at max_tokens=3, but has 1 tokens"),
    "no completion": (text({"choices": []}), "is not understood"),
    "a null for completions": (text({"choices": None}), "is not understood"),
    "a page": (text("<html>"), "is not understood"),
    "half an answer": (text('{"choices": [{"token_ids": [1, 2'), "is not understood"),
    "null": (text("null"), "is not understood"),
    "bytes that are no text": (
        raw(HEAD + b"Content-Length: 4\r\n\r\n\xff\xfe\x00\xd8"),
        "is not understood",
    ),
    "brackets within brackets": (text("[" * 200_000), "is not understood"),
    "closed brackets within brackets": (text("[" * 900 + "]" * 900), "is not understood"),
    "weights of another run": (labeled((lambda label: "1@other", 0, 3)), "from weights '1@other'"),
    "weights to come": (
        labeled((lambda label: "7" + label[1:], 0, 3)),
        "from version 7; the newest one is 1",
    ),
    "weights of no number": (
        labeled((lambda label: "²" + label[1:], 0, 3)),
        "not from published ones",
    ),
    "weights that are a number": (labeled((lambda label: 1, 0, 3)), "version: wanted str"),
    "spans that overlap": (labeled((same, 0, 2), (same, 1, 3)), "is not said"),
    "a span that ends in true": (labeled((same, 0, True), (same, 1, 3)), "end: wanted int"),
    "weights of nothing": (completion(weight_versions=7), "is not understood"),
    "a redirect": (
        raw(b"HTTP/1.1 302 Found\r\nLocation: http://a/\r\nContent-Length: 0\r\n\r\n"),
        "redirects to http://a/",
    ),
    "a refusal": (
        lambda body: error(401, "who are you"),
        "answered 401: who are you; set vllm.api_key",
    ),
    "a refusal without words": (text({"error": [[["x"]]]}, 413), "answered 413"),
    "a failure": (lambda body: error(500, "cursed"), "answered 500: cursed"),
    "silence": (lambda body: (None, 60), "no answer in"),
    "an answer that drips": (drip(HEAD + b"\r\n"), "no answer in"),
    "a header that drips": (drip(HEAD + b"X: ", b"x"), "no answer in"),
    "an answer without an end": (endless(b"[" * (1 << 20)), "more than 8 MiB"),
    "a header without an end": (endless(b"X: y\r\n" * 1000, HEAD), "can't be reached, or died"),
    "a compressed answer": (gzip_bomb, "is compressed"),
    "an answer broken off": (
        raw(HEAD + b"Content-Length: 100\r\n\r\n{"),
        "can't be reached, or died",
    ),
    "a line that is no HTTP": (raw(b"hello\r\n\r\n"), "can't be reached, or died"),
}

JUNK = [None, True, 7, 1.5, "x", [], [7], [[]], {}, {"id": 1, "root": 2}, "[" * 200_000]
STARTS = {
    "/health": (),
    "/version": ("version",),
    "/server_info": ("vllm_config", "vllm_config.model_config", "vllm_config.model_config.max_model_len",
                     "vllm_config.model_config.dtype", "vllm_config.model_config.logprobs_mode",
                     "vllm_config.lora_config", "vllm_config.weight_transfer_config"),
    "/weight_info": ("weight_version",),
    "/is_paused": ("is_paused",),
    "/v1/models": ("data",),
    "/tokenize": ("tokens",),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_model(tmp_path_factory.mktemp("model"))
    return types.SimpleNamespace(config=Unknown(), tokenizer=AutoTokenizer.from_pretrained(path))


@pytest.fixture
def fake(model):
    fake = Fake(model.tokenizer)
    yield fake
    fake.close()


@contextmanager
def bounded(seconds=PATIENCE + 5):
    """What happens within takes no longer than this, and less than 600 MB of memory."""
    began, before = time.monotonic(), psutil.Process().memory_info().rss
    yield
    assert time.monotonic() - began < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 600e6


def try_all(fake, model, directory):
    """Meet the server, publish weights, and sample a completion; return it."""

    async def run(source):
        await source.publish([("a", torch.ones(2))], 1)
        return await source.sample(Request(0, [5, 6], [0], SamplingParams(3, stop=(STOP,)), key=1))

    options = {
        "config": model.config,
        "tokenizer": model.tokenizer,
        "updates": Files(directory),
        "dtype": "float32",
    }
    source = VLLMServer(fake.url, timeout=PATIENCE / 2, patience=PATIENCE, **options)
    try:
        (sample,) = asyncio.run(run(source))
        return sample
    finally:
        asyncio.run(source.close())


def tell(fake, lie):
    """Answer with this lie where a completion of three tokens or more is asked for."""
    usual = fake.do_inference_v1_generate

    def answer(body):
        if body["sampling_params"]["max_tokens"] == 1:  # the server is tried out
            return usual(body)
        return lie(body, fake.label) if lie.__code__.co_argcount == 2 else lie(body)

    fake.odd[GENERATE] = answer


def test_a_server_that_tells_the_truth_is_believed(fake, model, tmp_path):
    tell(fake, completion((1, 2, STOP), finish_reason="stop"))
    assert try_all(fake, model, tmp_path).tokens == [1, 2, STOP]


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_lie_about_a_completion_is_an_error_that_says_which(name, fake, model, tmp_path):
    lie, says = COMPLETIONS[name]
    tell(fake, lie)
    with bounded(), pytest.raises(SourceError) as raised:
        try_all(fake, model, tmp_path)
    assert says in str(raised.value) and len(str(raised.value)) < 1000


def changed(answer, path, value):
    """A copy of a JSON answer with another value at this path."""
    answer = json.loads(json.dumps(answer))
    *parents, name = path.split(".")
    place = answer
    for parent in parents:
        place = place[parent]
    place[name] = value
    return answer


@pytest.mark.parametrize("path", STARTS)
def test_what_a_server_says_of_itself_is_checked_before_it_is_used(path, fake, model, tmp_path):
    """Each is either refused or harmless: never a traceback."""
    usual = getattr(fake, "do" + path.replace("/", "_"))
    refused = 0
    for junk in JUNK:
        status, truth = usual({"prompt": "a"})
        lies = [junk, *(changed(truth, name, junk) for name in STARTS[path])]
        for lie in lies:
            fake.odd[path] = lambda body, lie=lie, status=status: (status, lie)
            with bounded():
                try:
                    try_all(fake, model, tmp_path)
                except SourceError:
                    refused += 1
    fake.odd.clear()
    try_all(fake, model, tmp_path)
    assert refused > len(JUNK) / 2 or path == "/health", refused


SLOW = {
    "silence": lambda body: (None, 60),
    "a drip": drip(HEAD + b"\r\n"),
    "a header that drips": drip(HEAD + b"X: ", b"x"),
    "an answer without an end": endless(b"[" * (1 << 20)),
    "a redirect": COMPLETIONS["a redirect"][0],
}
ASKED = [
    "/health",
    "/version",
    "/server_info",
    "/weight_info",
    "/is_paused",
    "/v1/models",
    "/tokenize",
    "/pause",
]
ASKED += ["/init_weight_transfer_engine", "/update_weights", "/finish_weight_update", "/resume"]


def test_a_server_that_drips_its_health_or_its_version_is_given_up(fake, model, tmp_path):
    for path in ("/health", "/version"):
        fake.odd = {path: SLOW["a drip"]}
        with bounded(), pytest.raises(SourceError):
            try_all(fake, model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKED)
def test_no_route_of_a_server_holds_a_run_up_for_longer_than_its_patience(
    path, fake, model, tmp_path
):
    for lie in SLOW.values():
        fake.odd = {path: lie}
        with bounded(), pytest.raises(SourceError):
            try_all(fake, model, tmp_path)


def test_answers_that_each_come_in_time_do_not_take_longer_than_the_patience_in_all(
    fake, model, tmp_path
):
    def late(usual):
        return lambda body: (time.sleep(1.2), usual(body))[1]

    for path in ASKED[:7]:
        fake.odd[path] = late(getattr(fake, "do" + path.replace("/", "_")))
    with (
        bounded(),
        pytest.raises(SourceError, match=r"did not start, and answer what it was asked, in 3 s"),
    ):
        try_all(fake, model, tmp_path)


@pytest.mark.parametrize(
    "name", [slow(n) if i % 9 == 0 else exhaustive(n) for i, n in enumerate(COMPLETIONS)]
)
def test_a_run_ends_with_the_lie_and_without_a_traceback(name, fake, tmp_path, capfd):
    """About 90 s of processor time for all of them."""
    tell(fake, COMPLETIONS[name][0])
    fields = {
        **prepare(tmp_path),
        "source": "vllm",
        "max_tokens": 3,
        "steps": 1,
        "output": str(tmp_path / "run"),
    }
    fields["vllm"] = {"url": fake.url, "patience": PATIENCE, "timeout": PATIENCE / 2, "attempts": 2}
    settings = Path(tmp_path / "settings.yaml")
    settings.write_text(json.dumps(fields))
    assert main(["grpo", "--config", str(settings)]) == 1, (
        "an error without a message would be raised here"
    )
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    last = printed.rstrip().splitlines()[-1]
    assert last.startswith("burnish grpo: ") and "vllm: " in last
