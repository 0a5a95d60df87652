"""Records as examples: a dataset of token ids and masks, and an account of every row.

    columns         prompt         completions        trained                  + _row, numbers
    a row of SFT    [1, 15, 4]     [[7, 7, 2]]        [[True, True, True]]
    a pair          [1, 15, 4]     [[7, 2], [9, 2]]   [[True, True], [True, True]]

A row that can't be trained on as given is an error, or is counted and left out. Where the records
are memory-mapped, so are the examples.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features, List, Value, concatenate_datasets
from datasets.fingerprint import generate_random_fingerprint
from datasets.table import InMemoryTable

from . import columns, examples
from .accounting import NOTES, Accounting, combine, summarize
from .chat import Encoder
from .columns import BadRow, Message, ParsedRow, read_number, read_row
from .examples import EncodedExample, Example, Tokenization, TrainOn
from .images import IMAGE_FEATURE, ImageReader, ImageRef, is_same
from .mixture import load_data
from .records import Data, DataError, Records, is_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from .stream import Stream

    # A processor, or a reader with one, is for data with images.
    Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin | ImageReader


# ``encode(records, tokenizer, options)``, one of the functions below, perhaps with options bound.
Encode: TypeAlias = Callable[..., tuple[Dataset, Accounting]]
Parts: TypeAlias = Records | Sequence[Records] | Data  # each part is encoded by its own layout
Feature: TypeAlias = Value | List


class EncodeRow(Protocol):
    """One of `examples`, with its options bound: makes examples of a row."""

    def __call__(
        self, row: ParsedRow, encoder: Encoder, *, limit: Tokenization
    ) -> EncodedExample | list[EncodedExample]: ...


COLUMNS: dict[str, Feature] = {
    "prompt": List(Value("int32")),
    "completions": List(List(Value("int32"))),
    "trained": List(List(Value("bool"))),
}


@dataclass(frozen=True)
class _RowOptions:
    """How the rows of one part become examples; the fingerprint of the cache has all of it.

    Attributes:
        encode: an `EncodeRow` with its options.
        layout: the columns that hold prompt and completions.
        required: columns that must hold a number.
        written: columns of text that may write a number.
        image_folder: where relative paths of images begin; None where rows with images are refused.
        no_images: why they are; "" where they are not.
        structures: the features of columns whose structs Arrow has filled with nulls.
        annotation: the column for what a row is labeled with, or "".
    """

    encode: "partial[EncodedExample | list[EncodedExample]]"
    layout: tuple[str, ...]
    on_bad_row: str
    required: Sequence[str]
    written: Sequence[str]
    system_prompt: str
    image_folder: str | None
    no_images: str
    structures: Mapping[str, object]
    annotation: str


DEFAULT = Tokenization()


def encode_supervised(
    records: Parts,
    tokenizer: "Tokenizer",
    options: Tokenization = DEFAULT,
    *,
    train_on: TrainOn = "auto",
) -> tuple[Dataset, Accounting]:
    """Encode demonstrations, as examples with one completion each.

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
    encode = partial(examples.demonstration, train_on=train_on)
    return _encode(records, tokenizer, options, columns.SUPERVISED, encode)


def encode_preference(
    records: Parts,
    tokenizer: "Tokenizer",
    options: Tokenization = DEFAULT,
    *,
    numeric_columns: Sequence[str] = (),
) -> tuple[Dataset, Accounting]:
    """Encode preference pairs, as examples with two completions each, the chosen one first.

    ``numeric_columns``, such as a `margin`, must hold a finite number in every row, and become
    float64.
    """
    return _encode(
        records, tokenizer, options, columns.PREFERENCE, examples.pair, required=numeric_columns
    )


