"""Markdown that is made by a program: prose in lines of at most 100 columns."""

import re
import textwrap
from collections.abc import Iterable, Iterator

COLUMNS = 100
_FENCE = "```"
_BOUND = "\x00"  # a space at which no line ends
_ITEM = re.compile(r"(\s*)([-*]|\d+\.) +")
# words that mean something else at the start of a line
_BEGINS_A_LIST = re.compile(r"[-+*=#>]+|\d+[.)]")


def wrapped(page: str) -> str:
    """The page with its paragraphs and list items wrapped; code, tables and headings stay.

    Two spaces at the end of a line, which make a line break, stay at the end of a line.
    """
    made: list[str] = []
    prose: list[str] = []
    in_code = False
    for line in page.splitlines():
        is_fence = line.startswith(_FENCE)
        if is_fence or in_code or _stays(line, in_prose=bool(prose)):
            made += _paragraph(prose)
            prose = []
            made.append(line)
            in_code = in_code != is_fence
            continue
        if prose and (_ITEM.match(line) or prose[-1].endswith("  ")):
            made += _paragraph(prose)
            prose = []
        prose.append(line)
    made += _paragraph(prose)
    return "\n".join(made) + "\n"


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table of Markdown; a bar in a cell is no end of the cell."""
    names = list(header)
    lines = [names, ["--"] * len(names), *rows]
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _stays(line: str, *, in_prose: bool) -> bool:
    if not line.strip() or line.startswith(("|", "#", ":::", "!", "<")):
        return True
    return line.startswith("    ") and not in_prose


def _paragraph(lines: list[str]) -> Iterator[str]:
    if not lines:
        return
    item = _ITEM.match(lines[0])
    indent = len(item[0]) if item else len(lines[0]) - len(lines[0].lstrip())
    words = _words(" ".join(lines))
    first = lines[0][:indent]
    text = " ".join(words)[len(first.strip()) :].strip() if item else " ".join(words)
    end = "  " if lines[-1].endswith("  ") else ""
    filled = textwrap.wrap(
        text,
        COLUMNS - len(end),
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in filled:
        yield line.replace(_BOUND, " ") + (end if line is filled[-1] else "")


def _words(text: str) -> list[str]:
    """The words of a text; one that would begin a list or a heading stays with the one before."""
    words: list[str] = []
    for word in text.split():
        if len(words) > 1 and _BEGINS_A_LIST.fullmatch(word):
            words[-1] += _BOUND + word
        else:
            words.append(word)
    return words
