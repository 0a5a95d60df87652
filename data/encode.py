"""Records as examples: a dataset of token ids and masks, memory-mapped, and an account of every
row.

A row that can't be trained on as given is an error, or is counted and left out.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features, List, Value, concatenate_datasets
from datasets.fingerprint import generate_random_fingerprint
from datasets.table import InMemoryTable

from . import columns, examples
from .accounting import NOTES, Accounting, combine, summarize
from .chat import Encoder
from .columns import BadRow, Message, read_number, read_row
from .examples import EncodedExample, Example, Tokenization, TrainOn
from .images import IMAGE_FEATURE, ImageReader, ImageRef, stamp_of
from .mixture import load_data
from .records import Data, DataError, Records, is_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from .stream import Stream

    # A processor, or a reader with one, is for data with images.
    Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin | ImageReader


Parts: TypeAlias = Records | Sequence[Records] | Data  # each part is encoded by its own layout

COLUMNS = {
    "prompt": List(Value("int32")),
    "completions": List(List(Value("int32"))),
    "trained": List(List(Value("bool"))),
}


DEFAULT = Tokenization()


def encode_supervised(
    records: Parts,
    tokenizer: "Tokenizer",
    options: Tokenization = DEFAULT,
    *,
    train_on: TrainOn = "auto",
) -> tuple[Dataset, Accounting]:
    """Demonstrations as examples with one completion each.

    Args:
        records: in a layout of `columns.SUPERVISED`; or several parts, see `mixture.load_data`.
        train_on: the tokens that carry loss: the assistant's, the completion's, or all but the
            first. "auto" is assistant for `messages`, completion for `prompt`/`completion`, all for
            `text`.

    Returns:
        Columns prompt, completions, trained, the numeric columns of the records (of a CSV, those
        whose texts are numbers), and `_row`, where each example is in the records; and an account
        of every row.

    Raises:
        DataError: naming source, row and fix.
    """
    if train_on not in ("auto", "assistant", "completion", "all"):
        raise ValueError(f"train_on: wanted auto, assistant, completion or all, got {train_on!r}")
    return _encode(
        records,
        tokenizer,
        options,
        columns.SUPERVISED,
        partial(examples.demonstration, train_on=train_on),
    )


def encode_preference(
    records: Parts,
    tokenizer: "Tokenizer",
    options: Tokenization = DEFAULT,
    *,
    numeric_columns: Sequence[str] = (),
) -> tuple[Dataset, Accounting]:
    """Preference pairs as examples with two completions each, the chosen one first.

    ``numeric_columns``, such as a `margin`, must hold a finite number in every row, and become
    float64.
    """
    return _encode(
        records, tokenizer, options, columns.PREFERENCE, examples.pair, required=numeric_columns
    )


def encode_unpaired(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Completions labeled good or bad, as examples with one completion each and a bool column
    `desirable`.

    A preference pair is two such examples, the chosen completion and then the rejected one.
    """
    return _encode(
        records,
        tokenizer,
        options,
        columns.UNPAIRED,
        examples.unpaired,
        {"desirable": Value("bool")},
    )


