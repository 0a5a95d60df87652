"""What a row of a conversation says is what is trained: nothing is added, lost or passed over in
silence.
"""

import json

import pytest
from burnish.data import (
    DataError,
    Tokenization,
    encode_preference,
    encode_prompts,
    encode_supervised,
    example,
)
from burnish.data.chat import Encoder, read_chat_template
from datasets import Dataset

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "aaaa"}
END = "<|im_end|>"


def trained(tokenizer, dataset) -> list[str]:
    """The trained tokens of each completion of each example."""
    return [
        tokenizer.decode([token for token, train in zip(ids, mask, strict=True) if train])
        for index in range(len(dataset))
        for ids, mask in zip(*example(dataset, index)[1:3], strict=True)
    ]


def calling(name: str, **arguments) -> dict:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def schema(name: str, *parameters: str) -> dict:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": properties}},
    }


CALLED = [
    {
        "messages": [USER, calling("add", a=1, b=2), {"role": "tool", "content": "3"}, ANSWER],
        "tools": [schema("add", "a", "b")],
    },
    {
        "messages": [
            USER,
            calling("weather", city="Rome"),
            {"role": "tool", "content": "sun"},
            ANSWER,
        ],
        "tools": [schema("weather", "city")],
    },
]


@pytest.mark.parametrize("form", ["parquet", "disk", "jsonl"])
def test_tool_calls_are_the_same_from_arrow_and_from_json(byte_tokenizer, tmp_path, form) -> None:
    tokenizer, path = byte_tokenizer("tools"), tmp_path / f"rows.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, CALLED)))
    else:
        (
            Dataset.from_list(CALLED).to_parquet
            if form == "parquet"
            else Dataset.from_list(CALLED).save_to_disk
        )(path)
    dataset, _ = encode_supervised(str(path), tokenizer)
    assert trained(tokenizer, dataset) == [
        f'{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}{END}aaaa{END}',
        f'{{"name": "weather", "arguments": {{"city": "Rome"}}}}{END}aaaa{END}',
    ]
    assert "null" not in tokenizer.decode(example(dataset, 1).prompt)
    assert '{"properties": {"city": {"type": "string"}}}' in tokenizer.decode(
        example(dataset, 1).prompt
    )


def test_a_null_that_json_says_is_kept(byte_tokenizer, tmp_path) -> None:
    tokenizer, path = byte_tokenizer("tools"), tmp_path / "rows.jsonl"
    messages = [USER, calling("add", a=1, b=None), {"role": "tool", "content": "3"}, ANSWER]
    path.write_text("\n".join(map(json.dumps, [{"messages": messages}, CALLED[1]])))
    dataset, _ = encode_supervised(str(path), tokenizer)
    assert '"arguments": {"a": 1, "b": null}' in trained(tokenizer, dataset)[0]


SEVERAL = [ANSWER, {"role": "user", "content": "more"}, ANSWER]


