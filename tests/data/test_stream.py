import json
import random
import re
from collections import Counter
from functools import partial

import pytest
from burnish.data import (
    Batches,
    DataError,
    Stream,
    StreamBatches,
    Tokenization,
    encode_supervised,
    example,
    load_data,
    stream,
    token_cost,
)
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

ROWS = [[{"text": f"{p}:{i}"} for i in range(5 + p % 7)] for p in range(25)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(stream, "BLOCK", 75)
    monkeypatch.setattr(stream, "CHUNK", 16)


@pytest.fixture
def open_stream(byte_tokenizer):
    """``open_stream(data, ...)`` is a stream, and ``open_stream.texts(stream, step)`` the texts of
    its steps.
    """
    tokenizer = byte_tokenizer()

    def opened(data, *, batch_size=4, seed=0, on_bad_row="error", **options) -> Stream:
        options = {"batch_size": batch_size, "seed": seed, "shuffle": True, **options}
        encode = partial(
            encode_supervised,
            tokenizer=tokenizer,
            options=Tokenization(cached=False, on_bad_row=on_bad_row),
        )
        return Stream(data, encode, **options)

    def texts(opened: Stream, *steps: int) -> list[str]:
        return [
            tokenizer.decode(row["prompt"] + row["completions"][0]).removesuffix("<eos>")
            for step in steps
            for row in opened.open(step)
        ]

    opened.texts = texts
    return opened


@pytest.fixture
def write(tmp_path):
    def write(name: str, rows) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def mixture() -> list[dict]:
    weights = [1.0, 0.5, 2.0]
    return [{"path": rows, "weight": weights[i % 3]} for i, rows in enumerate(ROWS)]


def test_a_step_is_the_same_wherever_the_stream_was_opened(mixture, open_stream) -> None:
    undisturbed = open_stream(mixture)
    steps = [open_stream.texts(undisturbed, step) for step in range(40)]
    # several epochs of some parts
    assert max(Counter(text for step in steps for text in step).values()) > 1
    for step in (0, 7, 39):
        assert open_stream.texts(open_stream(mixture), step) == steps[step]
    resumed = open_stream(mixture)
    resumed.open(0)
    assert [open_stream.texts(resumed, step) for step in range(31, 40)] == steps[31:]
    assert open_stream.texts(undisturbed, 3) == steps[3]  # backwards
    assert [open_stream.texts(open_stream(mixture, seed=1), step) for step in range(5)] != steps[:5]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_mixture_of_25_parts_goes_on_as_it_would_have_wherever_it_is_cut(
    streaming, mixture, byte_tokenizer
) -> None:
    tokenizer, tokenization, plan = (
        byte_tokenizer(),
        Tokenization(cached=False),
        {"micro_tokens": 40, "ranks": 2},
    )

    def steps(first: int) -> list[list]:
        """What the steps from this one on train on, and its plan, in a process that took none
        before.
        """
        encode = partial(encode_supervised, tokenizer=tokenizer, options=tokenization)
        if streaming:
            examples = Stream(mixture, encode, batch_size=9, seed=3, shuffle=True)
            batches = StreamBatches(examples, steps=12, shared_prompt=False, **plan)
        else:
            examples, accounting = encode(load_data(mixture, seed=3)[0])
            assert len(accounting.parts) == 25
            cost = token_cost(examples, shared_prompt=False)
            batches = Batches(cost, batch_size=9, seed=3, steps=12, **plan)
        return [
            [
                [[example(examples, i) for i in micro] for micro in rank]
                for rank in batches.plan(step)
            ]
            for step in range(first, 12)
        ]

    undisturbed = steps(0)
    assert len({str(step) for step in undisturbed}) == 12
    for cut in random.Random(0).sample(range(1, 12), 3):
        assert steps(cut) == undisturbed[cut:]


def test_an_epoch_has_each_row_once_and_the_next_one_has_them_in_another_order(
    write, open_stream
) -> None:
    rows = [{"text": f"row {i}"} for i in range(200)]  # in blocks of 75
    opened = open_stream(write("a", rows), batch_size=10)
    first, second = open_stream.texts(opened, *range(20)), open_stream.texts(opened, *range(20, 40))
    everything = [row["text"] for row in rows]
    assert sorted(first) == sorted(second) == sorted(everything)
    assert first != everything and second != first
    assert sorted(first[:75]) == sorted(everything[:75])
    as_stored = open_stream(write("a", rows), batch_size=10, shuffle=False)
    assert open_stream.texts(as_stored, *range(21)) == everything + everything[:10]


def test_parts_are_drawn_in_proportion_to_their_weights(write, open_stream) -> None:
    data = {
        write(name, [{"text": f"{name} {i}"} for i in range(9)]): weight
        for name, weight in (("a", 3), ("b", 1))
    }
    opened = open_stream(data, batch_size=50)
    counts = Counter(text[0] for text in open_stream.texts(opened, *range(20)))
    assert abs(counts["a"] - 750) < 4 * (1000 * 0.75 * 0.25) ** 0.5
    rows = Counter(text for text in open_stream.texts(opened, *range(20)) if text[0] == "a")
    assert max(rows.values()) - min(rows.values()) <= 1


def test_every_kind_of_data_is_streamed(tmp_path, write, open_stream) -> None:
    rows = [{"text": f"row {i}"} for i in range(6)]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    DatasetDict(
        {"train": Dataset.from_list([{"text": "x"}]), "other": Dataset.from_list(rows)}
    ).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "shards").mkdir()
    write("shards/train-0", rows[:4]), write("shards/train-1", rows[4:])
    renamed = [{"content": row["text"]} for row in rows]
    for data in (
        write("a", rows),
        str(tmp_path / "a.parquet"),
        str(tmp_path / "a.csv"),
        f"{tmp_path}/saved#other",
        str(tmp_path / "shards"),
        {"path": write("b", renamed), "columns": {"content": "text"}},
        rows,
        IterableDataset.from_generator(lambda: iter(rows)),
        IterableDatasetDict({"train": IterableDataset.from_generator(lambda: iter(rows))}),
        {
            "path": IterableDatasetDict(
                {"other": IterableDataset.from_generator(lambda: iter(rows))}
            ),
            "split": "other",
        },
    ):
        opened = open_stream(data, batch_size=3, shuffle=False)
        assert open_stream.texts(opened, 0, 1) == [row["text"] for row in rows], data


