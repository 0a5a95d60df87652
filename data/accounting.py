"""The account of an encoded dataset: no row is lost without being counted here."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from datasets import Dataset, List, Value

if TYPE_CHECKING:
    from .records import Records

NOTES = {  # columns that an encoded dataset has until `account` has read them
    "_kind": Value("string"),
    "_problem": Value("string"),
    "_truncated": Value("bool"),
    "_shortened": Value("bool"),
    "_pair": List(Value("int64")),  # digests of prompt + chosen and of prompt + rejected
}


@dataclass(frozen=True)
class Accounting:
    """What became of the rows.

    Attributes:
        source: where they came from.
        read, kept: rows.
        truncated: rows kept that `max_length` shortened.
        skipped: rows left out, by kind (`"identical after truncation"`, `"fully masked"`, `"prompt too long"`, ...).
        first: by the same kinds, where the first such row is and what is wrong with it.
        shortened: rows kept whose prompt lost its last tokens to the completion, because a token spans the two or
            because the chat template renders a prompt alone differently.
        contradictory: rows kept whose pair is also there with chosen and rejected swapped.
        total_tokens, trained_tokens: of the rows kept; a shared prompt counts once.
        unused: columns that nothing reads.
    """

    source: str
    read: int
    kept: int
    truncated: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    shortened: int = 0
    contradictory: int = 0
    total_tokens: int = 0
    trained_tokens: int = 0
    max_length: int | None = None
    unused: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.read:,} rows read, {self.kept:,} kept; "
            f"{self.total_tokens:,} tokens, {self.trained_tokens:,} of them trained"
        ]
        lines += [f"  {count:,} skipped, {kind}; the first: {self.first[kind]}" for kind, count in self.skipped.items()]
        if self.truncated:
            lines.append(f"  {self.truncated:,} truncated to max_length={self.max_length}")
        if self.shortened:
            lines.append(f"  {self.shortened:,} where the prompt's last tokens went to the completion")
        if self.contradictory:
            lines.append(f"  {self.contradictory:,} where another row prefers the other answer of the same pair")
        if self.unused:
            lines.append(f"  unused columns: {', '.join(self.unused)}")
        return "\n".join(lines)


def account(
    encoded: Dataset, records: "Records", *, max_length: int | None, unused: Sequence[str]
) -> tuple[list[int], Accounting]:
    """The rows to keep, and the account of all of them."""
    kept: list[int] = []
    skipped: dict[str, int] = {}
    first: dict[str, str] = {}
    totals = np.zeros(4, dtype=np.int64)
    digests: list[npt.NDArray[np.int64]] = []
    start = 0
    for table in encoded.with_format("arrow").iter(batch_size=1000):
        for row, kind in enumerate(table["_kind"].to_pylist(), start):
            if kind is None:
                kept.append(row)
                continue
            skipped[kind] = skipped.get(kind, 0) + 1
            if kind not in first:
                first[kind] = f"{records.where(row)}: {table['_problem'][row - start].as_py()}"
        # A row that is skipped has no tokens.
        trained = pc.list_flatten(pc.list_flatten(table["trained"]))
        prompt = pc.sum(pc.list_value_length(table["prompt"])).as_py() or 0
        flags = [pc.sum(column).as_py() or 0 for column in (table["_truncated"], table["_shortened"], trained)]
        totals += [*flags, prompt + len(trained)]
        digests.append(pc.list_flatten(table["_pair"]).to_numpy())
        start = len(kept) + sum(skipped.values())
    truncated, shortened, trained_tokens, total_tokens = map(int, totals)
    return kept, Accounting(
        source=records.source,
        read=len(encoded),
        kept=len(kept),
        truncated=truncated,
        skipped=skipped,
        first=first,
        shortened=shortened,
        contradictory=_swapped(np.concatenate(digests).reshape(-1, 2)),
        total_tokens=total_tokens,
        trained_tokens=trained_tokens,
        max_length=max_length,
        unused=tuple(unused),
    )


def _swapped(pairs: npt.NDArray[np.int64]) -> int:
    """How many pairs of digests are there in the other order as well."""
    one_way, other_way = (pairs[:, a] + 3 * pairs[:, b] for a, b in ((0, 1), (1, 0)))  # wraps around: a hash of the two
    return int(np.isin(one_way, other_way).sum())
