"""Texts that look like times or numbers stay text, whatever the other rows hold."""

import datetime
import gzip
import json

import pytest
from burnish.data import encode_supervised, load

DATES = [{"prompt": "a", "answer": "2024-05-01"}, {"prompt": "b", "answer": "2023-01-02 10:00:00"}]
MIXED = [
    {"prompt": "a", "answer": "06"},
    {"prompt": "b", "answer": 6},
    {"prompt": "c", "answer": None},
]
AS_TEXT = [
    {"prompt": "a", "answer": "06"},
    {"prompt": "b", "answer": "6"},
    {"prompt": "c", "answer": None},
]


def write(path, rows):
    """As lines; as one list in a .json file."""
    text = (
        json.dumps(rows)
        if ".json" in path.suffixes
        else "".join(json.dumps(row) + "\n" for row in rows)
    )
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_dates_of_a_json_file_are_text(tmp_path, name) -> None:
    path = write(tmp_path / name, DATES)
    assert list(load(path).dataset) == DATES
    assert list(load(path, split="train[1:]").dataset) == DATES[1:]


def test_dates_within_messages_are_trained_on(tmp_path, byte_tokenizer) -> None:
    messages = [
        {"role": "user", "content": "2024-05-01"},
        {"role": "assistant", "content": "2024-05-02"},
    ]
    tokenizer = byte_tokenizer()
    data, _ = encode_supervised(write(tmp_path / "a.jsonl", [{"messages": messages}]), tokenizer)
    assert tokenizer.decode(data[0]["completions"][0]) == "2024-05-02<|im_end|>"


def test_texts_beside_numbers_stay_as_they_are_written(tmp_path) -> None:
    assert list(load(write(tmp_path / "a.jsonl", MIXED)).dataset) == AS_TEXT
    assert list(load(MIXED).dataset) == AS_TEXT


def test_a_column_of_lists_and_texts_keeps_both(tmp_path) -> None:
    rows = [{"prompt": "a", "info": ["x"]}, {"prompt": "b", "info": "y"}]
    assert list(load(write(tmp_path / "a.jsonl", rows)).dataset) == rows


def test_times_of_rows_in_memory_stay_times() -> None:
    rows = [{"prompt": "a", "when": datetime.datetime(2024, 5, 1)}]
    assert list(load(rows).dataset) == rows


def test_dates_of_several_files_at_once_are_named(tmp_path, caplog) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, DATES)
    for several in (str(tmp_path / "*.jsonl"), tmp_path):
        caplog.clear()
        assert len(load(several).dataset) == 4
        assert "texts of answer are read as times or numbers" in caplog.text
    caplog.clear()
    assert len(load(tmp_path / "a.jsonl").dataset) == 2
    assert caplog.text == ""
