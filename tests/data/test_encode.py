import gc
import json
import re
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import pyarrow as pa
import pytest
from burnish.data import (
    Accounting,
    DataError,
    Tokenization,
    encode_preference,
    encode_supervised,
    example,
    load,
)
from burnish.data import encode as encoding
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

USER = {"role": "user", "content": "What is 2+2?"}
ANSWER = {"role": "assistant", "content": "four"}
OTHER = {"role": "assistant", "content": "five, or bob"}
SYSTEM = {"role": "system", "content": "Count."}

COMPLETIONS = {
    "plain": [
        {"prompt": "The sky is", "completion": " blue."},
        {"prompt": "The sky is ", "completion": "blue."},  # a token spans the two
        {"prompt": "", "completion": "alone"},
        {"prompt": "one\n", "completion": "\ntwo é"},
    ],
    "conversational": [
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [SYSTEM, USER, ANSWER, USER], "completion": [OTHER]},
        {"prompt": [USER, ANSWER], "completion": [OTHER]},  # the prompt ends with the assistant
    ],
}
PAIRS = {
    "plain": [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " black."},
        {"prompt": "The sky is ", "chosen": "blue.", "rejected": "black."},
    ],
    "plain, implicit prompt": [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
        {"chosen": "The sky", "rejected": "The sky is black."},
    ],
    "conversational": [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": [SYSTEM, USER, ANSWER, USER], "chosen": [OTHER], "rejected": [ANSWER]},
        {"prompt": [USER, ANSWER], "chosen": [OTHER], "rejected": [ANSWER]},
    ],
    "conversational, implicit prompt": [
        {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, OTHER]},
        {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER, USER, OTHER]},
    ],
}
ARGUMENTS = {
    "dataset_num_proc": None,
    "truncation_mode": "keep_start",
    "dataset_text_field": "text",
}


def peer_arguments(max_length: int | None, **more):
    return SimpleNamespace(
        **ARGUMENTS, max_length=max_length, assistant_only_loss=False, shuffle_dataset=False, **more
    )


@pytest.fixture(params=["smollm2", "llama3", "gemma"])
def tokenizer(request, byte_tokenizer):
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    return byte_tokenizer(request.param, adds_bos=request.param == "llama3")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", COMPLETIONS.values(), ids=COMPLETIONS)
def test_supervised_tokens_are_those_of_the_peer(rows, tokenizer, trl) -> None:
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
    prepare = trl.trainer.sft_trainer.SFTTrainer._prepare_dataset
    theirs = prepare(
        trainer, Dataset.from_list(rows), tokenizer, peer_arguments(None), False, None, "train"
    )
    ours, _ = encode_supervised(rows, tokenizer)
    for index, expected in enumerate(theirs):
        found = example(ours, index)
        assert found.prompt + found.completions[0] == expected["input_ids"]
        labels = [-100] * len(found.prompt) + found.completions[0]
        # Nothing predicts the first token: a label there is never used.
        assert labels[1:] == expected["labels"][1:]


@pytest.mark.filterwarnings("ignore")
def test_a_completion_of_several_messages_has_the_peers_tokens_and_trains_no_user(
    tokenizer, trl
) -> None:
    rows = [{"prompt": [SYSTEM, USER], "completion": [ANSWER, USER, OTHER]}]
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
    prepare = trl.trainer.sft_trainer.SFTTrainer._prepare_dataset
    theirs = prepare(
        trainer, Dataset.from_list(rows), tokenizer, peer_arguments(None), False, None, "train"
    )[0]
    ours, _ = encode_supervised(rows, tokenizer)
    found = example(ours, 0)
    ids = found.prompt + found.completions[0]
    assert ids == theirs["input_ids"][: len(ids)]
    assert not tokenizer.decode(theirs["input_ids"][len(ids) :]).strip()
    trained = zip(*found.completions, *found.trained, strict=True)
    text = tokenizer.decode([token for token, train in trained if train], skip_special_tokens=True)
    assert text == ANSWER["content"] + OTHER["content"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["text", "messages"])
