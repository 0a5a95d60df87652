"""One turn with a verifier, such as those of reasoning-gym; a game of several turns whose optimal
play is known.
"""

import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

from ..rewards.reasoning_gym import ReasoningGym
from ..rewards.scoring import call
from ..rollouts.sample import Row, Sample
from .multi_turn import Step

RewardOfRow = Callable[[Row, Sample], float | Awaitable[float | None] | None]


class SingleTurn:
    """An environment of a reward function ``(row, sample)``, such as ``ReasoningGym()``."""

    def __init__(self, reward: RewardOfRow) -> None:
        self.reward = reward
        self.row: Row = {}

    def reset(self, row: Row) -> Any:
        self.row = row
        return row["prompt"]

    async def step(self, completion: Sample) -> Step:
        return Step(done=True, reward=await call(self.reward, self.row, completion))


def reasoning_gym(tag: str = "answer") -> SingleTurn:
    return SingleTurn(ReasoningGym(tag))


def optimal_guesses(numbers: int) -> int:
    """⌈log₂(n + 1)⌉ in the worst case: each reply halves the range at best, and asking for the
    middle does it.
    """
    return numbers.bit_length()


class GuessNumber:
    """Guess a number; replies say whether it is higher or lower.

    The last whole number of a completion is the guess.

    r = min(1, b/k) for finding it with the k-th guess, where b is `optimal_guesses`, and 0 for not
    finding it: optimal play always earns 1. A completion without a number, or with one outside of
    the range, is a wasted guess.

    Args:
        guesses: number of allowed guesses, as a multiple of those that optimal play needs.
    """

    def __init__(self, *, guesses: float = 2.0) -> None:
        if not guesses >= 1:
            raise ValueError(
                f"guess_number: guesses must be >= 1, so that the game can be won, got {guesses}"
            )
        self.guesses = guesses
        self.low = self.high = self.secret = self.used = 0

    def reset(self, row: Row) -> Any:
        # int: in a CSV they are texts
        self.low = int(row["low"])
        self.high = int(row["high"])
        self.secret = int(row["secret"])
        self.used = 0
        return row["prompt"]

    def step(self, completion: Sample) -> Step:
        self.used += 1
        best = optimal_guesses(self.high - self.low + 1)
        numbers = re.findall(r"-?[0-9]+", completion.text)
        guess = None
        if numbers and len(numbers[-1]) < 20:  # longer ones take long to read
            guess = int(numbers[-1])
        if guess == self.secret:
            return Step("correct", done=True, reward=min(1.0, best / self.used), counts={"won": 1})
        if self.used >= self.guesses * best:
            return Step(done=True, reward=0.0, counts={"won": 0})
        if guess is None or not self.low <= guess <= self.high:
            hint = f"Say a whole number from {self.low} to {self.high}."
            return Step(hint, reward=0.0, counts={"wasted": 1})
        return Step("higher" if guess < self.secret else "lower", reward=0.0)


def guess_rows(count: int, *, low: int = 1, high: int = 100, seed: int = 0) -> list[dict[str, Any]]:
    """Games as rows, each number of the range equally likely."""
    if high < low:
        raise ValueError(f"guess_rows: wanted low <= high, got {low} and {high}")
    rng = random.Random(seed)
    rules = "Guess it: say one number, and I answer higher or lower."
    prompt = [
        {"role": "user", "content": f"I have chosen a whole number from {low} to {high}. {rules}"}
    ]
    return [
        {"prompt": prompt, "low": low, "high": high, "secret": rng.randint(low, high)}
        for _ in range(count)
    ]
