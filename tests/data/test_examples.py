import pytest
from burnish.data.chat import Encoder
from burnish.data.columns import BadRow, ParsedRow
from burnish.data.examples import (
    Tokenization,
    completed,
    demonstration,
    pair,
    solution,
    stepwise,
    unpaired,
)

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "aaaa"}
ANYTHING = Tokenization(None, "keep_start")


@pytest.fixture
def encoder(byte_tokenizer) -> Encoder:
    return Encoder(byte_tokenizer())


def text(encoder: Encoder, example) -> tuple[str, list[tuple[str, str]]]:
    """The prompt, and of each completion the trained tokens and all tokens."""
    decode = encoder.tokenizer.decode
    return decode(example.prompt), [
        (decode([token for token, train in zip(ids, trained, strict=True) if train]), decode(ids))
        for ids, trained in zip(example.completions, example.trained, strict=True)
    ]


def supervised(encoder, row, limit=ANYTHING, train_on="auto"):
    [encoded] = demonstration(row, encoder, train_on=train_on, limit=limit)
    return encoded


def test_text_is_trained_but_for_its_first_token(encoder) -> None:
    example = supervised(encoder, ParsedRow(None, ("text",))).example
    assert text(encoder, example) == ("t", [("ext<eos>", "ext<eos>")])


def test_a_conversation_ends_with_the_last_trained_token(encoder) -> None:
    example = supervised(encoder, ParsedRow(None, ([USER, ANSWER],))).example
    assert text(encoder, example) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
        [("aaaa<|im_end|>", "aaaa<|im_end|>")],
    )


def test_what_the_user_says_between_answers_is_in_the_completion_and_not_trained(encoder) -> None:
    example = supervised(encoder, ParsedRow(None, ([USER, ANSWER, USER, ANSWER],))).example
    between = "\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert text(encoder, example)[1] == [
        ("aaaa<|im_end|>" * 2, f"aaaa<|im_end|>{between}aaaa<|im_end|>")
    ]


def test_a_completion_of_messages_trains_on_all_that_the_template_adds(encoder) -> None:
    example = supervised(encoder, ParsedRow([USER], ([ANSWER],))).example
    assert text(encoder, example)[1] == [("aaaa<|im_end|>\n", "aaaa<|im_end|>\n")]


@pytest.mark.parametrize(
    ("row", "train_on", "trained"),
    [
        (
            ParsedRow([USER, ANSWER, USER], ([ANSWER, USER, ANSWER],)),
            "assistant",
            "aaaa<|im_end|>" * 2,
        ),
        (
            ParsedRow([USER], ([ANSWER],)),
            "all",
            "user\nq<|im_end|>\n<|im_start|>assistant\naaaa<|im_end|>\n",
        ),
        (
            ParsedRow(None, ([USER, ANSWER],)),
            "all",
            "user\nq<|im_end|>\n<|im_start|>assistant\naaaa<|im_end|>\n",
        ),
        (ParsedRow("pr", ("aa",)), "all", "raa<eos>"),
        (ParsedRow("pr", ("aa",)), "completion", "aa<eos>"),
    ],
)
def test_what_is_trained_can_be_chosen(encoder, row, train_on, trained) -> None:
    assert text(encoder, supervised(encoder, row, train_on=train_on).example)[1][0][0] == trained


@pytest.mark.parametrize(
    ("row", "train_on", "message"),
    [
        (ParsedRow("p", ("a",)), "assistant", "wants conversations, got plain text"),
        (ParsedRow(None, ("a",)), "assistant", "wants conversations, got plain text"),
        (
            ParsedRow(None, ([USER, ANSWER],)),
            "completion",
            "wants the columns prompt and completion",
        ),
    ],
)
def test_what_a_layout_does_not_have_cannot_be_chosen(encoder, row, train_on, message) -> None:
    with pytest.raises(ValueError, match=message):
        supervised(encoder, row, train_on=train_on)