def test_tokens_trained_in_full_are_those_of_the_peer(layout, tokenizer, trl) -> None:
    rows = {
        "text": [{"text": "Once upon a time"}, {"text": f"ended already{tokenizer.eos_token}"}],
        "messages": [
            {"messages": [USER, ANSWER]},
            {"messages": [SYSTEM, USER, ANSWER, USER, OTHER]},
        ],
    }[layout]
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=False)
    prepare = trl.trainer.sft_trainer.SFTTrainer._prepare_dataset
    theirs = prepare(
        trainer, Dataset.from_list(rows), tokenizer, peer_arguments(7), False, None, "train"
    )
    ours, _ = encode_supervised(rows, tokenizer, Tokenization(max_length=7), train_on="all")
    for index, expected in enumerate(theirs):
        found = example(ours, index)
        assert found.prompt + found.completions[0] == expected["input_ids"]
        assert [False, *found.trained[0]] == [index > 0 for index in range(len(expected["labels"]))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("max_length", [None, 64])
@pytest.mark.parametrize("rows", PAIRS.values(), ids=PAIRS)
def test_preference_tokens_are_those_of_the_peer(rows, max_length, tokenizer, trl) -> None:
    dpo = trl.trainer.dpo_trainer
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    dataset = Dataset.from_list(rows)
    prepared = dpo.DPOTrainer._prepare_dataset(
        trainer, dataset, tokenizer, peer_arguments(max_length), "train"
    )
    ours, accounting = encode_preference(
        rows, tokenizer, Tokenization(max_length=max_length, on_bad_row="skip")
    )
    assert accounting.kept == len(prepared)
    batch = dpo.DataCollatorForPreference(pad_token_id=0, max_length=max_length)(list(prepared))
    for index in range(len(ours)):
        found = example(ours, index)
        for row, completion in zip((index, index + len(ours)), found.completions, strict=True):
            real = batch["attention_mask"][row].bool()
            assert found.prompt + completion == batch["input_ids"][row][real].tolist()
            assert len(completion) == batch["completion_mask"][row].sum()


def test_numeric_columns_pass_through_and_others_are_reported(byte_tokenizer) -> None:
    rows = [
        {
            "text": "ab",
            "margin": 1.5,
            "votes": 3,
            "sure": True,
            "author": "x",
            "chat_template_kwargs": None,
        }
    ]
    dataset, accounting = encode_supervised(rows, byte_tokenizer())
    assert dataset.column_names == [
        "margin",
        "votes",
        "sure",
        "prompt",
        "completions",
        "trained",
        "_row",
    ]
    assert (dataset[0]["margin"], dataset[0]["votes"], dataset[0]["sure"]) == (1.5, 3, True)
    assert accounting.unused == ("author", "chat_template_kwargs")
    assert "unused columns: author, chat" in str(accounting)


def test_columns_of_a_csv_that_write_numbers_are_numeric(tmp_path, byte_tokenizer) -> None:
    table = "text,weight,sure,code,note\na,0.5,True,06,\nb,,false,x7,\n"
    (tmp_path / "a.csv").write_text(table)
    for options in (Tokenization(), Tokenization(cached=False)):
        dataset, accounting = encode_supervised(tmp_path / "a.csv", byte_tokenizer(), options)
        assert dataset["weight"][:] == [0.5, None]
        assert dataset["sure"][:] == [1.0, 0.0]
        assert accounting.unused == ("code", "note")
    assert encode_supervised([{"text": "a", "code": "06"}], byte_tokenizer())[1].unused == ("code",)


def test_a_bad_row_names_its_fix_and_how_to_leave_all_of_them_out(byte_tokenizer) -> None:
    rows = [{"prompt": "p", "chosen": "a", "rejected": "a"}]
    advice = "remove the row; --on_bad_row skip leaves such rows out, and counts them"
    with pytest.raises(DataError, match=advice):
        encode_preference(rows, byte_tokenizer())
    with pytest.raises(DataError, match="no EOS token") as setting:  # which is no row's fault
        encode_supervised([{"text": "a"}], byte_tokenizer(eos_token=""))
    assert "on_bad_row" not in str(setting.value)


def test_a_numeric_column_with_a_name_of_ours_is_refused(byte_tokenizer) -> None:
    with pytest.raises(
        DataError, match="examples have a column 'trained' of their own; rename yours"
    ):
        encode_supervised([{"text": "a", "trained": 1}], byte_tokenizer())


def test_a_tokenizer_without_a_pad_token_works(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.pad_token is None
    dataset, _ = encode_preference(PAIRS["conversational"], tokenizer)
    assert len(dataset) == 3
    assert tokenizer.pad_token is None


def test_a_template_can_be_given(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer(None)
    template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    dataset, _ = encode_supervised(
        [{"prompt": [USER], "completion": [ANSWER]}],
        tokenizer,
        Tokenization(chat_template=template),
    )
    assert tokenizer.decode(example(dataset, 0).completions[0]) == "four<eos>"
    with pytest.raises(
        DataError,
        match="records row 1: the row is a conversation and the tokenizer has no chat template",
    ):
        encode_supervised([{"prompt": [USER], "completion": [ANSWER]}], tokenizer)


GOOD = {"prompt": "pp", "chosen": "aaaa", "rejected": "bb", "margin": 1.0}
BAD = {
    "missing": GOOD | {"chosen": None},
    "empty": GOOD | {"rejected": ""},
    "not text": GOOD | {"chosen": 5},
    "identical": GOOD | {"rejected": "aaaa"},
    "identical after truncation": GOOD | {"chosen": "xxxxxxxxa", "rejected": "xxxxxxxxb"},
    "prompt too long": GOOD | {"prompt": "p" * 8},
}


@pytest.fixture
def bad_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [GOOD, *BAD.values(), GOOD | {"prompt": "other"}])
    )
    return path


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_stops_with_file_line_and_fix(kind, tmp_path, byte_tokenizer) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [GOOD, GOOD, BAD[kind]]))
    with pytest.raises(
        DataError, match=r"^pairs\.jsonl line 3: .*; .*(fix|fill|remove|raise|rename)"
    ) as caught:
        encode_preference(load(path), byte_tokenizer(), Tokenization(max_length=8))
    assert type(caught.value) is DataError
    assert caught.value.__cause__ is None  # a clean message, not the way out of Dataset.map


