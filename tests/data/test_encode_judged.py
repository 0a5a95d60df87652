"""Rows that say something of their answers: feedback, scores, rankings, steps, margins."""

import math
from itertools import chain
from types import SimpleNamespace

import pytest
from burnish.data import (
    DataError,
    Tokenization,
    encode_preference,
    encode_ranking,
    encode_scores,
    encode_stepwise,
    encode_unpaired,
    example,
    step_example,
)
from datasets import Dataset, List, Value

USER = {"role": "user", "content": "What is 2+2?"}
ANSWER = {"role": "assistant", "content": "four"}
OTHER = {"role": "assistant", "content": "five, or bob"}

UNPAIRED = {
    "plain": [
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        {"prompt": "The sky is ", "completion": "blue.", "label": False},  # a token spans the two
    ],
    "conversational": [
        {"prompt": [USER], "completion": [ANSWER], "label": True},
        {"prompt": [USER, ANSWER, USER], "completion": [OTHER], "label": False},
        {"prompt": [USER], "completion": [ANSWER], "label": True},
    ],
    "plain pairs": [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " black."},
        {"prompt": "The sky is ", "chosen": "blue.", "rejected": "green."},
    ],
    "plain pairs, implicit prompt": [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    ],
    "conversational pairs": [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": [USER, ANSWER, USER], "chosen": [OTHER], "rejected": [ANSWER]},
    ],
    "conversational pairs, implicit prompt": [
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    ],
}
STEPS = [
    {
        "prompt": "Which is larger, 9.8 or 9.11?",
        "completions": ["11 > 8.", "So 9.11 > 9.8."],
        "labels": [True, False],
    },
    {"prompt": "2+2", "completions": ["four"], "labels": [True]},
]


