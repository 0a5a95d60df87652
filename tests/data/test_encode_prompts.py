"""Prompts that are to be answered."""

from typing import Any

import pytest
from burnish.data import DataError, Tokenization, encode_prompts, load


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Any) -> Any:
    return byte_tokenizer()


def test_a_plain_prompt_is_its_tokens_and_nothing_more(tokenizer: Any) -> None:
    data, accounting = encode_prompts(
        [{"prompt": "ab", "answer": "c"}, {"prompt": "b", "answer": "d"}], tokenizer
    )
    assert [tokenizer.decode(ids) for ids in data["prompt"]] == ["ab", "b"]
    assert data["completions"] == [[], []]
    assert accounting.read == accounting.kept == 2


def test_a_conversation_ends_where_the_assistant_is_to_begin(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "ab"}]
    data, _ = encode_prompts([{"prompt": messages}], tokenizer)
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(data["prompt"][0]) == rendered


def test_a_row_says_where_it_is_in_the_records_so_that_judges_find_its_columns(
    tokenizer: Any,
) -> None:
    records = load(
        [
            {"prompt": "a", "answer": "1"},
            {"prompt": "", "answer": "2"},
            {"prompt": "b", "answer": "3"},
        ]
    )
    data, accounting = encode_prompts(records, tokenizer, Tokenization(on_bad_row="skip"))
    assert [records.dataset[row]["answer"] for row in data["row"]] == ["1", "3"]
    assert accounting.skipped == {"no prompt": 1}
    assert accounting.unused == ()


def test_too_long_a_prompt_is_an_error_unless_it_may_be_cut(tokenizer: Any) -> None:
    rows = [{"prompt": "abcdef"}]
    with pytest.raises(DataError, match="6 tokens and max_length is 4"):
        encode_prompts(rows, tokenizer, Tokenization(max_length=4))
    cut = {
        how: encode_prompts(rows, tokenizer, Tokenization(max_length=4, truncation=how))[0]
        for how in ("keep_start", "keep_end")
    }
    assert {how: tokenizer.decode(data["prompt"][0]) for how, data in cut.items()} == {
        "keep_start": "abcd",
        "keep_end": "cdef",
    }


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "'prompt' is empty, so nothing predicts the first token"),
        ([], "'prompt' has no messages"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "ends with .* role assistant",
        ),
        (
            [{"role": "system", "content": "a"}],
            "ends with a message of the role system, wanted a user's or a tool's",
        ),
        (
            [{"role": "system", "content": "a"}, {"role": "user", "content": " \n"}],
            "message 2, the user's, is empty",
        ),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "row 2: the content of .* has a part of the type 'image', wanted text",
        ),
        (None, "'prompt' is missing"),
    ],
)
def test_what_can_not_be_answered_is_an_error(tokenizer: Any, prompt: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        good = [{"role": "user", "content": "a"}] if isinstance(prompt, list) else "a"
        encode_prompts([{"prompt": good}, {"prompt": prompt}], tokenizer)
