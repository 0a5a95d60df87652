"""What a step logs of its rewards, and what should worry whoever reads it."""

import logging
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...objectives import group_stats, total_reward
from ..rollouts.sample import Sample
from .judge import Unscored, Weighted

log = logging.getLogger(__name__)


class Judged(NamedTuple):
    """Scores as `objectives.advantage` takes them: `total_reward`, `normalize_then_sum`.

    Attributes:
        reward: float64 [samples, rewards], NaN where there is no score.
        group: int64 [samples], the task of each.
        weight: float64 [rewards].
    """

    reward: Tensor
    group: Tensor
    weight: Tensor


def judged(rewards: Sequence[Weighted], samples: Sequence[Sample]) -> Judged:
    """The scores that `judge` wrote.

    Raises:
        ValueError: if a sample was not judged by one of these functions.
    """
    for sample in samples:
        for reward in rewards:
            if reward.name not in sample.rewards:
                raise ValueError(f"reward {reward.name}: answer {sample.index} of task {sample.task} was not judged")
    scores = [[_or_nan(sample.rewards[reward.name]) for reward in rewards] for sample in samples]
    return Judged(
        torch.tensor(scores, dtype=torch.float64).reshape(len(samples), len(rewards)),
        torch.tensor([sample.task for sample in samples], dtype=torch.int64),
        torch.tensor([reward.weight for reward in rewards], dtype=torch.float64),
    )


def reward_metrics(rewards: Sequence[Weighted], samples: Sequence[Sample], unscored: Unscored) -> dict[str, float]:
    """Of one step, under TRL's names where it has one; what there was nothing to measure of is left out.

    rewards/<name>/mean, /std      of each function's scores, unweighted; the standard deviation is unbiased
    rewards/<name>/unscored        answers that it gave none, and of these rewards/<name>/unscored/<reason>
    reward, reward_std, frac_reward_zero_std, frac_unscored    of the weighted sums, see `group_stats`
    zero_std_groups                groups in which no two sums differ, so that they teach nothing
    """
    matrix, group, weight = judged(rewards, samples)
    metrics: dict[str, float] = {}
    for reward, column in zip(rewards, matrix.unbind(1), strict=True):
        scores = column[~column.isnan()]
        name = f"rewards/{reward.name}"
        if len(scores):
            metrics[f"{name}/mean"] = scores.mean().item()
            metrics[f"{name}/std"] = scores.std().item() if len(scores) > 1 else 0.0
        metrics[f"{name}/unscored"] = float(len(column) - len(scores))
    metrics |= {f"rewards/{name}/unscored/{reason}": float(n) for (name, reason), n in sorted(unscored.items())}
    if len(samples):
        total = total_reward(matrix, weight)
        stats = group_stats(total, group)
        groups = len(set(group[~total.isnan()].tolist()))
        metrics |= {name: value.item() for name, value in stats.items() if not value.isnan()}
        metrics["zero_std_groups"] = round(stats["frac_reward_zero_std"].item() * groups)
    return metrics


@dataclass
class Watch:
    """Reports, once each, rewards whose scale or silence spoils a run.

    Args:
        factor: by how much a score must exceed what was usual, or one reward's spread another's.
        patience: steps of which the usual is learned, and steps in a row without a score.
    """

    factor: float = 100.0
    patience: int = 3
    reported: set[str] = field(default_factory=set)
    _largest: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _spread: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _silent: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __call__(self, rewards: Sequence[Weighted], samples: Sequence[Sample]) -> list[str]:
        """What is new to say after this step; it is logged as well."""
        problems: dict[str, str] = {}
        matrix = judged(rewards, samples).reward
        for reward, column in zip(rewards, matrix.unbind(1), strict=True):
            scores = column[~column.isnan()]
            problems |= self._silence(reward.name, len(scores), len(samples))
            if len(scores):
                problems |= self._explosion(reward.name, scores.abs().max().item())
            if len(scores) > 1:
                self._spread[reward.name].append(abs(reward.weight) * scores.std().item())
        problems |= self._drowned()
        new = {kind: problem for kind, problem in problems.items() if kind not in self.reported}
        self.reported |= set(new)
        for problem in new.values():
            log.warning("%s", problem)
        return list(new.values())

    def _silence(self, name: str, scores: int, samples: int) -> dict[str, str]:
        self._silent[name] = 0 if scores or not samples else self._silent[name] + 1
        if self._silent[name] < self.patience:
            return {}
        return {
            f"silent {name}": f"reward {name}: gave no score in {self.patience} steps in a row, so it teaches nothing; "
            f"the metrics rewards/{name}/unscored/... say why, and the first failure was logged"
        }

    def _explosion(self, name: str, largest: float) -> dict[str, str]:
        before = self._largest[name]
        usual = statistics.median(before) if len(before) >= self.patience else 0.0
        before.append(largest)
        del before[:-100]
        if not usual or largest <= self.factor * usual:
            return {}
        return {
            f"explosion {name}": f"reward {name}: a score of size {largest:g}, where {usual:g} was usual; clip it, or "
            "take its logarithm, because one such answer decides the whole step"
        }

    def _drowned(self) -> dict[str, str]:
        means = {
            name: statistics.fmean(spreads[-100:])
            for name, spreads in self._spread.items()
            if len(spreads) >= self.patience and any(spreads)
        }
        if len(means) < 2:
            return {}
        loud, quiet = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        if means[loud] <= self.factor * means[quiet]:
            return {}
        return {
            f"drowned {quiet}": f"reward {quiet}: varies by {means[quiet]:g} where {loud} varies by {means[loud]:g}, "
            f"weights included, so that {loud} decides alone; change the weights, or normalize each reward before "
            "summing (normalize_then_sum)"
        }


def _or_nan(score: float | None) -> float:
    return float("nan") if score is None else score
