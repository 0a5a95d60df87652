"""Records as examples: a dataset of token ids and masks, memory-mapped, and an account of every row.

A row that can't be trained on as given is an error, or is counted and left out.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from datasets import Dataset, Features, List, Value
from datasets.fingerprint import generate_random_fingerprint

from .accounting import NOTES, Accounting, account
from .chat import Encoder
from .example import Example
from .examples import (
    Encoded,
    Limit,
    TrainOn,
    Truncation,
    answers,
    demonstration,
    feedback,
    judged_steps,
    pair,
    question,
    solution,
)
from .layouts import (
    FEEDBACK,
    OPTION_COLUMNS,
    PREFERENCE,
    PROMPTS,
    RANKING,
    SCORES,
    SOLUTION,
    STEPS,
    SUPERVISED,
    BadRow,
    Layout,
    Message,
    find_layout,
    read_number,
    read_row,
)
from .records import Data, DataError, Records, load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnBadRow = Literal["error", "skip"]
Column: TypeAlias = Value | List

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
    encode = partial(demonstration, train_on=train_on, limit=Limit(max_length, truncation))
    return _encode(records, Encoder(tokenizer, chat_template), SUPERVISED, encode, on_bad_row, processes)


def encode_preference(
    records: Records | Data,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int | None = None,
    truncation: Truncation = "keep_start",
    on_bad_row: OnBadRow = "error",
    chat_template: str | None = None,
    processes: int | None = None,
    columns: Sequence[str] = (),
) -> tuple[Dataset, Accounting]:
    """Preference pairs as examples with two completions each, the chosen one first.

    ``keep_end`` cuts the beginning of the prompt until the longer answer fits, for both answers alike. ``columns``,
    such as a `margin`, must hold a finite number in every row, and become float64. The other arguments are those of
    `encode_supervised`.
    """
    encode = partial(pair, limit=Limit(max_length, truncation))
    return _encode(
        records, Encoder(tokenizer, chat_template), PREFERENCE, encode, on_bad_row, processes, columns=columns
    )


def encode_feedback(
    records: Records | Data,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int | None = None,
    truncation: Truncation = "keep_start",
    on_bad_row: OnBadRow = "error",
    chat_template: str | None = None,
    processes: int | None = None,
) -> tuple[Dataset, Accounting]:
    """Answers that someone liked or didn't, as examples with one completion each and a bool column `desirable`.

    A preference pair is two such examples, the chosen answer and then the rejected one. Truncation is that of
    `encode_preference`, the other arguments are those of `encode_supervised`.
    """
    encode = partial(feedback, limit=Limit(max_length, truncation))
    judgment = {"desirable": Value("bool")}
    return _encode(records, Encoder(tokenizer, chat_template), FEEDBACK, encode, on_bad_row, processes, judgment)


def encode_scores(
    records: Records | Data,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int | None = None,
    truncation: Truncation = "keep_start",
    on_bad_row: OnBadRow = "error",
    chat_template: str | None = None,
    processes: int | None = None,
) -> tuple[Dataset, Accounting]:
    """Answers with a score, as examples with one completion each and a float64 column `score`.

    Truncation is that of `encode_preference`, the other arguments are those of `encode_supervised`.
    """
    encode = partial(answers, limit=Limit(max_length, truncation))
    judgment = {"score": Value("float64")}
    return _encode(records, Encoder(tokenizer, chat_template), SCORES, encode, on_bad_row, processes, judgment)


def encode_ranking(
    records: Records | Data,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int | None = None,
    truncation: Truncation = "keep_start",
    on_bad_row: OnBadRow = "error",
    chat_template: str | None = None,
    processes: int | None = None,
) -> tuple[Dataset, Accounting]:
    """Ranked answers to one prompt, as examples with a completion for each and their places in a column `rank`, 0 best.

    Ranks are a permutation: no ties. Truncation is that of `encode_preference`, the other arguments are those of
    `encode_supervised`.
    """
    encode = partial(answers, limit=Limit(max_length, truncation))
    judgment = {"rank": List(Value("int64"))}
    return _encode(records, Encoder(tokenizer, chat_template), RANKING, encode, on_bad_row, processes, judgment)


def encode_prompts(
    records: Records | Data,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int | None = None,
    truncation: Truncation = "error",
    on_bad_row: OnBadRow = "error",
    chat_template: str | None = None,
    processes: int | None = None,
) -> tuple[Dataset, Accounting]:
    """Prompts that the policy is to answer, as examples without completions, and an int64 column `row`, where each is
    in the records, whose other columns are for whoever judges the answers.

    ``max_length`` is that of the prompt. The other arguments are those of `encode_supervised`.
    """
    encode = partial(question, limit=Limit(max_length, truncation))
    return _encode(records, Encoder(tokenizer, chat_template), PROMPTS, encode, on_bad_row, processes, rows=True)


def encode_steps(
    records: Records | Data,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    separator: str = "\n",
    train_on_last_step_only: bool = False,
    max_length: int | None = None,
    truncation: Truncation = "keep_start",
    on_bad_row: OnBadRow = "error",
    chat_template: str | None = None,
    processes: int | None = None,
) -> tuple[Dataset, Accounting]:
    """Solutions judged step by step, as examples with one completion each.

        completion = step 1 + separator + step 2 + separator + ...

    Trained is the last token of each separator, where the step can be judged: a step's score is read at that token, not
    predicted from the one before. A column `label` holds one float64 in [0, 1] for each trained token, in order.

    Args:
        separator: what ends a step; its tokens never merge with those of the step.
        train_on_last_step_only: judge the solution as a whole, at its end.
        truncation: ``keep_start`` leaves out the steps that don't end within `max_length`, their labels too;
            ``keep_end`` cuts the beginning of the prompt.

    The other arguments are those of `encode_supervised`.
    """
    encode = partial(
        judged_steps,
        separator=separator,
        train_on_last_step_only=train_on_last_step_only,
        limit=Limit(max_length, truncation),
    )
    judgment = {"label": List(Value("float64"))}
    return _encode(records, Encoder(tokenizer, chat_template), STEPS, encode, on_bad_row, processes, judgment)


def step_example(
    prompt: str | list[Message],
    steps: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    separator: str = "\n",
    chat_template: str | None = None,
) -> Example:
    """One solution as `encode_steps` sees it, to be scored: ``trained`` is true where each step's score is read.

    Raises:
        DataError: if there is no step, or a step is empty or no text.
    """
    try:
        row = read_row({"prompt": prompt, "completions": list(steps)}, SOLUTION)
        return solution(row, Encoder(tokenizer, chat_template), separator=separator)
    except BadRow as bad:
        raise DataError(f"step_example: {bad.problem}") from None


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
    encode: "partial[Encoded] | partial[list[Encoded]]",
    on_bad_row: OnBadRow,
    processes: int | None,
    judgment: Mapping[str, Column] | None = None,
    columns: Sequence[str] = (),
    rows: bool = False,
) -> tuple[Dataset, Accounting]:
    if on_bad_row not in ("error", "skip"):
        raise ValueError(f"on_bad_row: wanted error or skip, got {on_bad_row!r}")
    records = records if isinstance(records, Records) else load(records)
    source = records.dataset
    try:
        layout = find_layout(source.column_names, layouts)
    except ValueError as error:
        raise DataError(f"{records.source}: {error}") from None
    made = {**COLUMNS, **(judgment or {}), **NOTES}
    numeric = {} if rows else _numeric_columns(records, layout, columns, made)
    settings = {"encode": encode, "layout": layout, "on_bad_row": on_bad_row, "columns": columns}
    fingerprint = _fingerprint(source, encoder, settings)
    try:
        encoded = source.map(
            _encode_rows,
            batched=True,
            with_indices=True,
            fn_kwargs={**settings, "encoder": encoder, "numeric": list(numeric), "made": list(made)},
            remove_columns=source.column_names,
            features=Features({**numeric, **made}),
            num_proc=processes,
            new_fingerprint=fingerprint or generate_random_fingerprint(),
            load_from_cache_file=fingerprint is not None,
            desc=f"Tokenizing {records.source}",
        )
    except _Stop as stop:
        raise DataError(f"{records.where(stop.index)}: {stop.problem}") from None
    kept, accounting = account(
        encoded,
        records,
        judgment=next(iter(judgment or {}), None),
        max_length=encode.keywords["limit"].max_length,
        unused=[] if rows else [n for n in source.column_names if n not in {*layout, *OPTION_COLUMNS, *numeric}],
    )
    if not kept:
        raise DataError(f"{records.source}: no row is left to train on\n{accounting}")
    if len(kept) < len(encoded):
        encoded = encoded.select(kept)
    if rows:
        encoded = encoded.rename_column("_row", "row")
    return encoded.remove_columns([name for name in NOTES if name in encoded.column_names]), accounting


def _encode_rows(
    rows: Mapping[str, list[Any]],
    indices: list[int],
    *,
    encode: "partial[Encoded] | partial[list[Encoded]]",
    encoder: Encoder,
    layout: Layout,
    on_bad_row: OnBadRow,
    columns: Sequence[str],
    numeric: Sequence[str],
    made: Sequence[str],
) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {name: [] for name in (*numeric, *made)}
    for position, index in enumerate(indices):
        record = {name: column[position] for name, column in rows.items()}
        kind, problem, examples = None, None, [Encoded(Example([], [], []))]
        try:
            record |= {name: read_number(record[name], name) for name in columns}
            found = encode(read_row(record, layout), encoder)
            examples = found if isinstance(found, list) else [found]
        except BadRow as bad:
            if on_bad_row == "error":
                raise _Stop(index, bad.problem) from None
            kind, problem, record = bad.kind, bad.problem, {}
        except ValueError as error:  # no fault of this row: the others would fail as well
            raise _Stop(index, str(error)) from error
        for encoded in examples:
            judgment = [encoded.judgment] if len(made) > len(COLUMNS) + len(NOTES) else []
            notes = (kind, problem, encoded.truncated, encoded.shortened, encoded.claim, index)
            values = (*map(record.get, numeric), *encoded.example, *judgment, *notes)
            for name, value in zip(out, values, strict=True):
                out[name].append(value)
    return out


def _numeric_columns(
    records: Records, layout: Layout, required: Sequence[str], made: Mapping[str, Column]
) -> dict[str, Value]:
    found = records.dataset.features
    numeric = {
        name: kind
        for name, kind in found.items()
        if name not in layout and isinstance(kind, Value) and kind.dtype.startswith(("int", "uint", "float", "bool"))
    }
    for name in required:
        if name not in found:
            raise DataError(f"{records.source}: wanted a column '{name}', found ({', '.join(found)}); add or rename it")
        numeric[name] = Value("float64")
    for name in numeric:
        if name in made:
            raise DataError(f"{records.source}: examples have a column '{name}' of their own; rename yours")
    return numeric


def _fingerprint(source: Dataset, encoder: Encoder, settings: Mapping[str, Any]) -> str | None:
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
        settings["encode"].func.__qualname__,
        sorted(settings["encode"].keywords.items()),
        sorted((name, value) for name, value in settings.items() if name != "encode"),
        [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))],
        version("transformers"),
        version("tokenizers"),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
