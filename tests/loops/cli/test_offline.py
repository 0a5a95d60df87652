"""Where the Hub is out of reach, models that are not here are told of at once."""

import json
import time

import pytest
from burnish.loops.cli import main
from tiny import write_rows


def no_address(*arguments, **options):
    raise OSError("Name or service not known")


@pytest.mark.parametrize("command", ["chat", "score", "merge"])
def test_a_model_that_is_nowhere_is_told_of_without_waiting(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", no_address)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    described = {"peft_type": "LORA", "base_model_name_or_path": "no/where"}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    words = {
        "chat": ["no/where"],
        "score": ["no/where", str(rows)],
        "merge": [str(adapter), str(tmp_path / "merged")],
    }
    began = time.monotonic()
    status = main([command, *words[command]])
    assert status == 1
    assert "no/where" in capsys.readouterr().err
    assert time.monotonic() - began < 20
