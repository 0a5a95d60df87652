"""A rollout: sampled completions, their scores, and columns over their trained tokens.

    samples -> scores -> advantages -> examples, several completions of one prompt each -> micro-batches

Whatever mixes completions (group means, whitening, generalized advantages) is computed once per rollout, over all of it
and on every rank alike, so that the split into micro-batches and ranks does not matter.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor

from ...data import Batches, Example
from ...objectives import sequence_sum
from ..batch import Batch, collate
from ..models.backbone import Layout
from ..rewards.table import RewardTable, reward_table, score
from ..rollouts.sample import Row, Sample

Examples = list[list[int]]  # of each example, the indices of its completions in the rollout


class RolloutBuffer:
    """Completions in the order of (task, index), and columns [tokens] over all of their trained tokens.

    Completions that must not be trained on have no trained token: those that are unscored, aborted, or (with
    ``mask_truncated``) cut off. Columns are set and read as ``buffer[name]``; every batch has its part of them.
    From the start there are ``sampled_logp``, the sampler's log-probs, and ``age``, versions behind the step.

    Args:
        samples: or groups of them.
        scores: of the samples in that order; `score` gives them later. Without a reward nothing is unscored.
        version: of the weights of the step that trains on them first; the newest that sampled, unless given.
        dtype: of the columns.
    """

    def __init__(
        self,
        samples: Sequence[Sample] | Sequence[Sequence[Sample]],
        scores: RewardTable | None = None,
        *,
        mask_truncated: bool = False,
        version: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.samples = in_order(samples)
        self.trained = [sample.trained for sample in self.samples]
        self.dtype = dtype
        self.columns: dict[str, Tensor] = {}
        newest = max((span.version for sample in self.samples for span in sample.spans), default=0)
        self["sampled_logp"] = self._flat(lambda sample: sample.logprobs)
        self["age"] = self._flat(lambda sample: _ages(sample, newest if version is None else version))
        self.mask([sample.finish == "aborted" for sample in self.samples])
        if mask_truncated:
            self.mask([sample.finish == "length" for sample in self.samples])
        self.scores = reward_table([], self.samples) if scores is None else scores
        if self.scores.group.tolist() != [sample.task for sample in self.samples]:
            raise ValueError("rollout: scores are those of other samples, or in another order; sort by (task, index)")
        self._mask_unscored()

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        if len(column) != len(self.sequence):
            raise ValueError(
                f"rollout: {name} must have one entry per trained token, {len(self.sequence)}, got {len(column)}; "
                "a value per completion becomes one per token by [rollout.sequence]"
            )
        self.columns[name] = column.to(self.dtype) if column.is_floating_point() else column

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def sequence(self) -> Tensor:
        """int64 [tokens], the completion that each trained token belongs to."""
        return torch.arange(len(self.samples)).repeat_interleave(self.lengths)

    @property
    def lengths(self) -> Tensor:
        """int64 [completions], the number of their trained tokens."""
        return torch.tensor([sum(trained) for trained in self.trained], dtype=torch.int64)

    @property
    def reward(self) -> Tensor:
        """float64 [completions], the weighted sum of the scores; NaN where there is none."""
        return self.scores.total

    @property
    def unfinished(self) -> Tensor:
        """float64 [completions], 1 for those that did not end by themselves."""
        return torch.tensor([sample.finish != "stop" for sample in self.samples], dtype=torch.float64)

    @property
    def groups(self) -> list[list[int]]:
        """The completions of each prompt that have a token to train on."""
        groups: dict[int, list[int]] = {}
        for i, sample in enumerate(self.samples):
            if any(self.trained[i]):
                groups.setdefault(sample.task, []).append(i)
        return list(groups.values())

    def score(self, rewards: Sequence[Any], rows: Sequence[Row] | None = None) -> RewardTable:
        """Score the completions, and mask those without a score. See `burnish.loops.rewards.score`."""
        self.scores = score(rewards, self.samples, rows)
        self._mask_unscored()
        return self.scores

    def mask(self, masked: Sequence[bool]) -> None:
        """Train on no token of these completions."""
        kept = ~torch.tensor(masked, dtype=torch.bool)[self.sequence]
        self.columns = {name: column[kept] for name, column in self.columns.items()}
        for i, sample in enumerate(self.samples):
            if masked[i]:
                self.trained[i] = [False] * len(sample.tokens)

    def _mask_unscored(self) -> None:
        if len(self.scores.weight):
            self.mask(self.reward.isnan().tolist())

    def sum(self, column: Tensor) -> Tensor:
        """[completions], the sum of a column [tokens] over each of them."""
        return sequence_sum(column, self.sequence, len(self.samples))

    def split_groups(self, max_tokens: int | None, layout: Layout) -> list[Examples]:
        """The examples of each group: one, so that the prompt is computed once, unless it exceeds ``max_tokens``."""
        return [self._split(group, max_tokens, layout) for group in self.groups]

    def micro_batches(
        self,
        max_tokens: int | None = None,
        *,
        examples: Examples | None = None,
        layout: Layout = "shared",
        accelerator: Accelerator | None = None,
    ) -> list[Batch]:
        """This rank's micro-batches of one step, on its device; an empty one where there is nothing to train on.

        Args:
            max_tokens: that a micro-batch computes at most, unless one completion alone has more.
            examples: the completions that share an example; those of a group unless given.
            layout: of the policy, whose rows decide whether a shared prompt is computed once.
            accelerator: this process, unless given.
        """
        if examples is None:
            examples = [example for group in self.split_groups(max_tokens, layout) for example in group]
        process: Any = accelerator or PartialState()
        plan = self.plan(examples, max_tokens, layout, process.num_processes)[process.process_index]
        return [self.batch(part, process.device) for part in plan]

    def plan(self, examples: Examples, max_tokens: int | None, layout: Layout, ranks: int = 1) -> list[list[Examples]]:
        """The examples of each micro-batch of each rank."""
        if not examples:
            return [[[]]] * ranks
        batches = Batches(
            [self._cost(example, layout) for example in examples],
            batch_size=len(examples),
            micro_tokens=max_tokens,
            seed=0,
            shuffle=False,
            steps=1,
            ranks=ranks,
        )
        return [[[examples[position] for position in part] for part in rank] for rank in batches.plan(0)]

    def batch(self, examples: Examples, device: torch.device | str = "cpu") -> Batch:
        """Examples with their part of all columns."""
        starts = np.cumsum([0, *self.lengths.tolist()])
        completions = [i for example in examples for i in example]
        index = torch.tensor([t for i in completions for t in range(starts[i], starts[i + 1])], dtype=torch.int64)
        columns = {name: column[index] for name, column in self.columns.items()}
        return collate([self._example(example) for example in examples], columns, device)

    def _example(self, completions: Sequence[int]) -> Example:
        samples = [self.samples[i] for i in completions]
        return Example(samples[0].prompt, [s.tokens for s in samples], [self.trained[i] for i in completions])

    def _cost(self, completions: Sequence[int], layout: Layout) -> int:
        """Tokens of an example, as `data.token_cost` counts them."""
        prompt = len(self.samples[completions[0]].prompt)
        tokens = sum(len(self.samples[i].tokens) for i in completions)
        return prompt * (1 if layout == "shared" else len(completions)) + tokens

    def _split(self, group: Sequence[int], max_tokens: int | None, layout: Layout) -> Examples:
        examples: Examples = [[]]
        for i in group:
            larger = [*examples[-1], i]
            if examples[-1] and max_tokens is not None and self._cost(larger, layout) > max_tokens:
                larger = [i]
                examples.append(larger)
            examples[-1] = larger
        return examples

    def _flat(self, values: Callable[[Sample], Sequence[float]]) -> Tensor:
        """One number per token of each completion, as a column over the trained ones."""
        column = [
            value
            for sample, trained in zip(self.samples, self.trained, strict=True)
            for value, kept in zip(values(sample), trained, strict=True)
            if kept
        ]
        return torch.tensor(column, dtype=self.dtype)


def rollout_metrics(rollout: RolloutBuffer) -> dict[str, float]:
    """Metrics of completions under TRL's names, the share that is masked, and their age."""
    lengths = torch.tensor([sum(sample.trained) for sample in rollout.samples], dtype=torch.float64)
    ended = rollout.unfinished == 0
    masked = torch.tensor([not any(trained) for trained in rollout.trained], dtype=torch.float64)
    metrics: dict[str, float] = {}
    for name, some in (("", lengths), ("terminated_", lengths[ended])):
        if len(some):
            kinds = {"mean": some.mean(), "min": some.min(), "max": some.max()}
            metrics |= {f"completions/{kind}_{name}length": float(value) for kind, value in kinds.items()}
    if len(lengths):
        metrics["completions/clipped_ratio"] = float((~ended).double().mean())
        metrics["completions/masked_ratio"] = float(masked.mean())
    age = rollout["age"]
    return metrics | ({"age/mean": float(age.mean()), "age/max": float(age.max())} if len(age) else {})


def in_order(samples: Sequence[Sample] | Sequence[Sequence[Sample]]) -> list[Sample]:
    """Samples, or groups of them, in the order of (task, index)."""
    groups = cast(Sequence[Any], samples)
    flat: list[Sample] = [s for group in groups for s in ([group] if isinstance(group, Sample) else group)]
    return sorted(flat, key=lambda sample: (sample.task, sample.index))


def _ages(sample: Sample, version: int) -> list[float]:
    ages = [0.0] * len(sample.tokens)
    for span in sample.spans:
        ages[span.start : span.end] = [float(version - span.version)] * (span.end - span.start)
    return ages