@pytest.fixture(params=["smollm2", "llama3", "gemma"])
def tokenizer(request, byte_tokenizer):
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    return byte_tokenizer(request.param, adds_bos=request.param == "llama3")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("max_length", [None, 64])
@pytest.mark.parametrize("rows", UNPAIRED.values(), ids=UNPAIRED)
def test_feedback_tokens_are_those_of_the_peer(rows, max_length, tokenizer, trl) -> None:
    kto = trl.trainer.kto_trainer
    trainer = SimpleNamespace(
        _tokenizer=tokenizer, calculate_KL=False, desirable_weight=1, undesirable_weight=1
    )
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=max_length)
    prepared = kto.KTOTrainer._prepare_dataset(
        trainer, Dataset.from_list(rows), tokenizer, arguments, "train"
    )
    batch = kto.DataCollatorForUnpairedPreference(pad_token_id=0, max_length=max_length)(
        list(prepared)
    )
    ours, accounting = encode_unpaired(
        rows, tokenizer, Tokenization(max_length=max_length, on_bad_row="skip")
    )
    assert accounting.examples == len(ours) == len(prepared)
    # The peer has all chosen answers first, we have each pair together.
    pairs = "chosen" in rows[0]
    order = (
        [row + half for row in range(len(ours) // 2) for half in (0, len(ours) // 2)]
        if pairs
        else range(len(ours))
    )
    for index, theirs in enumerate(order):
        found = example(ours, index)
        (completion,), (trained,) = found.completions, found.trained
        assert (
            found.prompt + completion
            == batch["input_ids"][theirs][batch["attention_mask"][theirs].bool()].tolist()
        )
        assert sum(trained) == len(completion) == batch["completion_mask"][theirs].sum()
        assert ours[index]["desirable"] is bool(batch["label"][theirs])


def test_a_pair_as_feedback_has_the_labels_and_columns_of_the_peer(byte_tokenizer, trl) -> None:
    rows = [{"prompt": "p", "chosen": f"c{n}", "rejected": f"r{n}", "votes": n} for n in range(3)]
    theirs = trl.data_utils.unpair_preference_dataset(Dataset.from_list(rows))
    tokenizer = byte_tokenizer()
    ours, _ = encode_unpaired(rows, tokenizer)
    found = [
        (
            tokenizer.decode(row["completions"][0]).removesuffix("<eos>"),
            row["desirable"],
            row["votes"],
        )
        for row in ours
    ]
    assert sorted(found) == sorted(
        (row["completion"], row["label"], row["votes"]) for row in theirs
    )


@pytest.mark.parametrize("label", [2, "yes", None, math.nan])
def test_a_label_that_is_not_boolean_stops_with_row_value_and_fix(label, byte_tokenizer) -> None:
    rows = [
        {"prompt": "p", "completion": "a", "label": True},
        {"prompt": "p", "completion": "b", "label": label},
    ]
    # A column of truth values has no NaN: Arrow takes it for a missing one.
    shown = "missing" if label is None or label != label else repr(label)
    with pytest.raises(
        DataError,
        match=rf"^records row 2: 'label' is {shown}, wanted true or false \(1 or 0\); con",
    ):
        encode_unpaired(rows, byte_tokenizer())
    _, accounting = encode_unpaired(rows, byte_tokenizer(), Tokenization(on_bad_row="skip"))
    assert (accounting.skipped, accounting.labels) == (
        {"bad label": 1},
        {"desirable": 1, "undesirable": 0},
    )


def test_labels_of_a_csv_are_read(tmp_path, byte_tokenizer) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion,label\np,a,True\np,b,false\n")
    assert encode_unpaired(tmp_path / "a.csv", byte_tokenizer())[0]["desirable"][:] == [True, False]


def test_desirable_and_undesirable_answers_are_counted(byte_tokenizer) -> None:
    rows = [{"prompt": "p", "completion": f"a{n}", "label": n % 3 == 0} for n in range(10)]
    _, accounting = encode_unpaired(rows, byte_tokenizer())
    assert accounting.labels == {"desirable": 4, "undesirable": 6}
    assert str(accounting).endswith("\n  4 desirable, 6 undesirable")


@pytest.mark.parametrize("label", [True, False])
def test_feedback_of_one_kind_is_kept_and_said(label, byte_tokenizer) -> None:
    dataset, accounting = encode_unpaired(
        [{"prompt": "p", "completion": "a", "label": label}], byte_tokenizer()
    )
    assert len(dataset) == 1
    assert str(accounting).endswith("undesirable: one class is empty")


def test_a_pair_as_feedback_is_one_row_and_two_examples_or_none(byte_tokenizer) -> None:
    good = {"prompt": "p", "chosen": "a", "rejected": "c"}
    bad = {"prompt": "p", "chosen": "a", "rejected": ""}
    dataset, accounting = encode_unpaired(
        [good, bad, good, bad], byte_tokenizer(), Tokenization(on_bad_row="skip")
    )
    assert (
        (accounting.read, accounting.kept, accounting.examples) == (4, 2, 4) == (4, 2, len(dataset))
    )
    assert accounting.skipped == {"empty": 2}
    assert accounting.first["empty"].startswith("records row 2: 'rejected' is empty")
    assert str(accounting).startswith(
        "records: 4 rows read, 2 kept as 4 examples; 12 tokens, 8 of them trained"
    )
    with pytest.raises(DataError, match=r"^records row 3: 'rejected' is empty"):
        encode_unpaired([good, good, bad], byte_tokenizer())


@pytest.mark.parametrize(
    ("prompt", "a", "b", "c"),
    [("p", "a", "b", "c"), ([USER], [ANSWER], [OTHER], [ANSWER | {"content": "six"}])],
    ids=["plain", "conversational"],
)
def test_feedback_that_contradicts_itself_is_counted(prompt, a, b, c, byte_tokenizer) -> None:
    answers = [(a, True), (b, True), (a, False), (c, False), (c, False), (a, True)]
    rows = [{"prompt": prompt, "completion": answer, "label": label} for answer, label in answers]
    elsewhere = [
        row | {"prompt": "q" if prompt == "p" else [USER, ANSWER, USER]} for row in rows[1:2]
    ]
    disagrees = [elsewhere[0] | {"prompt": prompt, "label": False}]
    assert encode_unpaired(rows, byte_tokenizer())[1].contradictory == 3
    assert encode_unpaired(rows + elsewhere, byte_tokenizer())[1].contradictory == 3
    accounting = encode_unpaired(rows + elsewhere + disagrees, byte_tokenizer())[1]
    assert accounting.contradictory == 5
    assert "5 contradictory: another row has the same completions with the opposite label" in str(
        accounting
    )


@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize(
    ("prompt", "a", "b", "c"),
    [("p ", "a", "b", "c"), ([USER], [ANSWER], [OTHER], [ANSWER | {"content": "six"}])],
    ids=["plain", "conversational"],
)
def test_pairs_that_contradict_each_other_are_counted(
    prompt, a, b, c, implicit, byte_tokenizer
) -> None:
    def pair(chosen, rejected) -> dict:
        if implicit:
            return {"chosen": prompt + chosen, "rejected": prompt + rejected}
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    consistent = [pair(a, b), pair(a, b), pair(b, c), pair(a, c)]
    assert encode_preference(consistent, byte_tokenizer())[1].contradictory == 0
    assert encode_preference([*consistent, pair(b, a)], byte_tokenizer())[1].contradictory == 3
    rows = [*consistent, pair(b, a), pair(c, b), *[pair(c, a)] * 2]
    assert encode_preference(rows, byte_tokenizer())[1].contradictory == 8
    # Taken one by one every answer but one kind is liked in one row and disliked in another.
    assert encode_unpaired(consistent, byte_tokenizer())[1].contradictory == 3


def test_a_contradiction_with_a_row_left_out_does_not_count(byte_tokenizer) -> None:
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "b", "rejected": "a"},
    ]
    rows = [row | {"margin": margin} for row, margin in zip(rows, (1.0, math.nan), strict=True)]
    assert encode_preference(rows, byte_tokenizer())[1].contradictory == 2
    skip = Tokenization(on_bad_row="skip")
    assert (
        encode_preference(rows, byte_tokenizer(), skip, numeric_columns=["margin"])[1].contradictory
        == 0
    )