def test_without_a_prompt_the_first_token_is_not_trained(encoder) -> None:
    assert text(encoder, supervised(encoder, ParsedRow("", ("xy",))).example) == (
        "x",
        [("y<eos>", "y<eos>")],
    )
    example = pair(ParsedRow("", ("xy", "xz")), encoder, limit=ANYTHING).example
    assert text(encoder, example) == ("x", [("y<eos>", "y<eos>"), ("z<eos>", "z<eos>")])
    with pytest.raises(
        BadRow, match="the prompt is empty, so nothing predicts the first token; give a prompt"
    ):
        pair(ParsedRow("", ("x", "y")), encoder, limit=ANYTHING)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (Tokenization(11, "keep_start"), (False, "pppp", "aaaaaa<eos>")),
        (Tokenization(6, "keep_start"), (True, "pppp", "aa")),
        (Tokenization(5, "keep_start"), (True, "pppp", "a")),
        (Tokenization(8, "keep_end"), (True, "p", "aaaaaa<eos>")),
        # As in TRL: the sequence that is left begins within the answer, and nothing predicts its
        # first token.
        (Tokenization(6, "keep_end"), (True, "a", "aaaa<eos>")),
    ],
)
def test_truncation_of_an_answer(encoder, limit, expected) -> None:
    found = supervised(encoder, ParsedRow("pppp", ("aaaaaa",)), limit)
    prompt, [(_, completion)] = text(encoder, found.example)
    assert (found.truncated, prompt, completion) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (Tokenization(9, "keep_start"), (False, "pppp", "aaaa<eos>", "b<eos>")),
        (Tokenization(6, "keep_start"), (True, "pppp", "aa", "b<eos>")),
        (Tokenization(7, "keep_end"), (True, "pp", "aaaa<eos>", "b<eos>")),
        (Tokenization(6, "keep_end"), (True, "p", "aaaa<eos>", "b<eos>")),
    ],
)
def test_truncation_of_a_pair(encoder, limit, expected) -> None:
    found = pair(ParsedRow("pppp", ("aaaa", "b")), encoder, limit=limit)
    prompt, [(_, chosen), (_, rejected)] = text(encoder, found.example)
    assert (found.truncated, prompt, chosen, rejected) == expected
    assert all(all(trained) for trained in found.example.trained)


def test_the_answers_of_a_conversation_that_max_length_reaches_are_trained(encoder) -> None:
    whole = supervised(encoder, ParsedRow(None, ([USER, ANSWER, USER, ANSWER],))).example
    length = len(whole.prompt) + len(whole.completions[0])
    found = supervised(
        encoder,
        ParsedRow(None, ([USER, ANSWER, USER, ANSWER],)),
        Tokenization(length - 1, "keep_start"),
    )
    assert text(encoder, found.example)[1][0][0] == "aaaa<|im_end|>aaaa"
    found = supervised(
        encoder,
        ParsedRow(None, ([USER, ANSWER, USER, ANSWER],)),
        Tokenization(length - 20, "keep_start"),
    )
    assert text(encoder, found.example)[1] == [("aaaa<|im_end|>", "aaaa<|im_end|>")]


@pytest.mark.parametrize(
    ("row", "limit", "kind", "problem"),
    [
        (
            ParsedRow("pppp", ("a",)),
            Tokenization(4, "keep_start"),
            "prompt too long",
            "4 tokens precede the first trained one and max_",
        ),
        (
            ParsedRow(None, ([USER, ANSWER],)),
            Tokenization(9, "keep_start"),
            "fully masked",
            "so nothing is left to train on; raise max",
        ),
        (
            ParsedRow("pppp", ("a",)),
            Tokenization(5, "error"),
            "too long",
            "6 tokens and max_length is 5; raise max_length, choose the",
        ),
        (
            ParsedRow("pppp", ("a", "b")),
            Tokenization(5, "error"),
            "too long",
            "6 tokens and max_length is 5",
        ),
        (
            ParsedRow("pppp", ("a", "b")),
            Tokenization(4, "keep_start"),
            "prompt too long",
            "the prompt has 4 tokens and max_length is 4",
        ),
        (
            ParsedRow("pp", ("aaaa", "b")),
            Tokenization(5, "keep_end"),
            "completion too long",
            "a completion has 5 tokens and max_length is 5",
        ),
        (
            ParsedRow("pp", ("aaab", "aaac")),
            Tokenization(5, "keep_start"),
            "identical after truncation",
            "two completions differ only beyond max_length=5, so neither is preferred; raise max_length",
        ),
        (
            ParsedRow("", ("<eos>", "<eos>x")),
            ANYTHING,
            "empty",
            "a completion has no tokens of its own",
        ),
        (
            ParsedRow("pp", ("a", "a<eos>")),
            ANYTHING,
            "identical",
            "two completions have the same tokens, so neither is preferred; remove the row",
        ),
    ],
)
def test_a_row_without_anything_left_to_learn_says_so(encoder, row, limit, kind, problem) -> None:
    with pytest.raises(BadRow, match=problem) as caught:
        if len(row.completions) == 2:
            pair(row, encoder, limit=limit)
        else:
            supervised(encoder, row, limit)
    assert caught.value.kind == kind


