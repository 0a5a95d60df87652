import json
import math
import re

import pytest
from burnish.data.columns import (
    PREFERENCE,
    RANKING,
    SCORES,
    SOLUTION,
    STEPWISE,
    SUPERVISED,
    UNPAIRED,
    BadRow,
    find_layout,
    read_row,
)

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("columns", "accepted", "layout"),
    [
        (["prompt", "completion", "messages"], SUPERVISED, ("prompt", "completion")),
        (["prompt", "prompt_id", "messages"], SUPERVISED, ("messages",)),
        (["messages", "text"], SUPERVISED, ("messages",)),
        (["conversations", "id"], SUPERVISED, ("conversations",)),
        (["text"], SUPERVISED, ("text",)),
        (
            ["prompt", "chosen", "rejected", "messages"],
            PREFERENCE,
            ("prompt", "chosen", "rejected"),
        ),
        (["margin", "chosen", "rejected"], PREFERENCE, ("chosen", "rejected")),
        (["prompt", "completion", "label"], UNPAIRED, ("prompt", "completion", "label")),
        (["prompt", "chosen", "rejected"], UNPAIRED, ("prompt", "chosen", "rejected")),
    ],
)
def test_the_layout_follows_from_the_columns(columns, accepted, layout) -> None:
    assert find_layout(columns, accepted) == layout


@pytest.mark.parametrize(
    ("columns", "accepted", "message"),
    [
        (
            ["promt", "completion"],
            SUPERVISED,
            "found the columns (promt, completion), wanted (prompt, completion) or",
        ),
        (["promt", "completion"], SUPERVISED, "should 'promt' be 'prompt'?"),
        (["choosen", "rejected"], PREFERENCE, "should 'choosen' be 'chosen'?"),
        (
            ["chosen", "rejected"],
            SUPERVISED,
            "these are preference pairs, for a recipe such as dpo or kto, or reward with",
        ),
        (
            ["prompt", "completion", "label"],
            PREFERENCE,
            "these are completions with labels, for a recipe such as kto",
        ),
        (
            ["prompt", "completions", "labels"],
            PREFERENCE,
            "these are steps with labels, for a recipe such as prm",
        ),
        (
            ["prompt", "completion", "score"],
            STEPWISE,
            "these are completions with scores, for reward with --loss score_regression",
        ),
        (
            ["prompt", "completions", "ranks"],
            STEPWISE,
            "these are ranked completions, for reward with --loss plackett_luce",
        ),
        (
            ["prompt", "completion", "lable"],
            UNPAIRED,
            "for a recipe such as sft; should 'lable' be 'label'?",
        ),
        (
            ["instruction", "context", "response"],
            SUPERVISED,
            "columns: {instruction: prompt, context: prompt, response",
        ),
        (["text"], PREFERENCE, "these are demonstrations, for a recipe such as sft"),
        (
            ["prompt", "completion", "images"],
            SUPERVISED,
            "column 'images': the model reads text alone",
        ),
        (
            ["prompt", "chosen", "rejected", "image"],
            PREFERENCE,
            "column 'image': the model reads text alone",
        ),
    ],
)
def test_columns_that_fit_no_layout_are_refused_with_the_nearest(
    columns, accepted, message
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_layout(columns, accepted)


def test_rows_are_taken_apart() -> None:
    assert read_row({"text": "t"}, ("text",)).completions == ("t",)
    row = read_row({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, ("prompt", "completion"))
    assert (row.prompt, row.completions) == ([SYSTEM, USER], ([ANSWER],))
    row = read_row({"prompt": "q", "chosen": "a", "rejected": "b"}, PREFERENCE[0])
    assert (row.prompt, row.completions) == ("q", ("a", "b"))


def test_what_chosen_and_rejected_share_is_the_prompt() -> None:
    pair = {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, OTHER]}
    row = read_row(pair, PREFERENCE[1])
    assert (row.prompt, row.completions) == ([SYSTEM, USER], ([ANSWER], [OTHER]))
    # A plain prompt beside messages repeats what they begin with.
    assert read_row({"prompt": "q", **pair}, PREFERENCE[0]) == row
    # Or it is what the user says.
    row = read_row({"prompt": "q", "chosen": [ANSWER], "rejected": [OTHER]}, PREFERENCE[0])
    assert (row.prompt, row.completions) == ([USER], ([ANSWER], [OTHER]))
    row = read_row({"chosen": "The sky is blue", "rejected": "The sky is grey"}, PREFERENCE[1])
    assert (row.prompt, row.completions) == ("The sky is", (" blue", " grey"))


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("The sky is blue", "The sky is grey"),
        ("The sky is blue", "The sky is black"),
        ("one two", "one two three"),
        ([USER, ANSWER], [USER, OTHER]),
        ([USER, ANSWER, USER, ANSWER], [USER, ANSWER, USER, OTHER]),
        ([USER, ANSWER], [USER, ANSWER, USER, OTHER]),
    ],
)
def test_the_shared_prompt_is_that_of_the_peer(chosen, rejected, trl) -> None:
    row = read_row({"chosen": chosen, "rejected": rejected}, PREFERENCE[1])
    expected = trl.data_utils.extract_prompt({"chosen": chosen, "rejected": rejected})
    assert {
        "prompt": row.prompt,
        "chosen": row.completions[0],
        "rejected": row.completions[1],
    } == expected


