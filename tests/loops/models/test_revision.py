"""A revision of a model on the Hub: its weights and its tokenizer are read, and a directory has no
revisions.
"""

import os
import shutil
import subprocess
import sys

import burnish
import pytest
import torch
from safetensors.torch import load_file
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(2)]
SFT = """
import sys
from burnish.loops.cli import main
sys.exit(main(["sft", "--model", "someone/model", *sys.argv[1:]]))
"""


def cached(home, models):
    """Lay a cache of the Hub out, with the revisions of one model."""
    place = home / "hub/models--someone--model"
    (place / "refs").mkdir(parents=True)
    for revision, directory in models.items():
        commit = f"{len(revision):040x}"
        shutil.copytree(directory, place / "snapshots" / commit)
        (place / "refs" / revision).write_text(commit)


def test_a_revision_of_a_model_is_read_with_its_tokenizer(tmp_path):
    models = {"main": tmp_path / "first", "v2": tmp_path / "second"}
    for revision, directory in models.items():
        save_model(directory)
        template = directory / "chat_template.jinja"
        template.write_text(template.read_text() + f"{{# {revision} #}}")
    other = AutoModelForCausalLM.from_pretrained(models["v2"])
    with torch.no_grad():
        other.get_input_embeddings().weight.add_(1)
    other.save_pretrained(models["v2"])
    cached(tmp_path / "home", models)

    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    flags = [
        "--data",
        str(data),
        "--output",
        str(tmp_path / "run"),
        "--learning_rate",
        "0",
        "--steps",
        "1",
    ]
    command = [sys.executable, "-c", SFT, *flags, "--model_revision", "v2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trained = load_file(tmp_path / "run/model/model.safetensors")
    wanted = load_file(models["v2"] / "model.safetensors")
    assert all(torch.equal(trained[name], wanted[name]) for name in wanted)
    assert "v2" in (tmp_path / "run/model/chat_template.jinja").read_text()


def test_a_revision_of_a_directory_or_of_a_model_in_memory_is_refused(tmp_path):
    start = save_model(tmp_path / "start")
    with pytest.raises(
        ValueError,
        match=r"model_revision: .*start is a directory, and holds one revision.*got 'v2'",
    ):
        burnish.sft(str(start), ROWS, model_revision="v2")
    burnish.sft(str(start), ROWS, model_revision="main")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(start),
        AutoTokenizer.from_pretrained(start),
    )
    with pytest.raises(ValueError, match="model_revision: the model is loaded already"):
        burnish.sft(model, ROWS, tokenizer=tokenizer, model_revision="v2")
