"""The model card of a trained model: ``README.md`` beside its weights, with the header that the Hub
reads.

All of it is known by the run: the base model and its license, the data with their account, the
losses with their papers, the command, the versions and what was measured on held-out data. No
network is asked. Directories of the machine are left out, as cards are published.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from yaml import YAMLError

from ..redaction import hide
from ..train.losses import Term
from ..train.mix import hyper_parameters
from .checkpoint import writing
from .record import FILE, parts_of
from .report import entries
from .storage import sync, write

# What the Hub shows a model of this class for, by the end of the class's name.
_TASKS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}
_LICENSE = ("license", "license_name", "license_link")
# that leads to a file, without the file itself
_DIRECTORY = re.compile(r"(?<![\w:./~])~?/(?:[^/\s'\"=,:]+/)*")
_LONGEST = 2000  # characters of a command


def write_cards(training: Any, entry: Mapping[str, Any]) -> None:
    """Write the cards of the trained model, and of its adapter if there is one; the main process
    calls it.

    Args:
        training: the `Training`, whose model and curves are written.
        entry: what the record has of this start, see `record.recorded`.
    """
    curves = training.directory / "curves.png"
    for name in ("model", "adapter"):
        directory = training.directory / name
        if not directory.is_dir():
            continue
        card = make_card(training, entry, adapter=name == "adapter")
        with writing("the model card", training.checkpoints):
            if curves.exists():
                write(directory / curves.name, [curves.read_bytes()])
            write(directory / "README.md", [str(card).encode()])
            sync(directory)


def make_card(training: Any, entry: Mapping[str, Any], *, adapter: bool) -> ModelCard:
    """The card of the model, or of the adapter alone."""
    header = header_of(entry, adapter=adapter)
    what = "Adapter of" if adapter else "Fine-tuned from"
    sections = [
        f"# {what} {_cell(base_name(entry))}",
        _introduction(training, entry, adapter=adapter),
        "## Data",
        *_data(training, entry),
        "## Losses",
        "\n".join(_loss_lines(training.losses)),
        *_measured(training.directory, _step_of(training)),
        "## How it was made",
        *_making(entry),
    ]
    text = "\n\n".join(sections)
    return ModelCard(hide(f"---\n{header.to_yaml()}\n---\n\n{text}\n"))


def base_name(entry: Mapping[str, Any]) -> str:
    """The name of the base model on the Hub, or that of its directory."""
    name = entry["model"]["name"] or entry["model"]["architecture"]
    return Path(name).name if Path(name).exists() or Path(name).is_absolute() else str(name)


def header_of(entry: Mapping[str, Any], *, adapter: bool) -> ModelCardData:
    """The header: base model and license, data sets of the Hub, library, task and tags."""
    base = base_metadata(entry["model"])
    architecture = entry["model"]["architecture"]
    task = next((task for ending, task in _TASKS.items() if architecture.endswith(ending)), None)
    published = [part["source"] for part in entry["data"] if part.get("revision")]
    relation = "adapter" if adapter else "finetune"
    return ModelCardData(
        base_model=base.get("base_model"),
        base_model_relation=relation if "base_model" in base else None,
        datasets=list(dict.fromkeys(published)) or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=task,
        tags=["burnish", entry["recipe"]],
        **{name: base[name] for name in _LICENSE if name in base},
    )


def base_metadata(model: Mapping[str, Any]) -> dict[str, Any]:
    """Name and license of the base model, as far as they are known here.

    A model of the Hub has its name, and its license if its card was downloaded. A directory has
    what its own card says.
    """
    name = model["name"] or ""
    if Path(name).is_dir():
        said = _header(Path(name) / "README.md")
        return {key: said[key] for key in ("base_model", *_LICENSE) if said.get(key)}
    if not name or Path(name).is_absolute():
        return {}
    card = try_to_load_from_cache(name, "README.md", revision=model["revision"])
    said = _header(Path(card)) if isinstance(card, str) else {}
    return {"base_model": name, **{key: said[key] for key in _LICENSE if said.get(key)}}


def _header(card: Path) -> dict[str, Any]:
    """The header of a card; nothing of one that is not there, or that can't be read."""
    with suppress(OSError, ValueError, TypeError, YAMLError):
        # What others wrote there may be no license of the Hub's list, or no text at all.
        data: Any = ModelCard(card.read_text(), ignore_metadata_errors=True).data
        header: dict[str, Any] = data.to_dict()
        return {key: value for key, value in header.items() if isinstance(value, str)}
    return {}


