"""Accounting of an encoded dataset: every row is counted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, List, Value

from .records import Records

# Columns that an encoded dataset has until `summarize` has read them; `_row` stays, for messages.
NOTES = {
    "_kind": Value("string"),  # of a bad row, such as "prompt too long"; null for a good one
    "_problem": Value("string"),
    "_truncated": Value("bool"),
    "_shortened": Value("bool"),
    "_special": Value("bool"),
    "_keeps_system": Value("bool"),
    "_unknown": Value("int64"),  # tokens that stand for text without tokens
    "_digests": List(Value("int64")),  # of what the row says, and of what would contradict it
    "_ends": List(Value("int32")),  # of the completions
    "_row": Value("int64"),  # of the records
}

# The share of a text's tokens that may be unknown before a run warns. A tokenizer of the text's
# language is well below: SentencePiece covers all but 0.05 % of the characters of its corpus, by
# default. Of another script nearly all is unknown, so that a twentieth of such rows is told too.
MAX_UNKNOWN = 0.05


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
        first: by the same kinds, where the first such row is and what is wrong with it; where that
            of "special" is; and as "unknown", where the row with the most unknown tokens is.
        shortened: examples whose prompt lost its last tokens to the completion: a token spans the
            two, or the chat template renders a prompt alone differently.
        special: examples with the text of a special token in a message.
        own_system: examples with a system message of their own, where all rows were to get one.
        contradictory: examples that another one contradicts: the same pair with chosen and rejected
            swapped, or the same completion labeled the other way.
        labels: how many completions are desirable and undesirable, where there are such labels.
        total_tokens, trained_tokens: of the rows kept; a shared prompt counts once.
        images, image_tokens: those of the examples, and how many of the tokens they are.
        unknown_tokens: those of the rows kept that stand for text without tokens, such as `<unk>`.
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
    unknown_tokens: int = 0
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
        else:
            lines += [f"  {fact}" for fact in self._facts()]
        return "\n".join(lines)

    def _headline(self) -> str:
        """Such as "rows.jsonl: 100 rows read of 200, 98 kept; 5,210 tokens, 2,107 of them trained"."""
        text = f"{self.source}: {self.read:,} rows read"
        if self.available is not None:
            text += f" of {self.available:,}"
        text += f", {self.kept:,} kept"
        if self.examples != self.kept:
            text += f" as {self.examples:,} examples"
        text += f"; {self.total_tokens:,} tokens"
        if self.trained_tokens:
            text += f", {self.trained_tokens:,} of them trained"
        if self.images:
            text += f"; {self.images:,} images, {self.image_tokens:,} of the tokens"
        return text

    @property
    def unknown_share(self) -> float:
        """The share of the text's tokens that are unknown; image tokens are none of the text."""
        return self.unknown_tokens / max(1, self.total_tokens - self.image_tokens)

    def warnings(self) -> list[str]:
        """What is likely wrong with all of the data, though each row can be trained on."""
        told = []
        for part in self.parts or (self,):
            if part.unknown_share > MAX_UNKNOWN:
                told.append(
                    f"{part.source}: the tokenizer does not know {part.unknown_share:.0%} of the "
                    f"tokens, most of them in {part.first['unknown']}, and the model can't tell one "
                    "from another; take a model whose tokenizer knows this language or script"
                )
        return told

    def _facts(self) -> list[str]:
        """What is to be known of the rows, a line each."""
        facts = []
        for kind, count in self.skipped.items():
            facts.append(f"{count:,} skipped, {kind}; the first: {self.first[kind]}")
        counts = {
            f"truncated to max_length={self.max_length}": self.truncated,
            "where the prompt's last tokens went to the completion": self.shortened,
            f"with a special token in a message; the first: {self.first.get('special')}": self.special,
            "that keep a system message of their own, instead of system_prompt": self.own_system,
            "contradictory: another row has the same completions with the opposite label": self.contradictory,
        }
        for fact, count in counts.items():
            if count:
                facts.append(f"{count:,} {fact}")
        if self.unknown_tokens:
            unknown = (
                f"{self.unknown_tokens:,} unknown tokens, {self.unknown_share:.1%} of the text's"
            )
            facts.append(f"{unknown}; most of them: {self.first['unknown']}")
        if self.labels:
            labels = ", ".join(f"{count:,} {label}" for label, count in self.labels.items())
            if not all(self.labels.values()):
                labels += ": one class is empty"
            facts.append(labels)
        if self.unused:
            unused = f"unused columns: {', '.join(self.unused)}"
            if "system" in self.unused:
                unused += "; columns: {system: system_prompt} begins conversations with it"
            facts.append(unused)
        return facts


