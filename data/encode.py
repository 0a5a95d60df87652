"""Records as examples: a dataset of token ids and masks, memory-mapped, and an account of every row.

A row that can't be trained on as given is an error, or is counted and left out.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from datasets import Dataset, Features, List, Value
from datasets.fingerprint import generate_random_fingerprint

from .accounting import NOTES, Accounting, account
from .chat import Encoder
from .example import Example
from .examples import Encoded, Limit, TrainOn, Truncation, demonstration, pair
from .layouts import OPTION_COLUMNS, PREFERENCE, SUPERVISED, BadRow, Layout, find_layout, read_row
from .records import Data, DataError, Records, load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnBadRow = Literal["error", "skip"]

COLUMNS = {
    "prompt": List(Value("int32")),
    "completions": List(List(Value("int32"))),
    "trained": List(List(Value("bool"))),
}


def encode_supervised(
    records: Records | Data,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int | None = None,
    truncation: Truncation = "keep_start",
    train_on: TrainOn = "auto",
    on_bad_row: OnBadRow = "error",
    chat_template: str | None = None,
    processes: int | None = None,
) -> tuple[Dataset, Accounting]:
    """Demonstrations as examples with one completion each.

    Args:
        records: in a layout of `layouts.SUPERVISED`.
        max_length: tokens of prompt and completion together; None for no limit.
        truncation: of a longer one, keep the start (TRL's default) or the end, or take it for a bad row.
        train_on: the tokens that carry loss: the assistant's, the completion's, or all but the first. "auto" is
            assistant for `messages`, completion for `prompt`/`completion`, all for `text`.
        on_bad_row: raise at a row that can't be trained on, or count it and leave it out.
        chat_template: Jinja source to use instead of the tokenizer's own template.
        processes: how many tokenize at once.

    Returns:
        Columns prompt, completions, trained and the numeric columns of the records; and an account of every row.

    Raises:
        DataError: naming source, row and fix.
    """
    if train_on not in ("auto", "assistant", "completion", "all"):
        raise ValueError(f"train_on: wanted auto, assistant, completion or all, got {train_on!r}")
    limit = Limit(max_length, truncation)
    encode = partial(demonstration, train_on=train_on, limit=limit)
    return _encode(records, Encoder(tokenizer, chat_template), SUPERVISED, encode, limit, on_bad_row, processes)


def encode_preference(
    records: Records | Data,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int | None = None,
    truncation: Truncation = "keep_start",
    on_bad_row: OnBadRow = "error",
    chat_template: str | None = None,
    processes: int | None = None,
) -> tuple[Dataset, Accounting]:
    """Preference pairs as examples with two completions each, the chosen one first.

    ``keep_end`` cuts the beginning of the prompt until the longer answer fits, for both answers alike. The other
    arguments are those of `encode_supervised`.
    """
    limit = Limit(max_length, truncation)
    encode = partial(pair, limit=limit)
    return _encode(records, Encoder(tokenizer, chat_template), PREFERENCE, encode, limit, on_bad_row, processes)


def example(dataset: Dataset, index: int) -> Example:
    """The example in one row of an encoded dataset."""
    row = dataset[index]
    return Example(row["prompt"], row["completions"], row["trained"])


class _Stop(Exception):
    """Carries a bad row out of `Dataset.map`, from another process if need be."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(index, problem)
        self.index, self.problem = index, problem


def _encode(
    records: Records | Data,
    encoder: Encoder,
    layouts: Sequence[Layout],
    encode: "partial[Encoded]",
    limit: Limit,
    on_bad_row: OnBadRow,
    processes: int | None,
) -> tuple[Dataset, Accounting]:
    if on_bad_row not in ("error", "skip"):
        raise ValueError(f"on_bad_row: wanted error or skip, got {on_bad_row!r}")
    records = records if isinstance(records, Records) else load(records)
    source = records.dataset
    try:
        layout = find_layout(source.column_names, layouts)
    except ValueError as error:
        raise DataError(f"{records.source}: {error}") from None
    numeric = _numeric_columns(records, layout)
    fingerprint = _fingerprint(source, encoder, encode, on_bad_row)
    try:
        encoded = source.map(
            _encode_rows,
            batched=True,
            with_indices=True,
            fn_kwargs={"encode": encode, "encoder": encoder, "layout": layout, "on_bad_row": on_bad_row},
            remove_columns=[name for name in source.column_names if name not in numeric],
            features=Features({**numeric, **COLUMNS, **NOTES}),
            num_proc=processes,
            new_fingerprint=fingerprint or generate_random_fingerprint(),
            load_from_cache_file=fingerprint is not None,
            desc=f"Tokenizing {records.source}",
        )
    except _Stop as stop:
        raise DataError(f"{records.where(stop.index)}: {stop.problem}") from None
    unused = [name for name in source.column_names if name not in {*layout, *OPTION_COLUMNS, *numeric}]
    kept, accounting = account(encoded, records, max_length=limit.max_length, unused=unused)
    if not kept:
        raise DataError(f"{records.source}: no row is left to train on\n{accounting}")
    if len(kept) < len(encoded):
        encoded = encoded.select(kept)
    return encoded.remove_columns(list(NOTES)), accounting


def _encode_rows(
    rows: Mapping[str, list[Any]],
    indices: list[int],
    *,
    encode: "partial[Encoded]",
    encoder: Encoder,
    layout: Layout,
    on_bad_row: OnBadRow,
) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {name: [] for name in (*COLUMNS, *NOTES)}
    for position, index in enumerate(indices):
        kind, problem, encoded = None, None, Encoded(Example([], [], []))
        try:
            encoded = encode(read_row({name: column[position] for name, column in rows.items()}, layout), encoder)
        except BadRow as bad:
            if on_bad_row == "error":
                raise _Stop(index, bad.problem) from None
            kind, problem = bad.kind, bad.problem
        except ValueError as error:  # no fault of this row: the others would fail as well
            raise _Stop(index, str(error)) from error
        found = encoded.example
        digests = [_digest(found.prompt, answer) for answer in found.completions] if layout in PREFERENCE else []
        values = (*found, kind, problem, encoded.truncated, encoded.shortened, digests)
        for name, value in zip(out, values, strict=True):
            out[name].append(value)
    return out


def _digest(prompt: list[int], completion: list[int]) -> int:
    """Names a prompt and its answer, so that pairs labeled both ways are found without holding their tokens."""
    content = array("q", [len(prompt), *prompt, *completion]).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _numeric_columns(records: Records, layout: Layout) -> dict[str, Value]:
    numeric = {
        name: kind
        for name, kind in records.dataset.features.items()
        if name not in layout and isinstance(kind, Value) and kind.dtype.startswith(("int", "uint", "float", "bool"))
    }
    for name in numeric:
        if name in COLUMNS or name in NOTES:
            raise DataError(f"{records.source}: examples have a column '{name}' of their own; rename yours")
    return numeric


def _fingerprint(source: Dataset, encoder: Encoder, encode: "partial[Encoded]", on_bad_row: str) -> str | None:
    """Names the result by all that it depends on, this folder's code included; None where a tokenizer can't say."""
    backend = getattr(encoder.tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = (
        source._fingerprint,
        backend.to_str(),
        type(encoder.tokenizer).__qualname__,
        sorted(encoder.tokenizer.special_tokens_map.items()),
        encoder.tokenizer.chat_template,
        encoder.chat_template,
        encode.func.__qualname__,
        sorted(encode.keywords.items()),
        on_bad_row,
        [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))],
        version("transformers"),
        version("tokenizers"),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