def test_skipped_rows_are_counted_by_kind_and_none_is_lost(bad_file, byte_tokenizer) -> None:
    dataset, accounting = encode_preference(
        load(bad_file), byte_tokenizer(), Tokenization(max_length=8, on_bad_row="skip")
    )
    assert accounting.skipped == dict.fromkeys(BAD, 1)
    assert (
        (accounting.read, accounting.kept)
        == (8, 2)
        == (sum(accounting.skipped.values()) + 2, len(dataset))
    )
    assert [len(example(dataset, index).prompt) for index in range(2)] == [2, 5]
    assert dataset.column_names == ["margin", "prompt", "completions", "trained", "_row"]
    assert dataset["_row"][:] == [0, 7]
    assert accounting.first["prompt too long"].startswith(
        "pairs.jsonl line 7: the prompt has 8 tokens"
    )
    assert accounting.truncated == 1  # "other" + "aaaa<eos>" is 10 tokens
    assert accounting.total_tokens == 2 + 5 + 3 + 5 + 3 + 3
    assert accounting.trained_tokens == 5 + 3 + 3 + 3
    text = str(accounting)
    assert text.startswith(
        "pairs.jsonl: 8 rows read, 2 kept; 21 tokens, 14 of them trained\n  1 skipped, missing; the"
    )
    assert "1 truncated to max_length=8" in text


def test_rows_are_told_apart_over_thousands(byte_tokenizer) -> None:
    rows = [GOOD | {"prompt": f"p{number}", "margin": number} for number in range(2500)]
    for bad in (1, 999, 2100):
        rows[bad] |= {"chosen": ""}
    rows[2200] |= {"chosen": None}
    dataset, accounting = encode_preference(rows, byte_tokenizer(), Tokenization(on_bad_row="skip"))
    assert dataset["margin"][:] == [
        number for number in range(2500) if number not in (1, 999, 2100, 2200)
    ]
    assert byte_tokenizer().decode(example(dataset, 2100).prompt) == "p2103"
    assert accounting.skipped == {"empty": 3, "missing": 1}
    assert [problem.split(":")[0] for problem in accounting.first.values()] == [
        "records row 2",
        "records row 2201",
    ]


def test_the_account_is_the_same_out_of_the_cache(bad_file, byte_tokenizer) -> None:
    settings = Tokenization(max_length=8, on_bad_row="skip")
    first = encode_preference(load(bad_file), byte_tokenizer(), settings)
    again = encode_preference(load(bad_file), byte_tokenizer(), settings)
    assert again[0].cache_files == first[0].cache_files != []
    assert again[1] == first[1]
    assert list(again[0]) == list(first[0])