@pytest.mark.parametrize("field", ["completion", "pair"])
def test_an_answer_that_the_template_leaves_out_is_empty(byte_tokenizer, field) -> None:
    silent = Encoder(
        byte_tokenizer(),
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    )
    with pytest.raises(BadRow, match="the chat template leaves nothing of a completion") as caught:
        if field == "pair":
            pair(ParsedRow([USER], ([ANSWER], [ANSWER | {"content": "b"}])), silent, limit=ANYTHING)
        else:
            supervised(silent, ParsedRow([USER], ([ANSWER],)))
    assert caught.value.kind == "empty"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, "keep_start"), "at least 2, for a prompt and a completion, got 1"),
        ((5, "middle"), "got 'middle'"),
    ],
)
def test_impossible_limits_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenization(*arguments)


def test_every_answer_of_a_ranking_continues_the_prompt_and_is_trained(encoder) -> None:
    found = completed(
        ParsedRow("pp", ("a", "bb", "c"), annotation=[2, 0, 1]),
        encoder,
        limit=Tokenization(4, "keep_start"),
    )
    assert text(encoder, found.example) == (
        "pp",
        [("a<eos>", "a<eos>"), ("bb", "bb"), ("c<eos>", "c<eos>")],
    )
    assert (found.truncated, found.annotation) == (True, [2, 0, 1])
    with pytest.raises(BadRow, match="two completions have the same tokens"):
        completed(ParsedRow("pp", ("a", "b", "a"), annotation=[2, 0, 1]), encoder, limit=ANYTHING)
    with pytest.raises(BadRow, match="two completions differ only beyond max_length=4"):
        completed(
            ParsedRow("pp", ("a", "bbc", "bbd"), annotation=[2, 0, 1]),
            encoder,
            limit=Tokenization(4, "keep_start"),
        )


def test_a_pair_is_a_desirable_and_an_undesirable_answer(encoder) -> None:
    found = unpaired(ParsedRow("pppp", ("aaaa", "c")), encoder, limit=Tokenization(7, "keep_end"))
    assert [encoded.annotation for encoded in found] == [True, False]
    # Each on its own: the shorter answer keeps the whole prompt.
    assert [text(encoder, encoded.example) for encoded in found] == [
        ("pp", [("aaaa<eos>", "aaaa<eos>")]),
        ("pppp", [("c<eos>", "c<eos>")]),
    ]
    with pytest.raises(BadRow, match="two completions differ only beyond max_length=5") as caught:
        unpaired(ParsedRow("pp", ("aaab", "aaac")), encoder, limit=Tokenization(5, "keep_start"))
    assert caught.value.kind == "identical after truncation"


def test_an_answer_says_what_would_contradict_it(encoder) -> None:
    [good] = unpaired(ParsedRow("p", ("a",), annotation=True), encoder, limit=ANYTHING)
    [bad] = unpaired(ParsedRow("p", ("a",), annotation=False), encoder, limit=ANYTHING)
    assert good.digests == bad.digests[::-1]
    for other in (
        ParsedRow("p", ("c",), annotation=False),
        ParsedRow("pa", ("c",), annotation=False),
    ):
        [found] = unpaired(other, encoder, limit=ANYTHING)
        assert not set(good.digests) & set(found.digests)


def test_the_same_tokens_after_another_prompt_contradict_nothing(encoder) -> None:
    [short], [long] = (
        unpaired(ParsedRow(prompt, (answer,), annotation=True), encoder, limit=ANYTHING)
        for prompt, answer in (("p", "aa"), ("pa", "a"))
    )
    assert (
        short.example.prompt + short.example.completions[0]
        == long.example.prompt + long.example.completions[0]
    )
    assert not set(short.digests) & set(long.digests)


STEPS = ("aa", "b b", "c")  # with the separator 3, 3 and 2 tokens: " b" is one
LABELS = [1.0, 0.25, 0.0]


def steps(encoder, limit=ANYTHING, prompt="pp", completions=STEPS, separator="\n", last=False):
    row = ParsedRow(prompt, completions, annotation=LABELS[: len(completions)])
    return stepwise(row, encoder, separator=separator, train_on_last_step_only=last, limit=limit)


