"""Data by name: parts of datasets, their columns and weights, and held-out rows.

    data: HuggingFaceH4/ultrachat_200k#train_sft            path:config@revision#split
    data: {path: openai/gsm8k, name: main, columns: {question: prompt, answer: completion}}
    data: [{path: a.jsonl, weight: 0.5}, {path: b.parquet, weight: 2}]
    data: {a.jsonl: 0.5, b.parquet: 2}                      the same in short

An epoch takes ``weight`` times the rows of a part: 0.5 takes half of them, drawn by the seed, 2
each twice. So a mixture has a length, its account says the rows of each part, and which of them
make up a step depends on nothing but the step. Each part is encoded by its own layout.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import datasets
import numpy as np
import numpy.typing as npt
from datasets import Dataset, DatasetDict, IterableDatasetDict

from .batches import permutation
from .columns import ASSISTANT, Message
from .hashes import by_digest, by_name, by_size, row_hashes
from .records import Data, DataError, Records, is_text, load, parse_name

log = logging.getLogger(__name__)

# Data by name, as YAML gives them, or the rows themselves: what parts are made of.
Named: TypeAlias = Data | Records | Mapping[str, object] | Sequence[object]


@dataclass(frozen=True)
class Part:
    """One part of the data.

    Attributes:
        path, name, split, revision, data_files, data_dir: what is read, in the terms of
            `datasets.load_dataset`.
        columns: names of the columns to keep; or other names for some of them, as in
            ``{question: prompt}``. Several with the same new name are joined, with an empty line
            between texts; ``reward_model.ground_truth`` names a part of one. A column that is
            called `system_prompt` holds the first message of each conversation.
        system_prompt: makes conversations of plain text, and begins each conversation with this
            message, unless it has a system message of its own, which it keeps and is counted; ""
            makes conversations without one.
        weight: how many times the rows are taken in an epoch.
        fraction: instead of a weight, this part's share of the mixture (TRL's), which is as
            long as every part has rows for.
    """

    path: Data | Records
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    data_files: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None
    data_dir: str | None = None
    columns: Sequence[str] | Mapping[str, str] | None = None
    system_prompt: str | None = None
    weight: float = 1.0
    fraction: float | None = None

    def load(self) -> Records:
        """All rows, under the requested names of columns."""
        return self.reshaped(self.read())

    def read(self, *, streaming: bool = False) -> Records:
        """All rows as they are stored; see `reshaped`."""
        given: dict[str, Any] = {}  # None is not given: `load` has defaults of its own
        for name in ("name", "split", "revision", "data_files", "data_dir"):
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        if streaming:
            given["streaming"] = True
        records = load(self.path, **given)
        if isinstance(self.path, str) and self.split:
            return replace(records, source=f"{records.source}#{self.split}")
        return records

    def reshaped(self, records: Records) -> Records:
        """Rows under the requested names of columns, as conversations if requested."""
        dataset = records.dataset
        for name in self.columns or ():
            dataset = _with_inner(dataset, name)
        for name in self.columns or ():
            if name not in dataset.column_names:
                there = ", ".join(dataset.column_names)
                problem = f"columns: there is no {name!r}; there are {there}"
                raise DataError(f"{records.source}: {problem}")
        if isinstance(self.columns, Mapping):
            dataset = _renamed(dataset, self.columns)
        elif self.columns is not None:
            dataset = dataset.select_columns(list(self.columns))
        if self.system_prompt is not None:
            dataset = _conversational(dataset, self.system_prompt, records.source)
        return replace(records, dataset=dataset, system_prompt=self.system_prompt or "")


def _with_inner(dataset: Dataset, name: str) -> Dataset:
    """Add an inner column of a struct, such as reward_model.ground_truth, beside the struct."""
    outer = name.partition(".")[0]
    if name in dataset.column_names or outer not in dataset.column_names:
        return dataset
    inner = dataset.select_columns([outer]).flatten()  # names its columns with dots, as we do
    if name not in inner.column_names:
        return dataset
    return datasets.concatenate_datasets([dataset, inner.select_columns([name])], axis=1)


def load_data(
    data: Named,
    eval_data: Named | float | None = None,
    *,
    seed: int = 0,
    streaming: bool = False,
) -> tuple[list[Records], list[Records]]:
    """Read the rows to train on, and the held-out rows, by their parts.

    Args:
        data: text, a mapping with the fields of `Part`, a list of them, a mapping of paths to
            weights, or rows.
        eval_data: data too; or how many rows of ``data`` are held out, below 1 their share, where
            rows that say the same are all on one side; or other fields of the parts of ``data``,
            such as ``#test`` or {split: test}.
        streaming: leave the rows to train on to a `Stream`.

    Raises:
        DataError: if a part can't be read, lacks a column, or no row of it is left.
    """
    parts = named_parts(data)
    if isinstance(eval_data, int | float):
        if streaming:
            problem = "rows can't be held out of data that are streamed"
            raise DataError(f"eval_data: {problem}; name others, or another split")
        return _hold_out(_weighted(parts, seed), eval_data, seed)
    held_out = _held_out_parts(parts, eval_data)
    train = [] if streaming else _weighted(parts, seed)
    rest = _weighted(held_out, seed)
    _warn_of_shared(train, rest)
    return train, rest


def _held_out_parts(parts: list[Part], eval_data: Named | None) -> list[Part]:
    """The parts that ``eval_data`` names: of its own, or those of the data with other fields."""
    if eval_data is None:
        return []
    if isinstance(eval_data, str) and eval_data.startswith("#"):
        eval_data = {"split": eval_data[1:]}
    others = set(_FIELDS) - {"path"}
    if isinstance(eval_data, Mapping) and eval_data and eval_data.keys() <= others:
        # each row is measured once, whatever its weight in the training
        changes: dict[str, Any] = {"weight": 1.0, "fraction": None, **eval_data}
        return [replace(part, **changes) for part in parts]
    return named_parts(eval_data)


def _warn_of_shared(train: Sequence[Records], held_out: Sequence[Records]) -> None:
    """Say how many held-out rows are trained on as well: measuring them measures nothing new."""
    if not (train and held_out):
        return
    count = sum(len(part.dataset) for part in held_out)
    # The sizes of images leave few rows whose images have to be read.
    for identity in (by_size, by_digest):
        trained = [row_hashes(part, 0, identity) for part in train]
        measured = [row_hashes(part, 0, identity) for part in held_out]
        train = _among(train, trained, measured)
        held_out = _among(held_out, measured, trained)
        if not held_out:
            return
    shared = sum(len(part.dataset) for part in held_out)
    log.warning("eval_data: %d of its %d rows are also trained on; name others", shared, count)


def _among(
    parts: Sequence[Records],
    hashes: Sequence[npt.NDArray[np.uint64]],
    others: Sequence[npt.NDArray[np.uint64]],
) -> list[Records]:
    """The rows whose hashes are among the others; no part without one."""
    known = np.concatenate(others)
    kept = []
    for part, of_part in zip(parts, hashes, strict=True):
        rows = np.flatnonzero(np.isin(of_part, known))
        if len(rows):
            kept.append(part.pick(rows))
    return kept


def concatenated(parts: Sequence[Records]) -> Dataset:
    """The rows of all parts in one table; an empty one if there is none.

    Raises:
        DataError: if a column is text in one part and messages in another, or of other types that
            don't agree.
    """
    tables = [part.dataset for part in parts]
    try:
        return datasets.concatenate_datasets(tables or [Dataset.from_dict({})])
    except ValueError as error:
        sources = ", ".join(part.source for part in parts)
        problem = f"the columns of these parts don't fit into one table: {error}"
        raise DataError(f"{sources}: {problem}") from error


def part_of(parts: Sequence[Records], row: int) -> tuple[Records, int]:
    """The part that a row of the concatenated parts is from, and its number there."""
    for part in parts:
        if row < len(part.dataset):
            return part, row
        row -= len(part.dataset)
    raise IndexError(row)


def where(parts: Sequence[Records], row: int) -> str:
    """Name a row of the concatenated parts, for a message."""
    part, number = part_of(parts, row)
    return part.where(number)


_FIELDS = [field.name for field in fields(Part)]


def named_parts(data: Named) -> list[Part]:
    """The parts that `data` names, not read yet."""
    if isinstance(data, list | tuple) and data and all(map(_names_part, data)):
        return [_part(part) for part in data]
    if isinstance(data, Mapping) and _are_weights(data.values()):
        return [_part({"path": path, "weight": weight}) for path, weight in data.items()]
    return [_part(data)]


def _names_part(entry: Any) -> bool:
    """True for a text or a mapping with a path; false for a row."""
    return isinstance(entry, str | Records) or "path" in entry


def _are_weights(values: Collection[object]) -> bool:
    """True for numbers, of which there is one at least."""
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _part(data: object) -> Part:
    given: dict[str, Any] = {"path": data}
    # the splits of a dataset are a dict, too
    if isinstance(data, Mapping) and not isinstance(data, DatasetDict | IterableDatasetDict):
        given = dict(data)
    for name in given:
        if name not in _FIELDS:
            raise DataError(f"data: a part has no {name!r}; it has {', '.join(_FIELDS)}")
    if "path" not in given:
        wanted = "which is a file, a directory, or the name of a dataset on the Hub"
        raise DataError(f"data: a part has no 'path', {wanted}")
    if isinstance(given["path"], str):
        given |= parse_name(given["path"])
    part = Part(**given)
    for name in ("weight", "fraction"):
        value = getattr(part, name)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise DataError(f"data: {name} of {part.path}: wanted a number above 0, got {value!r}")
    return part


def _weighted(parts: Sequence[Part], seed: int) -> list[Records]:
    """Read all parts, each of its rows as many times as its weight says."""
    loaded = [part.load() for part in parts]
    if not all(hasattr(records.dataset, "__len__") for records in loaded):
        wanted = "set streaming=True, and steps; eval_data is read at once: give it as rows, a file or a Dataset"
        raise DataError(f"data: an IterableDataset is read step by step; {wanted}")
    weights = _weights(parts, [len(records.dataset) for records in loaded])
    for number, (records, weight) in enumerate(zip(loaded, weights, strict=True)):
        size = len(records.dataset)
        # 2.5 times 10 rows: all of them twice, and 5 of them once more
        times, rest = divmod(round(weight * size), size)
        if not times + rest:
            problem = f"weight: {weight:g} of its {size:,} rows is none; raise it"
            raise DataError(f"{records.source}: {problem}")
        if (times, rest) != (1, 0):
            drawn = permutation(size, seed, number, 1)[:rest]
            every = np.tile(np.arange(size), times)
            loaded[number] = records.pick(np.sort(np.concatenate([every, drawn])))
    return loaded


def _weights(parts: Sequence[Part], sizes: Sequence[int]) -> list[float]:
    """The weight of each part; where they have fractions, the largest that rows suffice for."""
    fractions = [part.fraction for part in parts if part.fraction is not None]
    if not fractions:
        return [part.weight for part in parts]
    if len(fractions) < len(parts):
        raise DataError("data: fraction: give one to each part of a mixture, or to none")
    # The part whose rows are used up first decides how long the mixture is.
    total = min(size / fraction for size, fraction in zip(sizes, fractions, strict=True))
    return [fraction * total / size for size, fraction in zip(sizes, fractions, strict=True)]


def _hold_out(
    parts: list[Records], amount: float, seed: int
) -> tuple[list[Records], list[Records]]:
    """Hold out the rows with the lowest hashes of their texts.

    So rows that say the same are on one side, and a row keeps its side when others are added. The
    images of a row count by their names.
    """
    keys = [row_hashes(part, seed, by_name) for part in parts]
    every = np.sort(np.concatenate(keys))
    count = round(amount * len(every)) if amount < 1 else int(amount)
    # where the limit is the highest hash, as of copies of one row, none would be left to train on
    if not 0 < count < len(every) or every[count - 1] == every[-1]:
        wanted = "wanted a share in (0, 1), or a number of rows that leaves others to train on"
        raise DataError(f"eval_data: {wanted}, got {amount} of {len(every):,} rows")
    limit = every[count - 1]
    train = []
    rest = []
    for part, key in zip(parts, keys, strict=True):
        held = key <= limit
        if not held.all():
            train.append(part.pick(np.flatnonzero(~held)))
        if held.any():
            rest.append(_once(part.pick(np.flatnonzero(held))))
    return train, rest


def _once(records: Records) -> Records:
    """Each row once, whatever the weight of its part."""
    assert records.picked is not None
    _, first = np.unique(records.picked, return_index=True)
    return records.pick(first)


def _renamed(dataset: Dataset, names: Mapping[str, str]) -> Dataset:
    """Give columns new names; a column that had one before goes, several with one are joined."""
    sources: dict[str, list[str]] = {}
    for old, new in names.items():
        sources.setdefault(new, []).append(old)
    replaced = [new for new in sources if new in dataset.column_names and new not in names]
    dataset = dataset.remove_columns(replaced)
    renamed = {}
    for new, several in sources.items():
        if len(several) > 1:
            dataset = dataset.map(
                _joined,
                batched=True,
                fn_kwargs={"new": new, "several": several},
                remove_columns=several,
                desc=f"Joining {new}",
            )
        elif several[0] != new:
            renamed[several[0]] = new
    # all at once, as two columns may exchange their names
    return dataset.rename_columns(renamed)


def _joined(
    rows: Mapping[str, list[object]], new: str, several: Sequence[str]
) -> dict[str, list[str]]:
    """A column of several, with an empty line between their texts; an empty text adds none."""
    joined = []
    for texts in zip(*(rows[name] for name in several), strict=True):
        written = [str(text) for text in texts if text]
        joined.append("\n\n".join(written))
    return {new: joined}


def _conversational(dataset: Dataset, system_prompt: str, source: str) -> Dataset:
    """Plain prompts and completions as conversations, the prompts with this system message first.

    `read_row` puts it before conversations that hold their prompts.
    """
    names = [name for name in _SPEAKERS if name in dataset.column_names]
    plain = [name for name in names if is_text(dataset.features[name])]
    are_plain = plain == names
    holds_prompts = not {"messages", "conversations"}.isdisjoint(dataset.column_names)
    if "prompt" in names and are_plain:
        return dataset.map(
            _as_messages,
            batched=True,
            fn_kwargs={"names": names, "system_prompt": system_prompt},
            remove_columns=names,
            desc="Making conversations",
        )
    if "prompt" in names and "prompt" not in plain:
        return dataset.map(
            _begun,
            batched=True,
            fn_kwargs={"system_prompt": system_prompt},
            features=dataset.features,
            desc="Adding the system prompt",
        )
    if are_plain and not holds_prompts:
        wanted = "wanted conversations, or a column 'prompt' of plain text and plain completions beside it"
        found = ", ".join(dataset.column_names)
        raise DataError(f"{source}: system_prompt: {wanted}, found ({found})")
    return dataset


# Who says the text of a column.
_SPEAKERS = {
    "prompt": "user",
    "completion": ASSISTANT,
    "chosen": ASSISTANT,
    "rejected": ASSISTANT,
}


def _as_messages(
    rows: Mapping[str, list[object]], names: Sequence[str], system_prompt: str
) -> dict[str, list[list[Message]]]:
    """Make a message of each plain text, and begin prompts with the system message.

    A row with a `system_prompt` of its own gets that one, from `read_row`.
    """
    turns: dict[str, list[list[Message]]] = {}
    for name in names:
        role = _SPEAKERS[name]
        turns[name] = [[{"role": role, "content": text}] for text in rows[name]]
    system: Message = {"role": "system", "content": system_prompt}
    of_rows = rows.get("system_prompt") or [None] * len(turns["prompt"])
    for of_row, turn in zip(of_rows, turns["prompt"], strict=True):
        if system_prompt and not of_row:
            turn.insert(0, system)
    return turns


def _begun(rows: Mapping[str, list[object]], system_prompt: str) -> dict[str, list[object]]:
    """Prompts that are conversations, with the system message where they and their rows have none.

    Rewards and environments see it too.
    """
    prompts = []
    of_rows = rows.get("system_prompt") or [None] * len(rows["prompt"])
    for of_row, prompt in zip(of_rows, rows["prompt"], strict=True):
        if system_prompt and not of_row:
            prompt = _begun_with(system_prompt, prompt)
        prompts.append(prompt)
    return {"prompt": prompts}


def _begun_with(system_prompt: str, prompt: object) -> object:
    """A conversation with this system message, unless it has one; any other value as it is."""
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)):
        return prompt
    first = prompt[0]
    # TRL's names, or else ShareGPT's
    role, content = ("role", "content") if first.get("role") else ("from", "value")
    if first.get(role) in ("system", "developer"):
        return prompt
    return [{role: "system", content: system_prompt}, *prompt]