def _introduction(training: Any, entry: Mapping[str, Any], *, adapter: bool) -> str:
    purpose = (inspect.getdoc(type(training.context.config)) or "").partition("\n")[0]
    revision = entry["model"]["revision"]
    of_revision = f" (revision `{revision}`)" if revision else ""
    what = f"An adapter of `{base_name(entry)}`" if adapter else f"`{base_name(entry)}`"
    lines = [
        f"{what}{of_revision}, trained by the recipe `{entry['recipe']}` of burnish in {_step_of(training):,} steps.",
        f"The recipe: {purpose}",
    ]
    config = training.context.config
    if config.load_best_model_at_end and training.best is not None:
        lines.append(
            f"The weights are those of step {training.best:,}, the best by `{config.keep_best}`."
        )
    return "\n".join(lines)


def _data(training: Any, entry: Mapping[str, Any]) -> Iterator[str]:
    """A table of the parts of the data, and what was left out of them."""
    stream = training.context.stream
    trained = entry["data"] if stream is None else parts_of(stream.accounting, ())
    parts = [
        *(("training", part) for part in trained),
        *(("held out", part) for part in entry["eval_data"]),
    ]
    rows = []
    for use, part in parts:
        numbers = [f"{part[name]:,}" for name in ("read", "kept", "tokens", "trained_tokens")]
        revision = part.get("revision") or ""
        digest = (part.get("sha256") or "")[:16]
        rows.append([use, _cell(_public(part["source"])), *numbers, revision, digest])
    header = [
        "use",
        "source",
        "rows read",
        "kept",
        "tokens",
        "of them trained",
        "revision",
        "SHA-256 of the rows",
    ]
    yield _table(header, rows)
    for use, part in parts:
        skipped = [f"{count:,} {kind}" for kind, count in part["skipped"].items()]
        if skipped:
            yield f"Left out of {_public(part['source'])} ({use}): {', '.join(skipped)}."


def _loss_lines(losses: Mapping[str, Term]) -> Iterator[str]:
    """A line for each loss that is trained on: coefficient, hyper-parameters, what it is, and its
    paper.
    """
    for name, term in losses.items():
        if not term.coefficient:
            continue
        function = getattr(term.function, "func", term.function)
        values = {key: parameter.default for key, parameter in hyper_parameters(function).items()}
        values |= getattr(term.function, "keywords", {})
        numbers = [
            f"{key}={value}"
            for key, value in values.items()
            if isinstance(value, int | float | str)
        ]
        of = f" ({', '.join(numbers)})" if numbers else ""
        documented = inspect.getdoc(function) or ""
        line = f"- `{name}`, coefficient {term.coefficient:g}{of}: {documented.partition(chr(10))[0]}".rstrip(
            ": "
        )
        paper = paper_of(documented)
        yield f"{line} {paper}" if paper else line


def paper_of(docstring: str) -> str:
    """The paragraph of a docstring that names the paper, in one line; "" if there is none."""
    found = re.search(r"^\s*(Paper: .*?)(?:\n\s*\n|\Z)", docstring, flags=re.S | re.M)
    return " ".join(found[1].split()) if found else ""


def _step_of(training: Any) -> int:
    """The step whose weights the model has: the last one, or the best one."""
    ends_with_best = training.context.config.load_best_model_at_end and training.best is not None
    return int(training.best if ends_with_best else training.step)


def _measured(directory: Path, step: int) -> Iterator[str]:
    """The held-out metrics before and after training, and the curves; nothing where there are none.

    Args:
        step: whose weights the model has.
    """
    lines = (line for line in entries(directory / "metrics.jsonl") if line["step"] <= step)
    evaluated = [line for line in lines if _held_out(line)]
    if evaluated:
        first, last = evaluated[0], evaluated[-1]
        names = sorted({*_held_out(first), *_held_out(last)})
        rows = [[_cell(name), _number(first.get(name)), _number(last.get(name))] for name in names]
        yield "## Held-out data"
        yield _table(["metric", f"step {first['step']}", f"step {last['step']}"], rows)
    if (directory / "curves.png").exists():
        yield "## Curves"
        yield "![Metrics over the steps](curves.png)"


def _held_out(line: Mapping[str, object]) -> list[str]:
    return [name for name in line if name.startswith("eval/")]


def _making(entry: Mapping[str, Any]) -> Iterator[str]:
    """The command, the devices and the versions."""
    yield f"    {_public(entry['command'])[:_LONGEST]}"
    yield "As a call in Python:"
    yield f"    {_public(entry['call'])[:_LONGEST]}"
    devices = [rank["device"] for rank in entry["ranks"]]
    counted = [f"{devices.count(device)} x {device}" for device in dict.fromkeys(devices)]
    yield f"Ranks: {', '.join(counted)}. Seed: {entry['seed']}. All of it is in `{FILE}` of the run."
    versions = [
        [name, version]
        for name, version in entry["versions"].items()
        if version and name != "platform"
    ]
    yield _table(["package", "version"], versions)


def _public(text: str) -> str:
    """A text without the directories of absolute paths."""
    return _DIRECTORY.sub("", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
