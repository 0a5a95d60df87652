"""Rewards of length and repetition. Only tokens that the policy sampled count, not those of tools
and users.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings
from ..rollouts.sample import Row, Sample
from .math import MathEquivalence
from .scoring import as_score, is_async


@dataclass(frozen=True)
class LengthTarget(Settings):
    """Distance of the length from ``target``, n*: r = −α |n − n*|, with the ``coefficient`` α > 0.

    Paper: Aggarwal and Welleck 2025 (L1), arXiv:2503.04697; α = 0.0003 there, beside a reward of 1
    for a right answer.
    """

    prefix = "length."
    target: NonNegativeInt
    coefficient: PositiveFloat = 0.0003

    def __call__(self, row: Row, sample: Sample) -> float:
        return -self.coefficient * abs(sample.length - self.target)


@dataclass(frozen=True)
class SoftOverlong(Settings):
    """Soft over-long punishment: nothing up to a length, then linearly down to −1 at the limit, and
    −1 beyond.

        r = 0                      n ≤ L − C
        r = ((L − C) − n)/C        L − C < n ≤ L
        r = −1                     n > L

    Args:
        limit: L, tokens.
        buffer: C, the tokens before the limit in which the punishment grows; 0 punishes from the
            limit on.

    Paper: Yu et al. 2025 (DAPO), arXiv:2503.14476, Eq. 13; L = 20480 and C = 4096 there.
    """

    prefix = "soft_overlong."
    limit: PositiveInt
    buffer: NonNegativeInt

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer > self.limit:
            raise ValueError(
                f"soft_overlong: wanted buffer <= limit, got {self.buffer} and {self.limit}"
            )

    def __call__(self, row: Row, sample: Sample) -> float:
        over = sample.length - (self.limit - self.buffer)
        if over <= 0:
            return 0.0
        return -1.0 if over > self.buffer else -over / self.buffer


@dataclass(frozen=True)
class Repetition(Settings):
    """The share of n-grams that are repeats of others: r = −p (1 − unique/all), 0 for less than n
    tokens.

    N-grams consist of adjacent sampled tokens: none spans a tool's or a user's turn. ``penalty`` is
    p ≥ 0. It is TRL's ``get_repetition_penalty_reward``; the paper charges the repeated tokens one
    by one.

    Paper: Yeo et al. 2025, arXiv:2502.03373, Appendix C.2.
    """

    prefix = "repetition."
    n: PositiveInt = 3
    penalty: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.penalty == math.inf:
            raise ValueError("repetition.penalty: must be finite, got inf")

    def __call__(self, row: Row, sample: Sample) -> float:
        ngrams = []
        for context in sample.contexts:
            pairs = zip(context.tokens, context.trained, strict=True)
            for sampled, run in groupby(pairs, key=lambda pair: pair[1]):
                tokens = [token for token, _ in run]
                if sampled:
                    places = range(len(tokens) - self.n + 1)
                    ngrams += [tuple(tokens[i : i + self.n]) for i in places]
        return -self.penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0


@dataclass(frozen=True)
class CosineLength(Settings):
    """A right completion earns more the shorter it is; a wrong one costs less the longer it is.

        r = b + ½(a − b)(1 + cos(π min(n/L, 1)))

    The paper has a further penalty for completions that reach the limit, which `SoftOverlong` is
    for; here, as in TRL, they get b. The default values are TRL's.

    Args:
        limit: L, tokens.
        right, wrong: (a, b), the rewards of right and wrong completions of no token and of L
            tokens.
        correct: a plain function whose score is 0.5 or more for a right completion; None is passed
            on, other values are NaN.

    Paper: Yeo et al. 2025, arXiv:2502.03373, Appendix C.1.
    """

    prefix = "cosine."
    limit: PositiveInt
    right: tuple[float, float] = (1.0, 0.5)
    wrong: tuple[float, float] = (-1.0, -0.5)
    correct: Callable[[Row, Sample], Any] = field(default_factory=MathEquivalence)

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_async(self.correct):
            raise ValueError(
                "cosine: correct must be a plain function; isolate the whole, not what is inside it"
            )

    @property
    def columns(self) -> Sequence[str]:
        return getattr(self.correct, "columns", ())

    def __call__(self, row: Row, sample: Sample) -> float | None:
        value = as_score(self.correct(row, sample))
        if isinstance(value, str | None):
            return math.nan if value else None
        start, end = self.right if value >= 0.5 else self.wrong
        share = min(sample.length / self.limit, 1.0)
        return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
