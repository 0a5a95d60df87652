"""An agent as a program: what it is told, what it returns, and that it ends with its
conversation.
"""

import sys
import time

import psutil
import pytest
from burnish.loops.agents import AgentProcess

ASK = """
import json, os, sys, urllib.request
def ask(text):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
row = json.load(sys.stdin)
"""


@pytest.fixture
def program(tmp_path):
    """An agent of these lines, after what makes `ask` and `row`."""

    def write(lines, **options):
        file = tmp_path / "agent.py"
        file.write_text(ASK + lines)
        return AgentProcess([sys.executable, str(file)], **options)

    return write


def test_a_program_asks_the_policy_and_prints_its_reward(says, program, played) -> None:
    agent = program("print('log')\nprint(float(ask(row['question']) == 'yes') / 2)\n")
    (sample,), source = played(says("yes"), agent, row={"question": "Well?"})
    assert sample.info["environment_reward"] == 0.5, source.failures
    assert sample.finish == "stop"


def test_a_program_may_leave_the_reward_to_others(says, program, played) -> None:
    (sample,), _ = played(says("yes"), program("ask('Well?')\nprint('null')\n"))
    assert sample.info["environment_reward"] is None


def test_variables_are_of_this_process_but_for_ranks(says, program, played, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("SEARCH", "here")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    lines = "ask('?')\nprint(float('RANK' not in os.environ) + (os.environ['SEARCH'] + os.environ['X'] == 'here!'))"
    (sample,), source = played(says("yes"), program(lines, environment={"X": "!"}))
    assert sample.info["environment_reward"] == 2.0, source.failures


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("ask('?')\nraise KeyError('sandbox')", "KeyError: 'sandbox'"),
        ("ask('?')\nprint('good')", "must be its reward, a number or null, got 'good'"),
        ("ask('?')", "must be its reward"),
    ],
)
def test_a_program_that_fails_is_named(says, program, played, lines, told) -> None:
    (sample,), source = played(says("yes"), program(lines))
    assert sample.finish == "aborted"
    assert told in source.failures["error"]


def test_a_program_that_is_killed_counts_once(says, program, played, tmp_path) -> None:
    """By SIGKILL, in two of four conversations, after a turn each: all turns are kept, two of the
    conversations are masked.
    """
    lines = """
ask("first")
if row["dies"] and os.environ["OPENAI_API_KEY"][0] in "01234567":
    import signal
    os.kill(os.getpid(), signal.SIGKILL)
ask("second")
print(1)
"""
    agent = program(lines)
    keys = iter(["0" * 32, "1" * 32, "8" * 32, "9" * 32])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "burnish.loops.agents.server.secrets.token_hex",
            lambda size: next(keys) if size == 16 else "x",
        )
        samples, source = played(says("yes"), agent, 0, 1, 2, 3, row={"dies": True})
    finishes = sorted(sample.finish for sample in samples)
    assert finishes == ["aborted", "aborted", "stop", "stop"], source.failures
    assert sorted(sample.info["turns"] for sample in samples) == [1, 1, 2, 2]
    assert [(sample.task, sample.index) for sample in samples] == [(0, i) for i in range(4)]
    assert "ended with -9" in source.failures["error"]


def test_a_program_and_its_children_end_with_the_conversation(
    says, program, played, tmp_path
) -> None:
    lines = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "60"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
ask("first")
time.sleep(60)
"""
    (sample,), source = played(says("yes"), program(lines), seconds=0.5)
    assert sample.finish == "aborted"
    assert "timeout" in source.failures
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not _runs(pid)


def _runs(pid):
    for _ in range(20):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("command", ["python agent.py", []])
def test_a_command_is_a_list(command) -> None:
    with pytest.raises(ValueError, match="command must be a list"):
        AgentProcess(command)
