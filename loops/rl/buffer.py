"""From sampled answers to the micro-batches of the steps that train on them.

    sampler -> groups -> rewards -> advantages -> examples, several answers to one prompt each -> micro-batches

A rollout is what is sampled at once and trained on in one optimizer step or in several. All that mixes answers (group
means, whitening, generalized advantages) is computed once per rollout, over all of it and on every rank alike, before
its first forward pass with gradients, so that the split into micro-batches and ranks does not matter.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ...data import Batches, Example
from ...objectives import weighted_reward
from ..batch import Batch, collate
from ..models.backbone import evaluating
from ..models.policy import Policy
from ..rewards.metrics import RewardTable
from ..rollouts.record import from_record, to_record
from ..rollouts.sample import Sample
from ..rollouts.scheduler import Group, RolloutScheduler
from ..runs.ranks import from_main

log = logging.getLogger(__name__)

PATIENCE = 8  # takes in a row, for one rollout, in which groups without variance are passed over


@dataclass
class RolloutBuffer:
    """Answers in the order of (task, index), and what is known of each of their trained tokens.

    Attributes:
        samples: the answers.
        trained: the tokens of each that are trained; none of those of an answer that is masked.
        judged: their scores, NaN where there is none; all NaN of an answer that is compared with no other, because a
            reward has failed at it or it was given up.
        columns: by name, each [tokens] over all trained tokens.
    """

    samples: list[Sample]
    trained: list[list[bool]]
    judged: RewardTable
    columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sequence(self) -> Tensor:
        """int64 [tokens], which answer each trained token belongs to."""
        lengths = torch.tensor([sum(trained) for trained in self.trained], dtype=torch.int64)
        return torch.arange(len(self.samples)).repeat_interleave(lengths)

    @property
    def reward(self) -> Tensor:
        """float64 [answers], the weighted sum of the scores; NaN where none could be given."""
        return weighted_reward(self.judged.reward, self.judged.weight)

    @property
    def groups(self) -> list[list[int]]:
        """The answers to each prompt that have a token to train on, where there are some."""
        groups: dict[int, list[int]] = {}
        for i, sample in enumerate(self.samples):
            if any(self.trained[i]):
                groups.setdefault(sample.task, []).append(i)
        return list(groups.values())

    def example(self, answers: Sequence[int]) -> Example:
        """Answers to one prompt as one example."""
        samples = [self.samples[i] for i in answers]
        return Example(samples[0].prompt, [s.tokens for s in samples], [self.trained[i] for i in answers])

    def cost(self, answers: Sequence[int], *, shared: bool) -> int:
        """Tokens of that example, as `data.token_cost` counts them."""
        prompt = len(self.samples[answers[0]].prompt)
        return prompt * (1 if shared else len(answers)) + sum(len(self.samples[i].tokens) for i in answers)


Unit = list[list[int]]  # what is trained on in the same step: examples, and of each its answers
Shape = Callable[[RolloutBuffer], list[Unit]]
Advantages = Callable[[RolloutBuffer], Mapping[str, Tensor]]
Judgment = Callable[[Sequence[Sample]], RewardTable]
Measure = Callable[[Batch], Mapping[str, Tensor]]
Report = Callable[[RolloutBuffer], Mapping[str, float]]


class Store(Protocol):
    """Where samples are kept."""

    def write(self, samples: list[Sample]) -> None: ...

    def keep(self, tasks: int) -> None:
        """Forget what was written of tasks from this one on: they are sampled again."""
        ...


class RolloutFeed:
    """``experience(step)`` is this rank's micro-batches of that step.

    Args:
        sampler: on the main process; None on the others, which are sent what it takes.
        judgment: from samples that were judged to their scores.
        check: on the main process, of the samples that this process takes first; what it raises ends the run.
        advantages: what is computed over a whole rollout, as columns [tokens].
        measure: what a forward pass without gradients says of a batch before it is trained on, as columns [tokens].
        shape: which answers make up an example, and which examples are trained on in the same step; unless told
            otherwise the answers to a prompt, in as many examples as it takes for none to exceed ``micro_tokens``.
        groups: prompts per rollout.
        steps: optimizer steps in all.
        epochs, minibatches: a rollout is trained on ``epochs`` times, each time in so many steps.
        mask_truncated: leave out answers that were cut at their longest; they count in group means.
        dynamic_sampling: pass over groups whose rewards are all the same, and take others instead (dynamic sampling).
        micro_tokens, seed: as in `Batches`.
        report: metrics of a rollout.
        first_step: told the metrics of the first step on each rollout, before which nothing was learned from it.
        store: where all answers are written to, those that were passed over too.
    """

    def __init__(
        self,
        sampler: RolloutScheduler | None,
        policy: Policy,
        accelerator: Accelerator,
        *,
        judgment: Judgment,
        check: Callable[[Sequence[Sample]], None] = lambda samples: None,
        advantages: Advantages = lambda rollout: {},
        measure: Measure | None = None,
        shape: Shape | None = None,
        groups: int,
        steps: int,
        epochs: int = 1,
        minibatches: int = 1,
        mask_truncated: bool = False,
        dynamic_sampling: bool = False,
        micro_tokens: int | None = None,
        seed: int = 0,
        report: Report = lambda rollout: {},
        first_step: Callable[[Mapping[str, float]], None] = lambda metrics: None,
        store: Store | None = None,
    ) -> None:
        self.sampler, self.policy, self.accelerator = sampler, policy, accelerator
        self.judgment, self.check, self.advantages, self.measure = judgment, check, advantages, measure
        self.shape = shape or self._split_groups
        self.groups, self.steps, self.epochs, self.minibatches = groups, steps, epochs, minibatches
        self.mask_truncated, self.dynamic_sampling = mask_truncated, dynamic_sampling
        self.micro_tokens, self.seed, self._report, self.store = micro_tokens, seed, report, store
        self.first_step = first_step
        self.rollout: RolloutBuffer | None = None
        self.number = -1  # of the rollout that is at hand
        self.metrics: dict[str, float] = {}
        self._first = False  # whether the last step that was asked for is the first on its rollout
        self._used_up = False  # whether all steps on the rollout at hand have been asked for
        self._stored = False  # whether this process has written samples

    @property
    def steps_per_rollout(self) -> int:
        return self.epochs * self.minibatches

    def __call__(self, step: int) -> list[Batch]:
        number, part = divmod(step, self.steps_per_rollout)
        if number != self.number or self.rollout is None:
            self.rollout = self._collect(number)
            self.number = number
        self._first, self._used_up = part == 0, part == self.steps_per_rollout - 1
        units = self.shape(self.rollout)
        examples = [example for i in self._chosen(len(units), number, part) for example in units[i]]
        return [self._batch(self.rollout, some) for some in self._plan(self.rollout, examples)]

    def report(self) -> dict[str, float]:
        """What the rollout at hand is like, the same in each of its steps."""
        return self.metrics

    def observe(self, metrics: Mapping[str, float]) -> None:
        """A step was taken, with these metrics over all ranks; nothing of it is remembered here."""
        if self._first:
            self.first_step(metrics)

    def state_dict(self) -> dict[str, Any]:
        kept = None
        if self.rollout is not None and not self._used_up:
            samples = [to_record(sample) for sample in self.rollout.samples]
            kept = {"samples": samples, "columns": self.rollout.columns}
        sampler = None if self.sampler is None else self.sampler.state_dict()
        return {"number": self.number, "rollout": kept, "metrics": self.metrics, "sampler": sampler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.sampler is not None:
            self.sampler.load_state_dict(state["sampler"])
        self.number, self.metrics, kept = state["number"], state["metrics"], state["rollout"]
        if kept is not None:
            self.rollout = self._laid_out([from_record(record) for record in kept["samples"]])
            self.rollout.columns = kept["columns"]

    def close(self) -> None:
        if self.sampler is not None:
            self.sampler.close()

    def _collect(self, number: int) -> RolloutBuffer:
        """Sample, judge, measure, and compute the advantages of one rollout."""
        samples, seen = self._sampled(number)
        rollout = self._laid_out(samples)
        precision = torch.promote_types(self.policy.plain.dtype, torch.float32)
        rollout.columns["sampled_logp"] = _flat(rollout, lambda sample: sample.logprobs, precision)
        rollout.columns["age"] = _flat(rollout, lambda sample: _ages(sample, number), precision)
        if self.measure is not None:
            rollout.columns |= self._measured(rollout, self.measure)
        rollout.columns |= {name: column.to(precision) for name, column in self.advantages(rollout).items()}
        self.metrics = {**rollout_metrics(rollout), **self._report(rollout), **seen}
        return rollout

    def _sampled(self, number: int) -> tuple[list[Sample], dict[str, float]]:
        """The answers of a rollout in the order of (task, index), on every rank, and metrics of what was left out."""

        def sample() -> tuple[list[Group], dict[str, float]]:
            assert self.sampler is not None
            if self.store is not None and not self._stored:
                self.store.keep(self.sampler.ledger.tasks)
                self._stored = True
            self.sampler.publish(number)
            return self._taken(self.sampler, number)

        groups, seen = from_main(self.accelerator, sample)
        return _in_order(groups), seen

    def _taken(self, sampler: RolloutScheduler, number: int) -> tuple[list[Group], dict[str, float]]:
        kept: list[Group] = []
        seen: list[Group] = []
        for _ in range(PATIENCE if self.dynamic_sampling else 1):
            taken = sampler.take(number, self.groups - len(kept))
            if self.rollout is None and not seen:
                self.check(_in_order(taken))
            seen += taken
            kept += [group for group in taken if not self.dynamic_sampling or self._varies(group)]
            if len(kept) == self.groups:
                break
        else:
            log.warning(
                "rollout %d: only %d of %d groups have answers of different reward, %d do not; it goes on with these. "
                "Prompts may be too easy or too hard for this policy",
                number,
                len(kept),
                self.groups,
                len(seen) - len(kept),
            )
        if self.store is not None:
            self.store.write(_in_order(seen))
        return kept, self._passed_over(seen, len(seen) - len(kept)) if self.dynamic_sampling else {}

    def _passed_over(self, seen: Sequence[Group], count: int) -> dict[str, float]:
        """Of groups that vary, the mean reward stays near the middle; that of all answers tells what is learned."""
        judged = self.judgment(_in_order(seen))
        reward = weighted_reward(judged.reward, judged.weight).nanmean()
        known = {} if reward.isnan() else {"reward/sampled": float(reward)}
        return {"groups_passed_over": float(count), **known}

    def _varies(self, group: Group) -> bool:
        judged = self.judgment(group)
        reward = weighted_reward(judged.reward, judged.weight)
        known = reward[~reward.isnan()]
        return bool((known != known[:1]).any())

    def _laid_out(self, samples: list[Sample]) -> RolloutBuffer:
        """Mask completions that are unscored, aborted, or (``mask_truncated``) cut off."""
        rollout = RolloutBuffer(samples, [sample.trained for sample in samples], self.judgment(samples))
        aborted = [sample.finish == "aborted" for sample in samples]
        rollout.judged.reward[torch.tensor(aborted, dtype=torch.bool)] = torch.nan  # nobody is compared with it
        self._mask(rollout, aborted)
        if len(rollout.judged.weight):  # without a reward there is nothing to be missed
            self._mask(rollout, rollout.reward.isnan().tolist())
        if self.mask_truncated:
            self._mask(rollout, [sample.finish == "length" for sample in samples])
        return rollout

    @staticmethod
    def _mask(rollout: RolloutBuffer, masked: Sequence[bool]) -> None:
        for i, sample in enumerate(rollout.samples):
            if masked[i]:
                rollout.trained[i] = [False] * len(sample.tokens)

    def _measured(self, rollout: RolloutBuffer, measure: Measure) -> dict[str, Tensor]:
        """The columns of ``measure`` over the whole rollout, on every rank, each example computed by one of them."""
        examples = [example for unit in self._split_groups(rollout) for example in unit]
        mine: list[tuple[list[int], dict[str, Tensor]]] = []
        with torch.no_grad(), evaluating(self.policy.model), self.accelerator.autocast():
            for some in self._plan(rollout, examples):
                columns = measure(self._batch(rollout, some))
                answers = [answer for example in some for answer in example]
                mine.append((answers, {name: column.cpu() for name, column in columns.items()}))
        everyone = gather_object(mine) if self.accelerator.num_processes > 1 else mine
        lengths = [sum(trained) for trained in rollout.trained]
        found: dict[str, dict[int, Tensor]] = {}
        for answers, columns in everyone:
            for name, column in columns.items():
                parts = found.setdefault(name, {-1: column[:0]})  # there may be no answer at all
                parts.update(zip(answers, torch.split(column, [lengths[i] for i in answers]), strict=True))
        return {name: torch.cat([parts[i] for i in sorted(parts)]) for name, parts in found.items()}

    def _split_groups(self, rollout: RolloutBuffer) -> list[Unit]:
        """All answers to a prompt in one example, so that the prompt is computed once, unless they are too many."""
        return [self._split(rollout, group) for group in rollout.groups]

    def _split(self, rollout: RolloutBuffer, group: Sequence[int]) -> Unit:
        unit: Unit = [[]]
        shared = self.policy.layout == "shared"
        for i in group:
            larger = [*unit[-1], i]
            if unit[-1] and self.micro_tokens is not None and rollout.cost(larger, shared=shared) > self.micro_tokens:
                larger = [i]
                unit.append(larger)
            unit[-1] = larger
        return unit

    def _chosen(self, count: int, number: int, part: int) -> Sequence[int]:
        """The units of one of the steps that train on a rollout: each of them once an epoch."""
        epoch, minibatch = divmod(part, self.minibatches)
        if self.minibatches == 1:
            return range(count)
        bits = np.random.Philox(np.random.SeedSequence([self.seed, number, epoch])).random_raw(count)
        order = np.argsort(bits, kind="stable")
        return [int(i) for i in sorted(order[minibatch :: self.minibatches])]

    def _plan(self, rollout: RolloutBuffer, examples: Sequence[list[int]]) -> list[list[list[int]]]:
        """The examples of each of this rank's micro-batches; an empty one where there is nothing to train on."""
        if not examples:
            return [[]]
        batches = Batches(
            [rollout.cost(answers, shared=self.policy.layout == "shared") for answers in examples],
            batch_size=len(examples),
            micro_tokens=self.micro_tokens,
            seed=0,
            shuffle=False,
            steps=1,
            ranks=self.accelerator.num_processes,
        )
        mine = batches.plan(0)[self.accelerator.process_index]
        return [[examples[position] for position in some] for some in mine]

    def _batch(self, rollout: RolloutBuffer, examples: Sequence[Sequence[int]]) -> Batch:
        answers = [i for example in examples for i in example]
        starts = np.cumsum([0, *(sum(trained) for trained in rollout.trained)])
        index = torch.tensor([t for i in answers for t in range(starts[i], starts[i + 1])], dtype=torch.int64)
        columns = {name: column[index] for name, column in rollout.columns.items()}
        return collate([rollout.example(some) for some in examples], columns, self.accelerator.device)


