"""The figures that our head is to meet."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..operation import Json

HEADER = ["target", "found", "wanted", ""]


def targets(cases: Sequence[Json], machine: Json) -> Iterator[Json]:
    """Each target with the figure that was measured, at the shape of the first case, log-prob and
    entropy.
    """
    heads = [
        c for c in cases if c["operation"] == "kernels" and c["outputs"] == ["logprob", "entropy"]
    ]
    same = [c for c in heads if c["shape"] == heads[0]["shape"]]

    def rows(kind: str, *, sparse: bool = False) -> list[Json]:
        """Those that were measured, with the floors of their case; the fastest first."""
        chosen = [c for c in same if c["pass"] == kind and bool(c["dead_rows"]) == sparse]
        measured = [
            r | {"floors": list(c["floor"])}
            for c in chosen
            for r in c["rows"]
            if r["status"] == "measured"
        ]
        return sorted(measured, key=_seconds)

    train, forward = rows("train"), rows("forward")
    recomputing = [row for row in ours(train) if row["provider"].endswith("-recompute")]
    kept = [row for row in ours(train) if row not in recomputing]
    yield _ratio("train, tiles kept ÷ sustained products", kept, 0, 1.15)
    yield _ratio("train, recomputing ÷ sustained products", recomputing, 1, 1.15)
    yield _ratio("forward ÷ sustained products", ours(forward), 0, 1.12)
    yield _against_others(train)
    yield _dead_rows(ours(rows("train", sparse=True)), ours(train))
    yield _memory(recomputing, same)
    # a GPU's tensor cores cut sums off
    yield _error([*train, *forward], 1e-4 if "gpu" in machine else 1e-6)


def ours(rows: Iterable[Json]) -> list[Json]:
    return [row for row in rows if row["provider"].startswith("burnish")]


def _seconds(row: Json) -> float:
    return float(row["seconds"]["median"])


def _ratio(what: str, rows: list[Json], which: int, wanted: float) -> Json:
    """The fastest row over a floor of its case: the first with logits kept, the second with logits
    recomputed.
    """
    for row in rows:
        floor = row["floors"][which]
        ratio = row["ratio"][floor]
        text = f"{ratio:.3f} of {floor} ({row['provider']}, {1000 * _seconds(row):.1f} ms)"
        return _target(what, f"≤ {wanted}", text, ratio <= wanted)
    return _target(what, f"≤ {wanted}")


def _against_others(rows: list[Json]) -> Json:
    what, others = (
        "train ÷ the fastest of the others",
        [row for row in rows if row not in ours(rows)],
    )
    if not others or not ours(rows):
        return _target(what, "≤ 1")
    ratio = _seconds(ours(rows)[0]) / _seconds(others[0])
    return _target(what, "≤ 1", f"{ratio:.2f} ({others[0]['provider']})", ratio <= 1)


def _dead_rows(sparse: list[Json], rows: list[Json]) -> Json:
    what, dense = "backward with 80 % dead rows ÷ with none", {row["provider"]: row for row in rows}
    for row in sparse:
        if row["provider"] in dense:
            ratio = row["backward"]["median"] / dense[row["provider"]]["backward"]["median"]
            return _target(what, "≤ 0.3", f"{ratio:.2f} ({row['provider']})", ratio <= 0.3)
    return _target(what, "≤ 0.3")


def _memory(recomputing: list[Json], cases: list[Json]) -> Json:
    what, known = (
        "extra memory, recomputing, less gradients",
        [r for r in recomputing if r["extra_bytes"] is not None],
    )
    if not cases:
        return _target(what, "≤ 0.35 GB + float32 dW")
    tokens, width, vocab = cases[0]["shape"]
    bound = 0.35e9 + 4 * vocab * width
    wanted = f"≤ {bound / 1e9:.3f} GB (0.35 + float32 dW)"
    if not known:
        return _target(what, wanted)
    extra = known[0]["extra_bytes"] - getattr(torch, cases[0]["dtype"]).itemsize * width * (
        tokens + vocab
    )
    return _target(what, wanted, f"{extra / 1e9:.3f} GB", extra <= bound)


def _error(rows: list[Json], wanted: float) -> Json:
    """The largest of all of ours."""
    what, worst = "error of a log-prob, in nats", dict[str, float]()
    for row in rows:
        name = "burnish" if row["provider"].startswith("burnish") else row["provider"]
        worst[name] = max(worst.get(name, 0.0), row["errors"].get("logprob", 0.0))
    if (error := worst.pop("burnish", None)) is None:
        return _target(what, f"≤ {wanted:.0e}")
    others = ", ".join(f"{name} {other:.1e}" for name, other in worst.items())
    return _target(
        what,
        f"≤ {wanted:.0e}",
        f"{error:.1e}" + (f" ({others})" if others else ""),
        error <= wanted,
    )


def _target(what: str, wanted: str, found: str = "not measured", met: bool | None = None) -> Json:
    return {"what": what, "found": found, "wanted": wanted, "met": met}


def cells(targets: Iterable[Json]) -> list[list[str]]:
    verdicts = {None: "", True: "met", False: "missed"}
    return [
        [target["what"], target["found"], target["wanted"], verdicts[target["met"]]]
        for target in targets
    ]