@pytest.mark.parametrize("form", [list, json.dumps])
def test_shared_gpt_names_are_read_as_roles(form) -> None:
    value = form([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}])
    assert read_row({"conversations": value}, ("conversations",)).completions == ([USER, ANSWER],)


CALL = {"name": "f", "arguments": {"a": 1}}
TOOL = {"role": "tool", "content": "7"}


@pytest.mark.parametrize(
    "turns",
    [
        [
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "7"},
        ],
        [
            {"from": "function_call", "value": json.dumps([CALL])},
            {"role": "function", "content": "7"},
        ],
        [
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "f", "arguments": '{"a": 1}'},
            },
            {"role": "tool", "content": "7"},
        ],
    ],
)
def test_calls_of_other_forms_are_read_as_tool_calls(turns) -> None:
    (messages,) = read_row({"messages": [USER, *turns, ANSWER]}, ("messages",)).completions
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": CALL}],
    }
    assert messages == [USER, called, TOOL, ANSWER]
    with pytest.raises(
        BadRow, match="content of 'messages' message 2, a function_call, is not JSON: "
    ):
        read_row(
            {"messages": [USER, {"from": "function_call", "value": "f(1)"}, ANSWER]}, ("messages",)
        )


def test_a_column_system_prompt_is_the_first_message() -> None:
    beside = {"system_prompt": "s"}
    assert read_row({"messages": [USER, ANSWER]} | beside, ("messages",)).completions == (
        [SYSTEM, USER, ANSWER],
    )
    assert read_row({"prompt": [USER], "completion": [ANSWER]} | beside, SUPERVISED[0]).prompt == [
        SYSTEM,
        USER,
    ]
    for prompt in ({}, {"prompt": "q"}):
        pair = {"chosen": [USER, ANSWER], "rejected": [USER, OTHER], **prompt, **beside}
        assert read_row(pair, PREFERENCE[not prompt]).prompt == [SYSTEM, USER]
    assert (
        read_row({"messages": [USER, ANSWER], "system_prompt": None}, ("messages",)).completions[0][
            0
        ]
        == USER
    )


def test_tools_may_be_json_and_keys_that_arrow_filled_in_are_dropped() -> None:
    record = {
        "messages": [USER | {"tool_calls": None}, ANSWER | {"tool_calls": None}],
        "tools": '[{"type": "function"}]',
        "chat_template_kwargs": {"enable_thinking": False, "tone": None},
    }
    row = read_row(record, ("messages",))
    assert row.completions == ([USER, ANSWER],)
    assert row.template_options == {"tools": [{"type": "function"}], "enable_thinking": False}


