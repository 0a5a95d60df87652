"""Several completions of each held-out prompt: their mean reward, and whether one of k is right.

    avg@n      the mean over prompts of the mean reward of n completions
    pass@k     the probability that of k completions one at least is right, estimated from n without bias:
               the mean over prompts of 1 - C(n - c, k) / C(n, k), where c of n are right

Intervals are those of the bootstrap over prompts: the prompts are drawn again, with replacement, and
what falls outside the middle 95 % of the results is cut off.

Paper: Chen et al. 2021, arXiv:2107.03374, Eq. 1.
"""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from .table import RewardTable

_DRAWS = 1000  # of the bootstrap
_OUTSIDE = (2.5, 97.5)  # percentiles
_SEED = 0  # the interval of the same rewards is the same


def pass_at_k(right: int, drawn: int, k: int) -> float:
    """The probability that one of k completions is right, by ``right`` of ``drawn`` that are.

    Raises:
        ValueError: unless 0 <= right <= drawn and 1 <= k <= drawn.
    """
    if not (0 <= right <= drawn and 1 <= k <= drawn):
        raise ValueError(
            f"pass_at_k: wanted 0 <= right <= drawn and 1 <= k <= drawn, got right={right}, drawn={drawn}, k={k}"
        )
    return 1 - math.comb(drawn - right, k) / math.comb(drawn, k)


def at_k_metrics(table: RewardTable, count: int, right_from: float) -> dict[str, float]:
    """``avg@n``, ``pass@1``, ``pass@2``, ``pass@4``, ... and ``pass@n``, each with ``/low`` and
    ``/high``.

    A completion without a reward is unknown, not wrong: it is left out, and where fewer than k of a
    prompt are known, so is that prompt from pass@k.

    Args:
        table: of ``count`` completions of each prompt.
        right_from: the smallest reward of a completion that counts as right.
    """
    total = table.measured_total
    known = ~total.isnan()
    by_prompt: list[list[float]] = []
    for task in sorted(set(table.group.tolist())):
        by_prompt.append(total[known & (table.group == task)].tolist())
    metrics = _with_interval(f"avg@{count}", [fmean(rewards) for rewards in by_prompt if rewards])
    for k in sorted({*_powers_of_two(count), count}):
        passed = []
        for rewards in by_prompt:
            if len(rewards) >= k:
                right = sum(reward >= right_from for reward in rewards)
                passed.append(pass_at_k(right, len(rewards), k))
        metrics |= _with_interval(f"pass@{k}", passed)
    return metrics


def _powers_of_two(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]


def _with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean of one value a prompt, and its interval; nothing without a value."""
    if not values:
        return {}
    of_prompts = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(len(of_prompts), size=(_DRAWS, len(of_prompts)))
    low, high = np.percentile(of_prompts[drawn].mean(1), _OUTSIDE)
    return {name: float(of_prompts.mean()), f"{name}/low": float(low), f"{name}/high": float(high)}
