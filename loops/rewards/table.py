"""One table of scores per rollout, read by advantages, metrics and the monitor of degenerate
rewards alike.
"""

import logging
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...objectives import group_stats, weighted_reward
from ..rollouts.event_loops import run
from ..rollouts.sample import Row, Sample
from .scoring import RewardFunction, check_columns, name_of, score_samples

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardTable:
    """The scores of samples by every reward function. `score` makes one.

    Attributes:
        reward: float64 [samples, rewards], NaN where a function does not apply. The whole row is
            NaN where a function of a weight other than 0 has failed, or the completion was aborted:
            it is compared with no other.
        group: int64 [samples], the task of each sample.
        weight: float64 [rewards].
        total: float64 [samples], the weighted sums; NaN where there is none. Those of a group that
            differ by rounding alone are equal.
        measured_total: as ``total``, with the scores of aborted completions: what metrics count.
        scores: ``[samples][rewards]``, as the functions gave them, failures included.
        numbers: by name, float64 [scored], all scores that are numbers, even if another function
            failed.
    """

    reward: Tensor
    group: Tensor
    weight: Tensor
    total: Tensor
    measured_total: Tensor
    scores: Sequence[Sequence[float | str | None]]
    numbers: Mapping[str, Tensor]


def score(
    rewards: Sequence[RewardFunction | Callable[..., object]],
    samples: Sequence[Sample],
    rows: Sequence[Row] | None = None,
) -> RewardTable:
    """Score every sample by every function that has not scored it yet, and return the table of all
    scores.

    Args:
        rewards: functions as `scoring.adapted` takes them, or any of them in a `RewardFunction`,
            with a weight.
        rows: for each sample, the row that its prompt came from; by default ``sample.row``.

    Raises:
        ValueError: if a function needs a column that a row does not have, or two functions have the
            same name.
    """
    functions = _reward_functions(rewards)
    if rows is None:
        rows = [sample.row or {} for sample in samples]
    _score_missing(functions, samples, rows)
    scores: list[list[float | str | None]] = []
    values: list[list[float]] = []
    for sample in samples:
        given_by_all = [sample.rewards[f.name] for f in functions]
        scores.append(given_by_all)
        values.append([_number(value) for value in given_by_all])
    given = torch.tensor(values, dtype=torch.float64).reshape(len(samples), len(functions))
    weight = torch.tensor([f.weight for f in functions], dtype=torch.float64)
    group = torch.tensor([sample.task for sample in samples], dtype=torch.int64)

    failed = [_has_failed(row, functions) for row in scores]
    aborted = [sample.finish == "aborted" for sample in samples]
    measured = given.masked_fill(torch.tensor(failed, dtype=torch.bool)[:, None], torch.nan)
    compared = measured.masked_fill(torch.tensor(aborted, dtype=torch.bool)[:, None], torch.nan)
    numbers = {}
    for function, column in zip(functions, given.unbind(1), strict=True):
        numbers[function.name] = column[~column.isnan()]
    return RewardTable(
        reward=compared,
        group=group,
        weight=weight,
        total=_without_rounding(weighted_reward(compared, weight), group),
        measured_total=_without_rounding(weighted_reward(measured, weight), group),
        scores=scores,
        numbers=numbers,
    )


def _reward_functions(
    rewards: Sequence[RewardFunction | Callable[..., object]],
) -> list[RewardFunction]:
    """Each reward as a `RewardFunction`; ValueError if they are no list of functions."""
    if isinstance(rewards, Mapping):
        raise ValueError(
            "score: wanted a list, got a mapping; weigh a function by RewardFunction(name, f, weight)"
        )
    if callable(rewards) or isinstance(rewards, RewardFunction | str):
        raise ValueError(
            "score: wanted a list of functions, got one that is in none; write it in brackets, [reward]"
        )
    functions = []
    for place, reward in enumerate(rewards):
        if isinstance(reward, RewardFunction):
            functions.append(reward)
        elif isinstance(reward, str) or callable(reward):
            functions.append(RewardFunction(name_of(reward), reward))
        else:
            raise ValueError(f"score: wanted functions, got {reward!r:.80} in place {place}")
    return functions


