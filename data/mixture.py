"""Data by name: parts of datasets, their columns and weights, and held-out rows.

    data: HuggingFaceH4/ultrachat_200k#train_sft                     path:config@revision#split
    data: {path: openai/gsm8k, name: main, columns: {question: prompt, answer: completion}}
    data: [{path: a.jsonl, weight: 0.5}, {path: b.parquet, weight: 2}]      or in short, {a.jsonl: 0.5, b.parquet: 2}

An epoch takes ``weight`` times the rows of a part: 0.5 takes half of them, drawn by the seed, 2
each twice. So a mixture has a length, its account says the rows of each part, and which of them
make up a step depends on nothing but the step. Each part is encoded by its own layout.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
from datasets import Dataset, DatasetDict, IterableDatasetDict

from .batches import permutation
from .columns import ASSISTANT, LAYOUT_COLUMNS, Message
from .records import Data, DataError, Records, is_text, load, parse_name

log = logging.getLogger(__name__)


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

    path: Any
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    data_files: Any = None
    data_dir: str | None = None
    columns: Sequence[str] | Mapping[str, str] | None = None
    system_prompt: str | None = None
    weight: float = 1.0
    fraction: float | None = None

    def load(self) -> Records:
        """All rows, under the requested names of columns."""
        return self.reshaped(self.read())

    def read(self, **options: Any) -> Records:
        """All rows as they are stored; see `reshaped`."""
        options |= {
            name: getattr(self, name)
            for name in ("name", "split", "revision", "data_files", "data_dir")
        }
        given = {name: value for name, value in options.items() if value is not None}
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
                raise DataError(
                    f"{records.source}: columns: there is no {name!r}; there are {there}"
                )
        if isinstance(self.columns, Mapping):
            dataset = _renamed(dataset, self.columns)
        elif self.columns is not None:
            dataset = dataset.select_columns(list(self.columns))
        if self.system_prompt is not None:
            dataset = _conversational(dataset, self.system_prompt, records.source)
        return replace(records, dataset=dataset, system_prompt=self.system_prompt or "")


def _with_inner(dataset: Dataset, name: str) -> Dataset:
    """The dataset with a column of a struct, such as reward_model.ground_truth, beside the struct
    itself.
    """
    outer = name.partition(".")[0]
    if name in dataset.column_names or outer not in dataset.column_names:
        return dataset
    inner = dataset.select_columns([outer]).flatten()
    inner = inner.select_columns([name] if name in inner.column_names else [])
    return datasets.concatenate_datasets([dataset, inner], axis=1)


def load_data(
    data: Any, eval_data: Any = None, *, seed: int = 0, streaming: bool = False
) -> tuple[list[Records], list[Records]]:
    """The rows to train on, and the held-out rows, by their parts.

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
    if streaming and isinstance(eval_data, int | float):
        raise DataError(
            "eval_data: rows can't be held out of data that are streamed; name others, or another split"
        )
    if isinstance(eval_data, int | float):
        return _hold_out(_weighted(parts, seed), eval_data, seed)
    if isinstance(eval_data, str) and eval_data.startswith("#"):
        eval_data = {"split": eval_data[1:]}
    if isinstance(eval_data, Mapping) and eval_data and eval_data.keys() <= {*_FIELDS} - {"path"}:
        held_out = [
            replace(part, **{"weight": 1.0, "fraction": None, **eval_data}) for part in parts
        ]
    else:
        held_out = [] if eval_data is None else named_parts(eval_data)
    train = [] if streaming else _weighted(parts, seed)
    rest = _weighted(held_out, seed)
    _warn_of_shared(train, rest)
    return train, rest


def _warn_of_shared(train: Sequence[Records], held_out: Sequence[Records]) -> None:
    """Say how many held-out rows are trained on as well: measuring them measures nothing new."""
    if not (train and held_out):
        return
    trained = np.concatenate([_hashes(part.dataset, 0) for part in train])
    measured = np.concatenate([_hashes(part.dataset, 0) for part in held_out])
    shared = int(np.isin(measured, trained).sum())
    if shared:
        log.warning(
            "eval_data: %d of its %d rows are also trained on; name others", shared, len(measured)
        )


