"""The figures that our head is to meet."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

ResultRow = dict[str, Any]
HEADER = ["target", "found", "wanted", ""]


def targets(cases: Sequence[dict[str, Any]], machine: dict[str, Any]) -> Iterator[ResultRow]:
    """Each target with the figure that was measured, at the shape of the first case, log-prob and entropy."""
    heads = [c for c in cases if c["operation"] == "kernels" and c["outputs"] == ["logprob", "entropy"]]
    same = [c for c in heads if c["shape"] == heads[0]["shape"]]

    def rows(kind: str, *, sparse: bool = False) -> list[ResultRow]:
        """Those that were measured; the fastest first."""
        measured = [r for c in same if c["pass"] == kind and bool(c["dead_rows"]) == sparse for r in c["rows"]]
        return sorted((r for r in measured if r["status"] == "measured"), key=lambda r: r["seconds"]["median"])

    train, forward = rows("train"), rows("forward")
    recomputing = [row for row in ours(train) if row["provider"].endswith("-recompute")]
    kept = [row for row in ours(train) if row not in recomputing]
    yield _ratio("train, tiles kept ÷ sustained products", kept, same, 0, 1.15)
    yield _ratio("train, recomputing ÷ sustained products", recomputing, same, 1, 1.15)
    yield _ratio("forward ÷ sustained products", ours(forward), same, 0, 1.12)
    yield _against_others(train)
    yield _dead_rows(ours(rows("train", sparse=True)), ours(train))
    yield _memory(recomputing, same)
    yield _error([*train, *forward], 1e-4 if "gpu" in machine else 1e-6)  # a GPU's tensor cores cut sums off


def ours(rows: Iterable[ResultRow]) -> list[ResultRow]:
    return [row for row in rows if row["provider"].startswith("burnish")]


def _ratio(what: str, rows: list[ResultRow], cases: list[dict[str, Any]], which: int, wanted: float) -> ResultRow:
    """The fastest row over a floor of its case: the first with logits kept, the second with logits recomputed."""
    if not rows:
        return _target(what, None, f"≤ {wanted}")
    row = rows[0]
    floors = next(list(case["floor"]) for case in cases if any(row is other for other in case["rows"]))
    ratio = row["ratio"][floors[which]]
    text = f"{ratio:.3f} of {floors[which]} ({row['provider']}, {1000 * row['seconds']['median']:.1f} ms)"
    return _target(what, text, f"≤ {wanted}", ratio <= wanted)


def _against_others(rows: list[ResultRow]) -> ResultRow:
    what, others = "train ÷ the fastest of the others", [row for row in rows if row not in ours(rows)]
    if not others or not ours(rows):
        return _target(what, None, "≤ 1")
    ratio = ours(rows)[0]["seconds"]["median"] / others[0]["seconds"]["median"]
    return _target(what, f"{ratio:.2f} ({others[0]['provider']})", "≤ 1", ratio <= 1)


def _dead_rows(sparse: list[ResultRow], rows: list[ResultRow]) -> ResultRow:
    what, dense = "backward with 80 % dead rows ÷ with none", {row["provider"]: row for row in rows}
    for row in sparse:
        if row["provider"] in dense:
            ratio = row["backward"]["median"] / dense[row["provider"]]["backward"]["median"]
            return _target(what, f"{ratio:.2f} ({row['provider']})", "≤ 0.3", ratio <= 0.3)
    return _target(what, None, "≤ 0.3")


def _memory(recomputing: list[ResultRow], cases: list[dict[str, Any]]) -> ResultRow:
    what, known = "extra memory, recomputing, less gradients", [r for r in recomputing if r["extra_bytes"] is not None]
    if not cases:
        return _target(what, None, "≤ 0.35 GB + float32 dW")
    tokens, width, vocab = cases[0]["shape"]
    bound = 0.35e9 + 4 * vocab * width
    wanted = f"≤ {bound / 1e9:.3f} GB (0.35 + float32 dW)"
    if not known:
        return _target(what, None, wanted)
    extra = known[0]["extra_bytes"] - getattr(torch, cases[0]["dtype"]).itemsize * width * (tokens + vocab)
    return _target(what, f"{extra / 1e9:.3f} GB", wanted, extra <= bound)


def _error(rows: list[ResultRow], wanted: float) -> ResultRow:
    """The largest of all of ours."""
    what, worst = "error of a log-prob, in nats", dict[str, float]()
    for row in rows:
        name = "burnish" if row["provider"].startswith("burnish") else row["provider"]
        worst[name] = max(worst.get(name, 0.0), row["errors"].get("logprob", 0.0))
    if "burnish" not in worst:
        return _target(what, None, f"≤ {wanted:.0e}")
    others = ", ".join(f"{name} {error:.1e}" for name, error in worst.items() if name != "burnish")
    text = f"{worst['burnish']:.1e}" + (f" ({others})" if others else "")
    return _target(what, text, f"≤ {wanted:.0e}", worst["burnish"] <= wanted)


def _target(what: str, found: str | None, wanted: str, met: bool | None = None) -> ResultRow:
    return {"what": what, "found": found or "not measured", "wanted": wanted, "met": met}


def cells(targets: Iterable[ResultRow]) -> Iterator[list[str]]:
    for target in targets:
        met = "" if target["met"] is None else "met" if target["met"] else "missed"
        yield [target["what"], target["found"], target["wanted"], met]