def test_whatever_changes_the_tokens_misses_the_cache(tmp_path, byte_tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": [USER, ANSWER, USER, OTHER]}) + "\n") * 2)

    def cache(tokenizer, split="train", train_on="auto", **settings) -> str:
        options = Tokenization(**settings)
        data, _ = encode_supervised(load(path, split=split), tokenizer, options, train_on=train_on)
        return data.cache_files[0]["filename"]

    other_template = byte_tokenizer("llama3")
    more_tokens = byte_tokenizer()
    more_tokens.add_tokens(["four"])
    files = [
        cache(byte_tokenizer()),
        cache(byte_tokenizer(), split="train[1:]"),
        cache(other_template),
        cache(more_tokens),
        cache(byte_tokenizer(bos_token="<eos>")),
        cache(byte_tokenizer(), chat_template=byte_tokenizer("gemma").chat_template),
        cache(byte_tokenizer(), max_length=64),
        cache(byte_tokenizer(), max_length=64, truncation="keep_end"),
        cache(byte_tokenizer(), train_on="all"),
        cache(byte_tokenizer(), on_bad_row="skip"),
    ]
    assert len(set(files)) == len(files)
    # It is the same template, wherever it comes from.
    assert cache(byte_tokenizer(), chat_template=other_template.chat_template) == files[2]
    path.write_text(json.dumps({"messages": [USER, OTHER]}) + "\n")
    assert cache(byte_tokenizer()) not in files


def test_several_processes_give_the_same_and_the_same_errors(bad_file, byte_tokenizer) -> None:
    settings = {"max_length": 8, "on_bad_row": "skip"}
    rows = load(bad_file).dataset.to_list()
    alone, account = encode_preference(rows, byte_tokenizer(), Tokenization(**settings))
    shared, same_account = encode_preference(
        rows, byte_tokenizer(), Tokenization(processes=2, **settings)
    )
    assert list(alone) == list(shared)
    assert account == same_account
    with pytest.raises(DataError, match=r"records row \d: .*; .*(fill|remove)"):
        encode_preference(rows, byte_tokenizer(), Tokenization(max_length=8, processes=2))


def peak_of_encoding(path, tokenizer, rows: list[dict[str, str]]) -> int:
    """Bytes at most of Python, and those that Arrow holds in the end; records and tokens are on the
    disk.
    """
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    records, before = load(path), pa.total_allocated_bytes()
    gc.collect()
    tracemalloc.start()
    try:
        dataset, _ = encode_preference(records, tokenizer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(dataset) == len(rows) and dataset.cache_files
    return peak + pa.total_allocated_bytes() - before


def test_twice_the_rows_take_no_more_memory(tmp_path, byte_tokenizer, monkeypatch) -> None:
    def rows(count: int) -> list[dict[str, str]]:
        return [
            {"prompt": f"prompt {n}", "chosen": "yes " * 10, "rejected": "no " * 10}
            for n in range(count)
        ]

    def without_garbage(*arguments, **options):
        gc.collect()  # what earlier batches have left, 0.3 MB, which Python frees when it likes
        return encode_rows(*arguments, **options)

    encode_rows = encoding._encode_rows
    monkeypatch.setattr(encoding, "_encode_rows", without_garbage)
    few, many = (
        peak_of_encoding(tmp_path / f"{n}.jsonl", byte_tokenizer(), rows(n)) for n in (2000, 4000)
    )  # two batches at least, as some of a batch is there while the next one is encoded
    assert many - few < 2000 * 50  # an example has 80 tokens and as many masks


def test_rows_of_many_tokens_wait_for_their_batch_in_few_bytes(tmp_path, byte_tokenizer) -> None:
    rows = [
        {"prompt": "prompt " * 600 + f"{n}", "chosen": "yes " * 600, "rejected": "no " * 600}
        for n in range(100)
    ]
    tokens = sum(len(row[name]) for row in rows for name in row)
    # text, id and mask of each
    assert peak_of_encoding(tmp_path / "long.jsonl", byte_tokenizer(), rows) < 12 * tokens


def test_pairs_that_are_there_both_ways_are_counted(byte_tokenizer) -> None:
    swapped = {"prompt": "pp", "chosen": "bb", "rejected": "aaaa"}
    elsewhere = {"prompt": "qq", "chosen": "bb", "rejected": "aaaa"}
    rows = [GOOD, GOOD, elsewhere]
    assert encode_preference(rows, byte_tokenizer())[1].contradictory == 0
    accounting = encode_preference([*rows, swapped], byte_tokenizer())[1]
    assert accounting.contradictory == 3
    assert "3 contradictory: another row has the same completions with the opposite label" in str(
        accounting
    )


def test_prompts_that_give_up_tokens_are_counted(byte_tokenizer) -> None:
    rows = [{"prompt": "a ", "completion": "bob"}, {"prompt": "a", "completion": " bob"}]
    accounting = encode_supervised(rows, byte_tokenizer())[1]
    assert accounting.shortened == 1
    assert "1 where the prompt's last tokens went to the completion" in str(accounting)


def letters(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the letters a to e; all others are unknown."""
    tokens = ["<unk>", "<end>", *"abcde"]
    core = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **{"unk_token": "<unk>", "eos_token": "<end>", **special}
    )


def test_tokens_that_are_unknown_are_counted_and_warned_of() -> None:
    # With its end each row of letters has 20 tokens: here 2 of 40 are unknown, which is 5 %.
    known = {"prompt": "abcde" * 3, "completion": "abcd"}
    rows = [known, {"prompt": "abcde" * 3, "completion": "yabz"}]
    few = encode_supervised(rows, letters())[1]
    assert (few.unknown_tokens, few.total_tokens) == (2, 40)
    assert "2 unknown tokens, 5.0% of the text's; most of them: records row 2" in str(few)
    assert few.warnings() == []
    rows += [{"prompt": "abcde" * 3, "completion": "xyzz"}, known]
    more = encode_supervised(rows, letters())[1]
    assert more.unknown_tokens == 6
    assert more.warnings() == [
        "records: the tokenizer does not know 8% of the tokens, most of them in records row 3, and "
        "the model can't tell one from another; take a model whose tokenizer knows this language "
        "or script"
    ]


def test_each_part_of_a_mixture_warns_for_itself(tmp_path) -> None:
    english = tmp_path / "english.jsonl"
    english.write_text('{"prompt": "abcde", "completion": "abc"}\n' * 100)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "жук", "completion": "лук"}\n')
    account = encode_supervised({str(english): 1, str(other): 1}, letters())[1]
    assert account.unknown_share < 0.01
    (warning,) = account.warnings()
    assert warning.startswith("other.jsonl: the tokenizer does not know 86% of the tokens")


def test_image_tokens_are_no_text_of_which_a_share_is_unknown() -> None:
    account = Accounting(
        "rows", 1, 1, 1, 0, first={"unknown": "rows row 1"},
        total_tokens=1000, images=1, image_tokens=960, unknown_tokens=4,
    )  # fmt: skip
    assert "4 unknown tokens, 10.0% of the text's" in str(account)
    (warning,) = account.warnings()
    assert warning.startswith("rows: the tokenizer does not know 10% of the tokens")


def test_rows_that_are_left_out_have_no_unknown_tokens() -> None:
    rows = [{"prompt": "abcde", "completion": "abc"}, {"prompt": "zz", "completion": ""}]
    account = encode_supervised(rows, letters(), Tokenization(on_bad_row="skip"))[1]
    assert account.unknown_tokens == 0 and "unknown" not in str(account)


def test_an_unknown_token_that_ends_texts_is_no_sign_of_unknown_text() -> None:
    account = encode_supervised(
        [{"prompt": "ab", "completion": "a"}], letters(unk_token="<end>", eos_token="<end>")
    )[1]
    assert account.unknown_tokens == 0


def test_data_without_a_good_row_is_an_error_whatever_the_policy(byte_tokenizer) -> None:
    with pytest.raises(
        DataError, match=r"records: no row is left to train on\n.*1 rows read, 0 kept"
    ) as caught:
        encode_preference(
            [GOOD | {"chosen": ""}], byte_tokenizer(), Tokenization(on_bad_row="skip")
        )
    assert "1 skipped, empty; the first: records row 1: 'chosen' is empty" in str(caught.value)


def test_a_file_without_the_columns_is_named(tmp_path, byte_tokenizer) -> None:
    (tmp_path / "a.csv").write_text("promt,completion\nx,y\n")
    with pytest.raises(
        DataError,
        match=re.escape("a.csv: found the columns (promt, completion), wanted (prompt, compl"),
    ):
        encode_supervised(load(tmp_path / "a.csv"), byte_tokenizer())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"truncation": "middle"},
            "truncation: wanted keep_start, keep_end or error, got 'middle'",
        ),
        ({"on_bad_row": "ignore"}, "on_bad_row: wanted error or skip, got 'ignore'"),
        ({"train_on": "user"}, "train_on: wanted auto, assistant, completion or all, got 'user'"),
        ({"max_length": 1}, "max_length: wanted at least 2"),
    ],
)
def test_impossible_settings_are_refused(settings, message, byte_tokenizer) -> None:
    with pytest.raises(ValueError, match=message):
        train_on = settings.pop("train_on", "auto")
        encode_supervised(
            [{"text": "ab"}], byte_tokenizer(), Tokenization(**settings), train_on=train_on
        )


def test_importing_data_loads_no_trainer_and_no_model() -> None:
    code = "import sys, burnish.data; print([m for m in ('accelerate', 'trl', 'peft', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