def encode_triples(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Encode preference pairs with a gold completion, as examples with three completions each: the
    chosen one, the rejected one, and that in the column `reference`, which may be the chosen one
    again.
    """
    return _encode(records, tokenizer, options, columns.TRIPLES, examples.triple)


def encode_unpaired(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Encode completions labeled good or bad, each an example with a bool column `desirable`.

    A preference pair is two such examples, the chosen completion and then the rejected one.
    """
    made = ("desirable", Value("bool"))
    return _encode(records, tokenizer, options, columns.UNPAIRED, examples.unpaired, made)


def encode_scores(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Encode rated completions, as examples with one completion each and a float64 `score`."""
    made = ("score", Value("float64"))
    return _encode(records, tokenizer, options, columns.SCORES, examples.completed, made)


def encode_ranking(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Encode ranked completions of one prompt as one example.

    A column `rank` holds their places: 0 best, no ties.
    """
    made = ("rank", List(Value("int64")))
    return _encode(records, tokenizer, options, columns.RANKING, examples.completed, made)


def encode_prompts(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Encode prompts that the policy will complete, as examples without completions.

    An int64 column `row` says where each prompt is in the records, whose other columns are for
    rewards.
    """
    data, accounting = _encode(records, tokenizer, options, columns.PROMPTS, examples.prompt_only)
    return data.rename_column("_row", "row"), accounting


def encode_rows(
    records: Parts, tokenizer: "Tokenizer", options: Tokenization = DEFAULT
) -> tuple[Dataset, Accounting]:
    """Encode rows of which an environment makes prompts.

    If all of them have a column `prompt`, this is `encode_prompts`. Otherwise their prompts are
    empty, and nothing of a row is checked.
    """
    parts, _ = load_data(records)
    if all("prompt" in part.dataset.column_names for part in parts):
        return encode_prompts(parts, tokenizer, options)
    accounts = []
    for part in parts:
        count = len(part.dataset)
        accounts.append(
            Accounting(part.source, read=count, kept=count, examples=count, truncated=0)
        )
    total = sum(account.read for account in accounts)
    rows: dict[str, Sequence[object]] = {name: [[]] * total for name in COLUMNS}
    rows["row"] = range(total)
    data = Dataset.from_dict(rows, features=Features({**COLUMNS, "row": Value("int64")}))
    accounting = accounts[0] if len(accounts) == 1 else combine(accounts)
    return data, accounting


def encode_stepwise(
    records: Parts,
    tokenizer: "Tokenizer",
    options: Tokenization = DEFAULT,
    *,
    separator: str = "\n",
    train_on_last_step_only: bool = False,
) -> tuple[Dataset, Accounting]:
    """Encode solutions labeled step by step, as examples with one completion each.

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
    made = ("label", List(Value("float64")))
    return _encode(records, tokenizer, options, columns.STEPWISE, encode, made)


def step_example(
    prompt: str | list[Message],
    steps: Sequence[str],
    tokenizer: "Tokenizer",
    *,
    separator: str = "\n",
) -> Example:
    """Encode one solution to be scored: ``trained`` is true where each step's score is read.

    Raises:
        DataError: if there is no step, or a step is empty or no text.
    """
    try:
        record = {"prompt": prompt, "completions": list(steps)}
        row = read_row(record, columns.SOLUTION)
        return examples.solution(row, _encoder(tokenizer, DEFAULT), separator=separator)
    except BadRow as bad:
        raise DataError(f"step_example: {bad.problem}") from None


def prompt_tokens(
    record: Mapping[str, object],
    tokenizer: "Tokenizer",
    options: Tokenization = DEFAULT,
    *,
    system_prompt: str = "",
) -> list[int]:
    """The token ids of one prompt, as `encode_prompts` makes them, however long it is.

    Args:
        record: with a column `prompt`, and those that a chat template reads.
        system_prompt: the first message of a conversation that has no system message of its own.

    Raises:
        DataError: if it is no prompt.
    """
    limit = replace(options, max_length=None, truncation="error")
    try:
        row = read_row(record, columns.PROMPTS[0], system_prompt)
        encoded = examples.prompt_only(row, _encoder(tokenizer, options), limit=limit)
        return list(encoded.example.prompt)
    except BadRow as bad:
        raise DataError(bad.problem) from None


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
    encode: EncodeRow,
    made: tuple[str, Feature] | None = None,
    *,
    required: Sequence[str] = (),
) -> tuple[Dataset, Accounting]:
    """Encode each part by its own layout, and concatenate them.

    Args:
        encode: makes examples of a row.
        made: a further column that it makes, of the annotation, and its type.
        required: columns of the records that must hold a number in every row.
    """
    parts, _ = load_data(records)
    tables = []
    accounts = []
    start = 0  # of a part's rows among all, one part after another
    for part in parts:
        encoded, accounting = _encode_part(
            part, tokenizer, options, layouts, start, encode, made, required
        )
        tables.append(encoded)
        accounts.append(accounting)
        start += len(part.dataset)
    if len(parts) == 1:
        return tables[0], accounts[0]
    return concatenate_datasets(_with_same_columns(tables)), combine(accounts)


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
    encode: EncodeRow,
    made: tuple[str, Feature] | None,
    required: Sequence[str],
) -> tuple[Dataset, Accounting]:
    """Encode every row of a part, count the rows, and leave the bad ones out; see `_encode`."""
    source = records.dataset
    encoder = _encoder(tokenizer, options)
    no_images = ""
    if encoder.images is None:
        no_images = options.no_images or columns.TEXT_ALONE
    layout = _layout_of(records, layouts, no_images)
    prompts_only = layouts == columns.PROMPTS
    annotation = dict([made] if made else [])
    schema: dict[str, Feature] = {**COLUMNS, **annotation, **NOTES}
    if encoder.images is not None:
        schema["images"] = IMAGE_FEATURE
    numeric: dict[str, Value] = {}
    if not prompts_only:
        numeric = _numeric_columns(records, layout, required, schema)
    features = Features({**numeric, **schema})
    truncation = options.truncation or ("error" if prompts_only else "keep_start")
    # without what changes no token, as the fingerprint of the cache has the limit in it
    limit = replace(
        options, truncation=truncation, no_images="", processes=None, chat_template=None
    )
    options_of_row = {*columns.OPTION_COLUMNS, *columns.IMAGE_COLUMNS}
    structures = _features_of(source, {*layout, *options_of_row})
    texts = [name for name in numeric if is_text(source.features[name])]
    of_rows = _RowOptions(
        encode=partial(encode, limit=limit),
        layout=layout,
        on_bad_row=options.on_bad_row,
        required=required,
        written=[name for name in texts if name not in required],
        system_prompt=records.system_prompt,
        image_folder=None if no_images else records.folder,
        no_images=no_images,
        structures=structures,
        annotation=next(iter(annotation), ""),
    )
    try:
        encoded = _encode_table(records, options, encoder, features, of_rows)
    except BadRow as bad:
        assert bad.row is not None
        problem = f"{records.where(bad.row)}: {bad.problem}"
        if bad.kind != "setting":
            problem += "; --on_bad_row skip leaves such rows out, and counts them"
        raise DataError(problem) from None

    read = {*structures, *numeric}
    if prompts_only:
        read |= set(source.column_names)  # rewards and environments read the others
    unused = [name for name in source.column_names if name not in read]
    unused += columns.unused_options(source.features, layout, encoder.uses)
    labeled = "desirable" in annotation
    kept, accounting = summarize(
        encoded, records, labeled=labeled, max_length=options.max_length, unused=unused
    )
    if not len(kept):
        raise DataError(f"{records.source}: no row is left to train on\n{accounting}")
    encoded = _numbered_from(start, encoded)
    if len(kept) < len(encoded):
        encoded = encoded.select(kept)
    notes_read = [name for name in NOTES if name != "_row"]
    return encoded.remove_columns(notes_read), accounting


def _layout_of(
    records: Records, layouts: Sequence[tuple[str, ...]], no_images: str
) -> tuple[str, ...]:
    names = records.dataset.column_names
    try:
        return columns.find_layout(names, layouts, no_images=no_images)
    except ValueError as error:
        raise DataError(f"{records.source}: {error}") from None


def _numbered_from(start: int, encoded: Dataset) -> Dataset:
    """Count the rows of a part's examples through all parts, in which it begins at ``start``."""
    if not start:
        return encoded
    rows = encoded.data.column("_row").to_numpy() + start
    return encoded.remove_columns("_row").add_column("_row", rows)


def _features_of(source: Dataset, names: Collection[str]) -> dict[str, object]:
    """The features of some columns, in the order of the dataset; a dict is a struct's feature."""
    return {name: kind for name, kind in source.features.items() if name in names}


def _encode_table(
    records: Records,
    options: Tokenization,
    encoder: Encoder,
    features: Features,
    of_rows: _RowOptions,
) -> Dataset:
    """Encode all rows; cached, if asked for, by a fingerprint of what the result depends on."""
    source = records.dataset
    schema = features.arrow_schema
    if options.cached:
        arguments = {"options": of_rows, "encoder": encoder, "schema": schema}
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
        # `map` would hash the arguments itself, the tokenizer's state too, which use changes.
        encoded = encode(new_fingerprint=_fingerprint(source, encoder, of_rows))
        if _images_changed(encoded):  # since they were encoded, and cached, by an earlier run
            encoded = encode(new_fingerprint=generate_random_fingerprint())
        return encoded
    indices = list(range(len(source)))
    table = InMemoryTable(_encode_rows(source[:], indices, of_rows, encoder, schema))
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
        described = (images.field(name).to_pylist() for name in ("path", "stamp", "digest"))
        for path, stamp, digest in zip(*described, strict=True):
            if stamp and not is_same(path, stamp, digest):
                return True
    return False


def _encode_rows(
    rows: Mapping[str, list[object]],
    indices: list[int],
    options: _RowOptions,
    encoder: Encoder,
    schema: pa.Schema,
) -> pa.Table:
    """Encode a batch of rows, given by columns, into a table with the columns of the schema.

    Raises:
        BadRow: with the row's index, unless ``on_bad_row`` is "skip"; of the kind "setting", if
            every row would fail as this one does.
    """
    out: dict[str, list[object]] = {name: [] for name in schema.names}
    for position, index in enumerate(indices):
        record = {name: column[position] for name, column in rows.items()}
        for name, kind in options.structures.items():
            record[name] = columns.without_invented(record[name], kind)
        notes: dict[str, object] = dict.fromkeys(NOTES)
        notes |= {"_special": False, "_keeps_system": False, "_row": index}
        encoded = [EncodedExample(Example([], [], []))]  # of a row that is left out
        try:
            for name in options.required:
                record[name] = read_number(record[name], name)
            for name in options.written:
                record[name] = columns.number_of_text(record[name])
            row = read_row(
                record,
                options.layout,
                options.system_prompt,
                options.image_folder,
                options.no_images,
            )
            made_of_row = options.encode(row, encoder)
            encoded = made_of_row if isinstance(made_of_row, list) else [made_of_row]
            notes["_special"] = encoder.names_special_token(row)
            notes["_keeps_system"] = row.keeps_system
        except BadRow as bad:
            if options.on_bad_row == "error":
                raise BadRow(bad.kind, bad.problem, index) from None
            notes["_kind"] = bad.kind
            notes["_problem"] = bad.problem
            record = {}  # its numbers may be of another type than the schema's
        except ValueError as error:  # not the fault of this row: the others would fail as well
            raise BadRow("setting", str(error), index) from error
        for one in encoded:
            notes["_truncated"] = one.truncated
            notes["_shortened"] = one.shortened
            notes["_digests"] = one.digests
            notes["_ends"] = one.ends
            notes["_unknown"] = _occurrences(encoder.unknown, one.example)
            # The last of one name wins: a column of the records may be called `prompt` too.
            values = {
                **record,
                options.annotation: one.annotation,
                **notes,
                **_arrays(one.example),
            }
            for name, column in out.items():
                column.append(values.get(name))
    return pa.table(out, schema)


def _occurrences(token: int | None, example: Example) -> int:
    """How often a token is in the prompt and the completions."""
    if token is None:
        return 0
    return sum(ids.count(token) for ids in (example.prompt, *example.completions))


def _arrays(example: Example) -> dict[str, object]:
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
    made: Mapping[str, Feature],
) -> dict[str, Value]:
    """The columns of numbers that examples keep, and their types.

    They are the numeric columns, the required ones, and of a CSV texts that write numbers.

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
            found = f"wanted a column '{name}', found ({', '.join(types)})"
            raise DataError(f"{records.source}: {found}; add or rename it")
        numeric[name] = Value("float64")
    for name in numeric:
        if name in made:
            problem = f"examples have a column '{name}' of their own"
            raise DataError(f"{records.source}: {problem}; rename yours")
    return numeric


def _writes_numbers(dataset: Dataset, name: str) -> bool:
    """True if each text of a column that is not empty writes a number, true or false.

    A column without any text writes none.
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


def _fingerprint(source: Dataset, encoder: Encoder, options: _RowOptions) -> str:
    """Fingerprint of everything that the result depends on, code and versions included.

    A tokenizer in pure Python can't be written down whole, so it gets a new one each time.
    """
    tokenizer = encoder.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return str(generate_random_fingerprint())
    folder = Path(__file__).parent
    code = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in _DECISIVE]
    encode = options.encode
    others = [field.name for field in fields(options) if field.name != "encode"]
    parts = (
        source._fingerprint,
        backend.to_str(),
        type(tokenizer).__qualname__,
        sorted(tokenizer.special_tokens_map.items()),
        encoder.chat_template or tokenizer.chat_template,
        # The repr of a function has its address, which is another one in each process.
        encode.func.__qualname__,
        sorted(encode.keywords.items()),
        [(name, getattr(options, name)) for name in others],
        code,
        version("transformers"),
        version("tokenizers"),
        "" if encoder.images is None else str(encoder.images.processor),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
