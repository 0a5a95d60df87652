"""A sample as plain data: what checkpoints, ``samples.jsonl`` and Parquet files hold.

task, index, prompt, tokens, trained, logprobs, finish, text     as in `Sample`
spans                                                            [[version, start, end], ...]
rewards, info                                                    mappings; in Parquet, as JSON text
"""

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from .sample import Sample, VersionSpan

NAMES = tuple(field.name for field in fields(Sample) if field.name != "row")


def to_record(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in NAMES} | {"spans": [list(span) for span in sample.spans]}


def plain(value: Any, who: str) -> Any:
    """A value as JSON and checkpoints hold it: numbers and arrays of numpy and torch become Python's, tuples lists.

    Args:
        who: names the value, and who left it, in the message.

    Raises:
        ValueError: if it can't be told in numbers, text, lists and mappings.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry, f"{who}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{who}[{i}]") for i, entry in enumerate(value)]
    if hasattr(value, "tolist") and type(found := value.tolist()) is not type(value):  # that of a longdouble is itself
        return plain(found, who)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise ValueError(
        f"{who}: wanted numbers, text, lists or mappings, which can be stored with a sample, got "
        f"{type(value).__name__}; convert it, str(...) perhaps"
    )


def from_record(record: dict[str, Any]) -> Sample:
    """Raises:
    ValueError: if a field is missing or unknown.
    """
    if set(record) != set(NAMES):
        odd = sorted(set(record) ^ set(NAMES))
        raise ValueError(f"sample: wanted the fields {', '.join(NAMES)}; missing or unknown: {', '.join(odd)}")
    return Sample(**{**record, "spans": [VersionSpan(*span) for span in record["spans"]]})
