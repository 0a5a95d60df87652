"""A user's function that decides which rows of the data are asked next, from the rewards so far.

    order(history) -> the rows of a rollout, as indices into the data, best first

    def by_variance(history):
        known = history.seen > 0
        useless = known & (history.varied == 0)
        return [*history.rows[~useless[history.rows]], *history.rows]

The main process calls it when the first task of a rollout begins. From then on the row of each of
these tasks is fixed; it is sent to the other ranks, and kept in checkpoints with the history.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...data import permutation
from ..redaction import resolved
from ..registry import as_setting_error, build, find_one
from ..rewards.scoring import RewardFunction
from ..rewards.table import score
from ..rollouts.sample import Row, Sample

_DRAW = 3  # tells these permutations from those of other draws by the same seed


@dataclass(frozen=True)
class History:
    """What is known of the rows when those of a rollout are chosen.

    The rows are those that train: of the data without what is left out because of its length.

    Attributes:
        choice: how many choices came before, to seed what is drawn at random.
        wanted: how many rows are taken, `prompts_per_rollout`.
        rows: int64 [rows], all of them. Those chosen least often come first; those chosen equally
            often are in an order that is drawn for each choice, or in that of the data without
            `shuffle`.
        asked: int64 [rows], how often each was chosen; its groups may be under way still.
        seen: int64 [rows], groups whose rewards are known.
        reward: float64 [rows], mean reward of these groups; NaN where there is none.
        varied: float64 [rows], share of these groups whose rewards varied; NaN where there is none.
        row: ``row(i)``, the columns of a row.
    """

    choice: int
    wanted: int
    rows: npt.NDArray[np.int64]
    asked: npt.NDArray[np.int64]
    seen: npt.NDArray[np.int64]
    reward: npt.NDArray[np.float64]
    varied: npt.NDArray[np.float64]
    row: Callable[[int], Row]


Order = Callable[[History], Iterable[int]]


def resolve_order(spec: str | Mapping[str, Mapping[str, Any]] | Order) -> Order:
    """Return the function that a configuration names, or that is given itself.

    Raises:
        ValueError: if it is not found, or is no function of (history).
    """
    name, found, settings = find_one("order", spec, {}, __package__)
    order = build(f"order {name}", found, resolved(settings))
    try:
        inspect.signature(order).bind("history")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"order {name}: wanted a function of (history), or a class with such a __call__, that returns rows: {error}"
        ) from None
    function: Order = order
    return function


class Curriculum:
    """``curriculum(task)`` is the row that a task completes.

    Args:
        order: the user's function; only the main process calls it.
        count: rows of the data.
        wanted: rows of a rollout.
        seed, shuffle: of `History.rows`.
        row: ``row(i)``, the columns of a row.

    Attributes:
        rows: of each task, in their order.

    Raises:
        ValueError: if there are fewer rows than a rollout takes.
    """

    def __init__(
        self,
        order: Order,
        count: int,
        wanted: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        row: Callable[[int], Row] = lambda number: {},
    ) -> None:
        if count < wanted:
            raise ValueError(
                f"order: a rollout takes {wanted} different rows, and the data has {count}; lower prompts_per_rollout"
            )
        self.order, self.row = order, row
        self.count, self.wanted = count, wanted
        self.seed, self.shuffle = seed, shuffle
        self.rows: list[int] = []
        self.choices = 0
        self.asked = np.zeros(count, np.int64)
        self.seen = np.zeros(count, np.int64)
        self.varied = np.zeros(count, np.int64)
        self.reward = np.zeros(count)  # the sum of the means of groups
        self._sent = 0

    def __call__(self, task: int) -> int:
        while len(self.rows) <= task:
            self._choose()
        return self.rows[task]

    def observe(self, groups: Iterable[list[Sample]], rewards: Sequence[RewardFunction]) -> None:
        """Enter the rewards of groups; those without any teach nothing of their row."""
        for group in groups:
            total = score(rewards, group).total
            total = total[~total.isnan()]
            if len(total) == 0:
                continue
            row = self.rows[group[0].task]
            self.seen[row] += 1
            self.varied[row] += len(torch.unique(total)) > 1
            self.reward[row] += float(total.mean())

    def unsent(self) -> list[int]:
        """The rows that were chosen since the last call, for the other ranks."""
        rows = self.rows[self._sent :]
        self._sent = len(self.rows)
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": torch.tensor(self.rows, dtype=torch.int64),
            "choices": self.choices,
            "asked": torch.tensor(self.asked),
            "seen": torch.tensor(self.seen),
            "varied": torch.tensor(self.varied),
            "reward": torch.tensor(self.reward),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: if it is of data with more or fewer rows.
        """
        if len(state["asked"]) != self.count:
            raise ValueError(
                f"order: the run to resume had {len(state['asked'])} rows, and the data has {self.count}; give the "
                "same data"
            )
        self.rows = state["rows"].tolist()
        self.choices = state["choices"]
        self.asked = state["asked"].numpy().copy()
        self.seen = state["seen"].numpy().copy()
        self.varied = state["varied"].numpy().copy()
        self.reward = state["reward"].numpy().copy()
        self._sent = len(self.rows)  # every rank reads the same checkpoint

    def _choose(self) -> None:
        """Have the user's function choose the rows of the next tasks."""
        history = self._history()
        with as_setting_error("order", Exception):
            chosen = self.order(history)
        rows = self._checked(chosen)
        self.rows += rows.tolist()
        self.asked[rows] += 1
        self.choices += 1

    def _history(self) -> History:
        place = np.arange(self.count)
        if self.shuffle:
            place = permutation(self.count, self.seed, self.choices, _DRAW)
        known = self.seen > 0
        groups = np.where(known, self.seen, 1)
        # copies: what the function writes into them is not remembered
        return History(
            choice=self.choices,
            wanted=self.wanted,
            rows=place[np.argsort(self.asked[place], kind="stable")],
            asked=self.asked.copy(),
            seen=self.seen.copy(),
            reward=np.where(known, self.reward / groups, np.nan),
            varied=np.where(known, self.varied / groups, np.nan),
            row=self.row,
        )

    def _checked(self, chosen: Any) -> npt.NDArray[np.int64]:
        """The first rows that were chosen, each once.

        Raises:
            ValueError: if they are no indices of rows, or too few.
        """
        try:
            rows = np.asarray(chosen if hasattr(chosen, "__array__") else list(chosen))
        except (TypeError, ValueError):
            rows = np.zeros(1)
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise ValueError(
                "order: wanted the indices of rows, best first, such as history.rows, got "
                f"{type(chosen).__name__} {str(chosen)[:60]}"
            )
        _, first = np.unique(rows, return_index=True)
        rows = rows[np.sort(first)][: self.wanted].astype(np.int64)
        if len(rows) < self.wanted:
            raise ValueError(
                f"order: it chose {len(rows)} different rows, and a rollout takes {self.wanted}; put others behind "
                "them, such as history.rows"
            )
        if rows.min() < 0 or rows.max() >= self.count:
            outside = rows[(rows < 0) | (rows >= self.count)][0]
            raise ValueError(f"order: there are rows 0 to {self.count - 1}, it chose {outside}")
        return rows