def test_what_others_say_within_a_completion_is_not_trained(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer()
    dataset, _ = encode_supervised([{"prompt": [USER], "completion": SEVERAL}], tokenizer)
    assert trained(tokenizer, dataset) == [f"aaaa{END}" * 2]
    pair = {
        "prompt": [USER],
        "chosen": SEVERAL,
        "rejected": [{"role": "assistant", "content": "b"}],
    }
    dataset, _ = encode_preference([pair], tokenizer)
    assert trained(tokenizer, dataset) == [f"aaaa{END}" * 2, f"b{END}\n"]
    assert "more" in tokenizer.decode(example(dataset, 0).completions[0])
    tokenizer = byte_tokenizer("tools")
    dataset, _ = encode_preference([{**pair, "chosen": CALLED[0]["messages"][1:]}], tokenizer)
    assert (
        trained(tokenizer, dataset)[0]
        == f'{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}{END}aaaa{END}'
    )


def test_all_of_a_completion_can_be_trained(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer()
    dataset, _ = encode_supervised(
        [{"prompt": [USER], "completion": SEVERAL}], tokenizer, train_on="all"
    )
    assert "more" in trained(tokenizer, dataset)[0]


def test_an_answer_of_several_turns_that_is_no_single_text_cannot_be_in_a_pair(
    byte_tokenizer,
) -> None:
    thought = {"role": "assistant", "content": "<think>x</think>4"}
    pair = {"prompt": [USER], "chosen": [thought, USER, ANSWER], "rejected": [ANSWER]}
    with pytest.raises(
        DataError,
        match=r"row 1: the chat template renders turns of a completion in another way.*row of",
    ):
        encode_preference([pair], byte_tokenizer("forgets_thinking"))
    dataset, accounting = encode_supervised(
        [{"prompt": pair["prompt"], "completion": pair["chosen"]}],
        byte_tokenizer("forgets_thinking"),
    )
    assert (accounting.kept, accounting.examples) == (1, 2)
    assert trained(byte_tokenizer(), dataset) == [f"<think>x</think>4{END}", f"aaaa{END}"]


@pytest.mark.parametrize("switch", [{"train": False}, {"weight": 0}])
def test_a_message_that_is_not_to_be_trained_is_not(byte_tokenizer, tmp_path, switch) -> None:
    tokenizer, path = byte_tokenizer(), tmp_path / "rows.jsonl"
    rows = [
        {"messages": [USER, {"role": "assistant", "content": "bad"} | switch, USER, ANSWER]},
        {"messages": SEVERAL},
    ]
    rows[1]["messages"] = [USER, ANSWER]
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset, _ = encode_supervised(str(path), tokenizer)
    assert trained(tokenizer, dataset) == [f"aaaa{END}"] * 2
    assert "bad" in tokenizer.decode(example(dataset, 0).prompt)
    with pytest.raises(
        DataError, match="all messages of the assistant's say train: false; remove the row"
    ):
        encode_supervised([{"messages": [USER, ANSWER | switch]}], tokenizer)
    with pytest.raises(DataError, match="say train: false"):
        encode_supervised([{"prompt": [USER], "completion": [ANSWER | switch]}], tokenizer)


@pytest.mark.parametrize("encode", [encode_supervised, encode_prompts, encode_preference])
def test_tools_that_the_template_does_not_write_are_refused(byte_tokenizer, encode) -> None:
    row = {
        "prompt": [USER],
        "completion": [ANSWER],
        "chosen": [ANSWER],
        "rejected": [ANSWER | {"content": "b"}],
    }
    with pytest.raises(
        DataError,
        match="row 1: the chat template leaves out 'tools'; use one that knows tools, or name no tools",
    ):
        encode([row | {"tools": CALLED[0]["tools"]}], byte_tokenizer())
    encode([row | {"tools": "[]"}], byte_tokenizer())


@pytest.mark.parametrize("layout", ["messages", "prompt and completion", "pair"])
def test_what_the_assistant_does_and_the_template_does_not_write_is_refused(
    byte_tokenizer, layout
) -> None:
    def encode(turn: dict) -> None:
        if layout == "messages":
            encode_supervised([{"messages": [USER, turn]}], byte_tokenizer())
        elif layout == "pair":
            encode_preference(
                [{"prompt": [USER], "chosen": [turn], "rejected": [ANSWER]}], byte_tokenizer()
            )
        else:
            encode_supervised([{"prompt": [USER], "completion": [turn]}], byte_tokenizer())

    with pytest.raises(
        DataError, match="leaves out tool call 1 of message 2; use a template that writes it"
    ):
        encode(calling("add", a=1) | {"content": "see"})
    with pytest.raises(DataError, match="leaves out the reasoning of message 2"):
        encode(ANSWER | {"content": "b", "reasoning_content": "because"})


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_message_that_the_template_does_not_write_is_refused(byte_tokenizer, role) -> None:
    written = f"{{{{ m.content if m.role != '{role}' }}}}"
    template = byte_tokenizer().chat_template.replace("{{ m.content }}", written)
    first, other = {"role": role, "content": "obey"}, ANSWER | {"content": "b"}
    for encode, row in (
        (encode_supervised, {"messages": [first, USER, ANSWER]}),
        (encode_prompts, {"prompt": [first, USER]}),
        (encode_preference, {"prompt": [first, USER], "chosen": [ANSWER], "rejected": [other]}),
    ):
        with pytest.raises(DataError, match=f"leaves out messages of the role {role}; use another"):
            encode([row], byte_tokenizer(), Tokenization(chat_template=template))


def test_the_text_of_a_special_token_in_a_message_is_counted_and_named(byte_tokenizer) -> None:
    told = {"role": "user", "content": f"say {END}"}
    rows = [{"messages": [USER, ANSWER]}, {"messages": [told, ANSWER]}, {"text": "a<eos>"}]
    _, accounting = encode_supervised(rows[:2], byte_tokenizer())
    assert (accounting.special, accounting.first) == (1, {"special": "records row 2"})
    assert "1 with a special token in a message; the first: records row 2" in str(accounting)
    _, accounting = encode_supervised(rows[2:], byte_tokenizer())
    assert accounting.special == 0  # plain text may be what a template made


def test_arguments_of_a_row_that_the_template_does_not_use_are_unused(byte_tokenizer) -> None:
    row = {
        "messages": [USER, ANSWER],
        "chat_template_kwargs": {"enable_thinking": True, "terse": True},
    }
    terse = "{% if terse %}!{% endif %}" + byte_tokenizer().chat_template
    _, accounting = encode_supervised([row], byte_tokenizer(), Tokenization(chat_template=terse))
    assert accounting.unused == ("chat_template_kwargs.enable_thinking",)
    beside = {"prompt": "q", "completion": "a", "tools": "[]", "system_prompt": "Be brief."}
    assert encode_supervised([beside], byte_tokenizer())[1].unused == ("tools", "system_prompt")


def test_what_tools_say_and_the_template_does_not_write_is_refused(byte_tokenizer) -> None:
    template = byte_tokenizer("tools").chat_template.replace(
        "{{ m.content }}", "{{ m.content if m.role != 'tool' }}"
    )
    with pytest.raises(DataError, match="leaves out messages of the role tool"):
        encode_supervised(CALLED[:1], byte_tokenizer(), Tokenization(chat_template=template))


def test_reasoning_that_the_template_cuts_out_of_an_answer_is_put_back(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer()
    template = tokenizer.chat_template.replace("m.content", "m.content.split('</think>')[-1]")
    thought = {"role": "assistant", "content": "<think>x</think>4"}
    options = Tokenization(chat_template=template)
    for row in ({"messages": [USER, thought]}, {"prompt": [USER], "completion": [thought]}):
        dataset, _ = encode_supervised([row], tokenizer, options)
        assert [text.strip() for text in trained(tokenizer, dataset)] == [f"<think>x</think>4{END}"]
    dataset, _ = encode_preference(
        [{"prompt": [USER], "chosen": [thought], "rejected": [ANSWER]}], tokenizer, options
    )
    assert [text.strip() for text in trained(tokenizer, dataset)] == [
        f"<think>x</think>4{END}",
        f"aaaa{END}",
    ]


def test_a_template_may_be_a_text_or_a_file_and_a_missing_file_is_no_text(
    byte_tokenizer, tmp_path
) -> None:
    tokenizer, path, rows = byte_tokenizer("llama3"), tmp_path / "chat.jinja", [{"prompt": [USER]}]
    text = byte_tokenizer("chatml").chat_template
    path.write_text(text, encoding="utf-8")
    expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    for template in (text, str(path), path):
        dataset, _ = encode_prompts(rows, tokenizer, Tokenization(chat_template=template))
        assert tokenizer.decode(dataset[0]["prompt"]) == expected
    assert read_chat_template(path) == read_chat_template(text) == text
    for missing in (tmp_path / "no.jinja", "no.jinja", str(tmp_path)):
        with pytest.raises(
            DataError,
            match=r"chat_template: there is no file '.*'; wanted a file, or the text of a",
        ):
            encode_prompts(rows, tokenizer, Tokenization(chat_template=missing))


def test_arguments_of_the_template_are_a_setting_and_those_of_a_row_come_first(
    byte_tokenizer,
) -> None:
    template = "{{ tone | default('plain') }}:{{ messages[0].content }}"
    rows = [{"prompt": [USER]}, {"prompt": [USER], "chat_template_kwargs": {"tone": "dry"}}]
    for kwargs, first in (({}, "plain:q"), ({"tone": "warm"}, "warm:q")):
        options = Tokenization(chat_template=template, chat_template_kwargs=kwargs)
        dataset, _ = encode_prompts(rows, byte_tokenizer(), options)
        assert [byte_tokenizer().decode(ids) for ids in dataset["prompt"]] == [first, "dry:q"]
    with pytest.raises(
        DataError,
        match="chat_template_kwargs: the chat template uses no 'tome'; correct or remove it",
    ):
        encode_prompts(
            rows,
            byte_tokenizer(),
            Tokenization(chat_template=template, chat_template_kwargs={"tome": 1}),
        )


def test_arguments_of_the_template_reach_every_rendering(byte_tokenizer) -> None:
    for template in ("chatml", "markers"):
        source = "{% if terse %}!{% endif %}" + byte_tokenizer(template).chat_template
        encoder = Encoder(byte_tokenizer(), source, {"terse": True})
        [(ids, _, _)] = encoder.assistant([USER, ANSWER], {})
        assert encoder.tokenizer.decode(ids).startswith("!<|im_start|>")


def test_turns_beyond_max_length_are_left_out_of_a_row_of_several_examples(byte_tokenizer) -> None:
    thought = {"role": "assistant", "content": "<think>x</think>4"}
    rows = [{"messages": [USER, thought, USER, ANSWER]}]
    tokenizer = byte_tokenizer("forgets_thinking")
    dataset, accounting = encode_supervised(rows, tokenizer)
    longest = max(len(row["prompt"]) + len(row["completions"][0]) for row in dataset)
    assert (accounting.kept, accounting.examples, accounting.truncated) == (1, 2, 0)
    dataset, accounting = encode_supervised(
        rows, tokenizer, Tokenization(max_length=longest - len("aaaa") - 1)
    )
    assert trained(tokenizer, dataset) == [f"<think>x</think>4{END}"]
    assert (accounting.kept, accounting.examples, accounting.truncated) == (1, 1, 1)
    with pytest.raises(DataError, match="tokens precede the first trained one and max_length is 5"):
        encode_supervised(rows, tokenizer, Tokenization(max_length=5))
    with pytest.raises(DataError, match=f"{longest} tokens and max_length is {longest - 1}"):
        encode_supervised(rows, tokenizer, Tokenization(max_length=longest - 1, truncation="error"))
