"""The examples of agents, each against the real package in an environment of its own, and OpenAI's
clients as they are.
"""

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from burnish.loops.agents import AgentProcess
from burnish.loops.environments import Limits, MultiTurnSource
from burnish.loops.rollouts.sample import Request, SamplingParams

EXAMPLES = Path(__file__).parents[3] / "examples/agents"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
ROW = {"question": "2+3?", "answer": "5"}

SERVER = """
from mcp.server import MCPServer

server = MCPServer("adder")


@server.tool()
def add(a: int, b: int) -> int:
    "The sum of two numbers."
    return a + b


server.run()
"""
GAMES = """
from openenv.core import Action, Environment, Observation, State


class Say(Action):
    text: str


class Heard(Observation):
    text: str


class Counting(Environment[Say, Heard, State]):
    def reset(self, seed=None, episode_id=None, *, start):
        self.wanted = start
        return Heard(text=f"Say {start}.")

    def step(self, action, timeout_s=None, **options):
        reward = float(action.text.strip() == str(self.wanted))
        self.wanted += 1
        return Heard(text=f"Say {self.wanted}.", done=self.wanted > 3, reward=reward)

    @property
    def state(self):
        return State(step_count=self.wanted)
"""
TASKS = """
import verifiers.v1 as vf


class Question(vf.TaskData):
    answer: str


class Answering(vf.Task[Question]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)
"""
SDK = """
import asyncio, json, sys
import openai

row = json.load(sys.stdin)
asked = {"model": "policy", "messages": [{"role": "user", "content": "Well?"}]}
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
"""
SYNC = """
client = openai.OpenAI()
completion = client.chat.completions.create(**asked)
reply = completion.choices[0].message
assert reply.content == "yes" and completion.usage.completion_tokens == 4
follow = [*asked["messages"], reply, {"role": "user", "content": "And?"}]
assert client.chat.completions.create(model="policy", messages=follow).choices[0].message.content == "yes"
streamed = client.chat.completions.create(**asked, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
assert text == "yes", text
try:
    client.chat.completions.create(**asked, temperature=0.1)
except openai.BadRequestError as error:
    assert error.param == "temperature", error
base = str(client.base_url).replace(client.api_key, "wrong")
try:
    openai.OpenAI(api_key="wrong", base_url=base).chat.completions.create(**asked)
except openai.AuthenticationError:
    print(1)
"""
ASYNC = """
async def run():
    client = openai.AsyncOpenAI()
    three = [client.chat.completions.create(**asked) for _ in range(3)]
    replies = [each.choices[0].message.content for each in await asyncio.gather(*three)]
    assert replies == ["yes"] * 3
    best = await client.chat.completions.create(**asked, n=2)
    assert len(best.choices) == 2
    async with client.chat.completions.stream(**asked, tools=[tool]) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "yes"
    return 1

print(asyncio.run(run()))
"""
SLOW = """
client = openai.OpenAI(timeout=0.3, max_retries=9)
print(float(client.chat.completions.create(**asked).choices[0].message.content == "yes"))
"""


def python_of(name):
    """The interpreter of an environment; tests that need it are skipped where there is none."""
    python = Path(os.environ.get("BURNISH_AGENTS", "nowhere"), name, "bin/python")
    if not python.exists():
        pytest.skip(
            f"no {name}: make environments with tests/support/tools/install_agents, name their folder in BURNISH_AGENTS"
        )
    return str(python)


@pytest.fixture
def example(tmp_path, monkeypatch, played, says):
    """The conversation of an example's program in an environment, beside a file of the user's."""

    def run(python, name, *arguments, say, row, files=()):
        monkeypatch.chdir(tmp_path)
        for file, text in dict(files).items():
            (tmp_path / file).write_text(text)
        folder = Path(python).parent
        path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        script = name if os.sep in name else str(EXAMPLES / name)
        agent = AgentProcess([python, script, *arguments], path)
        (sample,), source = played(
            says(say), agent, row=row, max_tokens=300, tokens=9000, attempts=1
        )
        assert sample.finish == "stop", source.failures
        return sample

    return run


def with_a_call(heard, turn):
    return [CALL, "5"][turn]


def test_the_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 40, path.name


def test_the_sdk(example) -> None:
    sample = example(python_of("openai"), "openai_sdk.py", say="5", row=ROW)
    assert (sample.info["environment_reward"], len(sample.contexts)) == (1.0, 1)