def test_an_assistant_may_call_tools_instead_of_saying_something() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result = {"role": "tool", "content": "7"}
    found = read_row({"messages": [USER, call, result, ANSWER]}, ("messages",)).completions[0]
    assert found[1] == call | {"content": ""}  # which many templates want


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": null}'}},
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": None}}},
        {"name": "f", "arguments": {"a": 1, "b": None}},
    ],
)
def test_a_tool_call_is_read_in_one_form_and_its_own_nulls_stay(call) -> None:
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        ANSWER,
    ]
    found = read_row({"messages": messages}, ("messages",)).completions[0][1]["tool_calls"]
    assert found == [
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    ]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            {"function": {"name": "f", "arguments": "a=1"}},
            "'arguments' of a tool call of .messages. message 2 is not JSON: ",
        ),
        (
            {"function": {"name": "f", "arguments": "[1]"}},
            "is a list, wanted a mapping of names to values",
        ),
        ("f(1)", "a tool call of 'messages' message 2 is text, wanted a mapping"),
    ],
)
def test_a_tool_call_that_no_template_could_write_is_refused(call, problem) -> None:
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        ANSWER,
    ]
    with pytest.raises(BadRow, match=problem):
        read_row({"messages": messages}, ("messages",))


def test_no_tool_calls_are_left_of_an_empty_list() -> None:
    assert read_row(
        {"messages": [USER, ANSWER | {"tool_calls": []}]}, ("messages",)
    ).completions == ([USER, ANSWER],)


@pytest.mark.parametrize(
    ("name", "value"), [("train", False), ("weight", 0), ("weight", 0.0), ("train", True)]
)
def test_a_message_may_say_whether_it_is_trained(name, value) -> None:
    row = read_row(
        {"messages": [USER | {name: None}, ANSWER | {name: value}, USER, ANSWER]}, ("messages",)
    )
    assert row.completions == ([USER, ANSWER | {"train": bool(value)}, USER, ANSWER],)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (
            [USER, ANSWER | {"weight": 0.5}],
            "'weight' of 'messages' message 2 is 0.5, wanted true or false",
        ),
        (
            [USER | {"train": True}, ANSWER],
            "'train' of 'messages' message 1 is True, wanted none, as only the",
        ),
    ],
)
def test_what_a_message_cannot_say_about_training_is_refused(messages, problem) -> None:
    with pytest.raises(BadRow, match=problem):
        read_row({"messages": messages}, ("messages",))


def test_two_messages_of_the_user_in_a_row_are_left_to_the_template() -> None:
    read_row({"messages": [USER, USER, ANSWER]}, ("messages",))


@pytest.mark.parametrize(
    ("layout", "record", "annotation"),
    [
        (*UNPAIRED[:1], {"prompt": "q", "completion": "a", "label": False}, False),
        (*SCORES, {"prompt": "q", "completion": "a", "score": -2}, -2.0),
        (
            *STEPWISE,
            {"prompt": "q", "completions": ["a", "b", "c"], "labels": [True, 0.25, 0]},
            [1.0, 0.25, 0.0],
        ),
        (*RANKING, {"prompt": "q", "completions": ["a", "b"], "ranks": [1.0, 0.0]}, [1, 0]),
        (*RANKING, {"prompt": [USER], "completions": [[ANSWER], [OTHER]], "ranks": [0, 1]}, [0, 1]),
    ],
)
def test_what_a_row_says_of_its_answers_is_its_annotation(layout, record, annotation) -> None:
    row = read_row(record, layout)
    assert repr(row.annotation) == repr(annotation)  # True is not 1
    assert row.prompt == record["prompt"]
    assert row.completions == (
        tuple(record["completions"]) if "completions" in record else (record["completion"],)
    )


@pytest.mark.parametrize(
    ("label", "desirable"), [(True, True), (False, False), (1, True), (0, False), (1.0, True)]
)
def test_a_label_is_true_or_false_or_one_or_zero(label, desirable) -> None:
    row = read_row({"prompt": "a", "completion": "b", "label": label}, UNPAIRED[0])
    assert row.annotation is desirable