def _score_missing(
    functions: Sequence[RewardFunction], samples: Sequence[Sample], rows: Sequence[Row]
) -> None:
    """Score the samples that some function has not scored yet; each sample keeps its scores."""
    pending = []
    for i, sample in enumerate(samples):
        if any(f.name not in sample.rewards for f in functions):
            pending.append(i)
    for columns in {tuple(rows[i]) for i in pending}:
        check_columns(functions, columns)
    if pending:
        run(score_samples(functions, [rows[i] for i in pending], [samples[i] for i in pending]))


def _number(score: float | str | None) -> float:
    """The score, or NaN for a word (it failed) and for None (it does not apply)."""
    return torch.nan if isinstance(score, str | None) else score


def _has_failed(scores: Sequence[float | str | None], functions: Sequence[RewardFunction]) -> bool:
    """True if a function that has a weight gave a word instead of a score."""
    return any(
        isinstance(score, str) and f.weight for score, f in zip(scores, functions, strict=True)
    )


def _without_rounding(total: Tensor, group: Tensor) -> Tensor:
    """The sums, all alike in a group in which float32 can't tell them apart: 0.1 + 0.2 is no better
    than 0.3.
    """
    for task in torch.unique(group):
        members = (group == task) & ~total.isnan()
        rewards = total[members]
        if not len(rewards):
            continue
        rounding = torch.finfo(torch.float32).eps * rewards.abs().max()
        if rewards.max() - rewards.min() <= rounding:
            total[members] = rewards[0]
    return total


def reward_metrics(table: RewardTable) -> dict[str, float]:
    """Metrics of one step, under TRL's names if it has them; those without data are left out.

    rewards/<name>/mean, /std      of all scores that a function gave, unweighted; the standard deviation is unbiased
    rewards/<name>/unscored        completions that it gave none, and of these rewards/<name>/unscored/<reason>: none
                                   where it does not apply, or how it failed
    reward, reward_std, frac_reward_zero_std, frac_unscored    of the weighted sums, see `group_stats`; unscored are
                                   completions that no function applies to, or that one has failed
                                   at
    zero_std_groups                groups in which no two sums differ, so that they teach nothing
    """
    metrics: dict[str, float] = {}
    for i, (name, numbers) in enumerate(table.numbers.items()):
        if len(numbers):
            metrics[f"rewards/{name}/mean"] = numbers.mean().item()
            metrics[f"rewards/{name}/std"] = numbers.std().item() if len(numbers) > 1 else 0.0
        metrics[f"rewards/{name}/unscored"] = float(len(table.scores) - len(numbers))
        reasons: Counter[str] = Counter()
        for row in table.scores:
            score = row[i]
            if isinstance(score, str | None):
                reasons[score or "none"] += 1
        for reason, count in sorted(reasons.items()):
            metrics[f"rewards/{name}/unscored/{reason}"] = float(count)
    if len(table.scores):
        total = table.measured_total
        stats = group_stats(total, table.group)
        groups = len(set(table.group[~total.isnan()].tolist()))
        metrics |= {name: value.item() for name, value in stats.items() if not value.isnan()}
        metrics["zero_std_groups"] = round(stats["frac_reward_zero_std"].item() * groups)
    return metrics


