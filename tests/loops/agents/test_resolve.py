"""The name of an agent in a configuration."""

import pytest
from burnish.loops.agents import AgentProcess, resolve_agent

AGENTS = """
async def run(row, url, key):
    return 1.0

def two(row, url):
    return 1.0

class Agent:
    def __init__(self, steps=3):
        self.steps = steps

    async def __call__(self, row, url, key):
        return float(self.steps)

class NoAgent:
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def agents(tmp_path, monkeypatch):
    (tmp_path / "my_agents_of_tests.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_and_a_class_with_settings_are_found() -> None:
    assert resolve_agent("my_agents_of_tests:run").__name__ == "run"
    assert resolve_agent({"my_agents_of_tests:Agent": {"steps": 5}}).steps == 5
    assert resolve_agent("my_agents_of_tests:Agent").steps == 3


def test_a_program_is_a_command() -> None:
    agent = resolve_agent({"process": {"command": ["python", "agent.py"]}})
    assert isinstance(agent, AgentProcess)
    assert agent.command == ["python", "agent.py"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("my_agents_of_tests:two", "wanted a function of .row, url, key."),
        ("my_agents_of_tests:NoAgent", "wanted a function of .row, url, key."),
        ("my_agents_of_tests:number", "wanted a function of .row, url, key."),
        ("my_agents_of_tests:run_", "has no 'run_', did you mean 'run'"),
        ("proces", "did you mean 'process'"),
        ({"process": {}}, "needs command"),
        ({"process": {"comand": []}}, "did you mean 'command'"),
        ({"a": {}, "b": {}}, "wanted one name, got a, b"),
    ],
)
def test_what_is_no_agent_is_named(spec, told) -> None:
    with pytest.raises(ValueError, match=told):
        resolve_agent(spec)
