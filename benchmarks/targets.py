"""The figures that our head is to meet, from whatever was measured."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .report import Case

Row = dict[str, Any]


def targets(cases: Sequence[Case], machine: Row) -> Iterator[Row]:
    """What the head is to meet, and what was found: at the shape of the first case, log-prob and entropy."""
    heads = [c for c in cases if c["operation"] == "kernels" and c["outputs"] == ["logprob", "entropy"]]
    same = [c for c in heads if c["shape"] == heads[0]["shape"]]

    def rows(kind: str, *, sparse: bool = False) -> list[Row]:
        """Of those who were measured; the fastest first."""
        found = [r for c in same if c["pass"] == kind and bool(c["dead_rows"]) == sparse for r in c["rows"]]
        return sorted((r for r in found if r["status"] == "measured"), key=lambda r: r["seconds"]["median"])

    train, forward = rows("train"), rows("forward")
    again = [row for row in ours(train) if row["provider"].endswith("-recompute")]
    kept = [row for row in ours(train) if row not in again]
    yield _ratio("train, tiles kept ÷ sustained products", kept, same, 0, 1.15)
    yield _ratio("train, recomputing ÷ sustained products", again, same, 1, 1.15)
    yield _ratio("forward ÷ sustained products", ours(forward), same, 0, 1.12)
    yield _against_others(train)
    yield _dead_rows(ours(rows("train", sparse=True)), ours(train))
    yield _memory(again, same)
    yield _error([*train, *forward], on_gpu="gpu" in machine)


def ours(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["provider"].startswith("burnish")]


def _ratio(what: str, rows: list[Row], cases: list[Case], which: int, wanted: float) -> Row:
    """Of the fastest; ``which`` of the floors of its case: with logits kept, or computed again."""
    if not rows:
        return _target(what, None, f"≤ {wanted}")
    row = rows[0]
    floors = next(list(case["floor"]) for case in cases if any(row is other for other in case["rows"]))
    found = row["ratio"][floors[which]]
    text = f"{found:.3f} of {floors[which]} ({row['provider']}, {1000 * row['seconds']['median']:.1f} ms)"
    return _target(what, text, f"≤ {wanted}", found <= wanted)


def _against_others(rows: list[Row]) -> Row:
    what, others = "train ÷ the fastest of the others", [row for row in rows if row not in ours(rows)]
    if not others or not ours(rows):
        return _target(what, None, "≤ 1")
    found = ours(rows)[0]["seconds"]["median"] / others[0]["seconds"]["median"]
    return _target(what, f"{found:.2f} ({others[0]['provider']})", "≤ 1", found <= 1)


def _dead_rows(sparse: list[Row], rows: list[Row]) -> Row:
    what, whole = "backward with 80 % dead rows ÷ with none", {row["provider"]: row for row in rows}
    for row in sparse:
        if row["provider"] in whole:
            found = row["backward"]["median"] / whole[row["provider"]]["backward"]["median"]
            return _target(what, f"{found:.2f} ({row['provider']})", "≤ 0.3", found <= 0.3)
    return _target(what, None, "≤ 0.3")


def _memory(again: list[Row], cases: list[Case]) -> Row:
    what, known = "extra memory, recomputing, less gradients", [r for r in again if r["extra_bytes"] is not None]
    if not cases:
        return _target(what, None, "≤ 0.35 GB + float32 dW")
    tokens, width, vocab = cases[0]["shape"]
    bound = 0.35e9 + 4 * vocab * width
    wanted = f"≤ {bound / 1e9:.3f} GB (0.35 + float32 dW)"
    if not known:
        return _target(what, None, wanted)
    itemsize = getattr(torch, cases[0]["dtype"]).itemsize
    extra = known[0]["extra_bytes"] - itemsize * width * (tokens + vocab)
    return _target(what, f"{extra / 1e9:.3f} GB", wanted, extra <= bound)


def _error(rows: list[Row], *, on_gpu: bool) -> Row:
    """The largest of all of ours: with a GPU's tensor cores, which cut sums off, or without."""
    wanted = 1e-4 if on_gpu else 1e-6
    what = "error of a log-prob, in nats"
    worst: dict[str, float] = {}
    for row in rows:
        name = "burnish" if row["provider"].startswith("burnish") else row["provider"]
        worst[name] = max(worst.get(name, 0.0), row["errors"].get("logprob", 0.0))
    if "burnish" not in worst:
        return _target(what, None, f"≤ {wanted:.0e}")
    others = ", ".join(f"{name} {error:.1e}" for name, error in worst.items() if name != "burnish")
    text = f"{worst['burnish']:.1e}" + (f" ({others})" if others else "")
    return _target(what, text, f"≤ {wanted:.0e}", worst["burnish"] <= wanted)


def _target(what: str, found: str | None, wanted: str, met: bool | None = None) -> Row:
    return {"what": what, "found": found or "not measured", "wanted": wanted, "met": met}