def test_rows_that_are_left_out_are_counted_and_leave_their_step_smaller(
    write, open_stream
) -> None:
    data = write("a", [{"text": ""} if i == 5 else {"text": f"row {i}"} for i in range(8)])
    opened = open_stream(data, on_bad_row="skip", shuffle=False)
    assert [len(opened.open(step)) for step in range(3)] == [4, 3, 4]
    assert (opened.accounting.read, opened.accounting.kept, opened.accounting.skipped) == (
        12,
        11,
        {"empty": 1},
    )
    assert "the first: a.jsonl row 6: no token is left" in str(opened.accounting)
    with pytest.raises(DataError, match=r"a\.jsonl row 6: no token is left"):
        open_stream(data, shuffle=False).open(1)


def test_each_part_of_a_streamed_mixture_is_counted(write, open_stream) -> None:
    opened = open_stream({write("a", ROWS[0]): 1, write("b", ROWS[1]): 1})
    for step in range(5):
        opened.open(step)
    assert opened.accounting.read == sum(part.read for part in opened.accounting.parts) == 20
    assert {part.source for part in opened.accounting.parts} == {"a.jsonl", "b.jsonl"}


@pytest.mark.parametrize("rows", [[], [{"prompt": "a"}]])
def test_a_stream_of_nothing_to_train_on_is_refused(rows, tmp_path, open_stream) -> None:
    data = rows or IterableDataset.from_generator(lambda: iter(()))
    with pytest.raises(DataError, match=r"records: (no rows|found the columns \(prompt\))"):
        open_stream(data).open(0)


def test_a_split_that_a_stream_lacks_is_named(open_stream) -> None:
    splits = IterableDatasetDict(
        {"test": IterableDataset.from_generator(lambda: iter([{"text": "a"}]))}
    )
    for split in ("train", "test[:1]"):
        with pytest.raises(
            DataError, match=re.escape(f"records: no split '{split}'; there are test")
        ):
            open_stream({"path": splits, "split": split})


def test_the_ranks_share_a_step(mixture, open_stream) -> None:
    opened = open_stream(mixture, batch_size=9)
    batches = StreamBatches(opened, steps=3, micro_tokens=20, shared_prompt=False, ranks=2)
    assert len(batches) == 3
    for step in range(3):
        plan = batches.plan(step)
        assert (
            sorted(i for rank in plan for micro in rank for i in micro)
            == batches.indices(step)
            == list(range(9))
        )
        cost = token_cost(opened.open(step), shared_prompt=False)
        assert all(sum(cost[micro]) <= 20 for rank in plan for micro in rank)
        assert len(plan) == 2 and len(plan[0]) == len(plan[1])