def test_tools_of_an_mcp_server(example) -> None:
    python = python_of("openai")
    files = {"server.py": SERVER}
    sample = example(
        python, "mcp_tools.py", python, "server.py", say=with_a_call, row=ROW, files=files
    )
    assert (sample.info["environment_reward"], len(sample.contexts)) == (1.0, 1)
    assert sample.info["messages"][1]["content"] == "5"


def test_the_agents_sdk(example) -> None:
    sample = example(python_of("openai"), "openai_agents.py", say=with_a_call, row=ROW)
    assert (sample.info["environment_reward"], len(sample.contexts)) == (1.0, 1)


def test_an_environment_of_openenv(example) -> None:
    sample = example(
        python_of("openenv"),
        "openenv_environment.py",
        *("my_games:Counting", "my_games:Say"),
        say=lambda heard, turn: str(turn + 1),
        row={"start": 1},
        files={"my_games.py": GAMES},
    )
    assert (sample.info["environment_reward"], sample.info["turns"]) == (3.0, 3)
    assert len(sample.contexts) == 1


@pytest.mark.slow
def test_a_task_of_verifiers(example) -> None:
    """Slow, as its harness makes an environment of its own, by uv."""
    sample = example(
        python_of("verifiers"),
        "verifiers_task.py",
        *("my_tasks:Answering", "my_tasks:Question"),
        say="5",
        row={"prompt": "2+3?", "answer": "5"},
        files={"my_tasks.py": TASKS},
    )
    assert (sample.info["environment_reward"], sample.info["turns"]) == (1.0, 1)


@pytest.mark.parametrize(("lines", "contexts"), [(SYNC, 2), (ASYNC, 6)], ids=["sync", "async"])
def test_openais_clients_as_they_are(example, tmp_path, lines, contexts) -> None:
    file = tmp_path / "agent.py"
    file.write_text(SDK + lines)
    sample = example(python_of("openai"), str(file), say="yes", row={})
    assert sample.info["environment_reward"] == 1.0
    assert len(sample.contexts) == contexts
    drawn = 3 if contexts == 2 else 6
    assert sample.length == 4 * drawn


def test_a_client_that_loses_patience_is_told_what_was_begun(tmp_path, played, says) -> None:
    """OpenAI's own: it hangs up after 0.3 s, and asks again with x-stainless-retry-count."""
    (tmp_path / "agent.py").write_text(SDK + SLOW)
    source = says("yes", held=True)
    usual = source.sample

    async def later(request):
        asyncio.get_running_loop().call_later(1.5, source.released.set)
        return await usual(request)

    source.sample = later
    agent = AgentProcess([python_of("openai"), str(tmp_path / "agent.py")])
    (sample,), agents = played(source, agent, attempts=1)
    assert sample.info["environment_reward"] == 1.0, agents.failures
    assert len(source.asked) == 1
    assert sample.length == 4


class Counter:
    """As written for TRL's `environment_factory`."""

    def reset(self, **row):
        self.count = row["start"]
        return f" It is at {self.count}."

    def increment(self, by: int) -> str:
        """Add to the counter.

        Args:
            by: How much.
        """
        self.count += by
        return f"It is at {self.count}."

    def get_reward(self):
        return float(self.count)

    def _private(self):
        raise AssertionError


def test_a_class_for_trl_is_an_environment(tokenizer, turns, says, monkeypatch) -> None:
    """Its text is added to the prompt, its method is the tool, its reward is asked at the end."""
    spec = importlib.util.spec_from_file_location("from_trl", EXAMPLES / "trl_environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "my_environments", sys.modules[__name__])
    row = {"prompt": [{"role": "user", "content": "Count up."}], "start": 3}
    call = {"name": "increment", "arguments": {"by": 4}}
    source = MultiTurnSource(
        says(lambda heard, turn: [f"<tool_call>{json.dumps(call)}</tool_call>", "Done."][turn]),
        lambda: module.FromTRL("my_environments:Counter"),
        lambda task: row,
        turns,
        Limits(),
    )
    (sample,) = asyncio.run(source.sample(Request(0, [], (0,), SamplingParams(200), key=1)))
    assert tokenizer.decode(sample.prompt).count("Count up. It is at 3.") == 1
    assert sample.info["messages"][1]["content"] == "It is at 7."
    assert sample.info["environment_reward"] == 7.0
    assert list(module.FromTRL("my_environments:Counter").tools) == ["increment"]
    assert row["prompt"][0]["content"] == "Count up."
