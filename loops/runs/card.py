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
from .record import FILE, Entry, parts_of
from .report import entries
from .storage import sync, write

# What the Hub shows a model of this class for, by the end of the class's name.
_TASKS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}
_LICENSE = ("license", "license_name", "license_link")
# A directory in front of a file: /home/me/data/ of /home/me/data/train.jsonl, but nothing of an
# address such as https://huggingface.co.
_DIRECTORY = re.compile(r"(?<![\w:./~])~?/(?:[^/\s'\"=,:]+/)*")
_LONGEST = 2000  # characters of a command


def write_cards(training: Any, entry: Entry, beside: Path, step: int) -> None:
    """Write the cards of the trained model, and of its adapter if there is one.

    The main process calls it.

    Args:
        training: the `Training` that the cards tell of.
        entry: what the record has of this start, see `record.recorded`.
        beside: the directory that holds ``model`` and ``adapter``.
        step: whose weights these are.
    """
    curves = training.directory / "curves.png"
    for name in ("model", "adapter"):
        directory = beside / name
        if not directory.is_dir():
            continue
        card = make_card(training, entry, step, adapter=name == "adapter")
        with writing("the model card", training.checkpoints):
            if curves.exists():  # a card shows pictures of its own directory alone
                write(directory / curves.name, [curves.read_bytes()])
            write(directory / "README.md", [str(card).encode()])
            sync(directory)


def make_card(training: Any, entry: Entry, step: int, *, adapter: bool) -> ModelCard:
    """The card of the model of a step, or of the adapter alone."""
    header = header_of(entry, adapter=adapter)
    what = "Adapter of" if adapter else "Fine-tuned from"
    sections = [
        f"# {what} {_cell(base_name(entry))}",
        _introduction(training, entry, step, adapter=adapter),
        "## Data",
        *_data(training, entry),
        "## Losses",
        "\n".join(_loss_lines(training.losses)),
        *_measured(training.directory, step),
        "## How it was made",
        *_making(entry),
    ]
    text = "\n\n".join(sections)
    return ModelCard(hide(f"---\n{header.to_yaml()}\n---\n\n{text}\n"))


def base_name(entry: Entry) -> str:
    """The name of the base model on the Hub, or of its directory without the path to it."""
    name = str(entry["model"]["name"] or entry["model"]["architecture"])
    is_path = Path(name).exists() or Path(name).is_absolute()
    return Path(name).name if is_path else name


def header_of(entry: Entry, *, adapter: bool) -> ModelCardData:
    """The header: base model and license, data sets of the Hub, library, task and tags."""
    base = base_metadata(entry["model"])
    # A part that was read from the Hub has a revision; a local file must not be named as if it were
    # published.
    published = [part["source"] for part in entry["data"] if part.get("revision")]
    relation = None
    if "base_model" in base:
        relation = "adapter" if adapter else "finetune"
    license: dict[str, Any] = dict(_chosen(base, _LICENSE))
    return ModelCardData(
        base_model=base.get("base_model"),
        base_model_relation=relation,
        datasets=list(dict.fromkeys(published)) or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=_task_of(entry["model"]["architecture"]),
        tags=["burnish", entry["recipe"]],
        **license,
    )


def _task_of(architecture: str) -> str | None:
    """text-generation for Qwen3ForCausalLM"""
    for ending, task in _TASKS.items():
        if architecture.endswith(ending):
            return task
    return None


