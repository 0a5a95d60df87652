"""One table of scores per rollout, read by advantages, metrics and the monitor alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...objectives import weighted_reward
from ..rollouts.event_loops import run
from ..rollouts.sample import Row, Sample
from .scoring import RewardFunction, Score, score_samples
from .trl import adapted


@dataclass(frozen=True)
class RewardTable:
    """The scores of samples by every reward function.

    Attributes:
        reward: float64 [samples, rewards], NaN where a function does not apply. The whole row is NaN where a function
            of a weight other than 0 has failed, or the completion was aborted: it is compared with no other.
        group: int64 [samples], the task of each.
        weight: float64 [rewards].
        names: of the reward functions.
        scores: [samples][rewards], as the functions gave them, failures included.
        measured: as ``reward``, with the scores of aborted completions.
    """

    reward: Tensor
    group: Tensor
    weight: Tensor
    names: Sequence[str] = ()
    scores: Sequence[Sequence[Score]] = ()
    measured: Tensor | None = None

    @cached_property
    def total(self) -> Tensor:
        """float64 [samples], the weighted sum of the scores; NaN where there is none."""
        return weighted_reward(self.reward, self.weight)

    @cached_property
    def measured_total(self) -> Tensor:
        """As ``total``, with the scores of aborted completions: what metrics count."""
        return weighted_reward(self.reward if self.measured is None else self.measured, self.weight)


def score(
    rewards: Sequence[RewardFunction | Callable[..., Any]], samples: Sequence[Sample], rows: Sequence[Row] | None = None
) -> RewardTable:
    """Score every sample by every function that has not scored it yet, and return the table of all scores.

    Args:
        rewards: ``f(row, sample)``; ``f(completion, ...)``, called by the names of its parameters with the text of the
            completion and columns of the row, such as ``prompt``; functions written for TRL, ``f(prompts, completions,
            ...)``; those of `burnish.loops.rewards`; or any of them in a `RewardFunction`, with a weight.
        rows: of each sample, the row that its prompt came from; ``sample.row`` unless given.

    Raises:
        ValueError: if a function needs a column that a row does not have, or two functions have the same name.
    """
    functions = [reward if isinstance(reward, RewardFunction) else _named(reward) for reward in rewards]
    rows = [sample.row or {} for sample in samples] if rows is None else rows
    pending = [i for i, sample in enumerate(samples) if any(f.name not in sample.rewards for f in functions)]
    if pending:
        run(score_samples(functions, [rows[i] for i in pending], [samples[i] for i in pending]))
    return reward_table(functions, samples)


def reward_table(rewards: Sequence[RewardFunction], samples: Sequence[Sample]) -> RewardTable:
    """The table of what `score_samples` wrote.

    Raises:
        ValueError: if a sample was not scored by one of these functions.
    """
    for sample in samples:
        for reward in rewards:
            if reward.name not in sample.rewards:
                raise ValueError(
                    f"reward {reward.name}: completion {sample.index} of task {sample.task} was not scored"
                )
    scores: list[list[Any]] = [[sample.rewards[reward.name] for reward in rewards] for sample in samples]
    deciding = [i for i, reward in enumerate(rewards) if reward.weight]
    failed = [any(isinstance(row[i], str) for i in deciding) for row in scores]
    numbers = [[value if is_number(value) else torch.nan for value in row] for row in scores]
    measured = torch.tensor(numbers, dtype=torch.float64).reshape(len(samples), len(rewards))
    measured[torch.tensor(failed, dtype=torch.bool)] = torch.nan
    compared = measured.clone()
    compared[torch.tensor([sample.finish == "aborted" for sample in samples], dtype=torch.bool)] = torch.nan
    return RewardTable(
        compared,
        torch.tensor([sample.task for sample in samples], dtype=torch.int64),
        torch.tensor([reward.weight for reward in rewards], dtype=torch.float64),
        [reward.name for reward in rewards],
        scores,
        measured,
    )


def is_number(value: Score) -> TypeGuard[float]:
    return value is not None and not isinstance(value, str)


def _named(function: Callable[..., Any]) -> RewardFunction:
    return RewardFunction(getattr(function, "__name__", type(function).__name__), adapted(function))