@pytest.mark.parametrize(
    ("layout", "record", "annotation"),
    [
        (UNPAIRED[0], {"completion": "a", "label": "True"}, True),
        (UNPAIRED[0], {"completion": "a", "label": " 0 "}, False),
        (SCORES[0], {"completion": "a", "score": "-1e-1"}, -0.1),
        (STEPWISE[0], {"completions": '["a", "True"]', "labels": "[True, 0.25]"}, [1.0, 0.25]),
        (RANKING[0], {"completions": '["a", "b"]', "ranks": "[1, 0]"}, [1, 0]),
    ],
)
def test_numbers_and_lists_may_be_text_as_in_a_csv(layout, record, annotation) -> None:
    row = read_row({"prompt": "q", **record}, layout)
    assert repr(row.annotation) == repr(annotation)
    if "completions" in record:
        assert list(row.completions) == json.loads(record["completions"])


SAME = {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}


def test_a_prompt_that_repeats_the_user_is_no_part_of_a_pair_twice() -> None:
    again = {"role": "user", "content": "And then?"}
    several = {"chosen": [USER, ANSWER, again, ANSWER], "rejected": [USER, ANSWER, again, OTHER]}
    for pair, prompt in (
        (SAME, USER["content"]),
        (SAME, f" {USER['content']}\n"),
        (several, "And then?"),
        (SAME, ""),
    ):
        assert read_row({"prompt": prompt, **pair}, PREFERENCE[0]).prompt == pair["chosen"][:-1]


def test_a_prompt_that_contradicts_its_conversations_is_refused() -> None:
    with pytest.raises(
        BadRow, match="'prompt' is no message of the user's that 'chosen' and 'rejected' share"
    ) as bad:
        read_row({"prompt": "something else", **SAME}, PREFERENCE[0])
    assert bad.value.kind == "contradictory prompt"
    assert "columns: [chosen, rejected]" in bad.value.problem


def test_a_plain_prompt_stays_beside_answers_and_a_system_prompt() -> None:
    record = {"prompt": "q", "chosen": [ANSWER], "rejected": [OTHER], "system_prompt": "s"}
    row = read_row(record, PREFERENCE[0])
    assert row.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


def test_two_system_messages_of_one_row_are_refused_unless_they_agree() -> None:
    own = {"role": "system", "content": "Be kind."}
    record = {"messages": [own, USER, ANSWER], "system_prompt": "Be kind."}
    assert read_row(record, ("messages",)).completions == ([own, USER, ANSWER],)
    problem = "'messages' begins with a system message, and 'system_prompt' is another one; leave one of them out"
    with pytest.raises(BadRow, match=problem):
        read_row({**record, "system_prompt": "Be brief."}, ("messages",))


def test_train_and_weight_of_a_message_agree() -> None:
    both = {**ANSWER, "train": False, "weight": 0}
    row = read_row({"messages": [USER, both, USER, ANSWER]}, ("messages",))
    assert row.completions[0][1] == {**ANSWER, "train": False}
    with pytest.raises(
        BadRow,
        match="'train' of 'messages' message 2 is False and its 'weight' 1, which mean the same",
    ):
        read_row({"messages": [USER, {**both, "weight": 1}]}, ("messages",))


def test_content_in_parts_of_text_is_joined() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}]
    row = read_row({"messages": [{"role": "user", "content": parts}, ANSWER]}, ("messages",))
    assert row.completions == ([{"role": "user", "content": "What is it?"}, ANSWER],)


@pytest.mark.parametrize("label", [2, -1, 0.5, "2", "yes", "", None, math.nan, [True]])
def test_a_label_is_nothing_else(label) -> None:
    shown = "missing" if label is None else repr(label)
    with pytest.raises(
        BadRow, match=re.escape(f"'label' is {shown}, wanted true or false (1 or 0); convert it or")
    ) as caught:
        read_row({"prompt": "q", "completion": "a", "label": label}, UNPAIRED[0])
    assert caught.value.kind == "bad label"


@pytest.mark.parametrize("score", [True, "0,5", "true", None, math.nan, math.inf])
def test_a_score_is_a_finite_number(score) -> None:
    shown = "missing" if score is None else repr(score)
    with pytest.raises(
        BadRow, match=re.escape(f"'score' is {shown}, wanted a finite number; fix it or")
    ) as caught:
        read_row({"prompt": "q", "completion": "a", "score": score}, SCORES[0])
    assert caught.value.kind == "bad score"


