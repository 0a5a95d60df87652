import gzip
import json
import re
import tracemalloc

import datasets
import pytest
from burnish.data import DataError, load, records
from datasets import Dataset, DatasetDict

ROWS = [
    {"prompt": "a", "completion": "42", "margin": 1.5},
    {"prompt": "b", "completion": "None", "margin": 2.0},
]


def write(path, text: str):
    path.write_text(text, encoding="utf-8")
    return path


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_every_source_of_records_gives_the_same_rows(tmp_path) -> None:
    Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    sources = [
        write(tmp_path / "a.jsonl", lines(ROWS)),
        str(write(tmp_path / "a.json", json.dumps(ROWS))),
        tmp_path / "a.parquet",
        tmp_path / "saved",
        tmp_path / "splits",
        ROWS,
        Dataset.from_list(ROWS),
        DatasetDict({"train": Dataset.from_list(ROWS)}),
    ]
    for source in sources:
        assert list(load(source).dataset) == ROWS, source


def test_a_row_of_a_large_file_is_named_without_holding_the_file(tmp_path) -> None:
    records = load(write(tmp_path / "a.jsonl", "\n" + lines([{"prompt": "a" * 100_000}] * 100)))
    tracemalloc.start()
    try:
        assert records.where(99) == "a.jsonl line 101"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_part_of_a_split_can_be_read(tmp_path) -> None:
    assert (
        list(load(write(tmp_path / "a.jsonl", lines(ROWS)), split="train[1:]").dataset) == ROWS[1:]
    )


TABLE = "prompt,completion,answer\na,42,06\nb,None,1.50\n"
CELLS = [
    {"prompt": "a", "completion": "42", "answer": "06"},
    {"prompt": "b", "completion": "None", "answer": "1.50"},
]


def test_every_cell_of_a_csv_is_text_wherever_the_file_is(tmp_path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "with_card"
    folder.mkdir()
    other.mkdir()
    file = write(folder / "train.csv", TABLE)
    write(other / "train.csv", TABLE)
    write(other / "README.md", "A card.")
    for source in (file, folder, f"{folder}/*.csv", other):
        assert list(load(source).dataset) == CELLS, source
    assert list(load(str(folder), data_files="train.csv").dataset) == CELLS
    assert (
        list(load(file, streaming=True).dataset)
        == list(load(folder, streaming=True).dataset)
        == CELLS
    )


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("prompt,prompt\na,b\n", "a.csv: two columns are called 'prompt'; rename one of them"),
        (
            "prompt,completion\na,b,\nc,d,\n",
            "a.csv: row 1 has 3 cells and the header has 2; quote cells that hold a ','",
        ),
    ],
)
def test_a_csv_whose_cells_have_no_column_of_their_own_is_refused(tmp_path, table, problem) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        load(write(tmp_path / "a.csv", table))


def test_the_working_directory_is_named_by_its_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=f"^{tmp_path.name}: not a dataset that can be read: .*any .*data files"
    ):
        load(".")
    write(tmp_path / "train.jsonl", lines(ROWS))
    assert list(load(".").dataset) == ROWS


def test_a_csv_with_numbered_rows_keeps_its_columns(tmp_path) -> None:
    (row,) = load(write(tmp_path / "a.csv", ",prompt,completion\n0,a,b\n")).dataset
    assert (row["prompt"], row["completion"]) == ("a", "b")


def test_an_empty_cell_of_a_csv_is_empty_text_or_a_missing_value(tmp_path) -> None:
    records = load(write(tmp_path / "a.csv", "prompt,completion,margin\na,,\nNA,null,2\n"))
    assert list(records.dataset) == [
        {"prompt": "a", "completion": "", "margin": None},
        {"prompt": "NA", "completion": "null", "margin": "2"},
    ]


@pytest.mark.parametrize(
    "name, separator", [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t"), ("a.tsv.gz", "\t")]
)
def test_columns_may_be_separated_by_semicolons_or_tabs(tmp_path, name, separator) -> None:
    text = TABLE.replace(",", separator)
    (tmp_path / name).write_bytes(
        gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    )
    assert list(load(tmp_path / name).dataset) == CELLS


def test_records_in_memory_keep_columns_that_the_first_one_lacks() -> None:
    assert list(load([{"text": "a"}, {"text": "b", "margin": 1}]).dataset) == [
        {"text": "a", "margin": None},
        {"text": "b", "margin": 1},
    ]


def test_a_file_that_changed_is_read_again(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", lines(ROWS))
    load(path)
    assert list(load(write(path, lines(ROWS[::-1]))).dataset) == ROWS[::-1]


def test_a_row_is_named_by_its_line_where_there_are_lines(tmp_path) -> None:
    text = lines(ROWS[:1]) + "\n  \n" + lines(ROWS[1:])
    assert load(write(tmp_path / "a.jsonl", text)).where(1) == "a.jsonl line 4"
    assert load(write(tmp_path / "b.json", json.dumps(ROWS, indent=1))).where(1) == "b.json row 2"
    assert load(ROWS).where(1) == "records row 2"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert load(tmp_path / "a.jsonl.gz").where(1) == "a.jsonl.gz line 4"
    # Row 1 of a part is not line 1 of the file.
    for part in ("train[1:]", "train[1:]+train[:1]"):
        assert load(tmp_path / "a.jsonl", split=part).where(0) == "a.jsonl row 1"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a", "completion"', "not JSON: Expecting ':' delimiter at column 29"),
        ('{"prompt": "a"}, {"prompt": "b"}', "not JSON: Extra data at column 16"),
        ('["a", "b"]', "wanted a JSON object with named columns, got list"),
        (r'{"prompt": "\ud83d", "completion": "a"}', "not UTF-8 text"),
        ("nonsense", "not JSON: Expecting value at column 1"),
    ],
)
def test_a_malformed_json_line_is_named_with_the_fix(tmp_path, line, problem) -> None:
    path = write(tmp_path / "pairs.jsonl", lines(ROWS * 8) + f"\n{line}\n" + lines(ROWS))
    with pytest.raises(
        DataError, match="^" + re.escape(f"pairs.jsonl line 18: {problem}; fix or remove the line")
    ):
        load(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(ROWS).encode() + b'{"prompt": "\xff", "completion": "x"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl line 3: not UTF-8 text"):
        load(path)


def test_the_mark_at_the_start_of_a_file_from_windows_is_no_part_of_it(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS).encode())
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfprompt,completion\na,42\n")
    assert list(load(tmp_path / "a.jsonl").dataset) == ROWS
    assert list(load(tmp_path / "a.csv").dataset) == [{"prompt": "a", "completion": "42"}]