def concatenated(parts: Sequence[Records]) -> Dataset:
    """The rows of all parts in one table; an empty one if there is none.

    Raises:
        DataError: if a column is text in one part and messages in another, or of other types that
            don't agree.
    """
    try:
        return datasets.concatenate_datasets(
            [part.dataset for part in parts] or [Dataset.from_dict({})]
        )
    except ValueError as error:
        sources = ", ".join(part.source for part in parts)
        raise DataError(
            f"{sources}: the columns of these parts don't fit into one table: {error}"
        ) from error


def where(parts: Sequence[Records], row: int) -> str:
    """Name a row of the concatenated parts, for a message."""
    for part in parts:
        if row < len(part.dataset):
            return part.where(row)
        row -= len(part.dataset)
    raise IndexError(row)


_FIELDS = [field.name for field in fields(Part)]


def named_parts(data: Data | Mapping[str, Any]) -> list[Part]:
    """The parts that `data` names, not read yet."""
    if isinstance(data, list | tuple) and data and all(map(_names_part, data)):
        return [_part(part) for part in data]
    if (
        isinstance(data, Mapping)
        and data
        and all(isinstance(weight, int | float) for weight in data.values())
    ):
        return [_part({"path": path, "weight": weight}) for path, weight in data.items()]
    return [_part(data)]


def _names_part(entry: Any) -> bool:
    """True for a text or a mapping with a path; false for a row."""
    return isinstance(entry, str | Records) or "path" in entry


def _part(data: Any) -> Part:
    of_splits = isinstance(data, DatasetDict | IterableDatasetDict)
    given = {**data} if isinstance(data, Mapping) and not of_splits else {"path": data}
    for name in given:
        if name not in _FIELDS:
            raise DataError(f"data: a part has no {name!r}; it has {', '.join(_FIELDS)}")
    if "path" not in given:
        raise DataError(
            "data: a part has no 'path', which is a file, a directory, or the name of a dataset on the Hub"
        )
    if isinstance(given["path"], str):
        given |= parse_name(given["path"])
    part = Part(**given)
    for name in ("weight", "fraction"):
        value = getattr(part, name)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise DataError(f"data: {name} of {part.path}: wanted a number above 0, got {value!r}")
    return part


def _weighted(parts: Sequence[Part], seed: int) -> list[Records]:
    loaded = [part.load() for part in parts]
    if not all(hasattr(records.dataset, "__len__") for records in loaded):
        wanted = "set streaming=True, and steps; eval_data is read at once: give it as rows, a file or a Dataset"
        raise DataError(f"data: an IterableDataset is read step by step; {wanted}")
    sizes = [len(records.dataset) for records in loaded]
    weights = [part.weight for part in parts]
    fractions = [part.fraction for part in parts if part.fraction is not None]
    if fractions:
        if len(fractions) < len(parts):
            raise DataError("data: fraction: give one to each part of a mixture, or to none")
        total = min(size / fraction for size, fraction in zip(sizes, fractions, strict=True))
        weights = [fraction * total / size for size, fraction in zip(sizes, fractions, strict=True)]
    for number, (records, size, weight) in enumerate(zip(loaded, sizes, weights, strict=True)):
        times, rest = divmod(round(weight * size), size)
        if not times + rest:
            raise DataError(
                f"{records.source}: weight: {weight:g} of its {size:,} rows is none; raise it"
            )
        if (times, rest) != (1, 0):
            drawn = permutation(size, seed, number, 1)[:rest]
            every = np.tile(np.arange(size), times)
            loaded[number] = records.pick(np.sort(np.concatenate([every, drawn])))
    return loaded


def _hold_out(
    parts: list[Records], amount: float, seed: int
) -> tuple[list[Records], list[Records]]:
    """Hold out the rows with the lowest hashes of their texts."""
    keys = [_hashes(part.dataset, seed) for part in parts]
    every = np.sort(np.concatenate(keys))
    count = round(amount * len(every)) if amount < 1 else int(amount)
    if not 0 < count < len(every) or every[count - 1] == every[-1]:
        wanted = "wanted a share in (0, 1), or a number of rows that leaves others to train on"
        raise DataError(f"eval_data: {wanted}, got {amount} of {len(every):,} rows")
    is_held_out = [key <= every[count - 1] for key in keys]
    train = []
    rest = []
    for part, held in zip(parts, is_held_out, strict=True):
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


