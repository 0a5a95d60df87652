"""Equality of answers as mathematics: numbers, expressions, sets, intervals."""

import importlib.util
import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from ..rollouts.sample import Row, Sample

_FRACTION = re.compile(r"(?<!\d)[¼-¾⅐-⅞]")  # after a digit it is part of a mixed number


@dataclass(frozen=True)
class MathEquivalence:
    """1 if the last mathematical expression of the completion equals the row's answer, by
    Math-Verify, otherwise 0.

    42, 42.0, $42$ and \\boxed{42} are the same answer, and so are 1/2, 0.5 and \\frac12. An
    expression in \\boxed{} is read first. A completion without any mathematics is wrong (0). The
    reward does not apply to a row whose answer can't be read (None). The answer is in ``column``:
    text, LaTeX with or without dollar signs, or a number; of a text with #### (GSM8K), the part
    after it.

    Simplifying an expression may take forever, so name it in a configuration, which has it run in a
    process of its own, or wrap it in `isolated`. The library's own timeouts use alarms, which work
    only in the main thread: they are off.
    """

    column: str = "answer"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("needs the package math-verify; pip install 'burnish[math]'")

    @property
    def columns(self) -> Sequence[str]:
        return (self.column,)

    def __call__(self, row: Row, sample: Sample) -> float | None:
        library = importlib.import_module("math_verify")  # imported late: sympy takes a second
        # it warns that its timeouts are off
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        if row[self.column] is None:
            return None
        gold = str(row[self.column]).rpartition("####")[2].strip()
        if "$" not in gold and "\\boxed" not in gold:
            gold = f"\\boxed{{{gold}}}"  # so that all of it is read as one expression
        expected = _parse(library, gold)
        # What it can't read, it gives as a text.
        if all(isinstance(expression, str) for expression in expected):
            return None
        answer = _parse(library, sample.text)
        return float(library.verify(expected, answer, timeout_seconds=None, raise_on_error=True))


def _parse(library: ModuleType, text: str) -> list[object]:
    """The expressions of a text, as sympy has them, each perhaps beside its text."""
    text = _FRACTION.sub(_written_out, text.replace("−", "-"))
    kinds = [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]
    return list(library.parse(text, kinds, parsing_timeout=None, raise_on_error=True))


def _written_out(sign: re.Match[str]) -> str:
    """1/2 of ½"""
    return unicodedata.normalize("NFKC", sign[0]).replace("⁄", "/")
