"""Arguments and results of the experiments."""

import json
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

from ..operation import Json
from ..report import versions

RESULTS = Path(__file__).parents[1] / "results"


def chosen(arguments: Sequence[str], known: Iterable[str]) -> list[str]:
    """The recipes named on the command line, or all of them."""
    known = list(known)
    for recipe in arguments:
        if recipe not in known:
            raise SystemExit(f"no recipe {recipe!r}; wanted some of {', '.join(known)}")
    return list(arguments) or known


def read_metrics(run: Path) -> list[Json]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def earlier(path: Path) -> Json:
    """The results so far, of which a run replaces those of its own recipes; dated today."""
    results: Json = json.loads(path.read_text()) if path.exists() else {}
    return results | {
        "date": date.today().isoformat(),
        "versions": versions(("torch", "transformers")),
    }


def write(path: Path, results: Json) -> None:
    path.write_text(json.dumps(results, indent=2) + "\n")