def test_step_tokens_are_those_of_the_peer_before_it_dropped_them(tokenizer) -> None:
    ours, _ = encode_stepwise(STEPS, tokenizer)
    end = tokenizer("\n", add_special_tokens=False)["input_ids"]
    for index, row in enumerate(STEPS):
        found = example(ours, index)
        pieces = [
            tokenizer(step, add_special_tokens=False)["input_ids"] + end
            for step in row["completions"]
        ]
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        assert found.prompt == [tokenizer.bos_token_id, *prompt]
        assert found.completions == [list(chain(*pieces))]
        labels = iter(ours[index]["label"])
        found_labels = [next(labels) if train else -100 for train in found.trained[0]]
        assert found_labels == list(
            chain(
                *(
                    [-100] * (len(p) - 1) + [int(label)]
                    for p, label in zip(pieces, row["labels"], strict=True)
                )
            )
        )


def test_there_is_a_label_for_each_trained_token_and_a_row_without_any_is_bad(
    byte_tokenizer,
) -> None:
    rows = [
        {"prompt": "p", "completions": ["a", "bb", "c"], "labels": [1.0, 0.5, 0.0]},
        {"prompt": "p" * 20, "completions": ["a"], "labels": [1.0]},
        {"prompt": "p", "completions": ["a"], "labels": [0.25]},
    ]
    dataset, accounting = encode_stepwise(
        rows, byte_tokenizer(), Tokenization(max_length=7, on_bad_row="skip")
    )
    assert dataset.features["label"] == List(Value("float64"))
    assert dataset["label"][:] == [[1.0, 0.5], [0.25]]
    assert [sum(trained) for (trained,) in dataset["trained"]] == [2, 1]
    assert accounting.skipped == {"prompt too long": 1}
    assert (accounting.truncated, accounting.trained_tokens) == (1, 3)
    last, _ = encode_stepwise(rows[::2], byte_tokenizer(), train_on_last_step_only=True)
    assert last["label"][:] == [[0.0], [0.25]]
    with pytest.raises(
        DataError, match=r"^records row 2: the prompt has 21 tokens and max_length is 7"
    ):
        encode_stepwise(rows, byte_tokenizer(), Tokenization(max_length=7))


@pytest.mark.parametrize("prompt", ["2+2", [USER]], ids=["plain", "conversational"])
def test_a_solution_is_scored_where_it_was_trained(prompt, tokenizer) -> None:
    steps = ["one,", "two, bob"]
    dataset, _ = encode_stepwise(
        [{"prompt": prompt, "completions": steps, "labels": [1, 0]}], tokenizer, separator=" #"
    )
    assert step_example(prompt, steps, tokenizer, separator=" #") == example(dataset, 0)


def test_a_solution_that_cannot_be_scored_says_why(byte_tokenizer) -> None:
    with pytest.raises(DataError, match=r"^step_example: step 2 of 'completions' is empty"):
        step_example("p", ["a", ""], byte_tokenizer())
    with pytest.raises(DataError, match=r"^step_example: 'completions' is an empty list"):
        step_example("p", [], byte_tokenizer())


