"""Agents that talk to a tiny model, or to a source that says what it is told to."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import httpx2
import pytest
from burnish.data.chat import Encoder
from burnish.loops.agents import AgentSource, Limits
from burnish.loops.environments import ChatTurns
from burnish.loops.rollouts.local.source import LocalSource
from burnish.loops.rollouts.sample import Request, Sample, SamplingParams, VersionSpan
from tiny import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("agents") / "model", max_position_embeddings=4096)


@pytest.fixture(scope="session")
def tokenizer(model_directory):
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    tools = "{% if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"
    tokenizer.chat_template = tools + tokenizer.chat_template
    return tokenizer


@pytest.fixture(scope="session")
def model(model_directory):
    return AutoModelForCausalLM.from_pretrained(model_directory)


@pytest.fixture
def turns(tokenizer):
    return ChatTurns(Encoder(tokenizer))


class Scripted:
    """Says ``script(messages, turn)``, with an end token, from version 3.

    ``messages`` are the texts of the prompt, as its template separates them. A request may be held
    until ``released``.
    """

    overlaps, stored = True, False

    def __init__(self, tokenizer, script, *, held=False):
        self.tokenizer, self.script = tokenizer, script
        self.asked = []
        self.released = asyncio.Event()
        if not held:
            self.released.set()

    async def sample(self, request):
        self.asked.append(request)
        await self.released.wait()
        text = self.tokenizer.decode(request.prompt)
        heard = re.findall(r"<\|start\|>(?:\w+)\n(.*?)<\|end\|>", text, re.DOTALL)
        said = self.script(heard, request.turn) if callable(self.script) else self.script
        tokens = [*self.tokenizer(said)["input_ids"], self.tokenizer.eos_token_id]
        finish = "length" if len(tokens) > request.sampling.max_tokens else "stop"
        tokens = tokens[: request.sampling.max_tokens]
        (index,) = request.indices
        return [
            Sample(
                request.task,
                index,
                list(request.prompt),
                tokens,
                [True] * len(tokens),
                [-1.0 - len(self.asked)] * len(tokens),
                [VersionSpan(3, 0, len(tokens))],
                finish,
                self.tokenizer.decode(tokens, skip_special_tokens=True),
            )
        ]

    async def publish(self, weights, version):
        pass

    async def version(self):
        return 3

    async def close(self):
        pass


@pytest.fixture
def says(tokenizer):
    """A source that says a text, or what a function of the texts before makes."""
    return lambda script, **options: Scripted(tokenizer, script, **options)


@pytest.fixture
def local(model, tokenizer):
    return lambda: LocalSource(model, tokenizer, version=0)


@pytest.fixture
def played(turns):
    """The conversations of agents: ``played(source, run, ...)`` are samples and their source."""

    def play(source, run, *indices, row=None, max_tokens=8, task=0, options=(), **limits):
        async def sample():
            agents = AgentSource(
                source, run, lambda task: row or {}, turns, Limits(**limits), **dict(options)
            )
            request = Request(task, [1], indices or (0,), SamplingParams(max_tokens), key=11)
            try:
                return await agents.sample(request), agents
            finally:
                await agents.close()

        return asyncio.run(sample())

    return play


class Client:
    """Chat Completions by plain HTTP."""

    def __init__(self, url, key, http):
        self.url, self.key, self.http = url, key, http

    async def post(self, messages, *, retry=0, key=None, path="/chat/completions", **parameters):
        """The response to messages, or to one text of the user's."""
        if isinstance(messages, str):
            messages = [user(messages)]
        headers = {
            "Authorization": f"Bearer {key or self.key}",
            "x-stainless-retry-count": str(retry),
        }
        body = {"model": "policy", "messages": messages, **parameters}
        return await self.http.post(self.url + path, content=json.dumps(body), headers=headers)

    async def reply(self, messages, **parameters):
        """The message of the only choice."""
        response = await self.post(messages, **parameters)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]


@asynccontextmanager
async def client(url, key):
    async with httpx2.AsyncClient(timeout=30, trust_env=False) as http:
        yield Client(url, key, http)


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(name="client")
def client_fixture():
    return client


@pytest.fixture(name="user")
def user_fixture():
    return user