@dataclass
class RewardMonitor:
    """Report, once each, rewards with a bad scale or without scores, and completions that teach
    nothing.

    Args:
        factor: ratio of a score to the usual one, or of one reward's spread to another's, from
            which it is reported.
        patience: steps that show what is usual, and steps in a row without a score, a difference or
            an end.
    """

    factor: float = 100.0
    patience: int = 3
    reported: set[str] = field(default_factory=set)
    _past: dict[tuple[str, str], deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=100))
    )

    def __call__(self, table: RewardTable, samples: Sequence[Sample]) -> list[str]:
        """Log the new problems of this step, and return them."""
        problems = self._nothing_to_learn(table, samples)  # by kind
        spread: dict[str, float] = {}
        weights = table.weight.tolist()
        for i, (name, numbers) in enumerate(table.numbers.items()):
            problems |= self._silence(table, i, name, len(samples))
            problems |= self._explosion(name, numbers)
            usual = self._usual_spread(name, numbers, weights[i])
            if usual:
                spread[name] = usual
        problems |= self._drowned(spread)
        new = {kind: problem for kind, problem in problems.items() if kind not in self.reported}
        self.reported |= new.keys()
        for problem in new.values():
            log.warning("%s", problem)
        return list(new.values())

    def _nothing_to_learn(self, table: RewardTable, samples: Sequence[Sample]) -> dict[str, str]:
        """Steps in a row in which no completion is better than another, or none is whole."""
        # else each is alone in its group
        has_groups = len(set(table.group.tolist())) < len(table.group)
        all_alike = (
            has_groups
            and group_stats(table.measured_total, table.group)["frac_reward_zero_std"].item() == 1
        )
        all_cut = len(samples) > 0 and all(sample.finish == "length" for sample in samples)
        alike = self._lasting(
            "rewards: all completions of a prompt were worth the same",
            all_alike,
            "so they teach nothing by comparison (zero_std_groups and skipped count it); take harder or easier "
            "prompts, a reward that tells more completions apart, a higher temperature or a larger group_size",
        )
        cut = self._lasting(
            "max_tokens: every completion was cut before its end",
            all_cut,
            "so none is whole; allow more tokens, and see that the tokenizer's end token is the one that the model was "
            "made to end with",
        )
        return alike | cut

    def _lasting(self, problem: str, now: bool, advice: str) -> dict[str, str]:
        """The problem, once it is there in ``patience`` steps in a row."""
        past = self._past["lasting", problem]
        past.append(now)
        if sum(list(past)[-self.patience :]) < self.patience:
            return {}
        return {problem: f"{problem} in {self.patience} steps in a row, {advice}"}

    def _silence(self, table: RewardTable, i: int, name: str, count: int) -> dict[str, str]:
        """Steps in a row in which a reward has scored none of ``count`` completions."""
        why = "the metrics rewards/<name>/unscored/... say why, and the first time was logged"
        if all(row[i] is None for row in table.scores):
            why = "it returned None each time, as a function without a return statement does"
        is_silent = count > 0 and len(table.numbers[name]) == 0
        return self._lasting(
            f"reward {name}: gave no score", is_silent, f"so it teaches nothing; {why}"
        )

    def _explosion(self, name: str, numbers: Tensor) -> dict[str, str]:
        """A score that is larger by far than the largest of the steps before."""
        if not len(numbers):
            return {}
        largest = numbers.abs().max().item()
        before = self._past["largest", name]
        usual = statistics.median(before) if len(before) >= self.patience else 0.0
        before.append(largest)
        if not usual or largest <= self.factor * usual:
            return {}
        found = f"a score of size {largest:g}, where {usual:g} was usual"
        fix = "clip it, or take its logarithm, because one such completion decides the whole step"
        return {f"explosion {name}": f"reward {name}: {found}; {fix}"}

    def _usual_spread(self, name: str, numbers: Tensor, weight: float) -> float:
        """The mean over steps of a reward's standard deviation times its weight; 0 until enough
        steps are known.
        """
        past = self._past["spread", name]
        if len(numbers) > 1:
            past.append(abs(weight) * numbers.std().item())
        return statistics.fmean(past) if len(past) >= self.patience else 0.0

    def _drowned(self, spread: dict[str, float]) -> dict[str, str]:
        """The reward that varies least, if another one varies so much more that it decides
        alone.
        """
        if not spread:
            return {}
        ranked = sorted(spread, key=spread.__getitem__)
        quiet = ranked[0]
        loud = ranked[-1]
        if spread[loud] <= self.factor * spread[quiet]:
            return {}
        found = (
            f"varies by {spread[quiet]:g} where {loud} varies by {spread[loud]:g}, weights included"
        )
        fix = "change the weights, or normalize each reward before summing"
        how = "reward_aggregation: normalize; in code, gdpo_advantage"
        return {
            f"drowned {quiet}": f"reward {quiet}: {found}, so that {loud} decides alone; {fix} ({how})"
        }