def _chosen(header: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """The entries of a header under these keys, as far as it has them."""
    return {key: header[key] for key in keys if header.get(key)}


def base_metadata(model: Mapping[str, Any]) -> dict[str, str]:
    """Name and license of the base model, as far as they are known here.

    A model of the Hub has its name, and its license if its card was downloaded. A directory has
    what its own card says.
    """
    name = model["name"] or ""
    if Path(name).is_dir():
        said = _header(Path(name) / "README.md")
        return _chosen(said, ("base_model", *_LICENSE))
    if not name or Path(name).is_absolute():
        return {}
    # The path of the file, None, or an object that says that the Hub has no such file.
    card = try_to_load_from_cache(name, "README.md", revision=model["revision"])
    said = _header(Path(card)) if isinstance(card, str) else {}
    return {"base_model": name, **_chosen(said, _LICENSE)}


def _header(card: Path) -> dict[str, str]:
    """The texts in the header of a card; nothing of one that is not there, or can't be read."""
    with suppress(OSError, ValueError, TypeError, YAMLError):
        # What others wrote there may be no license of the Hub's list, or no text at all.
        data: Any = ModelCard(card.read_text(), ignore_metadata_errors=True).data
        header: dict[str, object] = data.to_dict()
        return {key: value for key, value in header.items() if isinstance(value, str)}
    return {}


def _introduction(training: Any, entry: Entry, step: int, *, adapter: bool) -> str:
    purpose = (inspect.getdoc(type(training.context.config)) or "").partition("\n")[0]
    revision = entry["model"]["revision"]
    of_revision = f" (revision `{revision}`)" if revision else ""
    what = f"An adapter of `{base_name(entry)}`" if adapter else f"`{base_name(entry)}`"
    lines = [
        f"{what}{of_revision}, trained by the recipe `{entry['recipe']}` of burnish in {step:,} steps.",
        f"The recipe: {purpose}",
    ]
    config = training.context.config
    takes_best = config.load_best_model_at_end or config.hub.every == "best"
    if takes_best and step == training.best:
        lines.append(f"The weights are those of step {step:,}, the best by `{config.keep_best}`.")
    return "\n".join(lines)


def _data(training: Any, entry: Entry) -> Iterator[str]:
    """A table of the parts of the data, and what was left out of them."""
    stream = training.context.stream
    # What a stream has read is known at the end of the run, not when its entry was written.
    trained = entry["data"] if stream is None else parts_of(stream.accounting, ())
    parts = [("training", part) for part in trained]
    parts += [("held out", part) for part in entry["eval_data"]]
    rows = []
    for use, part in parts:
        numbers = [f"{part[name]:,}" for name in ("read", "kept", "tokens", "trained_tokens")]
        revision = part.get("revision") or ""
        digest = (part.get("sha256") or "")[:16]
        rows.append([use, _cell(_public(part["source"])), *numbers, revision, digest])
    counts = ("rows read", "kept", "tokens", "of them trained")
    yield _table(["use", "source", *counts, "revision", "SHA-256 of the rows"], rows)
    for use, part in parts:
        skipped = [f"{count:,} {kind}" for kind, count in part["skipped"].items()]
        if skipped:
            yield f"Left out of {_public(part['source'])} ({use}): {', '.join(skipped)}."


def _loss_lines(losses: Mapping[str, Term]) -> Iterator[str]:
    """A line for each loss that is trained on.

    - `dpo`, coefficient 1 (beta=0.1, label_smoothing=0.0): Direct preference optimization: ... Paper: ...
    """
    for name, term in losses.items():
        if not term.coefficient:
            continue  # it is only measured
        # Of a partial, the function and the hyper-parameters that were set.
        function = getattr(term.function, "func", term.function)
        values = {key: parameter.default for key, parameter in hyper_parameters(function).items()}
        values |= getattr(term.function, "keywords", {})
        documented = inspect.getdoc(function) or ""
        summary, _, _ = documented.partition("\n")
        line = f"- `{name}`, coefficient {term.coefficient:g}{_in_brackets(values)}: {summary}"
        line = line.rstrip(": ")  # of a loss without a docstring
        paper = paper_of(documented)
        yield f"{line} {paper}" if paper else line


def _in_brackets(values: Mapping[str, object]) -> str:
    """The numbers and texts among hyper-parameters: " (beta=0.1, label_smoothing=0.0)"."""
    shown = []
    for key, value in values.items():
        if isinstance(value, int | float | str):
            shown.append(f"{key}={value}")
    return f" ({', '.join(shown)})" if shown else ""


def paper_of(docstring: str) -> str:
    """The paragraph of a docstring that names the paper, in one line; "" if there is none."""
    found = re.search(r"^\s*(Paper: .*?)(?:\n\s*\n|\Z)", docstring, flags=re.S | re.M)
    return " ".join(found[1].split()) if found else ""


def _measured(directory: Path, step: int) -> Iterator[str]:
    """The held-out metrics before and after training, and the curves; nothing where there are none.

    Args:
        step: whose weights the model has.
    """
    evaluated = []
    for line in entries(directory / "metrics.jsonl"):
        if line["step"] <= step and _held_out(line):
            evaluated.append(line)
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


def _making(entry: Entry) -> Iterator[str]:
    """The command, the devices and the versions."""
    yield f"    {_public(entry['command'])[:_LONGEST]}"
    yield "As a call in Python:"
    yield f"    {_public(entry['call'])[:_LONGEST]}"
    devices = [rank["device"] for rank in entry["ranks"]]
    counted = [f"{devices.count(device)} x {device}" for device in dict.fromkeys(devices)]
    yield f"Ranks: {', '.join(counted)}. Seed: {entry['seed']}. All of it is in `{FILE}` of the run."
    versions = []
    for name, version in entry["versions"].items():
        if version and name != "platform":  # which tells more of a machine than a reader needs
            versions.append([name, version])
    yield _table(["package", "version"], versions)


def _public(text: str) -> str:
    """A text without the directories of absolute paths."""
    return _DIRECTORY.sub("", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")  # which would begin the next cell


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
