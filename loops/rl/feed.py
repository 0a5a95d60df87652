"""The micro-batches of every step of an online run: rollouts are sampled, scored, measured, and trained on."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..batch import Batch
from ..models.backbone import evaluating
from ..rewards.scoring import refuse_broken
from ..rewards.table import reward_table
from ..rollouts.sample import Sample, from_record, to_record
from ..rollouts.scheduler import RolloutScheduler
from ..runs.ranks import from_main
from .buffer import Examples, RolloutBuffer, in_order, rollout_metrics
from .context import RLContext

log = logging.getLogger(__name__)

PATIENCE = 8  # takes in a row, for one rollout, in which groups without variance are passed over


class RolloutFeed:
    """``feed(step)`` gives this rank's micro-batches of that step.

    A rollout is what is sampled at once and trained on in one optimizer step or in several.

    Args:
        context: its scheduler samples, its rewards score, and its policy measures.
        groups: prompts per rollout.
        steps: optimizer steps in all.
        epochs, minibatches: a rollout is trained on ``epochs`` times, each time in so many steps.
        advantages: columns [tokens] that are computed over a whole rollout.
        measure: columns [tokens] that the policy gives of each batch before anything is learned from the rollout.
        select: the units of a rollout; each group is one unless given. The examples of a unit share a step.
        mask_truncated: leave out completions that were cut at their longest; they count in group means.
        dynamic_sampling: pass over groups whose rewards are all the same, and take others instead.
        report: further metrics of a rollout.
        first_step: receives the metrics of the first step on each rollout, before which nothing was learned from it.
    """

    def __init__(
        self,
        context: RLContext,
        *,
        groups: int,
        steps: int,
        epochs: int = 1,
        minibatches: int = 1,
        advantages: Callable[[RolloutBuffer], Mapping[str, Tensor]] = lambda rollout: {},
        measure: Callable[[Batch], Mapping[str, Tensor]] | None = None,
        select: Callable[[RolloutBuffer], list[Examples]] | None = None,
        mask_truncated: bool = False,
        dynamic_sampling: bool = False,
        report: Callable[[RolloutBuffer], Mapping[str, float]] = lambda rollout: {},
        first_step: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ) -> None:
        self.context, self.scheduler = context, context.scheduler
        self.groups, self.steps, self.epochs, self.minibatches = groups, steps, epochs, minibatches
        self.advantages, self.measure, self.select = advantages, measure, select or self._split_groups
        self.mask_truncated, self.dynamic_sampling = mask_truncated, dynamic_sampling
        self.report_rollout, self.first_step = report, first_step
        self.rollout: RolloutBuffer | None = None
        self.number = -1  # of the rollout that is at hand
        self.metrics: dict[str, float] = {}
        self._first = False  # whether the last step that was asked for is the first on its rollout
        self._used_up = False  # whether all steps on the rollout at hand have been asked for
        self._logged = False  # whether this process has written samples

    def __call__(self, step: int) -> list[Batch]:
        steps_per_rollout = self.epochs * self.minibatches
        number, part = divmod(step, steps_per_rollout)
        if number != self.number or self.rollout is None:
            self.rollout = self._collect(number)
            self.number = number
        self._first, self._used_up = part == 0, part == steps_per_rollout - 1
        units = self.select(self.rollout)
        examples = [example for i in self._chosen(len(units), number, part) for example in units[i]]
        return self._micro_batches(self.rollout, examples)

    def report(self) -> dict[str, float]:
        """Metrics of the rollout at hand, the same in each of its steps."""
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
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"number": self.number, "rollout": kept, "metrics": self.metrics, "scheduler": scheduler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.number, self.metrics, kept = state["number"], state["metrics"], state["rollout"]
        if kept is not None:
            self.rollout = self._buffer([from_record(record) for record in kept["samples"]], self.number)
            self.rollout.columns = kept["columns"]

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()

    def _collect(self, number: int) -> RolloutBuffer:
        """Sample and score one rollout, measure it, and compute its advantages."""
        samples, passed_over = self._sample(number)
        rollout = self._buffer(samples, number)
        if self.measure is not None:
            rollout.columns |= self._measured(rollout, self.measure)
        for name, column in self.advantages(rollout).items():
            rollout[name] = column
        self.metrics = {**rollout_metrics(rollout), **self.report_rollout(rollout), **passed_over}
        return rollout

    def _buffer(self, samples: list[Sample], number: int) -> RolloutBuffer:
        precision = torch.promote_types(self.context.model.plain.dtype, torch.float32)
        scores = reward_table(self.context.rewards, samples)
        return RolloutBuffer(samples, scores, mask_truncated=self.mask_truncated, version=number, dtype=precision)

    def _sample(self, number: int) -> tuple[list[Sample], dict[str, float]]:
        """The samples of a rollout, on every rank, and metrics of those that were passed over."""

        def sample() -> tuple[list[list[Sample]], dict[str, float]]:
            assert self.scheduler is not None
            sample_log = self.context.sample_log
            if sample_log is not None and not self._logged:
                sample_log.keep(self.scheduler.ledger.tasks)
                self._logged = True
            self.scheduler.publish()
            return self._take(self.scheduler, number)

        groups, passed_over = from_main(self.context.accelerator, sample)
        return in_order(groups), passed_over

    def _take(self, scheduler: RolloutScheduler, number: int) -> tuple[list[list[Sample]], dict[str, float]]:
        kept: list[list[Sample]] = []
        seen: list[list[Sample]] = []
        for _ in range(PATIENCE if self.dynamic_sampling else 1):
            taken = scheduler.take(self.groups - len(kept), step=number)
            if self.rollout is None and not seen:
                refuse_broken(self.context.rewards, in_order(taken))
            seen += taken
            kept += [group for group in taken if not self.dynamic_sampling or self._varies(group)]
            if len(kept) == self.groups:
                break
        else:
            log.warning(
                "rollout %d: only %d of %d groups have completions of different reward, %d do not; it goes on with "
                "these. Prompts may be too easy or too hard for this policy",
                number,
                len(kept),
                self.groups,
                len(seen) - len(kept),
            )
        if self.context.sample_log is not None:
            self.context.sample_log.write(in_order(seen))
        return kept, self._passed_over(seen, len(seen) - len(kept)) if self.dynamic_sampling else {}

    def _passed_over(self, seen: Sequence[list[Sample]], count: int) -> dict[str, float]:
        """The mean reward of all samples: that of the groups that vary stays near the middle and shows no learning."""
        reward = self._rewards_of(in_order(seen)).nanmean()
        known = {} if reward.isnan() else {"reward/sampled": float(reward)}
        return {"groups_passed_over": float(count), **known}

    def _varies(self, group: list[Sample]) -> bool:
        reward = self._rewards_of(group)
        known = reward[~reward.isnan()]
        return bool((known != known[:1]).any())

    def _rewards_of(self, samples: Sequence[Sample]) -> Tensor:
        return reward_table(self.context.rewards, samples).measured_total

    def _measured(self, rollout: RolloutBuffer, measure: Callable[[Batch], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The columns of ``measure`` over the whole rollout, on every rank, each example computed by one of them."""
        model, accelerator = self.context.model, self.context.accelerator
        examples = [example for unit in self._split_groups(rollout) for example in unit]
        plan = rollout.plan(examples, self.context.config.micro_tokens, model.layout, accelerator.num_processes)
        local: list[tuple[list[int], dict[str, Tensor]]] = []
        with torch.no_grad(), evaluating(model.model), accelerator.autocast():
            for part in plan[accelerator.process_index]:
                columns = measure(rollout.batch(part, accelerator.device))
                completions = [i for example in part for i in example]
                local.append((completions, {name: column.cpu() for name, column in columns.items()}))
        gathered = gather_object(local) if accelerator.num_processes > 1 else local
        lengths = rollout.lengths.tolist()
        parts: dict[str, dict[int, Tensor]] = {}
        for completions, columns in gathered:
            for name, column in columns.items():
                by_completion = parts.setdefault(name, {-1: column[:0]})  # there may be no completion at all
                by_completion.update(
                    zip(completions, torch.split(column, [lengths[i] for i in completions]), strict=True)
                )
        return {name: torch.cat([found[i] for i in sorted(found)]) for name, found in parts.items()}

    def _split_groups(self, rollout: RolloutBuffer) -> list[Examples]:
        return rollout.split_groups(self.context.config.micro_tokens, self.context.model.layout)

    def _micro_batches(self, rollout: RolloutBuffer, examples: Examples) -> list[Batch]:
        return rollout.micro_batches(
            self.context.config.micro_tokens,
            examples=examples,
            layout=self.context.model.layout,
            accelerator=self.context.accelerator,
        )

    def _chosen(self, count: int, number: int, part: int) -> Sequence[int]:
        """The units of one of the steps that train on a rollout: each of them once an epoch."""
        epoch, minibatch = divmod(part, self.minibatches)
        if self.minibatches == 1:
            return range(count)
        bits = np.random.Philox(np.random.SeedSequence([self.context.config.seed, number, epoch])).random_raw(count)
        order = np.argsort(bits, kind="stable")
        return [int(i) for i in sorted(order[minibatch :: self.minibatches])]
