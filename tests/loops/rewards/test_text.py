"""Formats and exact matches."""

import pytest
from burnish.loops.rewards.text import ExactMatch, Format, normalize

ALL = ("case", "punctuation", "articles", "whitespace", "numbers", "unicode")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>why</think>42", 1.0),
        ("<think>\nwhy\n</think>\nso\n42", 1.0),
        ("<think></think>", 1.0),
        ("Well. <think>why</think>42", 0.0),
        ("<think>why 42", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("", 0.0),
    ],
)
def test_the_default_format_is_reasoning_and_an_answer(text, expected, answer):
    assert Format()({}, answer(text)) == expected


def test_a_pattern_matches_the_whole_text_and_nothing_less(answer):
    reward = Format(r"Answer: \d+")
    assert reward({}, answer("Answer: 42")) == 1.0
    assert (
        reward({}, answer("Answer: 42!"))
        == reward({}, answer("My Answer: 42"))
        == reward({}, answer(""))
        == 0.0
    )
    assert Format("α.ω")({}, answer("α\nω")) == 1.0


def test_what_is_no_pattern_is_refused():
    with pytest.raises(ValueError, match=r"format: '\(' is no regular expression: missing \)"):
        Format("(")
    with pytest.raises(ValueError, match=r"exact_match: '\[' is no regular expression"):
        ExactMatch(extract="[")


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        *((said, "42") for said in ("42", "42.0", "$42$", " 42. ", "**42**", "042", "+42")),
        ("1,234,567.50", "1234567.5"),
        ("−5", "-5"),
        ("-0", "0"),
        ("0.0", "0"),
        (".", ""),
        ("The Eiffel  Tower!", "eiffel tower"),
        ("Straße", "STRASSE"),
        ("10" * 40, "10" * 40 + ".000"),
    ],
)
def test_what_does_not_count_is_ignored(said, wanted):
    assert normalize(said, ALL) == normalize(wanted, ALL)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("-5", "5"),
        ("4.2", "42"),
        ("42", "43"),
        ("1,2", "12"),
        ("v1.10", "v1.1"),
        ("10" * 40, "10" * 39 + "11"),
        ("a b", "ab"),
    ],
)
def test_what_counts_is_not(said, wanted):
    ignored = [part for part in ALL if part != "articles"] if said == "a b" else ALL
    assert normalize(said, ignored) != normalize(wanted, ignored)


@pytest.mark.parametrize(
    ("part", "said", "wanted"),
    [
        ("case", "Yes", "yes"),
        ("punctuation", "yes!", "yes"),
        ("articles", "the", " "),
        ("whitespace", " a  b", "a b"),
        ("numbers", "42.0", "42"),
        ("unicode", "４２", "42"),
    ],
)
def test_each_part_is_ignored_alone(part, said, wanted):
    assert normalize(said, [part]) == normalize(wanted, [part])
    assert normalize(said, []) == said != wanted


@pytest.mark.parametrize(
    ("row", "text", "expected"),
    [
        ({"answer": "Paris"}, "paris.", 1.0),
        ({"answer": 42}, "42.0", 1.0),
        ({"answer": ["Paris", "City of Light"]}, "city of light", 1.0),
        ({"answer": ["Paris"]}, "London", 0.0),
        ({"answer": "Paris"}, "", 0.0),
        ({"answer": None}, "Paris", None),
        ({"answer": []}, "Paris", None),
    ],
)
def test_an_answer_matches_any_that_the_row_accepts(row, text, expected, answer):
    assert ExactMatch()(row, answer(text)) == expected


def test_the_last_extract_is_the_answer(answer):
    reward = ExactMatch(extract=r"<answer>(.*?)</answer>")
    assert reward({"answer": "2"}, answer("<answer>1</answer> no, <answer>2</answer>")) == 1.0
    assert reward({"answer": "1"}, answer("<answer>1</answer> no, <answer>2</answer>")) == 0.0
    assert reward({"answer": "2"}, answer("2")) == 0.0
    assert ExactMatch(extract=r"\d+")({"answer": "2"}, answer("1 and 2")) == 1.0


def test_it_reads_the_column_that_it_is_told():
    assert ExactMatch(column="solution").columns == ("solution",)


def test_what_can_be_ignored_is_listed():
    with pytest.raises(ValueError, match=r"ignore knows case, punctuation, .* got 'accents'"):
        ExactMatch(ignore=["accents"])
