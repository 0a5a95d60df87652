"""A tokenizer of bytes under several chat templates, and a source that says what it is told to."""

import asyncio
from pathlib import Path

import pytest
from burnish.data.chat import Encoder
from burnish.loops.environments import ChatTurns
from burnish.loops.rollouts.sample import Request, Sample, SamplingParams, VersionSpan
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    *(
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    *(
        "<|endoftext|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
    ),
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Scripted:
    """Says one text after the other in each conversation, with an end token, at version 3 and then
    4 within each.
    """

    overlaps, stored = True, False

    def __init__(self, tokenizer, script, *, end="<|im_end|>", finish="stop"):
        self.tokenizer, self.script, self.finish = tokenizer, script, finish
        self.end = [tokenizer.convert_tokens_to_ids(end)] if end else []
        self.asked: list[Request] = []
        self.closed = False

    async def sample(self, request):
        self.asked.append(request)
        (index,) = request.indices
        said = (
            self.script(index, request.turn) if callable(self.script) else self.script[request.turn]
        )
        tokens = [*self.tokenizer(said, add_special_tokens=False)["input_ids"], *self.end]
        finish, tokens = (
            ("length" if len(tokens) > request.sampling.max_tokens else self.finish),
            tokens,
        )
        tokens = tokens[: request.sampling.max_tokens]
        middle = len(tokens) // 2
        await asyncio.sleep(0)
        return [
            Sample(
                request.task,
                index,
                list(request.prompt),
                tokens,
                [True] * len(tokens),
                [-(request.turn + 1) - t / 100 for t in range(len(tokens))],
                [VersionSpan(3, 0, middle), VersionSpan(4, middle, len(tokens))]
                if middle
                else [VersionSpan(4, 0, len(tokens))],
                finish,
                self.tokenizer.decode(tokens, skip_special_tokens=True),
            )
        ]

    async def publish(self, weights, version):
        self.published = version

    async def version(self):
        return 4

    async def close(self):
        self.closed = True


@pytest.fixture(scope="session")
def byte_tokenizer():
    """One token per byte, and some of two, so that text that is tokenized again could come out
    otherwise.
    """

    def build(template=CHATML):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*alphabet, "he", "in", "10"])}
        core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("i", "n"), ("1", "0")]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(SPECIAL)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>"
        )
        tokenizer.chat_template = template
        return tokenizer

    return build


@pytest.fixture(scope="session")
def tokenizer(byte_tokenizer):
    return byte_tokenizer()


@pytest.fixture
def turns(tokenizer):
    return ChatTurns(Encoder(tokenizer))


@pytest.fixture
def scripted():
    return Scripted


@pytest.fixture
def request_for():
    def build(*indices, task=0, max_tokens=200, **options):
        return Request(task, [], indices or (0,), SamplingParams(max_tokens, **options), key=11)

    return build


@pytest.fixture
def said():
    """An answer as environments see it."""

    def make(text):
        return Sample(0, 0, [1], [], [], [], [], "stop", text=text)

    return make


@pytest.fixture(scope="session")
def templates_of_the_peer():
    trl = pytest.importorskip("trl")
    return Path(trl.__file__).parent / "chat_templates"
