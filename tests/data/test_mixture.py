import json
import re
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from burnish.data import (
    DataError,
    Tokenization,
    concatenated,
    encode_preference,
    encode_prompts,
    encode_supervised,
    example,
    load,
    load_data,
    where,
)
from datasets import Dataset, DatasetDict


@pytest.fixture
def write(tmp_path):
    """Write rows as JSON Lines; by number, rows that say the name of the file and their number."""

    def write(name: str, rows) -> str:
        path = tmp_path / f"{name}.jsonl"
        rows = (
            [{"prompt": f"{name} {i} is", "completion": f" {i}"} for i in range(rows)]
            if type(rows) is int
            else rows
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def prompts(parts) -> list[list[str]]:
    return [part.dataset["prompt"][:] for part in parts]


def test_a_split_and_a_part_of_one_are_named_in_text_or_by_fields(tmp_path, write) -> None:
    rows = {
        name: Dataset.from_list([{"prompt": f"{name} {i}"} for i in range(4)])
        for name in ("train", "test_sft")
    }
    DatasetDict(rows).save_to_disk(str(tmp_path / "saved"))
    for data in (
        f"{tmp_path}/saved#test_sft[1:3]",
        {"path": f"{tmp_path}/saved", "split": "test_sft[1:3]"},
        {"path": DatasetDict(rows), "split": "test_sft[1:3]"},
    ):
        (part,), held_out = load_data(data)
        assert (part.dataset["prompt"][:], held_out) == (["test_sft 1", "test_sft 2"], [])
    (part,), _ = load_data(f"{tmp_path}/saved#train[:1]+test_sft[3:]")
    assert part.dataset["prompt"][:] == ["train 0", "test_sft 3"]
    assert prompts(load_data(write("a", 3) + "#train[2:]")[0]) == [["a 2 is"]]
    with pytest.raises(DataError, match=r"saved: no split 'test'; there are train, test_sft"):
        load_data(f"{tmp_path}/saved#test")


def test_a_path_that_exists_is_taken_as_it_is(tmp_path, write) -> None:
    assert prompts(load_data(write("a:b@c#d", 1))[0]) == [["a:b@c#d 0 is"]]


@pytest.mark.parametrize(
    "data",
    [
        "user/set:main@v2#test",
        {"path": "user/set", "name": "main", "revision": "v2", "split": "test"},
        {"path": "user/set:main", "revision": "v2", "split": "test"},
    ],
)
def test_a_dataset_of_the_hub_is_named_with_configuration_revision_and_split(
    monkeypatch, data
) -> None:
    asked = []
    rows = Dataset.from_list([{"text": "a"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or rows)
    load_data(data)
    options = {"split": "test", "revision": "v2", "streaming": False}
    assert asked == [(("user/set", "main"), options)]


def test_files_of_a_directory_are_chosen_by_a_pattern(tmp_path, write) -> None:
    for name in ("shard-1", "shard-2", "other"):
        write(name, 2)
    (part,), _ = load_data({"path": str(tmp_path), "data_files": "shard-*.jsonl"})
    assert part.dataset["prompt"][:] == [f"shard-{i} {j} is" for i in (1, 2) for j in (0, 1)]


def test_columns_get_other_names_and_several_are_joined(write) -> None:
    rows = [
        {"instruction": "Add.", "input": "2+2", "output": "4", "prompt": "old"},
        {"instruction": "Sing.", "input": "", "output": "La.", "prompt": "old"},
    ]
    columns = {"instruction": "prompt", "input": "prompt", "output": "completion"}
    (part,), _ = load_data({"path": write("alpaca", rows), "columns": columns})
    assert sorted(part.dataset.to_list(), key=lambda row: row["completion"]) == [
        {"prompt": "Add.\n\n2+2", "completion": "4"},
        {"prompt": "Sing.", "completion": "La."},
    ]
    (part,), _ = load_data({"path": write("alpaca", rows), "columns": ["output"]})
    assert part.dataset.column_names == ["output"]
    with pytest.raises(
        DataError,
        match=r"alpaca\.jsonl: columns: there is no 'question'; there are instruction, input",
    ):
        load_data({"path": write("alpaca", rows), "columns": {"question": "prompt"}})


@pytest.mark.parametrize(
    ("row", "encode", "columns"),
    [
        ({"instruction": "a", "input": "", "output": "b"}, encode_supervised,
         "instruction: prompt, input: prompt, output: completion"),
        ({"question": "a", "answer": "b"}, encode_supervised, "question: prompt, answer: completion"),
        ({"question": "a", "answer": "b"}, encode_prompts, "question: prompt"),
        ({"system": "s", "question": "a", "chosen": "b", "rejected": "c"}, encode_preference, "question: prompt"),
        ({"query": "a", "tools": "[]", "answers": "b"}, encode_supervised, "query: prompt, answers: completion"),
        ({"system": "s", "chat": "USER: a"}, encode_supervised, "chat: text"),
        ({"chosen": "b", "rejected": "c"}, encode_preference, None),
    ],
)  # fmt: skip
def test_columns_under_other_names_are_named_with_the_fix(
    row, encode, columns, write, byte_tokenizer
) -> None:
    wanted = (
        f"give data: {{path: ..., columns: {{{columns}}}}}"
        if columns
        else "share no beginning; give the 'prompt'"
    )
    with pytest.raises(DataError, match=re.escape(wanted)):
        encode(write("a", [row]), byte_tokenizer())


def test_a_system_prompt_makes_conversations_of_texts(write, byte_tokenizer) -> None:
    data = {"path": write("a", 1), "system_prompt": "Count."}
    (part,), _ = load_data(data)
    system, user = {"role": "system", "content": "Count."}, {"role": "user", "content": "a 0 is"}
    assert part.dataset[0] == {
        "prompt": [system, user],
        "completion": [{"role": "assistant", "content": " 0"}],
    }
    (part,), _ = load_data({**data, "system_prompt": ""})
    assert part.dataset[0]["prompt"] == [user]
    with pytest.raises(
        DataError,
        match=r"b\.jsonl: system_prompt: wanted conversations, or a column 'prompt' of plain",
    ):
        load_data({**data, "path": write("b", [{"text": "a"}])})


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
OTHER = {"role": "assistant", "content": "What?"}
OWN, COUNT = ({"role": "system", "content": text} for text in ("Be kind.", "Count."))


@pytest.mark.parametrize(
    ("encode", "row", "expected"),
    [
        (encode_supervised, {"messages": [USER, ANSWER]}, [COUNT, USER]),
        (encode_supervised, {"messages": [OWN, USER, ANSWER]}, [OWN, USER]),
        (encode_supervised, {"messages": [COUNT, USER, ANSWER]}, [COUNT, USER]),
        (encode_supervised, {"messages": json.dumps([USER, ANSWER])}, [COUNT, USER]),
        (
            encode_supervised,
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}]},
            [COUNT, USER],
        ),
        (encode_supervised, {"prompt": "Hi", "messages": [USER, ANSWER]}, [COUNT, USER]),
        (encode_supervised, {"prompt": [USER], "completion": [ANSWER]}, [COUNT, USER]),
        (encode_supervised, {"prompt": [OWN, USER], "completion": [ANSWER]}, [OWN, USER]),
        (
            encode_supervised,
            {"prompt": "Hi", "completion": "x", "system_prompt": "Be kind."},
            [OWN, USER],
        ),
        (encode_supervised, {"messages": [USER, ANSWER], "system_prompt": "Be kind."}, [OWN, USER]),
        (encode_preference, {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, [COUNT, USER]),
        (
            encode_preference,
            {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
            [COUNT, USER],
        ),
        (
            encode_preference,
            {"prompt": "Hi", "chosen": [ANSWER], "rejected": [OTHER]},
            [COUNT, USER],
        ),
        (encode_prompts, {"prompt": [USER]}, [COUNT, USER]),
        (encode_prompts, {"prompt": [OWN, USER]}, [OWN, USER]),
        (encode_prompts, {"prompt": "Hi"}, [COUNT, USER]),
    ],
)
def test_one_system_prompt_begins_conversations_of_every_layout(
    write, byte_tokenizer, encode, row, expected
) -> None:
    tokenizer = byte_tokenizer("chatml")
    data, account = encode({"path": write("a", [row]), "system_prompt": "Count."}, tokenizer)
    prompt = tokenizer.apply_chat_template(expected, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(data[0]["prompt"]) == prompt
    keeps = expected[0] == OWN
    assert account.own_system == keeps
    assert (
        "1 that keep a system message of their own, instead of system_prompt" in str(account)
    ) == keeps


def test_an_empty_system_prompt_adds_no_message_to_conversations(write) -> None:
    (part,), _ = load_data(
        {"path": write("a", [{"prompt": [USER], "completion": [ANSWER]}]), "system_prompt": ""}
    )
    assert part.dataset[0] == {"prompt": [USER], "completion": [ANSWER]}


def test_a_prompt_shows_its_system_message_to_rewards_and_environments(write) -> None:
    rows = [
        {"prompt": [USER]},
        {"prompt": [OWN, USER]},
        {"prompt": [USER], "system_prompt": "Be kind."},
    ]
    (part,), _ = load_data({"path": write("a", rows), "system_prompt": "Count."})
    assert part.dataset["prompt"][:] == [[COUNT, USER], [OWN, USER], [USER]]


def test_rows_that_are_both_trained_on_and_held_out_are_counted(write, caplog) -> None:
    rows = [{"prompt": f"{n}", "completion": "x"} for n in range(4)]
    train, other = (
        write("train", rows),
        write("other", [*rows[:2], {"prompt": "9", "completion": "x"}]),
    )
    load_data(train, other)
    assert "eval_data: 2 of its 3 rows are also trained on; name others" in caplog.text
    caplog.clear()
    load_data(train, write("new", [{"prompt": "8", "completion": "x"}]))
    load_data(train, 0.5)
    assert caplog.text == ""


def in_column(image) -> dict[str, object]:
    return {"images": [image]}


def in_part(image) -> dict[str, object]:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
    return {"prompt": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize("show", [in_column, in_part])
def test_held_out_rows_of_other_images_are_not_those_trained_on(show, tmp_path, caplog) -> None:
    """Whatever their files are called; three of the four images are of one size."""

    def rows(folder: str, contents: dict[str, bytes]) -> str:
        (tmp_path / folder / "images").mkdir(parents=True)
        written = []
        for name, content in contents.items():
            (tmp_path / folder / "images" / name).write_bytes(content)
            written.append({"prompt": "what?", "completion": "x", **show(f"images/{name}")})
        path = tmp_path / folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in written))
        return str(path)

    train = rows("train", {"1.png": b"aaaa", "2.png": b"bbbb"})
    load_data(train, rows("apart", {"1.png": b"cccc", "2.png": b"dd"}))
    assert caplog.text == ""
    load_data(train, rows("mixed", {"1.png": b"cccc", "9.png": b"aaaa", "2.png": b"dd"}))
    assert "eval_data: 1 of its 3 rows are also trained on" in caplog.text
    caplog.clear()
    train = [{"prompt": "what?", "completion": "x", **show({"bytes": b"aaaa"})}]
    held_out = rows("files", {"1.png": b"aaaa"})
    load_data(train, held_out)
    assert "eval_data: 1 of its 1 rows are also trained on" in caplog.text


@pytest.mark.parametrize("show", [in_column, in_part])
def test_rows_are_held_out_by_the_images_that_they_show(show, write) -> None:
    rows = [
        {"id": i, "prompt": "what?", "completion": "x", **show(f"{i // 2}.png")} for i in range(20)
    ]
    train, held_out = load_data(write("a", rows), 0.2)
    taken = {number // 2 for number in held_out[0].dataset["id"]}
    assert len(taken) == 2 and not taken & {number // 2 for number in train[0].dataset["id"]}


def test_a_weight_is_how_many_times_the_rows_are_taken(write) -> None:
    a, b = write("a", 10), write("b", 4)
    mixed, _ = load_data({a: 0.5, b: 2.5}, seed=1)
    first, second = prompts(mixed)
    assert len(set(first)) == 5 and first == sorted(first)
    assert Counter(Counter(second).values()) == {2: 2, 3: 2}
    as_list, _ = load_data([{"path": a, "weight": 0.5}, {"path": b, "weight": 2.5}], seed=1)
    assert prompts(as_list) == [first, second]
    assert prompts(load_data({a: 0.5, b: 2.5}, seed=2)[0]) != [first, second]
    with pytest.raises(DataError, match=r"b\.jsonl: weight: 0\.1 of its 4 rows is none; raise it"):
        load_data({a: 1, b: 0.1})


def test_two_halves_of_one_part_are_not_the_same_half(write) -> None:
    half = {"path": write("a", 100), "weight": 0.5}
    first, second = prompts(load_data([half, half])[0])
    assert 0 < len({*first} & {*second}) < 50


def test_fractions_are_shares_of_a_mixture_without_a_row_twice(write) -> None:
    parts = [{"path": write("a", 100), "fraction": 1}, {"path": write("b", 30), "fraction": 3}]
    assert [len(part.dataset) for part in load_data(parts)[0]] == [10, 30]
    with pytest.raises(DataError, match="fraction: give one to each part of a mixture, or to none"):
        load_data([*parts, write("c", 1)])


@pytest.mark.parametrize("amount", [0.2, 4])
def test_rows_are_held_out_by_what_they_say(amount, write) -> None:
    rows = [{"id": i, "prompt": f"p{i // 2}", "completion": "c"} for i in range(20)]  # each twice
    data = {"path": write("a", rows)}
    train, held_out = load_data(data, amount, seed=3)
    (rest,), (taken,) = prompts(train), prompts(held_out)
    assert len(taken) in (4, 5, 6) and len(rest) + len(taken) == 20
    assert not {*rest} & {*taken}
    again = load_data({"path": write("b", rows[::-1])}, amount, seed=3)[1]
    assert sorted(prompts(again)[0]) == sorted(taken)
    assert sorted(prompts(load_data(data, amount, seed=4)[1])[0]) != sorted(taken)


def test_held_out_rows_are_those_of_the_mixture_each_once(write) -> None:
    data = {write("a", 40): 0.5, write("b", 20): 2}
    train, held_out = load_data(data, 0.25)
    for part in range(2):
        assert not {*prompts(train)[part]} & {*prompts(held_out)[part]}
        assert len({*prompts(held_out)[part]}) == len(prompts(held_out)[part])
    assert len({*prompts(train)[0]} | {*prompts(held_out)[0]}) == 20
    assert len({*prompts(train)[1]} | {*prompts(held_out)[1]}) == 20


@pytest.mark.parametrize("amount", [0, 1.0e-9, 20, 21, -1])
def test_some_rows_are_held_out_and_some_are_not(amount, write) -> None:
    with pytest.raises(
        DataError, match=r"eval_data: wanted a share in \(0, 1\), or a number of rows .* of 20 rows"
    ):
        load_data(write("a", 20), amount)


def test_held_out_data_may_be_another_split_of_the_same_parts(tmp_path) -> None:
    for name in ("x", "y"):
        rows = {
            split: Dataset.from_list([{"prompt": f"{name} {split}"}] * 4)
            for split in ("train", "test")
        }
        DatasetDict(rows).save_to_disk(str(tmp_path / name))
    data = {str(tmp_path / "x"): 0.5, str(tmp_path / "y"): 1}
    for eval_data in ("#test", {"split": "test"}):
        train, held_out = load_data(data, eval_data)
        assert prompts(train) == [["x train"] * 2, ["y train"] * 4]
        assert prompts(held_out) == [["x test"] * 4, ["y test"] * 4]


def test_each_part_is_encoded_by_its_own_layout_and_counted(write, byte_tokenizer) -> None:
    chat = [
        {
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            "score": 1.0,
        }
    ] * 4
    chat[1] = {"messages": []}
    data = [{"path": write("plain", 3)}, {"path": write("chat", chat), "weight": 0.75}]
    options = Tokenization(on_bad_row="skip")
    mixed, account = encode_supervised(data, byte_tokenizer(), options)
    parts = [encode_supervised([part], byte_tokenizer(), options) for part in load_data(data)[0]]
    columns = [name for name in mixed.column_names if name != "_row"]
    assert list(mixed.select_columns(columns)) == [
        {name: row[name] for name in columns} for part, _ in parts for row in part
    ]
    assert account.parts == tuple(part for _, part in parts)
    assert (account.read, account.kept, account.parts[1].available) == (6, len(mixed), 4)
    assert str(account).splitlines()[0].startswith("2 parts: 6 rows read, ")
    assert "\n  chat.jsonl: 3 rows read of 4, " in str(account)


def test_a_mixture_with_rows_left_out_is_not_written_again(write, byte_tokenizer) -> None:
    rows = [{"prompt": f"p{n}", "completion": "c" * (n != 1)} for n in range(3)]
    data = [write("x", rows), write("y", rows)]
    mixed, account = encode_supervised(data, byte_tokenizer(), Tokenization(on_bad_row="skip"))
    folders = [Path(part.dataset.cache_files[0]["filename"]).parent for part in load_data(data)[0]]
    assert [len(list(folder.glob("cache-*.arrow"))) for folder in folders] == [1, 1]
    assert mixed["_row"][:] == [0, 2, 3, 5]
    assert account.skipped == {"empty": 2}


def test_numbers_beside_the_parts_agree(write, byte_tokenizer) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    data = [
        write("a", [{**pair, "margin": 1, "votes": 3}] * 2),
        write("b", [{**pair, "margin": 0.5}]),
    ]
    mixed, _ = encode_preference(data, byte_tokenizer())
    assert mixed.column_names == ["margin", "prompt", "completions", "trained", "_row"]
    assert mixed["_row"][:] == [0, 1, 2]  # of all parts one after another
    assert mixed["margin"][:] == [1.0, 1.0, 0.5]


def test_a_prompt_knows_its_row_in_all_parts(write, byte_tokenizer) -> None:
    parts, _ = load_data({write("a", 5): 0.4, write("b", 3): 2})
    encoded, _ = encode_prompts(parts, byte_tokenizer())
    rows, tokenizer = concatenated(parts), byte_tokenizer()
    for i in range(len(encoded)):
        assert tokenizer.decode(example(encoded, i).prompt) == rows[encoded[i]["row"]]["prompt"]
    assert (where(parts, 2), where(parts, 7)) == ("b.jsonl line 1", "b.jsonl line 3")


def test_a_row_of_a_part_is_named_by_its_line(write, byte_tokenizer) -> None:
    rows = [{"prompt": f"p{i}", "completion": "" if i == 6 else "c"} for i in range(8)]
    data = {write("a", 2): 1, write("b", rows): 3}
    with pytest.raises(DataError, match=r"b\.jsonl line 7: 'completion' is empty"):
        encode_supervised(data, byte_tokenizer())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "a", "weigth": 1}, "a part has no 'weigth'; it has path, name, split, revision"),
        ({"split": "train"}, "a part has no 'path', which is a file"),
        ([{"path": "a", "weight": 0}], "weight of a: wanted a number above 0, got 0"),
        ([{"path": "a", "weight": "much"}], "weight of a: wanted a number above 0, got 'much'"),
    ],
)
def test_a_part_that_says_nothing_sensible_is_refused(data, message) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        load_data(data)


def test_parts_that_fit_into_no_table_are_named(write) -> None:
    parts, _ = load_data(
        [write("a", 1), write("b", [{"prompt": [{"role": "user", "content": "q"}]}])]
    )
    with pytest.raises(
        DataError, match=r"a\.jsonl, b\.jsonl: the columns of these parts don't fit into one table"
    ):
        concatenated(parts)


def test_rows_in_memory_are_data_as_they_are() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    assert prompts(load_data(rows)[0]) == [["a", "b"]]
    parts = [{"path": rows, "weight": 2}, {"path": Dataset.from_list(rows)}]
    assert prompts(load_data(parts)[0]) == [["a", "a", "b", "b"], ["a", "b"]]
    assert load(rows).pick(np.array([1])).where(0) == "records row 2"


def test_rows_without_a_length_want_streaming() -> None:
    rows = Dataset.from_list([{"text": "a"}]).to_iterable_dataset()
    with pytest.raises(
        DataError, match="an IterableDataset is read step by step; set streaming=True, and steps"
    ):
        load_data(rows)
    with pytest.raises(
        DataError, match="eval_data is read at once: give it as rows, a file or a Dataset"
    ):
        load_data(rows, rows, streaming=True)