def test_a_malformed_json_array_is_named_with_the_place(tmp_path) -> None:
    with pytest.raises(DataError, match=r"a\.json: not JSON: .*line 2 column"):
        load(write(tmp_path / "a.json", '[{"text": "a"},\n{"text": "b"]'))


@pytest.mark.parametrize("begin", ["nonsense\n", "[1, 2\n", '[{"text": "a"},\n'])
def test_the_mistake_in_a_large_compressed_file_is_looked_for_in_bounded_memory(
    tmp_path, begin, monkeypatch
) -> None:
    monkeypatch.setattr(records, "_DIAGNOSED", 1 << 20)
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(begin)
        for _ in range(40):
            file.write(lines(ROWS) * 10_000)  # a megabyte
    tracemalloc.start()
    try:
        said = records._diagnose(path, "json", ValueError("bad"))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    line = "a.jsonl.gz line 1: not JSON: Expecting value at column 1; fix or remove the line"
    assert said == (line if begin[0] == "n" else "a.jsonl.gz: the json reader failed: bad")


def test_json_that_is_nested_without_end_is_named(tmp_path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl line 1: not JSON of a row: nested too deeply"):
        load(write(tmp_path / "a.jsonl", '{"a":' * 200_000))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "a.jsonl: no rows"),
        ("a.json", "[]", "a.json: no rows"),
        ("a.csv", "prompt,completion\n", "a.csv: no rows"),
        (
            "a.txt",
            "hello",
            "wanted a file that ends in .json, .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow, got .txt",
        ),
        ("a.jsonl.gz", "hello", "a.jsonl.gz: can't be read: Not a gzipped file"),
        ("a.parquet", "hello", "a.parquet: the parquet reader failed"),
    ],
)
def test_files_without_records_are_refused(tmp_path, name, text, message) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        load(write(tmp_path / name, text))


def test_a_directory_is_read_as_a_whole_or_refused(tmp_path) -> None:
    write(tmp_path / "0.jsonl", lines(ROWS[:1]))
    write(tmp_path / "1.jsonl", lines(ROWS[1:]))
    assert list(load(tmp_path).dataset) == list(load(f"{tmp_path}/*.jsonl").dataset) == ROWS
    with pytest.raises(DataError, match=r"nothing-\*\.jsonl"):
        load(f"{tmp_path}/nothing-*.jsonl")
    write(tmp_path / "2.jsonl", lines([ROWS[0] | {"more": 1}]))
    with pytest.raises(
        DataError, match=r"there are 1 new columns \({'more'}\); give all the same, or files of"
    ):
        load(tmp_path)
    (tmp_path / "2.jsonl").unlink()
    for name in ("train.jsonl", "2.csv"):
        write(tmp_path / name, lines(ROWS) if name != "2.csv" else "prompt,completion\na,b\n")
        with pytest.raises(
            DataError,
            match=r"would be left out beside .*; name the files that are to be read as parts",
        ):
            load(tmp_path)
        (tmp_path / name).unlink()


def test_a_file_that_does_not_exist_is_not_looked_for_on_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("asked the Hub")
    )
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file"):
        load(tmp_path / "nothing.jsonl")


def test_a_hub_name_carries_its_config(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or Dataset.from_list(ROWS)
    )
    assert load("trl-lib/things:plain", split="test").source == "trl-lib/things:plain"
    load("trl-lib/things")
    assert asked == [
        (("trl-lib/things", "plain"), {"split": "test", "streaming": False}),
        (("trl-lib/things", None), {"split": "train", "streaming": False}),
    ]


def test_a_hub_that_fails_is_quoted(monkeypatch) -> None:
    def fail(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        DataError,
        match=r"no/such: no such file, and not read from the Hub: offline; wanted a path, or",
    ):
        load("no/such")


def test_a_split_that_does_not_exist_is_refused_with_those_that_do(tmp_path) -> None:
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"splits: no split 'test'; there are train"):
        load(tmp_path / "splits", split="test")


def test_a_dataset_that_gives_tensors_is_read_as_plain_values() -> None:
    assert load(Dataset.from_list(ROWS).with_format("numpy")).dataset[0] == ROWS[0]
    with pytest.raises(DataError, match="with_transform changes rows as they are read; use"):
        load(Dataset.from_list(ROWS).with_transform(lambda rows: rows))


@pytest.mark.parametrize(
    ("data", "message"), [([1, 2], "row 1: wanted a dict of columns, got int"), (5, "got int")]
)
def test_what_is_no_record_is_refused(data, message) -> None:
    with pytest.raises(DataError, match=message):
        load(data)
