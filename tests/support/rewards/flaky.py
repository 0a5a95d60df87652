"""Environments that fail, for the command line to name: ``flaky:Steps``."""

import itertools

from burnish.loops.environments import Step
from online import even

_resets = itertools.count()


class Game:
    """Two turns, in which even tokens are liked."""

    opened, closed = 0, 0

    def __init__(self):
        Game.opened += 1
        self.turns = 0

    def reset(self, row):
        return row["prompt"]

    def step(self, answer):
        self.turns += 1
        return Step("and?", done=self.turns == 2, reward=even({}, answer))

    def close(self):
        Game.closed += 1


class Steps(Game):
    def step(self, answer):
        raise KeyError("board")


class Resets(Game):
    def reset(self, row):
        raise ConnectionError("no sandbox answers")


class SomeResets(Game):
    """Of every 16 resets the first six fail, so that a whole group never begins, and half of
    another.
    """

    def reset(self, row):
        if next(_resets) % 16 < 6:
            raise ConnectionError("no sandbox answers")
        return super().reset(row)


class Verdict(Game):
    """It pays in the end, and has no end of its own."""

    def __init__(self):
        super().__init__()
        self.answers = []

    def step(self, answer):
        self.answers.append(answer)
        return Step("and?")

    def reward(self):
        return sum(even({}, answer) for answer in self.answers)


class NaN(Game):
    def step(self, answer):
        return super().step(answer)._replace(reward=float("nan"))