@pytest.mark.parametrize(
    "ranks", [[1, 2], [0, 0], [2, 0], [0.0, 0.5], [False, True], [0, None], ["0", "1"]]
)
def test_ranks_are_a_permutation(ranks) -> None:
    with pytest.raises(
        BadRow, match=re.escape(f"'ranks' is {ranks}, wanted each of 0 (best), 1, ... once")
    ):
        read_row({"prompt": "q", "completions": ["a", "b"], "ranks": ranks}, RANKING[0])


@pytest.mark.parametrize(
    ("record", "layout", "problem"),
    [
        (
            {"labels": [True]},
            STEPWISE[0],
            "'completions' has 2 steps and 'labels' has 1; give each step one",
        ),
        ({"labels": [True] * 3}, STEPWISE[0], "'completions' has 2 steps and 'labels' has 3"),
        (
            {"labels": True},
            STEPWISE[0],
            "'labels' is true or false, wanted a list with one for each step",
        ),
        (
            {"labels": [True, None]},
            STEPWISE[0],
            "label 2 of 'labels' is missing, wanted true, false, or a probability",
        ),
        ({"labels": [0, 2]}, STEPWISE[0], "label 2 of 'labels' is 2, wanted"),
        ({"labels": [-1, 1]}, STEPWISE[0], "label 1 of 'labels' is -1, wanted"),
        ({"labels": [0.5, math.nan]}, STEPWISE[0], "label 2 of 'labels' is nan, wanted"),
        ({"labels": ["yes", "no"]}, STEPWISE[0], "label 1 of 'labels' is 'yes', wanted"),
        (
            {"completions": [], "labels": []},
            STEPWISE[0],
            "'completions' is an empty list; fill it in",
        ),
        ({"completions": "a b"}, SOLUTION, "'completions' is text, wanted a list"),
        (
            {"completions": ["a", " \n"]},
            SOLUTION,
            "step 2 of 'completions' is empty; remove it and its label",
        ),
        (
            {"completions": ["a", [ANSWER]]},
            SOLUTION,
            "step 2 of 'completions' is a list, wanted text",
        ),
        ({"prompt": []}, SOLUTION, "'prompt' has no messages"),
        (
            {"ranks": [0]},
            RANKING[0],
            "'completions' has 2 completions and 'ranks' has 1; give each completion one",
        ),
        (
            {"completions": ["a"], "ranks": [0]},
            RANKING[0],
            "'ranks' is [0], wanted each of 0 (best), 1, ... once, for at",
        ),
        (
            {"completions": ["a", ""], "ranks": [0, 1]},
            RANKING[0],
            "'completions 2' is empty; fill it in",
        ),
        (
            {"completions": ["a", [ANSWER]], "ranks": [0, 1]},
            RANKING[0],
            "'completions 2' is a list; give all of them",
        ),
        (
            {"prompt": "q", "completions": [[ANSWER], [OTHER]], "ranks": [0, 1]},
            RANKING[0],
            "'prompt' is text",
        ),
    ],
)
def test_steps_and_rankings_that_are_none_say_why(record, layout, problem) -> None:
    with pytest.raises(BadRow, match=re.escape(problem)):
        read_row({"prompt": "q", "completions": ["a", "b"]} | record, layout)


