"""MultiTurnSource of one turn, scored by a reward function: any task of reasoning-gym, say."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...data.columns import Message
from ..rewards.scoring import call
from ..rollouts.sample import Row, Sample
from .multi_turn import Step


class SingleTurn:
    """An environment of a reward function ``(row, sample)``, such as ``ReasoningGym()``."""

    def __init__(self, reward: Callable[[Row, Sample], float | Awaitable[float | None] | None]) -> None:
        self.reward = reward
        self.row: Row = {}

    def reset(self, row: Row) -> Sequence[Message]:
        self.row = row
        prompt: Any = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    async def step(self, completion: Sample) -> Step:
        return Step(done=True, reward=await call(self.reward, self.row, completion))