def summarize(
    encoded: Dataset,
    records: Records,
    *,
    labeled: bool,
    max_length: int | None,
    unused: Sequence[str],
) -> tuple[npt.NDArray[np.int64], Accounting]:
    """Count the rows of an encoded dataset, with its columns `NOTES`.

    Args:
        labeled: whether there is a column `desirable`.

    Returns:
        The indices of the examples to keep, and the account of all rows.
    """
    table = encoded.with_format("arrow")[:]  # memory-mapped where the dataset is
    kinds = table["_kind"]
    rows = table["_row"]
    kept = np.flatnonzero(pc.is_null(kinds))
    skipped: dict[str, int] = {}
    first: dict[str, str] = {}
    for each in pc.value_counts(kinds.drop_null()).to_pylist():
        kind = each["values"]
        at = pc.index(kinds, kind).as_py()
        skipped[kind] = each["counts"]
        first[kind] = f"{records.where(rows[at].as_py())}: {table['_problem'][at]}"
    special = pc.index(table["_special"], True).as_py()
    if special >= 0:  # else there is none
        first["special"] = records.where(rows[special].as_py())
    unknown = _total(table["_unknown"])
    if unknown:
        most = pc.index(table["_unknown"], pc.max(table["_unknown"])).as_py()
        first["unknown"] = records.where(rows[most].as_py())
    # a row that is skipped has no tokens
    trained = pc.list_flatten(pc.list_flatten(table["trained"]))
    image_lengths = _image_lengths(table)
    labels = {}
    if labeled:
        desirable = _total(table["desirable"])
        labels = {"desirable": desirable, "undesirable": len(kept) - desirable}
    # each example that has digests has two: of what it says, and of what would contradict it
    digests = pc.list_flatten(table["_digests"]).to_numpy()
    statements, contradictions = digests.reshape(-1, 2).T
    ends = pc.unique(pc.list_flatten(table["_ends"])).to_pylist()
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
        labels=labels,
        total_tokens=_total(pc.list_value_length(table["prompt"])) + len(trained),
        trained_tokens=_total(trained),
        images=len(image_lengths),
        image_tokens=int(image_lengths.sum()),
        unknown_tokens=unknown,
        max_length=max_length,
        end_tokens=tuple(sorted(ends)),
        unused=tuple(unused),
        available=records.available,
    )


def _image_lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    """The tokens of each image of the examples; of a row that is skipped there are none."""
    if "images" not in table.column_names:
        return np.zeros(0, np.int64)
    images = table["images"].combine_chunks().flatten()
    lengths: npt.NDArray[np.int64] = images.field("length").to_numpy().astype(np.int64)
    return lengths


def _total(column: pa.ChunkedArray) -> int:
    """The sum of numbers, or how many of a column are true; 0 for an empty one."""
    return int(pc.sum(column).as_py() or 0)


def combine(parts: Sequence[Accounting], source: str | None = None) -> Accounting:
    """The account of a mixture; or of one ``source`` whose rows were counted batch after batch."""
    counts: dict[str, Any] = {}
    for each in fields(Accounting):
        if each.type is int:
            counts[each.name] = sum(getattr(part, each.name) for part in parts)
    # Counter's update keeps zeros, which its + would drop: "0 undesirable" is worth a line.
    skipped = Counter[str]()
    labels = Counter[str]()
    first: dict[str, str] = {}
    end_tokens: set[int] = set()
    for part in parts:
        skipped.update(part.skipped)
        labels.update(part.labels)
        first = {**part.first, **first}  # of the earliest part that has one
        end_tokens.update(part.end_tokens)
    whole = replace(
        parts[0],
        **counts,
        skipped=dict(skipped),
        labels=dict(labels),
        first=first,
        end_tokens=tuple(sorted(end_tokens)),
    )
    if source is not None:
        return replace(whole, source=source)
    source = f"{len(parts)} parts"
    return replace(whole, source=source, unused=(), available=None, parts=tuple(parts))