def test_scores_travel_with_their_answers(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer()
    rows = [{"prompt": [USER], "completion": [ANSWER], "score": 3, "votes": 2}]
    dataset, _ = encode_scores(rows, tokenizer)
    assert dataset.features["score"] == Value("float64")
    assert (dataset[0]["score"], dataset[0]["votes"]) == (3.0, 2)
    assert [tokenizer.decode(ids) for ids in example(dataset, 0).completions] == [
        "four<|im_end|>\n"
    ]
    with pytest.raises(
        DataError, match=r"^records row 2: 'score' is nan, wanted a finite number; fix it or remove"
    ):
        encode_scores([*rows, rows[0] | {"score": math.nan}], tokenizer)


def test_ranks_are_in_the_order_of_their_answers(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer()
    rows = [
        {"prompt": "p", "completions": ["a", "b", "c"], "ranks": [2, 0, 1]},
        {"prompt": "p", "completions": ["a", "b"], "ranks": [1, 0]},
    ]
    dataset, _ = encode_ranking(rows, tokenizer)
    assert dataset.features["rank"] == List(Value("int64"))
    assert dataset["rank"][:] == [[2, 0, 1], [1, 0]]
    assert [tokenizer.decode(ids) for ids in example(dataset, 0).completions] == [
        "a<eos>",
        "b<eos>",
        "c<eos>",
    ]
    with pytest.raises(
        DataError,
        match=r"^records row 2: 'ranks' is \[0, 0\], wanted each of 0 \(best\), 1, .*ties",
    ):
        encode_ranking([rows[0], rows[1] | {"ranks": [0, 0]}], tokenizer)


@pytest.mark.parametrize(
    ("margin", "shown"), [(None, "missing"), (math.nan, "nan"), ("high", "'high'"), (True, "True")]
)
def test_a_margin_that_was_asked_for_is_a_number_in_every_row(
    margin, shown, byte_tokenizer
) -> None:
    rows = [{"prompt": "p", "chosen": f"a{n}", "rejected": "c", "margin": n} for n in range(3)]
    dataset, _ = encode_preference(rows, byte_tokenizer(), numeric_columns=["margin"])
    assert (dataset.features["margin"], dataset["margin"][:]) == (Value("float64"), [0.0, 1.0, 2.0])
    for bad in ([rows[0] | {"margin": margin}], [rows[0] | {"margin": margin}, *rows[1:]]):
        with pytest.raises(
            DataError,
            match=rf"^records row 1: 'margin' is ({shown}|missing), wanted a finite number",
        ):
            encode_preference(bad, byte_tokenizer(), numeric_columns=["margin"])
    dataset, accounting = encode_preference(
        bad, byte_tokenizer(), Tokenization(on_bad_row="skip"), numeric_columns=["margin"]
    )
    assert (dataset["margin"][:], accounting.skipped) == ([1.0, 2.0], {"bad margin": 1})


def test_a_margin_and_a_label_may_stand_in_a_csv(tmp_path, byte_tokenizer) -> None:
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected,margin\np,a,b,1.5\n")
    dataset, _ = encode_preference(tmp_path / "a.csv", byte_tokenizer(), numeric_columns=["margin"])
    assert dataset["margin"][:] == [1.5]
    (tmp_path / "b.csv").write_text("prompt,chosen,rejected,margin\np,a,b,much\n")
    with pytest.raises(DataError, match="'margin' is 'much', wanted a finite number"):
        encode_preference(tmp_path / "b.csv", byte_tokenizer(), numeric_columns=["margin"])


def test_a_column_that_was_asked_for_must_be_there(byte_tokenizer) -> None:
    rows = [{"prompt": "p", "chosen": "a", "rejected": "c", "margn": 1}]
    with pytest.raises(
        DataError,
        match=r"records: wanted a column 'margin', found \(prompt, chosen, rejected, margn\)",
    ):
        encode_preference(rows, byte_tokenizer(), numeric_columns=["margin"])


def test_a_column_with_the_name_of_a_judgment_is_refused(byte_tokenizer) -> None:
    with pytest.raises(
        DataError, match="examples have a column 'desirable' of their own; rename yours"
    ):
        encode_unpaired(
            [{"prompt": "p", "completion": "a", "label": True, "desirable": 1}], byte_tokenizer()
        )


def test_whatever_changes_the_judged_tokens_misses_the_cache(tmp_path, byte_tokenizer) -> None:
    path = tmp_path / "pairs.parquet"
    Dataset.from_list([{"prompt": "p", "chosen": "a", "rejected": "c", "margin": 1}]).to_parquet(
        path
    )
    solutions = tmp_path / "steps.parquet"
    Dataset.from_list(STEPS).to_parquet(solutions)
    encoded = [
        encode_preference(path, byte_tokenizer()),
        encode_preference(path, byte_tokenizer(), numeric_columns=["margin"]),
        encode_unpaired(path, byte_tokenizer()),
        encode_stepwise(solutions, byte_tokenizer()),
        encode_stepwise(solutions, byte_tokenizer(), separator="#"),
        encode_stepwise(solutions, byte_tokenizer(), train_on_last_step_only=True),
    ]
    files = [dataset.cache_files[0]["filename"] for dataset, _ in encoded]
    assert len(set(files)) == len(files)
