"""What a step logs of its rewards, and what should worry whoever reads it."""

import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ...objectives import group_stats, weighted_reward
from ..rollouts.sample import Sample
from .scoring import RewardFunction

log = logging.getLogger(__name__)


class RewardTable(NamedTuple):
    """Scores as `objectives.advantage` takes them: `weighted_reward`, `gdpo_advantage`.

    Attributes:
        reward: float64 [samples, rewards], NaN where a function does not apply. Where one of a weight other than 0 has
            failed, the whole row is NaN: the sample is compared with no other, in no reward.
        group: int64 [samples], the task of each.
        weight: float64 [rewards].
    """

    reward: Tensor
    group: Tensor
    weight: Tensor


def judged(rewards: Sequence[RewardFunction], samples: Sequence[Sample]) -> RewardTable:
    """The scores that `judge` wrote.

    Raises:
        ValueError: if a sample was not judged by one of these functions.
    """
    for sample in samples:
        for reward in rewards:
            if reward.name not in sample.rewards:
                raise ValueError(f"reward {reward.name}: answer {sample.index} of task {sample.task} was not judged")
    deciding = [reward.name for reward in rewards if reward.weight]
    unknown = [any(isinstance(sample.rewards[name], str) for name in deciding) for sample in samples]
    found = [[sample.rewards[reward.name] for reward in rewards] for sample in samples]
    scores = [[value if _is_number(value) else torch.nan for value in row] for row in found]
    matrix = torch.tensor(scores, dtype=torch.float64).reshape(len(samples), len(rewards))
    matrix[torch.tensor(unknown, dtype=torch.bool)] = torch.nan
    return RewardTable(
        matrix,
        torch.tensor([sample.task for sample in samples], dtype=torch.int64),
        torch.tensor([reward.weight for reward in rewards], dtype=torch.float64),
    )


def reward_metrics(rewards: Sequence[RewardFunction], samples: Sequence[Sample]) -> dict[str, float]:
    """Of one step, under TRL's names where it has one; what there was nothing to measure of is left out.

    rewards/<name>/mean, /std      of all scores that a function gave, unweighted; the standard deviation is unbiased
    rewards/<name>/unscored        answers that it gave none, and of these rewards/<name>/unscored/<reason>: none where
                                   it does not apply, or how it failed
    reward, reward_std, frac_reward_zero_std, frac_unscored    of the weighted sums, see `group_stats`; unscored is what
                                   no function applies to, or one has failed at
    zero_std_groups                groups in which no two sums differ, so that they teach nothing
    """
    matrix, group, weight = judged(rewards, samples)
    metrics: dict[str, float] = {}
    for reward in rewards:
        scores = _scores(reward, samples)
        name = f"rewards/{reward.name}"
        if len(scores):
            metrics[f"{name}/mean"] = scores.mean().item()
            metrics[f"{name}/std"] = scores.std().item() if len(scores) > 1 else 0.0
        metrics[f"{name}/unscored"] = float(len(samples) - len(scores))
        found = [sample.rewards[reward.name] for sample in samples]
        reasons = Counter("none" if value is None else value for value in found if not _is_number(value))
        metrics |= {f"{name}/unscored/{reason}": float(count) for reason, count in sorted(reasons.items())}
    if len(samples):
        total = weighted_reward(matrix, weight)
        stats = group_stats(total, group)
        groups = len(set(group[~total.isnan()].tolist()))
        metrics |= {name: value.item() for name, value in stats.items() if not value.isnan()}
        metrics["zero_std_groups"] = round(stats["frac_reward_zero_std"].item() * groups)
    return metrics


@dataclass
class RewardMonitor:
    """Reports, once each, rewards whose scale or silence spoils a run, and answers that nothing can be learned from.

    Args:
        factor: by how much a score must exceed what was usual, or one reward's spread another's.
        patience: steps of which the usual is learned, and steps in a row without a score, a difference, or an end.
    """

    factor: float = 100.0
    patience: int = 3
    reported: set[str] = field(default_factory=set)
    _largest: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _spread: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _lasting: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __call__(self, rewards: Sequence[RewardFunction], samples: Sequence[Sample]) -> list[str]:
        """What is new to say after this step; it is logged as well."""
        problems: dict[str, str] = {}
        matrix, group, weight = judged(rewards, samples)
        for reward in rewards:
            scores = _scores(reward, samples)
            problems |= self._lasts(
                f"reward {reward.name}: gave no score",
                "so it teaches nothing; the metrics rewards/<name>/unscored/... say why, and the first time was logged",
                now=len(scores) == 0 < len(samples),
            )
            if len(scores):
                problems |= self._explosion(reward.name, scores.abs().max().item())
            if len(scores) > 1:
                self._spread[reward.name].append(abs(reward.weight) * scores.std().item())
        problems |= self._drowned()
        compared = len(set(group.tolist())) < len(group)  # unless each answer is the only one to its prompt
        problems |= self._lasts(
            "rewards: all answers to a prompt were worth the same",
            "so they teach nothing by comparison (zero_std_groups and skipped count it); take harder or easier prompts,"
            " a reward that tells more answers apart, a higher temperature or a larger group_size",
            now=compared and group_stats(weighted_reward(matrix, weight), group)["frac_reward_zero_std"].item() == 1,
        )
        problems |= self._lasts(
            "max_tokens: every answer was cut before its end",
            "so none is whole; allow more tokens, and see that the tokenizer's end token is the one that the model was "
            "made to end with",
            now=len(samples) > 0 and all(sample.finish == "length" for sample in samples),
        )
        new = {kind: problem for kind, problem in problems.items() if kind not in self.reported}
        self.reported |= set(new)
        for problem in new.values():
            log.warning("%s", problem)
        return list(new.values())

    def _lasts(self, what: str, advice: str, *, now: bool) -> dict[str, str]:
        """What to say once it has been so for ``patience`` steps in a row."""
        self._lasting[what] = self._lasting[what] + 1 if now else 0
        if self._lasting[what] < self.patience:
            return {}
        return {what: f"{what} in {self.patience} steps in a row, {advice}"}

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
            "summing (reward_aggregation: normalize; in code, gdpo_advantage)"
        }


def _scores(reward: RewardFunction, samples: Sequence[Sample]) -> Tensor:
    """float64 [scored], the scores that a function gave."""
    found = (sample.rewards[reward.name] for sample in samples)
    return torch.tensor([value for value in found if _is_number(value)], dtype=torch.float64)


def _is_number(value: float | str | None) -> TypeGuard[float]:
    return value is not None and not isinstance(value, str)
