"""Agents in runs: named in a configuration, on one rank and on two, evaluated, and refused."""

import json
import sys
from pathlib import Path

import pytest
from burnish.loops.cli import main
from burnish.loops.config import Limits
from burnish.loops.own_code import burnish_alone, check_names, whose_code
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.settings import GRPO, PPO
from online import Killed, dying_in_step, lines, prepare, stored, under_torchrun
from tiny import save_model

PROGRAM = """
import json, os, sys, urllib.request

body = {"model": "policy", "messages": json.load(sys.stdin)["prompt"]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(sum(character < "n" for character in reply))
"""


@pytest.fixture
def fields(tmp_path):
    """Of a run with an agent."""
    return {
        **prepare(tmp_path),
        "rewards": {},
        "agent": "agents:parted",
        "output": str(tmp_path / "run"),
        "group_size": 2,
        "prompts_per_rollout": 2,
    }


def train(fields):
    open_grpo(GRPO(**fields)).train()
    return lines(Path(fields["output"])), stored(Path(fields["output"]))


def test_grpo_trains_on_what_an_agent_asked(fields) -> None:
    metrics, samples = train(fields)
    assert len(metrics) == 2
    assert all(line["turns/mean"] == 4.0 and line["turns/aborted"] == 0.0 for line in metrics)
    assert all(line["rewards/environment/mean"] > 0 for line in metrics)
    assert len(samples) == 8
    # the plan and the two parts are a tree of two branches, the sum stands alone
    assert all(len(sample["further"]) == 2 for sample in samples)


def test_agents_are_answered_while_the_trainer_trains(fields, tmp_path) -> None:
    """At max_staleness 1 the event loop is a thread's, which also waits for programs."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    fields |= {"max_staleness": 1, "steps": 3}
    fields["agent"] = {"process": {"command": [sys.executable, str(tmp_path / "agent.py")]}}
    metrics, samples = train(fields)
    assert [line["turns/aborted"] for line in metrics] == [0.0] * 3
    assert len(samples) >= 12


def test_a_run_that_is_killed_goes_on_and_counts_nothing_twice(fields) -> None:
    fields |= {"steps": 3, "save_every": 1}
    with dying_in_step(2), pytest.raises(Killed):
        train(fields)
    train({**fields, "resume": True})
    samples = stored(Path(fields["output"]))
    metrics = lines(Path(fields["output"]))
    assert [line["step"] for line in metrics] == [1, 2, 3]
    places = [(sample["task"], sample["index"]) for sample in samples]
    # those of the step that died were sampled and written twice, and trained once
    assert set(places) == {(task, index) for task in range(6) for index in range(2)}
    assert all(line["turns/mean"] == 4.0 for line in metrics)


def test_a_held_out_set_is_asked_by_the_agent_too(fields) -> None:
    fields |= {"eval_data": fields["data"], "eval_every": 1, "steps": 1, "agent": "agents:twice"}
    metrics, _ = train(fields)
    assert any("eval/reward" in line for line in metrics), metrics[-1].keys()


@pytest.mark.slow
def test_the_policy_of_two_ranks_answers_one_agent_as_that_of_one(fields, tmp_path) -> None:
    fields |= {"steps": 1, "dtype": "float64", "agent": "agents:twice", "limits": {"turns": 4}}
    outcome = under_torchrun(2, fields, 120)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    on_two = stored(Path(fields["output"]))
    fields |= {"output": str(tmp_path / "alone"), "limits": Limits(turns=4)}
    _, on_one = train(fields)
    drawn = [[sample["prompt"], sample["tokens"], sample["trained"]] for sample in on_one]
    assert drawn == [[each["prompt"], each["tokens"], each["trained"]] for each in on_two]
    assert len(on_one) == 4


def test_an_agent_that_fails_in_all_conversations_ends_the_run(fields, monkeypatch) -> None:
    monkeypatch.setattr("burnish.loops.agents.source._PAUSE", 0.0)
    fields["agent"] = "agents:broken"
    with pytest.raises(ValueError, match=r"(?s)agent: it failed in all 4.*KeyError: 'no sandbox'"):
        train(fields)


def test_a_tokenizer_without_a_template_is_refused(fields, tmp_path) -> None:
    fields["model"] = str(save_model(tmp_path / "plain", chat=False))
    fields["data"] = str(tmp_path / "texts.jsonl")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": "1"}) + "\n")
    with pytest.raises(ValueError, match=r"agent: .* the tokenizer has no chat template"):
        train(fields)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"environment": "guess_number"}, "an environment or with an agent; leave one"),
        ({"agent": None, "agent_host": "0.0.0.0"}, "agent_host: there is no agent"),
    ],
)
def test_what_contradicts_an_agent_is_said(changes, told) -> None:
    config = PPO(model="m", data="d", output="o", **{"agent": "agents:twice", **changes})
    assert any(told in problem for problem in config.contradictions())


def test_an_agent_is_code_that_a_configuration_names() -> None:
    function = GRPO(model="m", data="d", output="o", agent="agents:twice")
    program = GRPO(
        model="m", data="d", output="o", agent={"process": {"command": ["python", "a.py"]}}
    )
    assert "agents" in whose_code(function)
    assert "agent.process (['python', 'a.py'])" in whose_code(program)
    for config in (function, program):
        with burnish_alone(), pytest.raises(ValueError, match=r"agent.*--no_code"):
            check_names(config)


def test_an_agent_is_named_on_the_command_line(fields, tmp_path, capsys) -> None:
    arguments = ["--model", fields["model"], "--data", fields["data"], "--output", fields["output"]]
    arguments += ["--agent", "agents:none"]
    assert main(["grpo", *arguments]) == 1
    assert "agents has no 'none'" in capsys.readouterr().err