def encode_scores(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Completions with a score, as examples with one completion each and a float64 column
    `score`.
    """
    return _encode(
        records, tokenizer, options, columns.SCORES, examples.completed, {"score": Value("float64")}
    )


def encode_ranking(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Ranked completions of one prompt as one example, with a column `rank` of their places: 0
    best, no ties.
    """
    return _encode(
        records,
        tokenizer,
        options,
        columns.RANKING,
        examples.completed,
        {"rank": List(Value("int64"))},
    )


def encode_prompts(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Prompts that the policy will complete, as examples without completions.

    An int64 column `row` says where each prompt is in the records, whose other columns are for
    rewards.
    """
    data, accounting = _encode(records, tokenizer, options, columns.PROMPTS, examples.prompt_only)
    return data.rename_column("_row", "row"), accounting


def encode_rows(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Rows that an environment makes prompts of: like `encode_prompts` if all of them have a column
    `prompt`; otherwise with empty prompts, and nothing of a row is checked."""
    parts, _ = load_data(records)
    if all("prompt" in part.dataset.column_names for part in parts):
        return encode_prompts(parts, tokenizer, options)
    counts = [len(part.dataset) for part in parts]
    empty: dict[str, list[Any]] = {name: [[]] * sum(counts) for name in COLUMNS}
    data = Dataset.from_dict(
        {**empty, "row": range(sum(counts))}, features=Features({**COLUMNS, "row": Value("int64")})
    )
    accounts = [
        Accounting(part.source, read=count, kept=count, examples=count, truncated=0)
        for part, count in zip(parts, counts, strict=True)
    ]
    return data, accounts[0] if len(accounts) == 1 else combine(accounts)


def encode_stepwise(
    records: Parts,
    tokenizer: "Tokenizer",
    options: Tokenization = DEFAULT,
    *,
    separator: str = "\n",
    train_on_last_step_only: bool = False,
) -> tuple[Dataset, Accounting]:
    """Solutions labeled step by step, as examples with one completion each.

        completion = step 1 + separator + step 2 + separator + ...

    Trained is the last token of each separator, where the step can be judged: a step's score is
    read at that token, not predicted from the one before. A column `label` holds one float64 in [0,
    1] for each trained token, in order. ``keep_start`` leaves out the steps that don't end within
    `max_length`, their labels too; ``keep_end`` cuts the beginning of the prompt.

    Args:
        separator: the text that ends a step; its tokens never merge with the step's tokens.
        train_on_last_step_only: label the solution as a whole, at its end.
    """
    encode = partial(
        examples.stepwise, separator=separator, train_on_last_step_only=train_on_last_step_only
    )
    return _encode(
        records, tokenizer, options, columns.STEPWISE, encode, {"label": List(Value("float64"))}
    )


def step_example(
    prompt: str | list[Message],
    steps: Sequence[str],
    tokenizer: "Tokenizer",
    *,
    separator: str = "\n",
) -> Example:
    """One solution as `encode_stepwise` sees it, to be scored: ``trained`` is true where each
    step's score is read.

    Raises:
        DataError: if there is no step, or a step is empty or no text.
    """
    try:
        record = {"prompt": prompt, "completions": list(steps)}
        row = read_row(record, columns.SOLUTION)
        return examples.solution(row, _encoder(tokenizer, DEFAULT), separator=separator)
    except BadRow as bad:
        raise DataError(f"step_example: {bad.problem}") from None


def example(dataset: "Dataset | Stream", index: int) -> Example:
    """The example in one row of an encoded dataset."""
    row = dataset[index]
    images = images_of_row(row.get("images"))
    return Example(row["prompt"], row["completions"], row["trained"], images)


def images_of_row(stored: Sequence[Mapping[str, Any]] | None) -> tuple[ImageRef, ...]:
    """The images in a row of an encoded dataset, as its column `images` holds them."""
    return tuple(ImageRef(**image) for image in stored or ())


def _encoder(tokenizer: "Tokenizer", options: Tokenization) -> Encoder:
    """The encoder with this tokenizer, or with the tokenizer and the images of a processor."""
    images = None
    if isinstance(tokenizer, ImageReader):
        images = tokenizer
    elif hasattr(tokenizer, "image_processor"):
        images = ImageReader(tokenizer)
    text: Any = tokenizer if images is None else images.tokenizer
    return Encoder(text, options.chat_template, options.chat_template_kwargs, images)


def _encode(
    records: Parts,
    tokenizer: "Tokenizer",
    options: Tokenization,
    layouts: Sequence[tuple[str, ...]],
    *args: Any,
    **kwargs: Any,
) -> tuple[Dataset, Accounting]:
    """Encode each part by its own layout, and concatenate them."""
    parts, _ = load_data(records)
    # of the rows, one part after another
    starts = accumulate((len(part.dataset) for part in parts[:-1]), initial=0)
    encoded = [
        _encode_part(part, tokenizer, options, layouts, start, *args, **kwargs)
        for part, start in zip(parts, starts, strict=True)
    ]
    if len(encoded) == 1:
        return encoded[0]
    tables = _with_same_columns([data for data, _ in encoded])
    return concatenate_datasets(tables), combine([accounting for _, accounting in encoded])


def _with_same_columns(tables: Sequence[Dataset]) -> list[Dataset]:
    """The columns that all tables have; a column whose types differ becomes float64."""
    # All parts are encoded for one model, so all of them have `images`, or none has.
    features = Features()
    for name in tables[0].column_names:
        if all(name in table.column_names for table in tables):
            kinds = [table.features[name] for table in tables]
            are_same = kinds.count(kinds[0]) == len(kinds)
            features[name] = kinds[0] if are_same else Value("float64")
    selected = [table.select_columns(list(features)) for table in tables]
    return [table if table.features == features else table.cast(features) for table in selected]


def _encode_part(
    records: Records,
    tokenizer: "Tokenizer",
    options: Tokenization,
    layouts: Sequence[tuple[str, ...]],
    start: int,
    encode: Callable[..., EncodedExample | list[EncodedExample]],
    annotation: Mapping[str, Value | List] | None = None,
    required: Sequence[str] = (),
) -> tuple[Dataset, Accounting]:
    """Encode every row with ``encode(row, encoder, limit=...)``; ``annotation`` is a further column
    that it makes.
    """
    source = records.dataset
    encoder = _encoder(tokenizer, options)
    layout = _layout_of(records, layouts, sees_images=encoder.images is not None)
    prompts_only = layouts == columns.PROMPTS
    made = {**COLUMNS, **(annotation or {}), **NOTES}
    if encoder.images is not None:
        made["images"] = IMAGE_FEATURE
    numeric = {} if prompts_only else _numeric_columns(records, layout, required, made)
    features = Features({**numeric, **made})
    truncation = options.truncation or ("error" if prompts_only else "keep_start")
    limit = replace(options, truncation=truncation, processes=None, chat_template=None)
    options_of_row = {*columns.OPTION_COLUMNS, *columns.IMAGE_COLUMNS}
    structures = _features_of(source, {*layout, *options_of_row})
    settings = {
        "encode": partial(encode, limit=limit),
        "layout": layout,
        "on_bad_row": options.on_bad_row,
        "required": required,
        "written": [
            name for name in numeric if name not in required and is_text(source.features[name])
        ],
        "system_prompt": records.system_prompt,
        "image_folder": None if encoder.images is None else records.folder,
        "structures": structures,
        "annotation": next(iter(annotation or ()), ""),
    }
    try:
        encoded = _encode_table(records, options, encoder, features, settings)
    except BadRow as bad:
        assert bad.row is not None
        skip = (
            ""
            if bad.kind == "setting"
            else "; --on_bad_row skip leaves such rows out, and counts them"
        )
        raise DataError(f"{records.where(bad.row)}: {bad.problem}{skip}") from None

    # others of prompts are for rewards
    read = set(source.column_names) if prompts_only else {*structures, *numeric}
    unused = [name for name in source.column_names if name not in read]
    unused += columns.unused_options(source.features, layout, encoder.uses)
    labeled = "desirable" in (annotation or {})
    kept, accounting = summarize(
        encoded, records, labeled=labeled, max_length=options.max_length, unused=unused
    )
    if not len(kept):
        raise DataError(f"{records.source}: no row is left to train on\n{accounting}")
    encoded = _numbered_from(start, encoded)
    if len(kept) < len(encoded):
        encoded = encoded.select(kept)
    return encoded.remove_columns([name for name in NOTES if name != "_row"]), accounting


def _layout_of(
    records: Records, layouts: Sequence[tuple[str, ...]], *, sees_images: bool
) -> tuple[str, ...]:
    names = records.dataset.column_names
    try:
        return columns.find_layout(names, layouts, sees_images=sees_images)
    except ValueError as error:
        raise DataError(f"{records.source}: {error}") from None


def _numbered_from(start: int, encoded: Dataset) -> Dataset:
    """The examples of a part with their rows counted through all parts, of which it begins at
    ``start``.
    """
    if not start:
        return encoded
    rows = encoded.data.column("_row").to_numpy() + start
    return encoded.remove_columns("_row").add_column("_row", rows)


def _features_of(source: Dataset, names: Collection[str]) -> dict[str, Any]:
    """The features of some columns, in the order of the dataset."""
    return {name: kind for name, kind in source.features.items() if name in names}


def _encode_table(
    records: Records,
    options: Tokenization,
    encoder: Encoder,
    features: Features,
    settings: Mapping[str, Any],
) -> Dataset:
    """Encode all rows; cached, if asked for, by a fingerprint of everything that the result depends
    on.

    Args:
        settings: arguments of `_encode_rows`, the encoder and the schema beside them.
    """
    source = records.dataset
    arguments: dict[str, Any] = {**settings, "encoder": encoder, "schema": features.arrow_schema}
    if options.cached:
        encode = partial(
            source.map,
            _encode_rows,
            batched=True,
            with_indices=True,
            fn_kwargs=arguments,
            remove_columns=source.column_names,
            features=features,
            num_proc=options.processes,
            desc=f"Tokenizing {records.source}",
        )
        encoded = encode(new_fingerprint=_fingerprint(source, encoder, settings))
        if _images_changed(encoded):  # since they were encoded, and cached, by an earlier run
            encoded = encode(new_fingerprint=generate_random_fingerprint())
        return encoded
    table = InMemoryTable(_encode_rows(source[:], list(range(len(source))), **arguments))
    # `Dataset.from_dict` would fingerprint the table: longer than a small one takes, and nothing
    # reads it.
    fingerprint = generate_random_fingerprint()
    return Dataset(table, DatasetInfo(features=features), fingerprint=fingerprint)


def _images_changed(encoded: Dataset) -> bool:
    """True if the file of an image is another one than when its row was encoded."""
    if "images" not in encoded.column_names:
        return False
    for table in encoded.select_columns(["images"]).with_format("arrow").iter(1000):
        images = table["images"].combine_chunks().flatten()
        paths = images.field("path").to_pylist()
        stamps = images.field("stamp").to_pylist()
        if any(
            stamp and stamp_of(path) != stamp for path, stamp in zip(paths, stamps, strict=True)
        ):
            return True
    return False


def _encode_rows(
    rows: Mapping[str, list[Any]],
    indices: list[int],
    *,
    encode: Callable[..., EncodedExample | list[EncodedExample]],
    encoder: Encoder,
    layout: tuple[str, ...],
    on_bad_row: str,
    required: Sequence[str],
    written: Sequence[str],
    system_prompt: str,
    image_folder: str | None,
    structures: Mapping[str, Any],
    annotation: str,
    schema: pa.Schema,
) -> pa.Table:
    out: dict[str, list[Any]] = {name: [] for name in schema.names}
    for position, index in enumerate(indices):
        record = {name: column[position] for name, column in rows.items()}
        record |= {
            name: columns.without_invented(record[name], kind) for name, kind in structures.items()
        }
        kind: str | None = None
        problem: str | None = None
        special = False
        keeps_system = False
        encoded = [EncodedExample(Example([], [], []))]  # of a row that is left out
        try:
            record |= {name: read_number(record[name], name) for name in required}
            record |= {name: columns.number_of_text(record[name]) for name in written}
            row = read_row(record, layout, system_prompt, image_folder)
            made_of_row = encode(row, encoder)
            encoded = made_of_row if isinstance(made_of_row, list) else [made_of_row]
            special = encoder.names_special_token(row)
            keeps_system = row.keeps_system
        except BadRow as bad:
            if on_bad_row == "error":
                raise BadRow(bad.kind, bad.problem, index) from None
            kind = bad.kind
            problem = bad.problem
            record = {}
        except ValueError as error:  # not the fault of this row: the others would fail as well
            raise BadRow("setting", str(error), index) from error
        for one in encoded:
            notes = (
                kind,
                problem,
                one.truncated,
                one.shortened,
                special,
                keeps_system,
                one.digests,
                one.ends,
                index,
            )
            values = record | {annotation: one.annotation} | dict(zip(NOTES, notes, strict=True))
            values |= _arrays(one.example)
            for name, column in out.items():
                column.append(values.get(name))
    return pa.table(out, schema)


def _arrays(example: Example) -> dict[str, Any]:
    """The columns of an example as arrays: lists of a batch of long rows would take gigabytes."""
    return {
        "prompt": np.array(example.prompt, np.int32),
        "completions": [np.array(ids, np.int32) for ids in example.completions],
        "trained": [np.array(mask, bool) for mask in example.trained],
        "images": [image._asdict() for image in example.images],
    }


def _numeric_columns(
    records: Records,
    layout: tuple[str, ...],
    required: Sequence[str],
    made: Mapping[str, Value | List],
) -> dict[str, Value]:
    """The columns of numbers that examples keep: numeric ones, the required ones, and, of a CSV,
    numbers in texts.

    Raises:
        DataError: if a required column is missing, or a column has the name of one that is
            ``made``.
    """
    types = records.dataset.features
    numeric: dict[str, Value] = {}
    texts = []
    for name, kind in types.items():
        if name in layout or not isinstance(kind, Value):
            continue
        if kind.dtype.startswith(("int", "uint", "float", "bool")):
            numeric[name] = kind
        elif records.untyped and is_text(kind) and name not in made:
            texts.append(name)
    for name in texts:
        if _writes_numbers(records.dataset, name):
            numeric[name] = Value("float64")
    for name in required:
        if name not in types:
            raise DataError(
                f"{records.source}: wanted a column '{name}', found ({', '.join(types)}); add or rename it"
            )
        numeric[name] = Value("float64")
    for name in numeric:
        if name in made:
            raise DataError(
                f"{records.source}: examples have a column '{name}' of their own; rename yours"
            )
    return numeric


def _writes_numbers(dataset: Dataset, name: str) -> bool:
    """True if a column of text writes a number, true or false in every row that is not empty, and
    in at least one.
    """
    found = False
    for rows in dataset.select_columns([name]).iter(1000):
        numbers = [columns.number_of_text(text) for text in rows[name] if text is not None]
        if any(isinstance(number, str) for number in numbers):
            return False
        found |= bool(numbers)
    return found


# the files of this folder that determine tokens
_DECISIVE = ("chat", "columns", "encode", "examples", "images", "turns")


def _fingerprint(source: Dataset, encoder: Encoder, settings: Mapping[str, Any]) -> str:
    """Fingerprint of everything that the result depends on, code included; a new one for a
    tokenizer in pure Python.
    """
    backend = getattr(encoder.tokenizer, "backend_tokenizer", None)
    if backend is None:
        return str(generate_random_fingerprint())
    parts = (
        source._fingerprint,
        backend.to_str(),
        type(encoder.tokenizer).__qualname__,
        sorted(encoder.tokenizer.special_tokens_map.items()),
        encoder.chat_template or encoder.tokenizer.chat_template,
        settings["encode"].func.__qualname__,
        sorted(settings["encode"].keywords.items()),
        sorted((name, value) for name, value in settings.items() if name != "encode"),
        [Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in _DECISIVE],
        version("transformers"),
        version("tokenizers"),
        "" if encoder.images is None else str(encoder.images.processor),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
