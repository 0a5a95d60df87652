"""Who calls an objective what: a page of our names beside those of other frameworks.

    python -m burnish.benchmarks.docs.names

writes docs/names.md from names.yaml. The tests compare each function that the table names with
ours, value and gradient.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .markdown import table, wrapped

TABLE = Path(__file__).with_name("names.yaml")
PAGE = Path(__file__).parents[2] / "docs" / "names.md"
COMMAND = "python -m burnish.benchmarks.docs.names"

FRAMEWORKS = {  # and the versions that are compared
    "TRL": "1.16",
    "verl": "0.9.1",
    "SkyRL": "0.3.0",
    "prime-rl": "0.8.0",
    "OpenRLHF": "0.11.2",
    "torchtune": "0.6.1",
    "Liger": "0.8.5",
    "AReaL": "1.0.4",
    "slime": "0.3.1",
    "LLaMA-Factory": "0.9.6.dev0",
}

# Losses for which no row was written: none of these frameworks was found to have them.
NOWHERE = [
    "alpha_beta_divergence",
    "bradley_terry_ties",
    "chi_po",
    "dpo_positive",
    "dro",
    "hl_gauss",
    "length_regularized_dpo",
    "minillm",
    "ordinal_preference",
    "plackett_luce",
    "score_regression",
    "skew_forward_kl",
    "skew_reverse_kl",
    "taid",
    "tdpo1",
    "tdpo2",
    "topr",
    "z_loss",
]

HEAD = """# Who calls it what

The names of our objectives in other frameworks, and what makes ours theirs. A check mark says that
a test compares value and gradient with the framework's own function, on its padded batch; such
tests run in an environment that `tests/support/tools/install_peers` makes. "(read)" says that the
framework's source was read and not run; without either, the name is from its documentation.

"""

TAIL = """
Of theirs ours lack: SPIRAL's baseline, a running mean of each role's rewards (prime-rl `rae`), and
entropy-adaptive fine-tuning (LLaMA-Factory `use_eaft_loss`). axolotl 0.19 trains by TRL's losses;
its distillation is `forward_kl` of a teacher's top k, and its EBFT a `reinforce`.
"""


def text() -> str:
    """The page."""
    rows = yaml.safe_load(TABLE.read_text())
    versions = [f"{name} {version}" for name, version in FRAMEWORKS.items()]
    page = HEAD + f"Compared with {', '.join(versions)}.\n\n"
    page += table(["ours", *FRAMEWORKS], (list(_names(name, row)) for name, row in rows.items()))
    page += "\n\nIn none of them found: " + ", ".join(f"`{name}`" for name in NOWHERE) + ".\n"
    page += TAIL
    page += (
        "\n## What makes ours theirs\n\nAnd where theirs differs from its paper, or from ours.\n\n"
    )
    remarks = (remark for name, row in rows.items() for remark in _remarks(name, row))
    page += table(["objective", "there", "ours is theirs with", "theirs differs"], remarks)
    return wrapped(page)


def _names(objective: str, row: dict[str, dict[str, str]]) -> Iterator[str]:
    yield f"`{objective}`"
    for framework in FRAMEWORKS:
        entry = row.get(framework)
        if entry is None:
            yield ""
            continue
        yield entry["name"] + _evidence(entry)


def _evidence(entry: dict[str, str]) -> str:
    if "function" in entry or "test" in entry:
        return " ✓"
    return " (read)" if "read" in entry else ""


def _remarks(objective: str, row: dict[str, dict[str, str]]) -> Iterator[list[Any]]:
    for framework, entry in row.items():
        if "ours" in entry or "differs" in entry:
            there = f"{framework}: {entry['name']}"
            yield [f"`{objective}`", there, entry.get("ours", ""), entry.get("differs", "")]


if __name__ == "__main__":
    PAGE.write_text(text())
