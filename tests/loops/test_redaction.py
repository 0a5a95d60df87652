"""Secrets of a configuration: in no file, tracker, log or list of processes, and read from the
environment.
"""

import json
import logging
import os
import stat
import subprocess
import sys

import pytest
import yaml
from burnish.loops.cli import main
from burnish.loops.recipes.settings import GRPO
from burnish.loops.redaction import (
    MARK,
    HidingFormatter,
    hide,
    is_secret,
    redacted,
    resolved,
    resolved_data,
)
from burnish.loops.rewards import resolve_rewards
from burnish.loops.rl.sources import flags_of
from burnish.loops.runs.directory import check_directory, to_yaml
from burnish.loops.runs.trackers import flat
from tiny import save_model, sums, write_rows

KEY = "sk-proj-4Ff0a9Zk3LmQ8vXc71Bd"  # of the form of a key
WORD = "correct-horse-battery"  # of no such form


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "OPENAI_API_KEY",
        "HF_TOKEN",
        "auth_token",
        "client_secret",
        "password",
        "db-password",
    ],
)
def test_a_secret_is_known_by_whole_words_of_its_name(name):
    assert is_secret(name, WORD)
    assert redacted({"judge": {name: WORD}}) == {"judge": {name: MARK}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", "prompt_tokens"),
        ("max_tokens", "a-long-enough-text"),
        ("mask_token", "<|a_mask_token|>"),
        ("eos_token", "<|end_of_text|>"),
        ("tokenizer", "some/tokenizer-name"),
        ("key", "reference_answer"),
        ("token", "<|end_of_text|>"),
        ("answer_key", "reference_answer"),
        ("keys", "one-and-the-other"),
        ("monkey", "a-long-enough-text"),
        ("secretary", "a-long-enough-text"),
        ("pattern", "a text of several words, sk- among them"),
        ("api_key", "${ENV:OPENAI_API_KEY}"),
    ],
)
def test_what_is_no_secret_stays(name, value):
    assert redacted({name: value}) == {name: value}


def test_numbers_and_switches_stay_whatever_they_are_called():
    settings = {"max_tokens": 5, "api_key": None, "token": True, "password": 1.5}
    assert redacted(settings) == settings


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Bearer {KEY}", f"Bearer {MARK}"),
        (f"https://me:{WORD}@host:8000/v1", f"https://{MARK}@host:8000/v1"),
        (f"https://{KEY}@host", f"https://{MARK}@host"),
        ("hf_" + "aB3" * 10, MARK),
        ("http://host/a@b", "http://host/a@b"),
        ("http://me:${ENV:PASSWORD}@host", "http://me:${ENV:PASSWORD}@host"),
        ("mail me@example.com", "mail me@example.com"),
    ],
)
def test_secrets_are_known_by_their_form_in_any_text(text, shown):
    assert redacted({"header": text}) == {"header": shown}
    assert hide(f"it said: {text}!") == f"it said: {shown}!"


@pytest.fixture
def config(tmp_path):
    return GRPO(
        model="m",
        data="d",
        output=str(tmp_path / "run"),
        rewards={"my:Judge": {"api_key": WORD, "headers": [{"Authorization": f"Bearer {KEY}"}]}},
    )


def test_trackers_and_the_file_of_settings_hold_no_secret(config):
    for text in (to_yaml(config), str(flat(vars(config)))):
        assert MARK in text and WORD not in text and KEY not in text


def test_a_run_is_resumed_though_its_secrets_were_not_stored_or_have_changed(config, tmp_path):
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(to_yaml(config))
    rewards = {
        "my:Judge": {"api_key": "another-secret", "headers": [{"Authorization": f"Bearer {KEY}x"}]}
    }
    same = {"model": "m", "data": "d", "output": config.output, "resume": True}
    check_directory(GRPO(rewards=rewards, **same))
    with pytest.raises(ValueError, match="was run with rewards="):
        check_directory(GRPO(rewards={"my:Judge": {**rewards["my:Judge"], "limit": 3}}, **same))


def test_references_are_read_where_they_are_used(monkeypatch, tmp_path):
    (tmp_path / "my_judges.py").write_text(
        "class Judge:\n    def __init__(self, api_key): self.api_key = api_key\n"
        "    def __call__(self, completion): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JUDGES_KEY", KEY)
    (reward,) = resolve_rewards({"my_judges:Judge": {"api_key": "${ENV:JUDGES_KEY}"}})
    assert reward.function.args[0].api_key == KEY
    assert resolved({"a": ["x ${ENV:JUDGES_KEY}", 3]}) == {"a": [f"x {KEY}", 3]}
    with pytest.raises(
        ValueError, match=r"\$\{ENV:NOT_THERE\}: there is no environment variable NOT_THERE"
    ):
        resolved("${ENV:NOT_THERE}")


