"""The example of an environment in the docstring of its room runs as it is printed."""

import json
import re
import textwrap

from burnish.loops import environments
from burnish.loops.cli import main
from tiny import save_model, write_rows
from transformers import AutoTokenizer


def printed():
    """The file that the docstring shows, and the setting that names its environment."""
    text = environments.__doc__
    code = text[text.index("    from burnish") : text.index("and in the configuration")]
    return textwrap.dedent(code), re.search(r"``environment: (.*?)``", text)[1]


def test_the_environment_of_the_docstring_needs_no_column_prompt(tmp_path, monkeypatch, capsys):
    code, environment = printed()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_games.py").write_text(code)
    data = write_rows(tmp_path / "numbers.jsonl", [{"number": 1}])
    flags = [
        "--model",
        str(save_model(tmp_path / "model")),
        "--data",
        str(data),
        "--environment",
        environment,
    ]
    assert main(["data", "grpo", *flags]) == 0
    assert "numbers.jsonl: 1 rows read, 1 kept" in capsys.readouterr().out
    sampling = [
        "--prompts_per_rollout",
        "1",
        "--group_size",
        "2",
        "--max_tokens",
        "4",
        "--steps",
        "1",
    ]
    held_out = [
        "--eval_data",
        str(write_rows(tmp_path / "held_out.jsonl", [{"number": 2}, {"number": 3}])),
    ]
    assert main(["grpo", *flags, "--output", str(tmp_path / "run"), *sampling, *held_out]) == 0
    samples = [
        json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    asked = [{"role": "user", "content": "Double 1."}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert [tokenizer.decode(sample["prompt"]) for sample in samples] == [prompt] * 2
    before, after = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert "eval/reward" in before
    assert after["step"] == 1
