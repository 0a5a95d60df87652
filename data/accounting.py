"""Accounting of an encoded dataset: every row is counted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from datasets import Dataset, List, Value

from .records import Records

# columns that an encoded dataset has until `summarize` has read them; `_row` stays, for messages
NOTES = {
    "_kind": Value("string"),
    "_problem": Value("string"),
    "_truncated": Value("bool"),
    "_shortened": Value("bool"),
    "_special": Value("bool"),
    "_keeps_system": Value("bool"),
    "_digests": List(Value("int64")),  # of what the row says, and of what would contradict it
    "_ends": List(Value("int32")),  # of the completions
    "_row": Value("int64"),  # of the records
}


@dataclass(frozen=True)
class Accounting:
    """Counts of rows read, kept and skipped, and of the tokens in them.

    Attributes:
        source: where the rows came from.
        read, kept: rows.
        examples: made from the rows kept: one of each, but two of a pair whose completions are used
            separately, and several of a conversation if the chat template renders a turn
            differently once others follow.
        truncated: examples that `max_length` shortened.
        skipped: rows left out, by kind (`"identical after truncation"`, `"fully masked"`, `"prompt
            too long"`, ...).
        first: by the same kinds, where the first such row is and what is wrong with it; and where
            that of "special" is.
        shortened: examples whose prompt lost its last tokens to the completion: a token spans the
            two, or the chat template renders a prompt alone differently.
        special: examples with the text of a special token in a message.
        own_system: examples with a system message of their own, where all rows were to get one.
        contradictory: examples that another one contradicts: the same pair with chosen and rejected
            swapped, or the same completion labeled the other way.
        labels: how many completions are desirable and undesirable, where there are such labels.
        total_tokens, trained_tokens: of the rows kept; a shared prompt counts once.
        images, image_tokens: those of the examples, and how many of the tokens they are.
        end_tokens: those that end the completions of rows kept, or would end an answer to their
            prompts, in order.
        unused: columns that nothing reads.
        available: rows of the source, unless each of them is used exactly once.
        parts: of a mixture.
    """

    source: str
    read: int
    kept: int
    examples: int
    truncated: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    shortened: int = 0
    special: int = 0
    own_system: int = 0
    contradictory: int = 0
    labels: Mapping[str, int] = field(default_factory=dict)
    total_tokens: int = 0
    trained_tokens: int = 0
    images: int = 0
    image_tokens: int = 0
    max_length: int | None = None
    end_tokens: tuple[int, ...] = ()
    unused: tuple[str, ...] = ()
    available: int | None = None
    parts: tuple["Accounting", ...] = ()

    def __str__(self) -> str:
        lines = [self._headline()]
        if self.parts:
            for part in self.parts:
                lines += [f"  {line}" for line in str(part).split("\n")]
            return "\n".join(lines)
        lines += [
            f"  {count:,} skipped, {kind}; the first: {self.first[kind]}"
            for kind, count in self.skipped.items()
        ]
        if self.truncated:
            lines.append(f"  {self.truncated:,} truncated to max_length={self.max_length}")
        if self.shortened:
            lines.append(
                f"  {self.shortened:,} where the prompt's last tokens went to the completion"
            )
        if self.special:
            lines.append(
                f"  {self.special:,} with a special token in a message; the first: {self.first['special']}"
            )
        if self.own_system:
            lines.append(
                f"  {self.own_system:,} that keep a system message of their own, instead of system_prompt"
            )
        if self.contradictory:
            lines += [
                f"  {self.contradictory:,} contradictory: another row has the same completions with the opposite label"
            ]
        if self.labels:
            counts = ", ".join(f"{count:,} {label}" for label, count in self.labels.items())
            empty = "" if all(self.labels.values()) else ": one class is empty"
            lines.append(f"  {counts}{empty}")
        if self.unused:
            lines.append(f"  unused columns: {', '.join(self.unused)}")
        if "system" in self.unused:
            lines[-1] += "; columns: {system: system_prompt} begins conversations with it"
        return "\n".join(lines)

    def _headline(self) -> str:
        examples = f" as {self.examples:,} examples" if self.examples != self.kept else ""
        of = "" if self.available is None else f" of {self.available:,}"
        trained = f", {self.trained_tokens:,} of them trained" if self.trained_tokens else ""
        rows = f"{self.read:,} rows read{of}, {self.kept:,} kept{examples}"
        images = ""
        if self.images:
            images = f"; {self.images:,} images, {self.image_tokens:,} of the tokens"
        return f"{self.source}: {rows}; {self.total_tokens:,} tokens{trained}{images}"


def summarize(
    encoded: Dataset,
    records: Records,
    *,
    labeled: bool,
    max_length: int | None,
    unused: Sequence[str],
) -> tuple[npt.NDArray[np.int64], Accounting]:
    """The examples to keep, and the account of all rows; ``labeled``: whether there is a column
    `desirable`.
    """
    table = encoded.with_format("arrow")[:]  # memory-mapped where the dataset is
    kinds = table["_kind"]
    rows = table["_row"]
    problems = table["_problem"]
    kept = np.flatnonzero(pc.is_null(kinds))
    skipped = {
        each["values"]: each["counts"] for each in pc.value_counts(kinds.drop_null()).to_pylist()
    }
    firsts = {kind: pc.index(kinds, kind).as_py() for kind in skipped}
    special = pc.index(table["_special"], True).as_py()
    # a row that is skipped has no tokens
    trained = pc.list_flatten(pc.list_flatten(table["trained"]))
    desirable = _total(table["desirable"]) if labeled else 0
    image_lengths = _image_lengths(table)
    statements, contradictions = pc.list_flatten(table["_digests"]).to_numpy().reshape(-1, 2).T
    first = {
        kind: f"{records.where(rows[at].as_py())}: {problems[at]}" for kind, at in firsts.items()
    }
    if special >= 0:
        first["special"] = records.where(rows[special].as_py())
    return kept, Accounting(
        source=records.source,
        read=len(records.dataset),
        kept=len(records.dataset) - sum(skipped.values()),
        examples=len(kept),
        truncated=_total(table["_truncated"]),
        skipped=skipped,
        first=first,
        shortened=_total(table["_shortened"]),
        special=_total(table["_special"]),
        own_system=_total(table["_keeps_system"]),
        contradictory=int(np.isin(contradictions, statements).sum()),
        labels={"desirable": desirable, "undesirable": len(kept) - desirable} if labeled else {},
        total_tokens=_total(pc.list_value_length(table["prompt"])) + len(trained),
        trained_tokens=_total(trained),
        images=len(image_lengths),
        image_tokens=int(image_lengths.sum()),
        max_length=max_length,
        end_tokens=tuple(sorted(pc.unique(pc.list_flatten(table["_ends"])).to_pylist())),
        unused=tuple(unused),
        available=records.available,
    )


def _image_lengths(table: Any) -> npt.NDArray[np.int64]:
    """The tokens of each image of the examples; of a row that is skipped there are none."""
    if "images" not in table.column_names:
        return np.zeros(0, np.int64)
    images = table["images"].combine_chunks().flatten()
    lengths: npt.NDArray[np.int64] = images.field("length").to_numpy().astype(np.int64)
    return lengths


def _total(column: Any) -> int:
    return int(pc.sum(column).as_py() or 0)


def combine(parts: Sequence[Accounting], source: str | None = None) -> Accounting:
    """The account of a mixture; or of one ``source`` whose rows were counted one batch after
    another.
    """
    values: dict[str, Any] = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(Accounting)
        if field.type is int
    }
    # a sum of them would drop zeros
    counters = {"skipped": Counter[str](), "labels": Counter[str]()}
    for part, (name, counter) in product(parts, counters.items()):
        counter.update(getattr(part, name))
    values |= {name: dict(counter) for name, counter in counters.items()}
    values["end_tokens"] = tuple(sorted({token for part in parts for token in part.end_tokens}))
    values["first"] = {
        kind: where for part in reversed(parts) for kind, where in part.first.items()
    }
    if source is not None:
        return replace(parts[0], source=source, **values)
    return Accounting(
        f"{len(parts)} parts", **values, max_length=parts[0].max_length, parts=tuple(parts)
    )