MESSAGES, COMPLETION, PAIR, SHARED = ("messages",), ("prompt", "completion"), *PREFERENCE
BAD = [
    (
        {"prompt": "q", "completion": None},
        COMPLETION,
        "missing",
        "'completion' is missing; fill it in or remove the row",
    ),
    ({"prompt": "q"}, COMPLETION, "missing", "'completion' is missing"),
    (
        {"prompt": "q", "completion": ""},
        COMPLETION,
        "empty",
        "'completion' is empty; fill it in or remove the row",
    ),
    ({"prompt": [USER], "completion": []}, COMPLETION, "empty", "'completion' has no messages"),
    (
        {"prompt": [USER], "completion": [ANSWER | {"content": ""}]},
        COMPLETION,
        "empty",
        "'completion' message 1 is empty",
    ),
    ({"prompt": "q", "chosen": "a", "rejected": ""}, PAIR, "empty", "'rejected' is empty"),
    (
        {"prompt": "q", "completion": 5},
        COMPLETION,
        "not text",
        "'completion' is a number (5), wanted text or a list",
    ),
    (
        {"prompt": "q", "completion": True},
        COMPLETION,
        "not text",
        "'completion' is true or false, wanted text",
    ),
    ({"text": [USER]}, ("text",), "not text", "'text' is a list; name the column 'messages'"),
    (
        {"messages": "hi"},
        MESSAGES,
        "not text",
        "'messages' is text, wanted a list of {role, content}",
    ),
    (
        {"messages": ["hi"]},
        MESSAGES,
        "not text",
        "'messages' message 1 is text, wanted {role, content}",
    ),
    (
        {"messages": [USER | {"content": 5}, ANSWER]},
        MESSAGES,
        "not text",
        "the content of 'messages' message 1 is a number (5), wanted text",
    ),
    (
        {"messages": [USER | {"content": [{"type": "image", "url": "q"}]}, ANSWER]},
        MESSAGES,
        "not text",
        "the content of 'messages' message 1 has a part of the type 'image', wanted text",
    ),
    (
        {"messages": [{"role": "user"}, ANSWER]},
        MESSAGES,
        "missing",
        "'messages' message 1 has no content",
    ),
    ({"messages": []}, MESSAGES, "empty", "'messages' has no messages"),
    (
        {"messages": [USER]},
        MESSAGES,
        "roles",
        "'messages' has no assistant message, so there is nothing to learn",
    ),
    (
        {"messages": [USER, ANSWER, USER]},
        MESSAGES,
        "roles",
        "'messages' ends with a user message, wanted the assistant's",
    ),
    (
        {"messages": [ANSWER]},
        MESSAGES,
        "roles",
        "'messages' begins with the assistant, wanted a prompt before it",
    ),
    (
        {"messages": [USER, SYSTEM, ANSWER]},
        MESSAGES,
        "roles",
        "a system message comes later than first",
    ),
    (
        {"messages": [USER | {"role": "bot"}, ANSWER]},
        MESSAGES,
        "roles",
        "message 1 has the role 'bot', wanted one of sys",
    ),
    (
        {"prompt": [SYSTEM], "completion": [USER, ANSWER]},
        COMPLETION,
        "roles",
        "'completion' begins with a user message, wanted the assistant's; move it to the prompt",
    ),
    (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [USER]},
        PAIR,
        "roles",
        "'rejected' has no assistant message",
    ),
    ({"prompt": [], "completion": [ANSWER]}, COMPLETION, "no prompt", "'prompt' has no messages"),
    (
        {"prompt": "q", "completion": [ANSWER]},
        COMPLETION,
        "mixed",
        "'prompt' is text, 'completion' is a list; give all",
    ),
    (
        {"chosen": "q a", "rejected": [USER, OTHER]},
        SHARED,
        "mixed",
        "'chosen' is text, 'rejected' is a list; give all of them",
    ),
    (
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        PAIR,
        "identical",
        "'chosen' and 'rejected' are identical",
    ),
    (
        {"chosen": "q a", "rejected": "q a"},
        SHARED,
        "identical",
        "'chosen' and 'rejected' are identical",
    ),
    (
        {"chosen": "a", "rejected": "b"},
        SHARED,
        "no prompt",
        "'chosen' and 'rejected' share no beginning",
    ),
    ({"messages": [USER, ANSWER], "tools": "[{"}, MESSAGES, "not text", "'tools' is not JSON"),
    (
        {"messages": [USER, ANSWER], "tools": {"a": 1}},
        MESSAGES,
        "not text",
        "'tools' is a mapping, wanted a list",
    ),
    (
        {"messages": [USER, ANSWER], "chat_template_kwargs": "x"},
        MESSAGES,
        "not text",
        "'chat_template_kwargs' is text, wanted a mapping",
    ),
]


@pytest.mark.parametrize(("record", "layout", "kind", "problem"), BAD)
def test_a_bad_row_says_what_is_wrong(record, layout, kind, problem) -> None:
    with pytest.raises(BadRow, match=re.escape(problem)) as caught:
        read_row(record, layout)
    assert caught.value.kind == kind
