"""A sample as plain data: what checkpoints, ``samples.jsonl`` and Parquet files hold.

task, index, prompt, tokens, trained, logprobs, finish, text     as in `Sample`
spans                                                            [[version, start, end], ...]
rewards, info                                                    mappings; in Parquet, as JSON text
"""

from dataclasses import fields
from typing import Any

from .sample import Sample, Span

NAMES = tuple(field.name for field in fields(Sample))


def to_record(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in NAMES} | {"spans": [list(span) for span in sample.spans]}


def from_record(record: dict[str, Any]) -> Sample:
    """Raises:
    ValueError: if a field is missing or unknown.
    """
    if set(record) != set(NAMES):
        odd = sorted(set(record) ^ set(NAMES))
        raise ValueError(f"sample: wanted the fields {', '.join(NAMES)}; missing or unknown: {', '.join(odd)}")
    return Sample(**{**record, "spans": [Span(*span) for span in record["spans"]]})
