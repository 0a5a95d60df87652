"""Rewards of the text: its format, and exact matches."""

import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from ..registry import as_setting_error
from ..rollouts.sample import Row, Sample

IGNORABLE = ("case", "punctuation", "articles", "whitespace", "numbers", "unicode")
THINK = r"<think>(?!.*<think>).*?</think>.*"
# A sign belongs to a number unless it follows something that could be subtracted from.
_NUMBER = re.compile(
    r"((?<![\w.])(?:(?<![)\]}%])[-+−])?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?!\w))"
)


@dataclass(frozen=True)
class Format:
    """1 if the regular expression matches the whole completion, and 0 otherwise.

    A dot matches newlines too. Without a pattern: reasoning between <think> and </think>, then the
    answer, as in DeepSeek-R1 (Guo et al. 2025, arXiv:2501.12948) and TRL's ``think_format_reward``.
    A pattern that can match one text in very many ways, such as (a+)+, may take forever and stop
    the whole program: let it run in a process of its own (`isolated`, or isolate: true).
    """

    pattern: str = THINK

    def __post_init__(self) -> None:
        with as_setting_error(f"format: {self.pattern!r} is no regular expression", re.error):
            re.compile(self.pattern)

    def __call__(self, row: Row, sample: Sample) -> float:
        return float(re.fullmatch(self.pattern, sample.text, re.DOTALL) is not None)


@dataclass(frozen=True)
class ExactMatch:
    """1 if the normalized answer equals that of the row, or one of the row's, and 0 otherwise.

    Args:
        column: name of the column with the right answer, or a list of them; without an answer there
            is no score.
        extract: a regular expression; its last match in the text is the answer, or its first group
            if it has one. A completion without a match is wrong.
        ignore: see `normalize`. All of them by default but "unicode".

    Normalization is that of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250) and numbers.
    """

    column: str = "answer"
    extract: str = r"(?s).*"
    ignore: Sequence[str] = IGNORABLE[:-1]

    def __post_init__(self) -> None:
        with as_setting_error(f"exact_match: {self.extract!r} is no regular expression", re.error):
            re.compile(self.extract)
        unknown = sorted(set(self.ignore) - set(IGNORABLE))
        if unknown:
            raise ValueError(
                f"exact_match: ignore knows {', '.join(IGNORABLE)}, got {', '.join(map(repr, unknown))}"
            )

    @property
    def columns(self) -> Sequence[str]:
        return (self.column,)

    def __call__(self, row: Row, sample: Sample) -> float | None:
        accepted = row[self.column]
        if accepted is None or accepted == []:
            return None
        accepted = accepted if isinstance(accepted, list | tuple) else [accepted]
        last = None
        for match in re.finditer(self.extract, sample.text):
            if match.end() > match.start():  # .* also matches nothing at the end
                last = match
        if last is None:
            return 0.0
        answer = last[1 if last.re.groups else 0] or ""
        right = {normalize(str(each), self.ignore) for each in accepted}
        return float(normalize(answer, self.ignore) in right)


def normalize(text: str, ignore: Sequence[str]) -> str:
    """Remove differences that are ignored.

    unicode        compatibility forms (NFKC): full-width digits, ligatures
    case           capitals
    numbers        how a number is written: 42.0 is 42, 1,000 is 1000, and −5 is -5
    articles       a, an, the
    punctuation    all of it outside of numbers, including the signs around a formula ($42$) or a bold word (**42**)
    whitespace     how much of it, and where the text begins and ends
    """
    text = unicodedata.normalize("NFKC", text) if "unicode" in ignore else text
    text = text.casefold() if "case" in ignore else text
    # words, number, words, ..., number, words
    pieces = _NUMBER.split(text) if "numbers" in ignore else [text]
    pieces[::2] = [_words(piece, ignore) for piece in pieces[::2]]
    pieces[1::2] = map(_number, pieces[1::2])
    pieces[2:-1:2] = [between or " " for between in pieces[2:-1:2]]  # 1,2 is not 12
    text = "".join(pieces)
    return " ".join(text.split()) if "whitespace" in ignore else text


def _words(text: str, ignore: Sequence[str]) -> str:
    if "punctuation" in ignore:
        text = "".join(
            c for c in text if c not in string.punctuation and unicodedata.category(c)[0] != "P"
        )
    if "articles" in ignore:
        text = re.sub(r"\b(a|an|the)\b", " ", text)
    return text


def _number(text: str) -> str:
    whole, _, fraction = text.lstrip("+-−").replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if text[0] in "-−" and number != "0" else number
