"""Generated Markdown: prose is wrapped, and nothing changes what it means."""

import pytest
from burnish.benchmarks.docs.markdown import COLUMNS, table, wrapped

LONG = " ".join(f"word{i}" for i in range(40))


def test_prose_is_wrapped_and_keeps_its_words():
    page = wrapped(f"# Title\n\n{LONG}\n\n- {LONG}\n")
    lines = page.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert page.split() == ["#", "Title", *LONG.split(), "-", *LONG.split()]
    assert [line[:2] for line in lines[6:]] == ["- ", *["  "] * (len(lines) - 7)]


@pytest.mark.parametrize(
    "kept",
    [f"    {LONG}", f"| {LONG} |", f"# {LONG}", f"```text\n{LONG}\n```", f"![{LONG}](a.png)"],
    ids=["indented", "table", "heading", "fenced", "picture"],
)
def test_what_is_no_prose_stays_as_it_is(kept):
    assert wrapped(f"before\n\n{kept}\n\nafter\n") == f"before\n\n{kept}\n\nafter\n"


def test_a_line_break_stays_at_the_end_of_its_line():
    first, *rest = wrapped(f"{LONG}  \nnext\n").split("  \n")
    assert first.split() == LONG.split() and rest == ["next\n"]


@pytest.mark.parametrize("sign", ["-", "+", "*", "#", "1.", ">"])
def test_no_line_begins_with_what_would_begin_a_list(sign):
    page = wrapped("\n".join(f"{LONG[: 90 + i]} {sign} b" for i in range(12)))
    assert not any(line.startswith(f"{sign} ") for line in page.splitlines())
    assert page.split().count(sign) == 12


def test_a_bar_does_not_end_a_cell():
    assert table(["a"], [["x|y"]]) == "| a |\n| -- |\n| x\\|y |"
