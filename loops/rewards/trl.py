"""Reward functions written for TRL."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..rollouts.sample import Row, Sample, plain
from .scoring import call, from_text, marked, name_of, required


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as one of ours: the names of its parameters tell whether it was written for TRL or for text."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions have none that can be read
        return function
    if parameters.keys() & {"prompts", "completions", "completion_ids"}:
        return from_trl(function)
    return from_text(function) if "completion" in parameters else function


def from_trl(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function of TRL, ``f(prompts=, completions=, **columns) -> list[float]``, as one of ours.

    It gets what it would get there: prompts as the rows have them, completions as messages if the prompts are messages
    and as text otherwise, ``completion_ids``, and all other columns by their names. What it logs by ``log_extra`` and
    ``log_metric`` is kept in ``sample.info``.

    Raises:
        ValueError: if it cannot do without TRL's trainer.
    """
    names = required(function)
    for name in ("trainer_state", "environments"):
        if name in names:
            needs = f"{name_of(function)} needs {name}, which only TRL's trainer has"
            raise ValueError(f"from_trl: {needs}; give that parameter a default")
    ours = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
    columns = ["prompt", *(name for name in names if name not in ours)]
    return marked(partial(_call_trl, function), function, over="step", columns=columns)


async def _call_trl(function: Callable[..., Any], rows: Sequence[Row], samples: Sequence[Sample]) -> Any:
    def log_extra(name: str, values: Sequence[Any]) -> None:
        for sample, value in zip(samples, values, strict=True):
            sample.info[name] = plain(value, f"reward {name_of(function)}, which logs {name!r}")

    columns = {name for row in rows for name in row} - {"prompt", "completion", "completion_ids"}
    named: dict[str, Any] = {name: [row.get(name) for row in rows] for name in columns}
    named |= {
        "prompts": [row["prompt"] for row in rows],
        "completions": [
            sample.text
            if isinstance(row["prompt"], str)
            else sample.info.get("messages", [{"role": "assistant", "content": sample.text}])
            for row, sample in zip(rows, samples, strict=True)
        ],
        "completion_ids": [sample.tokens for sample in samples],
        "log_extra": log_extra,
        "log_metric": lambda name, value: log_extra(name, [value] * len(samples)),
    }
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        named = {name: value for name, value in named.items() if name in parameters}
    return await call(function, **named)