def judged(encoder, found) -> list[tuple[str, float]]:
    """What precedes each label, its own token included, and the label."""
    (ids,), (trained,) = found.example.completions, found.example.trained
    ends = [position for position, train in enumerate(trained) if train]
    assert len(ids) == len(trained)
    return [
        (encoder.tokenizer.decode(ids[: end + 1]), label)
        for end, label in zip(ends, found.annotation, strict=True)
    ]


@pytest.mark.parametrize("separator", ["\n", "\n\n", "<|im_end|>"])
def test_each_label_is_at_the_last_token_of_its_separator(encoder, separator) -> None:
    expected = list(zip(["aa@", "aa@b b@", "aa@b b@c@"], LABELS, strict=True))
    found = steps(encoder, separator=separator)
    assert judged(encoder, found) == [
        (so_far.replace("@", separator), label) for so_far, label in expected
    ]
    assert encoder.tokenizer.decode(found.example.prompt) == "<bos>pp"


@pytest.mark.parametrize(("completions", "separator"), [(("a", "b"), " "), (("a ", "c "), "b")])
def test_a_separator_merges_with_no_step(encoder, completions, separator) -> None:
    found = steps(encoder, completions=completions, separator=separator)
    assert len(encoder.bare(" b")) == 1  # so "a b" is two tokens
    [ids] = found.example.completions
    assert [encoder.tokenizer.decode(token) for token in ids] == list(
        separator.join([*completions, ""])
    )


def test_steps_may_answer_a_conversation(encoder) -> None:
    found = steps(encoder, prompt=[USER], completions=("a",))
    assert (
        text(encoder, found.example)[0] == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )
    assert judged(encoder, found) == [("a\n", 1.0)]


@pytest.mark.parametrize(("max_length", "kept"), [(11, 3), (10, 2), (9, 2), (8, 1), (7, 1), (6, 1)])
def test_steps_beyond_max_length_are_left_out_with_their_labels(encoder, max_length, kept) -> None:
    found = steps(encoder, Tokenization(max_length, "keep_start"))
    assert judged(encoder, found) == judged(encoder, steps(encoder))[:kept]
    assert found.example.trained[0][-1]  # nothing follows the last label
    assert found.truncated == (kept < 3)


def test_the_end_of_a_solution_is_kept_at_the_cost_of_its_prompt(encoder) -> None:
    found = steps(encoder, Tokenization(9, "keep_end"))
    assert text(encoder, found.example)[0] == "p"
    assert judged(encoder, found) == judged(encoder, steps(encoder))


def test_the_last_step_alone_can_be_trained(encoder) -> None:
    assert judged(encoder, steps(encoder, last=True)) == judged(encoder, steps(encoder))[-1:]
    assert (
        judged(encoder, steps(encoder, Tokenization(9, "keep_end"), last=True))
        == judged(encoder, steps(encoder))[-1:]
    )


@pytest.mark.parametrize(
    ("limit", "settings", "kind", "problem"),
    [
        (
            Tokenization(5, "keep_start"),
            {},
            "no step left",
            "the first step ends at token 6 and max_length is 5",
        ),
        (
            Tokenization(3, "keep_start"),
            {},
            "prompt too long",
            "the prompt has 3 tokens and max_length is 3",
        ),
        (
            Tokenization(8, "keep_end"),
            {},
            "completion too long",
            "a completion has 8 tokens and max_length is 8",
        ),
        (Tokenization(10, "error"), {}, "too long", "11 tokens and max_length is 10"),
        (
            Tokenization(10, "keep_start"),
            {"last": True},
            "last step too far",
            "the last step, the only one to train on, ends",
        ),
    ],
)
def test_a_solution_without_a_label_left_says_so(encoder, limit, settings, kind, problem) -> None:
    with pytest.raises(BadRow, match=problem) as caught:
        steps(encoder, limit, **settings)
    assert caught.value.kind == kind


def test_steps_need_a_prompt_or_a_bos_token_before_them(encoder, byte_tokenizer) -> None:
    assert text(encoder, solution(ParsedRow("", ("a",)), encoder, separator="\n"))[0] == "<bos>"
    with pytest.raises(
        BadRow, match="the prompt is empty and there is no BOS token to put in its place"
    ):
        solution(ParsedRow("", ("a",)), Encoder(byte_tokenizer(bos_token=None)), separator="\n")


def test_a_separator_without_tokens_is_refused(encoder) -> None:
    with pytest.raises(
        ValueError, match="separator: wanted text that the tokenizer has a token for, got ''"
    ):
        solution(ParsedRow("p", ("a",)), encoder, separator="")
