"""Micro-batches of every step of an online run: rollouts are sampled, scored, measured, and trained
on.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ...data import permutation
from ..batch import Batch
from ..environments import tool_metrics
from ..environments.multi_turn import refuse_failing
from ..models.backbone import evaluating
from ..rewards.scoring import refuse_broken, refuse_silent
from ..rewards.table import RewardMonitor, reward_metrics, score
from ..rollouts.arrays import from_tensors, packed, to_tensors
from ..rollouts.sample import Sample, from_record, to_record
from ..runs.feed import Measure, StepFeed
from ..runs.liveness import at, may_stand
from ..runs.ranks import from_main, tensors_from_main
from .buffer import RolloutBuffer
from .context import RLContext
from .settings import OnlineConfig

log = logging.getLogger(__name__)

PATIENCE = (
    8  # groups looked at for each that is wanted, where those without variance are passed over
)


@dataclass
class RolloutFeed(StepFeed):
    """``feed(step)`` gives this rank's micro-batches of that step.

    A rollout is a set of samples drawn at once and trained on in one optimizer step or several.

    Attributes:
        context: its configuration is an `OnlineConfig`, its scheduler samples, its rewards score,
            its policy measures.
        advantages: columns [tokens] that are computed over a whole rollout.
        measure: columns [tokens] that the policy gives of each batch before anything is learned
            from the rollout.
        select: the units of a rollout, the examples of each as indices of contexts; those of a
            group unless given. The examples of a unit share a step.
        dynamic_sampling: skip groups whose rewards are all the same, and take others instead.
        report: further metrics of a rollout.
        per_step: further metrics of the step that was taken.
        first_step: receives the metrics of the first step on each rollout, before which nothing was
            learned from it.
    """

    context: RLContext
    advantages: Callable[[RolloutBuffer], Mapping[str, Tensor]] = lambda rollout: {}
    measure: Callable[[Batch], Mapping[str, Tensor]] | None = None
    select: Callable[[RolloutBuffer], list[list[list[int]]]] | None = None
    dynamic_sampling: bool = False
    report: Callable[[RolloutBuffer], Mapping[str, float]] = lambda rollout: {}
    per_step: Callable[[], Mapping[str, float]] = dict
    first_step: Callable[[Mapping[str, float]], None] = lambda metrics: None

    def __post_init__(self) -> None:
        run = self.context.run
        self.config: OnlineConfig = run.config
        self.scheduler = self.context.scheduler
        self.batching: dict[str, Any] = {"layout": run.model.layout, "accelerator": run.accelerator}
        self.steps_per_rollout: int = self.config.steps_per_rollout
        self.stateful = True
        self.evaluates = run.eval_data is not None
        if self.scheduler is not None and self.dynamic_sampling:
            self.scheduler.keep = self._varies
        self.step = -1  # latest requested step
        self._published: int | None = None  # the version that an evaluation has published
        self.rollout: RolloutBuffer | None = None
        self.monitor = RewardMonitor()
        self.metrics: dict[str, float] = {}  # of the current rollout, the same in each of its steps

    @property
    def steps(self) -> int:
        rollouts = -(
            -len(self.context.run.data) * self.config.epochs // self.config.prompts_per_rollout
        )
        return self.config.steps or rollouts * self.steps_per_rollout

    def __call__(self, step: int) -> list[Batch]:
        rollout = self._rollout_of(step)
        return rollout.micro_batches(**self._planning(rollout, step))

    def _planning(self, rollout: RolloutBuffer, step: int) -> dict[str, Any]:
        """The arguments of `RolloutBuffer.plan` in this step."""
        limit = self.config.micro_tokens
        if self.select is not None:
            units = self.select(rollout)
        else:
            units = rollout.split_groups(limit, self.batching["layout"])
        if self.config.minibatches > 1:
            units = self._minibatch(units, step)
        examples = list(chain.from_iterable(units))
        return {"max_tokens": limit, "examples": examples, **self.batching}

    def _rollout_of(self, step: int) -> RolloutBuffer:
        """The rollout that a step trains on, sampled and measured if it is another one than
        before.
        """
        number = step // self.steps_per_rollout
        rollout = self.rollout
        if rollout is None or number != self.step // self.steps_per_rollout:
            rollout = self._next_rollout(number)
        self.step = step
        self.rollout = rollout
        return rollout

    def _next_rollout(self, number: int) -> RolloutBuffer:
        """Sample a rollout on the main process, or follow it; then compute its columns and metrics
        on every rank.
        """
        with at("sampling"):
            samples, sampling_metrics = self._taken(number)
        rollout = self._buffer(samples, number)
        if self.measure is not None:
            self._measure(rollout, self.measure)
        for name, column in self.advantages(rollout).items():
            rollout[name] = column
        self.metrics = {**self._metrics_of(rollout), **self.report(rollout), **sampling_metrics}
        return rollout

    def _minibatch(self, units: list[list[list[int]]], step: int) -> list[list[list[int]]]:
        """The units of one step: in each epoch over the rollout every unit is in one minibatch,
        drawn anew.
        """
        number, step_of_rollout = divmod(step, self.steps_per_rollout)
        epoch, minibatch = divmod(step_of_rollout, self.config.minibatches)
        drawn = permutation(len(units), self.config.seed, number, epoch)[
            minibatch :: self.config.minibatches
        ]
        return [units[i] for i in sorted(drawn)]

    def plan(self, step: int) -> list[list[int]]:
        """The prompts of each micro-batch of a step on the rollout at hand, as indices into the
        data.
        """
        rollout = self.rollout
        assert rollout is not None
        plan = []
        for examples in self.contexts(step):
            tasks = [rollout.task_of(contexts[0]) for contexts in examples]
            plan.append(list(map(self.context.order, tasks)))
        return plan

    def contexts(self, step: int) -> list[list[list[int]]]:
        """The examples of each micro-batch of a step on the rollout at hand, as indices of its
        contexts.
        """
        rollout = self.rollout
        assert rollout is not None
        return rollout.plan(**self._planning(rollout, step))

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a step over all ranks; nothing of them is stored here."""
        if self.step % self.steps_per_rollout == 0:
            self.first_step(metrics)

    def step_metrics(self) -> Mapping[str, float]:
        return {**self.metrics, **self.per_step()}

    def evaluate(self, measure: Measure, rows: object = None) -> Mapping[str, float]:
        """The rewards of completions for held-out prompts.

        Raises:
            ValueError: if rows are given.
        """
        if rows is not None:
            raise ValueError(
                "evaluate: an online recipe samples the completions of eval_data; pass rows as that"
            )
        # Further steps on a rollout make no version of their own.
        between_rollouts = (self.step + 1) % self.steps_per_rollout == 0
        with may_stand(self._longest_wait):
            metrics = self.context.evaluate(publish=between_rollouts)
        if between_rollouts and self.config.source != "policy":
            self._published = (self.step + 1) // self.steps_per_rollout
        return metrics

    def state_dict(self) -> dict[str, Any]:
        kept = None
        # it has further steps
        if self.rollout is not None and (self.step + 1) % self.steps_per_rollout:
            kept = {
                "samples": list(map(to_record, self.rollout.samples)),
                "columns": self.rollout.columns,
            }
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        curriculum = self.context.curriculum
        return {
            "step": self.step,
            "rollout": kept,
            "metrics": self.metrics,
            "scheduler": scheduler,
            "order": None if curriculum is None else curriculum.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.context.curriculum is not None:
            self.context.curriculum.load_state_dict(state["order"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        self.metrics = state["metrics"]
        kept = state["rollout"]
        if kept is not None:
            samples = [packed(from_record(record)) for record in kept["samples"]]
            for sample in samples:
                sample.images = self.context.images(sample.task)
            self.rollout = self._buffer(samples, self.step // self.steps_per_rollout)
            self.rollout.columns = kept["columns"]

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        if self.context.follow is not None:
            self.context.follow.close()

    def _buffer(self, samples: list[Sample], number: int) -> RolloutBuffer:
        """The samples of a rollout with their scores."""
        precision = torch.promote_types(self.context.run.model.plain.dtype, torch.float32)
        rollout = RolloutBuffer(
            samples, mask_truncated=self.config.mask_truncated, version=number, dtype=precision
        )
        rollout.score(self.context.rewards)
        return rollout

    def _taken(self, number: int) -> tuple[list[Sample], dict[str, float]]:
        """What `_take` returns, on every rank: the tokens as tensors, and the rest pickled."""
        context = self.context
        accelerator = context.run.accelerator
        if accelerator.num_processes == 1:
            groups, metrics = self._take(number)
            return list(chain.from_iterable(groups)), metrics
        tensors: dict[str, Tensor] = {}
        samples: list[Sample] = []

        def take() -> tuple[list[Sample], dict[str, float], list[int]]:
            groups, metrics = self._take(number)
            samples.extend(chain.from_iterable(groups))
            emptied, of_tokens = to_tensors(samples)
            tensors.update(of_tokens)
            chosen = [] if context.curriculum is None else context.curriculum.unsent()
            return emptied, metrics, chosen

        emptied, metrics, chosen = from_main(accelerator, take, context.follow)
        if context.curriculum is not None and not accelerator.is_main_process:
            context.curriculum.rows += chosen
        received = tensors_from_main(accelerator, tensors)
        return samples or from_tensors(emptied, received), metrics

    def _take(self, number: int) -> tuple[list[list[Sample]], dict[str, float]]:
        """On the main process, the groups of a rollout; with dynamic sampling only groups whose
        rewards vary, and metrics of all."""
        wanted = self.config.prompts_per_rollout
        assert self.scheduler is not None
        if self._published != number:
            with may_stand(self._longest_wait):
                self.scheduler.publish()
        kept: list[list[Sample]] = []
        passed_over: list[list[Sample]] = []
        wasted = 0
        limits = [PATIENCE * wanted]
        if number == 0:  # the first few show whether any reward works at all
            limits = [wanted, (PATIENCE - 1) * wanted]
        for most in limits:
            with may_stand(self._longest_wait):
                selection = self.scheduler.select(wanted - len(kept), step=number, most=most)
            kept += selection.kept
            passed_over += selection.passed_over
            wasted += selection.wasted
            sampled = sorted([*kept, *passed_over], key=lambda group: group[0].task)
            samples = list(chain.from_iterable(sampled))
            if self.rollout is None and most == limits[0]:
                self._refuse_first(samples, number)
        if len(kept) < wanted:
            log.warning(
                f"rollout {number}: only {len(kept)} of {wanted} groups have completions of different reward, "
                f"{len(passed_over)} do not; it continues with these. Take prompts that are neither too easy "
                "nor too hard for this policy, or a larger group_size"
            )
        self.context.sample_log(samples)
        if self.context.curriculum is not None:
            self.context.curriculum.observe([*kept, *passed_over], self.context.rewards)
        if not self.dynamic_sampling:
            return kept, {}
        metrics = {
            "groups_passed_over": float(len(passed_over)),
            "groups_wasted": float(wasted),
        }
        # The mean over all samples: over varied groups alone it stays near 0.5 and hides progress.
        reward = float(score(self.context.rewards, samples).measured_total.nanmean())
        if not math.isnan(reward):
            metrics["reward/sampled"] = reward
        return kept, metrics

    def _refuse_first(self, samples: list[Sample], number: int) -> None:
        """Raise ValueError if nothing can be learned from the first samples of a run, also of a
        resumed one.
        """
        assert self.scheduler is not None
        refuse_failing(self.scheduler.source, samples)
        refuse_broken(self.context.rewards, samples)
        # a resumed run may meet prompts that no function applies to, as the whole one does
        if number == 0:
            refuse_silent(self.context.rewards, samples)

    def _varies(self, group: list[Sample]) -> bool:
        """True if the group's rewards are not all the same."""
        total = score(self.context.rewards, group).total
        return len(torch.unique(total[~total.isnan()])) > 1

    @property
    def _longest_wait(self) -> float:
        """Seconds for which servers, rewards, environments and agents may leave the main process
        without an answer, by their own settings.
        """
        limits = [reward.timeout for reward in self.context.rewards]
        if self.config.source != "policy":
            limits.append(self.config.vllm.patience)
        if self.config.environment is not None or self.config.agent is not None:
            limits.append(self.config.limits.seconds)
        return max(limits, default=0.0)

    def _measure(
        self, rollout: RolloutBuffer, measure: Callable[[Batch], Mapping[str, Tensor]]
    ) -> None:
        """Set the columns of ``measure``, on every rank, each example computed by one of them."""
        model = self.context.run.model
        accelerator = self.context.run.accelerator
        rollout["token"] = torch.arange(len(rollout.sequence))
        local = []
        with torch.no_grad(), evaluating(model.model), accelerator.autocast():
            for batch in rollout.micro_batches(self.config.micro_tokens, **self.batching):
                columns = {**measure(batch), "token": batch.columns["token"]}
                local.append({name: column.cpu() for name, column in columns.items()})
        gathered = gather_object(local) if accelerator.num_processes > 1 else local
        measured = {
            name: torch.cat([columns[name] for columns in gathered]) for name in gathered[0]
        }
        order = measured.pop("token").argsort()
        del rollout.columns["token"]
        rollout.columns |= {name: column[order] for name, column in measured.items()}

    def _metrics_of(self, rollout: RolloutBuffer) -> dict[str, float]:
        """Metrics of a rollout.

        Completions under TRL's names, the share of them that is masked, and the age of their
        tokens; then rewards and conversations; and on the main process the sampler.
        """
        lengths = torch.tensor([sample.length for sample in rollout.samples], dtype=torch.float64)
        measured: dict[str, Tensor] = {}
        for name, some in (("", lengths), ("terminated_", lengths[rollout.unfinished == 0])):
            if len(some):
                kinds = {"mean": some.mean(), "min": some.min(), "max": some.max()}
                measured |= {
                    f"completions/{kind}_{name}length": value for kind, value in kinds.items()
                }
        if len(lengths):
            measured["completions/clipped_ratio"] = rollout.unfinished.mean()
            measured["completions/masked_ratio"] = (rollout.lengths == 0).double().mean()
        age = rollout["age"]
        if len(age):
            measured |= {"age/mean": age.mean(), "age/max": age.max()}
        metrics = {name: float(value) for name, value in measured.items()}
        if not self.context.rewards:
            return metrics
        metrics |= reward_metrics(rollout.scores)
        metrics |= conversation_metrics(rollout)
        if self.scheduler is None:
            return metrics
        self.monitor(rollout.scores, rollout.samples)
        metrics["sampling/seconds"] = self.scheduler.waited
        metrics["sampling/retries"] = float(self.scheduler.retries)
        self.scheduler.waited = 0.0  # of the next rollout
        return metrics


def conversation_metrics(rollout: RolloutBuffer) -> dict[str, float]:
    """Turns, tool calls and aborted ones of conversations with an environment; how many contexts
    they have, where that is more than one.
    """
    metrics: dict[str, float] = {}
    samples = rollout.samples
    turns = [sample.info["turns"] for sample in samples if "turns" in sample.info]
    if turns:
        aborted = sum(sample.finish == "aborted" for sample in samples)
        metrics = {"turns/mean": sum(turns) / len(turns), "turns/aborted": float(aborted)}
        metrics |= tool_metrics(samples)
    if len(rollout.contexts) > len(rollout):
        metrics["contexts/mean"] = len(rollout.contexts) / len(rollout)
    return metrics