def _hashes(dataset: Dataset, seed: int) -> npt.NDArray[np.uint64]:
    names = [
        name for name in dataset.column_names if name in LAYOUT_COLUMNS
    ] or dataset.column_names
    hashes = [
        hashlib.blake2b(repr((seed, values)).encode(errors="surrogatepass"), digest_size=8).digest()
        # decoding costs most
        for rows in dataset.select_columns(names).with_format("arrow").iter(1000)
        for values in zip(*rows.to_pydict().values(), strict=True)
    ]
    return np.frombuffer(b"".join(hashes), dtype="<u8")


def _renamed(dataset: Dataset, names: Mapping[str, str]) -> Dataset:
    """Give columns new names, which take the place of columns that have them; join columns with one
    new name.
    """
    sources: dict[str, list[str]] = {}
    for old, new in names.items():
        sources.setdefault(new, []).append(old)
    dataset = dataset.remove_columns(
        [new for new in sources if new in dataset.column_names and new not in names]
    )
    for new, several in sources.items():
        if len(several) > 1:
            joined: dict[str, Any] = {"new": new, "several": several}
            dataset = dataset.map(
                _joined,
                batched=True,
                fn_kwargs=joined,
                remove_columns=several,
                desc=f"Joining {new}",
            )
    renamed = {several[0]: new for new, several in sources.items() if len(several) == 1}
    return dataset.rename_columns({old: new for old, new in renamed.items() if old != new})


def _joined(
    rows: Mapping[str, list[Any]], new: str, several: Sequence[str]
) -> dict[str, list[str]]:
    joined = []
    for texts in zip(*(rows[name] for name in several), strict=True):
        joined.append("\n\n".join(str(text) for text in texts if text))
    return {new: joined}


def _conversational(dataset: Dataset, system_prompt: str, source: str) -> Dataset:
    """Plain prompts and completions as conversations, the prompts with this system message first.

    `read_row` puts it before conversations that hold their prompts.
    """
    roles = {"prompt": "user", "completion": ASSISTANT, "chosen": ASSISTANT, "rejected": ASSISTANT}
    roles = {name: role for name, role in roles.items() if name in dataset.column_names}
    is_plain = {name: is_text(dataset.features[name]) for name in roles}
    has_conversations = not all(is_plain.values()) or {"messages", "conversations"} & {
        *dataset.column_names
    }
    if "prompt" in roles and all(is_plain.values()):
        as_messages: dict[str, Any] = {"roles": roles, "system_prompt": system_prompt}
        dataset = dataset.map(
            _as_messages,
            batched=True,
            fn_kwargs=as_messages,
            remove_columns=list(roles),
            desc="Making conversations",
        )
    elif "prompt" in roles and not is_plain["prompt"]:
        begin: dict[str, Any] = {"system_prompt": system_prompt}
        dataset = dataset.map(
            _begun,
            batched=True,
            fn_kwargs=begin,
            features=dataset.features,
            desc="Adding the system prompt",
        )
    elif not has_conversations:
        wanted = "wanted conversations, or a column 'prompt' of plain text and plain completions beside it"
        raise DataError(
            f"{source}: system_prompt: {wanted}, found ({', '.join(dataset.column_names)})"
        )
    return dataset


def _as_messages(
    rows: Mapping[str, list[Any]], roles: Mapping[str, str], system_prompt: str
) -> dict[str, list[list[Message]]]:
    """Plain texts as messages. A row with a `system_prompt` of its own gets that one, from
    `read_row`.
    """
    turns = {
        name: [[{"role": role, "content": text}] for text in rows[name]]
        for name, role in roles.items()
    }
    system: Message = {"role": "system", "content": system_prompt}
    of_rows = rows.get("system_prompt") or [None] * len(turns["prompt"])
    for of_row, turn in zip(of_rows, turns["prompt"], strict=True):
        if system_prompt and not of_row:
            turn.insert(0, system)
    return turns


def _begun(rows: Mapping[str, list[Any]], system_prompt: str) -> dict[str, list[Any]]:
    """Prompts that are conversations, with the system message where they and their rows have none.

    Rewards and environments see it too.
    """
    prompts = []
    of_rows = rows.get("system_prompt") or [None] * len(rows["prompt"])
    for of_row, prompt in zip(of_rows, rows["prompt"], strict=True):
        is_conversation = isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)
        if system_prompt and not of_row and is_conversation:
            role, content = ("role", "content") if prompt[0].get("role") else ("from", "value")
            if prompt[0].get(role) not in ("system", "developer"):
                prompt = [{role: "system", content: system_prompt}, *prompt]
        prompts.append(prompt)
    return {"prompt": prompts}
