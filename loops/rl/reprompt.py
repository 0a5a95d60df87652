"""A teacher's prompts about the student's completions, written when these are known.

    reprompt(row, samples) -> a prompt for each of the samples, or None

    def with_solution(row, samples):
        right = [sample.text for sample in samples if sample.text == row["answer"]]
        hint = f"It is {right[0]}. {row['prompt']}" if right else None
        return [hint for _ in samples]

The samples are the completions of one row of the data. A prompt is a text, or a list of messages, as
the row's own. The teacher rates the completion as what follows this prompt; a completion without one
trains nothing. The main process calls the function, once for each row of a rollout.

Paper: Huebotter et al. 2026, "Reinforcement learning via self-distillation" (SDPO),
arXiv:2601.20802: its teacher is the student itself, told of the environment's feedback on the
completion, or of a completion of the same prompt that succeeded.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

from torch import Tensor

from ...data import DataError, part_of, prompt_tokens
from ...data.columns import OPTION_COLUMNS
from ..batch import Batch
from ..models.policy import Policy
from ..registry import as_setting_error, find
from ..rollouts.sample import Row, Sample
from ..runs.context import RunContext, tokenization
from ..runs.ranks import from_main
from ..runs.teacher import with_teacher_prompts
from .buffer import RolloutBuffer
from .context import rows_for_rewards

log = logging.getLogger(__name__)

Prompt: TypeAlias = str | list[dict[str, Any]]
Reprompt = Callable[[Row, Sequence[Sample]], Sequence[Prompt | None]]


def resolve_reprompt(spec: object) -> Reprompt:
    """The function that a configuration names, or is given.

    Raises:
        ValueError: if it is not found, or is no function of (row, samples).
    """
    found: Any = find("teacher.reprompt", spec, {}, "") if isinstance(spec, str) else spec
    try:
        inspect.signature(found).bind("row", "samples")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"teacher.reprompt {spec}: wanted a function of (row, samples) that returns a prompt for each: {error}"
        ) from None
    function: Reprompt = found
    return function


class Reprompts:
    """The teacher's prompts of the rollout at hand.

    Args:
        row_of: ``row_of(task)``, the row of the records whose prompt a task completes.
        limit: tokens that the teacher reads at most; None for no limit.

    Attributes:
        prompts: token ids for each completion of the rollout; None where it has no such prompt.
    """

    def __init__(
        self,
        function: Reprompt,
        run: RunContext[Policy],
        row_of: Callable[[int], int],
        limit: int | None,
    ) -> None:
        self.function = function
        self.run = run
        self.row_of = row_of
        self.limit = limit
        self.rows = rows_for_rewards(run.records)
        self.prompts: list[list[int] | None] = []

    def ask(self, rollout: RolloutBuffer) -> Mapping[str, Tensor]:
        """Ask for the prompts of a new rollout; those without one train nothing.

        Every rank calls it.

        Raises:
            ValueError: if the function fails, or returns no list of prompts.
        """
        self.prompts = from_main(self.run.accelerator, lambda: list(self._asked(rollout)))
        rollout.mask([prompt is None for prompt in self.prompts])
        return {}

    def metrics(self, rollout: RolloutBuffer) -> Mapping[str, float]:
        asked = [prompt is not None for prompt in self.prompts]
        return {"reprompted": sum(asked) / max(len(asked), 1)}

    def select(self, rollout: RolloutBuffer) -> list[list[list[int]]]:
        """Each completion as an example of its own: a teacher reads one prompt in an example."""
        return [[[i]] for i, trained in enumerate(rollout.trained) if any(trained)]

    def add(self, plan: Sequence[Sequence[Sequence[int]]], batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches with these prompts, a column of each.

        Args:
            plan: the examples of each, as indices of the completions.
        """
        prepared = []
        for batch, examples in zip(batches, plan, strict=True):
            prompts = [self.prompts[index] or [] for (index,) in examples]
            prepared.append(with_teacher_prompts(batch, prompts))
        return prepared

    def _asked(self, rollout: RolloutBuffer) -> Iterator[list[int] | None]:
        """The prompts of all completions, in their order."""
        for task, group in groupby(rollout.samples, lambda sample: sample.task):
            samples = list(group)
            number = self.row_of(task)
            row = self.rows(number)
            with as_setting_error("teacher.reprompt", Exception):
                prompts = self.function(row, [sample.copy() for sample in samples])
            if not isinstance(prompts, list | tuple) or len(prompts) != len(samples):
                raise ValueError(
                    f"teacher.reprompt: wanted a list of {len(samples)} prompts, one for each completion of a row, got "
                    f"{prompts!r:.80}"
                )
            for prompt, sample in zip(prompts, samples, strict=True):
                yield None if prompt is None else self._encoded(prompt, number, row, sample)

    def _encoded(self, prompt: Prompt, number: int, row: Row, sample: Sample) -> list[int] | None:
        part, _ = part_of(self.run.records, number)
        options = {name: row[name] for name in OPTION_COLUMNS if row.get(name) is not None}
        try:
            ids = prompt_tokens(
                {**options, "prompt": prompt},
                self.run.tokenizer,
                tokenization(self.run.config),
                system_prompt=part.system_prompt,
            )
        except DataError as error:
            raise ValueError(f"teacher.reprompt: {prompt!r:.80} is no prompt: {error}") from None
        length = len(ids) + len(sample.tokens)
        if self.limit is not None and length > self.limit:
            log.warning(
                "teacher.reprompt: a prompt and its completion make %d tokens, and the teacher's context is %d; it is "
                "left out",
                length,
                self.limit,
            )
            return None
        return ids
