"""Reward metrics of a step, and warnings about degenerate rewards."""

import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...objectives import group_stats
from ..rollouts.sample import Sample
from .scoring import Score
from .table import RewardTable, is_number

log = logging.getLogger(__name__)


def reward_metrics(table: RewardTable) -> dict[str, float]:
    """Metrics of one step, under TRL's names where it has one; those with nothing to measure are left out.

    rewards/<name>/mean, /std      of all scores that a function gave, unweighted; the standard deviation is unbiased
    rewards/<name>/unscored        completions that it gave none, and of these rewards/<name>/unscored/<reason>: none
                                   where it does not apply, or how it failed
    reward, reward_std, frac_reward_zero_std, frac_unscored    of the weighted sums, see `group_stats`; unscored are
                                   completions that no function applies to, or that one has failed at
    zero_std_groups                groups in which no two sums differ, so that they teach nothing
    """
    metrics: dict[str, float] = {}
    for name, given in _by_name(table).items():
        scores = _numbers(given)
        if len(scores):
            metrics[f"rewards/{name}/mean"] = scores.mean().item()
            metrics[f"rewards/{name}/std"] = scores.std().item() if len(scores) > 1 else 0.0
        metrics[f"rewards/{name}/unscored"] = float(len(given) - len(scores))
        reasons = Counter("none" if value is None else value for value in given if not is_number(value))
        metrics |= {f"rewards/{name}/unscored/{reason}": float(count) for reason, count in sorted(reasons.items())}
    if len(table.scores):
        total = table.measured_total
        stats = group_stats(total, table.group)
        groups = len(set(table.group[~total.isnan()].tolist()))
        metrics |= {name: value.item() for name, value in stats.items() if not value.isnan()}
        metrics["zero_std_groups"] = round(stats["frac_reward_zero_std"].item() * groups)
    return metrics


@dataclass
class RewardMonitor:
    """Reports, once each, rewards whose scale or silence spoils a run, and completions that teach nothing.

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

    def __call__(self, table: RewardTable, samples: Sequence[Sample]) -> list[str]:
        """The new problems of this step; they are logged as well."""
        problems: dict[str, str] = {}
        for (name, given), weight in zip(_by_name(table).items(), table.weight.tolist(), strict=True):
            scores = _numbers(given)
            problems |= self._lasts(
                f"reward {name}: gave no score",
                "so it teaches nothing; the metrics rewards/<name>/unscored/... say why, and the first time was logged",
                now=len(scores) == 0 < len(samples),
            )
            if len(scores):
                problems |= self._explosion(name, scores.abs().max().item())
            if len(scores) > 1:
                self._spread[name].append(abs(weight) * scores.std().item())
        problems |= self._drowned()
        compared = len(set(table.group.tolist())) < len(table.group)  # else each is alone in its group
        problems |= self._lasts(
            "rewards: all completions of a prompt were worth the same",
            "so they teach nothing by comparison (zero_std_groups and skipped count it); take harder or easier prompts,"
            " a reward that tells more completions apart, a higher temperature or a larger group_size",
            now=compared and group_stats(table.measured_total, table.group)["frac_reward_zero_std"].item() == 1,
        )
        problems |= self._lasts(
            "max_tokens: every completion was cut before its end",
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
        """The problem once it has lasted for ``patience`` steps in a row."""
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
            "take its logarithm, because one such completion decides the whole step"
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


def _by_name(table: RewardTable) -> dict[str, list[Score]]:
    return {name: [row[i] for row in table.scores] for i, name in enumerate(table.names)}


def _numbers(scores: Sequence[Score]) -> Tensor:
    """float64 [scored], those that are numbers."""
    return torch.tensor([value for value in scores if is_number(value)], dtype=torch.float64)
