"""The command in the places that people run it in: terminals, encodings and homes of other
kinds.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

import burnish.__main__ as command
import datasets
import pytest
from burnish.data import DataError, load_data
from burnish.loops import cli


def test_a_character_that_the_terminal_lacks_is_escaped(monkeypatch):
    reader, writer = os.pipe()
    usual = os.dup(1)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    monkeypatch.setattr(sys, "argv", ["burnish", "--version"])
    try:
        os.dup2(writer, 1)
        assert cli.main() == 0
        print("日本")
    finally:
        os.dup2(usual, 1)
        for each in (usual, writer):
            os.close(each)
    with os.fdopen(reader) as read:
        assert read.read().splitlines()[1] == r"\u65e5\u672c"


def test_a_closed_output_is_none(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "argv", ["burnish", "--version"])
    assert cli.main() == 0


def test_without_docstrings_the_command_says_so():
    run = [
        sys.executable,
        "-OO",
        "-c",
        "import sys; from burnish.__main__ import main; sys.exit(main(['--help']))",
    ]
    done = subprocess.run(
        run, capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert (
        done.returncode == 2
        and done.stderr.startswith("burnish: wanted docstrings")
        and not done.stdout
    )


@pytest.mark.parametrize("word", ["runs/Gr\udcfc\udcdfe"])
def test_a_name_that_is_no_utf8_is_refused_before_training(word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["burnish", "sft", "--output", word])
    assert command.main() == 2
    assert capsys.readouterr().err.startswith(
        r"burnish: 'runs/Gr\udcfc\udcdfe' is not UTF-8 here; set PYTHONUTF8=1"
    )


def test_a_cache_that_takes_no_files_is_named_with_the_remedy(tmp_path: Path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("/proc/burnish"))
    with pytest.raises(
        DataError, match=r"^rows.jsonl: .*No such file.*; set HF_HOME to a directory with room"
    ):
        load_data(str(tmp_path / "rows.jsonl"), None, seed=0, streaming=False)
