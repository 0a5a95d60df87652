"""What a scheduler knows of its tasks: which of them are taken, and how many are worth training
on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

# How much of what was known of the share of groups remains after each further step: the latest
# five or so steps count.
_REMAINS = 0.8
# Groups asked for, per group that is needed, where groups are passed over.
_MARGIN = 1.25


@dataclass
class Ledger:
    """The tasks that were trained on or passed over, each once, in whatever order.

    Attributes:
        low: every task below it is taken.
        above: the tasks from it on that are taken.
        ends: of step k, how many tasks the steps 0..k have taken.
    """

    low: int = 0
    above: set[int] = field(default_factory=set)
    ends: list[int] = field(default_factory=list)

    def __contains__(self, task: int) -> bool:
        return task < self.low or task in self.above

    def __len__(self) -> int:
        """How many tasks are taken."""
        return self.low + len(self.above)

    def untaken(self) -> Iterator[int]:
        """The tasks that are not taken, in their order, without an end."""
        return (task for task in count(self.low) if task not in self.above)

    def take(self, tasks: Iterable[int], step: int) -> None:
        """Enter the tasks of a step, which may take some more than once.

        Raises:
            AssertionError: if one of them was taken before, or a step was left out.
        """
        tasks = list(tasks)
        if not 0 <= len(self.ends) - step <= 1:
            raise AssertionError(
                f"scheduler: step {step}, on tasks {tasks}, would come after step {len(self.ends) - 1}"
            )
        self.pass_over(tasks)
        self.ends[step:] = [len(self)]

    def pass_over(self, tasks: Iterable[int]) -> None:
        """Enter tasks of which no step trains on any.

        Raises:
            AssertionError: if one of them was taken before.
        """
        for task in tasks:
            if task in self:
                raise AssertionError(f"scheduler: task {task} would be taken twice")
            self.above.add(task)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1

    def state_dict(self) -> dict[str, Any]:
        return {"ends": list(self.ends), "low": self.low, "above": sorted(self.above)}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Ledger":
        ends = list(state["ends"])
        # Checkpoints of earlier versions have neither of the others: tasks were taken in order.
        low = state.get("low", ends[-1] if ends else 0)
        return cls(low, set(state.get("above", ())), ends)


@dataclass
class UsefulShare:
    """The share of groups that are worth training on, estimated from those of the latest steps.

    Attributes:
        useful, seen: groups, those of earlier steps counted less and less.
    """

    useful: float = 0.0
    seen: float = 0.0

    @property
    def share(self) -> float:
        """In (0, 1); a half where nothing is known."""
        return (self.useful + 0.5) / (self.seen + 1)

    def observe(self, kept: int, passed_over: int) -> None:
        """Learn from the groups of a step."""
        self.useful = _REMAINS * self.useful + kept
        self.seen = _REMAINS * self.seen + kept + passed_over

    def asked(self, needed: int) -> int:
        """How many groups to ask for at once, so that hardly ever too few are useful.

        A quarter more than are needed on average; where few groups are passed over, only twice as
        many spare ones as are expected to be.
        """
        expected = needed / self.share
        spare = 2 * (expected - needed)
        return max(needed, round(min(_MARGIN * expected, needed + spare)))