def test_references_in_data_are_read_but_rows_are_not_touched(monkeypatch):
    monkeypatch.setenv("PLACE", "there")
    assert resolved_data("${ENV:PLACE}/a.jsonl") == "there/a.jsonl"
    assert resolved_data([{"path": "${ENV:PLACE}"}, "b"]) == [{"path": "there"}, "b"]
    assert resolved_data({"${ENV:PLACE}": 2.0}) == {"${ENV:PLACE}": 2.0}
    rows = [{"prompt": "say ${ENV:PLACE}"}]
    assert resolved_data(rows) is rows


def test_no_secret_gets_into_the_arguments_of_a_server():
    for option in (
        {"api_key": WORD},
        {"hf_token": WORD},
        {"served_model_name": f"https://me:{WORD}@host"},
    ):
        with pytest.raises(ValueError, match="every user of the machine can read the arguments"):
            flags_of(option)
    assert flags_of({"max_model_len": 9, "tokenizer": "some/tokenizer"}) == [
        *("--max-model-len", "9"),
        *("--tokenizer", "some/tokenizer"),
    ]


def test_a_log_has_no_secrets_not_even_in_tracebacks():
    try:
        raise ValueError(f"401 for {KEY}")
    except ValueError:
        record = logging.LogRecord(
            "a", logging.ERROR, "f", 1, "url %s", (f"http://me:{WORD}@h",), sys.exc_info()
        )
    shown = HidingFormatter("%(message)s").format(record)
    assert KEY not in shown and WORD not in shown and f"401 for {MARK}" in shown


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in sums(4)]
    return {
        "model": str(save_model(folder / "model")),
        "data": str(write_rows(folder / "data.jsonl", rows)),
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rewards": {"exact_match": {"tag": MARK}}},
            "rewards.exact_match.tag: the secret was left out",
        ),
        (
            {"source": "vllm", "vllm": {"url": f"http://{MARK}@host"}},
            "vllm.url: the secret was left out when this file was written",
        ),
        (
            {"run_name": "${ENV:HOME}"},
            r"run_name: ${ENV:NAME} is read in rewards, environment, agent, order, vllm, teacher, data, eval_data",
        ),
        (
            {"source": "vllm", "vllm": {"url": "${ENV:NOT_THERE}"}},
            "there is no environment variable NOT_THERE",
        ),
    ],
)
def test_mistakes_with_secrets_are_answered_before_anything_is_opened(
    fields, message, inputs, tmp_path, capsys
):
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(
            {**inputs, "output": str(tmp_path / "run"), "rewards": "exact_match", **fields}
        )
    )
    assert main(["grpo", "--config", str(file)]) == 1
    assert message in capsys.readouterr().err


JUDGE = """
import json
from pathlib import Path

class Judge:
    def __init__(self, api_key, password, url, headers, service, seen):
        self.held = [api_key, password, url, headers["Authorization"], service]
        self.seen = Path(seen)

    def __call__(self, completion):
        if not self.seen.exists():
            processes = Path("/proc").glob("[0-9]*/cmdline")
            lines = [path.read_bytes().decode(errors="replace") for path in processes if path.exists()]
            self.seen.write_text(json.dumps([self.held, lines]))
        raise ValueError(f"refused: {self.held}")

"""


def test_a_planted_secret_is_in_no_file_tracker_log_or_list_of_processes(inputs, tmp_path):
    """Five places: a key, a password, a login in an address, a header, and the environment."""
    (tmp_path / "my_judge.py").write_text(JUDGE)
    secrets = {place: f"{KEY}{place}" for place in ("key", "login", "header")} | {
        "password": WORD,
        "url": "from-envs-7",
    }
    judge = {
        "weight": 0.5,
        "isolate": True,
        "api_key": secrets["key"],
        "password": secrets["password"],
        "url": f"https://me:{secrets['login']}@host/v1",
        "headers": {"Authorization": f"Bearer {secrets['header']}"},
        "service": "http://me:${ENV:SERVICE_PASSWORD}@service",
        "seen": str(tmp_path / "seen"),
    }
    fields = {
        "rewards": {"my_judge:Judge": judge, "exact_match": 1.0},
        "output": str(tmp_path / "run"),
        "report_to": "tensorboard",
        "run_name": "secrets",
        **{"steps": 1, "prompts_per_rollout": 2, "group_size": 2, "max_tokens": 4},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**inputs, **fields}))

    command = [sys.executable, "-m", "burnish", "grpo", "--config", "run.yaml"]
    environment = {**os.environ, "SERVICE_PASSWORD": secrets["url"]}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    printed = ended.stdout + ended.stderr
    held, command_lines = json.loads((tmp_path / "seen").read_text())
    assert held[:4] == [
        judge["api_key"],
        judge["password"],
        judge["url"],
        judge["headers"]["Authorization"],
    ]
    assert held[4] == f"http://me:{secrets['url']}@service"
    assert "refused: [" in printed and MARK in printed, printed  # its errors are shown
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any("events" in path.name for path in files), printed
    for secret in secrets.values():
        assert secret not in printed
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert [line for line in command_lines if secret in line] == []
    assert stat.S_IMODE((tmp_path / "run/config.yaml").stat().st_mode) == 0o600
    stored = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert stored["rewards"]["my_judge:Judge"]["service"] == judge["service"]