def rollout_metrics(rollout: RolloutBuffer) -> dict[str, float]:
    """What TRL logs of completions, under its names, how many of them are masked, and how old they are."""
    lengths = torch.tensor([sum(sample.trained) for sample in rollout.samples], dtype=torch.float64)
    ended = torch.tensor([sample.finish == "stop" for sample in rollout.samples], dtype=torch.bool)
    masked = torch.tensor([not any(trained) for trained in rollout.trained], dtype=torch.float64)
    metrics: dict[str, float] = {}
    for name, some in (("", lengths), ("terminated_", lengths[ended])):
        if len(some):
            kinds = {"mean": some.mean(), "min": some.min(), "max": some.max()}
            metrics |= {f"completions/{kind}_{name}length": float(value) for kind, value in kinds.items()}
    if len(lengths):
        metrics["completions/clipped_ratio"] = float((~ended).double().mean())
        metrics["completions/masked_ratio"] = float(masked.mean())
    age = rollout.columns["age"]
    return metrics | ({"age/mean": float(age.mean()), "age/max": float(age.max())} if len(age) else {})


def _in_order(groups: Sequence[Group]) -> list[Sample]:
    samples = [sample for group in groups for sample in group]
    return sorted(samples, key=lambda sample: (sample.task, sample.index))


def _flat(rollout: RolloutBuffer, values: Callable[[Sample], Sequence[float]], dtype: torch.dtype) -> Tensor:
    """One number per token of each answer, as a column over the trained ones."""
    found = [
        value
        for sample, trained in zip(rollout.samples, rollout.trained, strict=True)
        for value, kept in zip(values(sample), trained, strict=True)
        if kept
    ]
    return torch.tensor(found, dtype=dtype)


def _ages(sample: Sample, version: int) -> list[float]:
    ages = [0.0] * len(sample.tokens)
    for span in sample.spans:
        ages[span.start : span.end] = [float(version - span.version)] * (span.end - span.start)
    return ages
