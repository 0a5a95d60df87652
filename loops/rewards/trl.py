"""Reward functions written for TRL."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..rollouts.sample import Row, Sample, plain
from .scoring import Over, from_text
from .workers import call

GIVEN = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
TRAINER_ONLY = ("trainer_state", "environments")


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as one of ours: the names of its parameters tell whether it was written for TRL or for text."""
    if {"prompts", "completions", "completion_ids"} & set(_parameters(function)):
        return from_trl(function)
    return from_text(function) if "completion" in _parameters(function) else function


@dataclass(frozen=True)
class from_trl:
    """A reward function of TRL, ``f(prompts=, completions=, **columns) -> list[float]``, as one of ours.

    It gets what it would get there: prompts as the rows have them, completions as messages if the prompts are messages
    and as text otherwise, ``completion_ids``, and all other columns by their names. What it logs by ``log_extra`` and
    ``log_metric`` is kept in ``sample.info``.

    Raises:
        ValueError: if it cannot do without TRL's trainer.
    """

    function: Callable[..., Any]
    over: ClassVar[Over] = "step"

    def __post_init__(self) -> None:
        missing = [name for name in TRAINER_ONLY if name in self._required]
        if missing:
            raise ValueError(
                f"from_trl: {_name(self.function)} needs {missing[0]}, which only TRL's trainer has; give that "
                "parameter a default"
            )

    @property
    def columns(self) -> Sequence[str]:
        return ["prompt", *(name for name in self._required if name not in GIVEN)]

    async def __call__(self, rows: Sequence[Row], samples: Sequence[Sample]) -> Any:
        log_extra = partial(_log_extra, _name(self.function), samples)
        columns = {name for row in rows for name in row} - {"prompt", "completion", "completion_ids"}
        given: dict[str, Any] = {name: [row.get(name) for row in rows] for name in columns}
        given |= {
            "prompts": [row["prompt"] for row in rows],
            "completions": [_completion(row, sample) for row, sample in zip(rows, samples, strict=True)],
            "completion_ids": [sample.tokens for sample in samples],
            "log_extra": log_extra,
            "log_metric": lambda name, value: log_extra(name, [value] * len(samples)),
        }
        parameters = _parameters(self.function)
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        return await call(self.function, **given)

    @property
    def _required(self) -> list[str]:
        return [
            name
            for name, parameter in _parameters(self.function).items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]


def _completion(row: Row, sample: Sample) -> Any:
    if isinstance(row["prompt"], str):
        return sample.text
    return sample.info.get("messages", [{"role": "assistant", "content": sample.text}])


def _log_extra(who: str, samples: Sequence[Sample], name: str, values: Sequence[Any]) -> None:
    for sample, value in zip(samples, values, strict=True):
        sample.info[name] = plain(value, f"reward {who}, which logs {name!r}")


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built-in functions have none that can be read
        return {}


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
