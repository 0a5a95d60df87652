"""An open run that samples: its rewards, where its completions come from, and how held-out prompts are evaluated."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate import Accelerator
from datasets import Dataset
from torch import nn

from ...data import encode_prompts, load
from ..environments import MultiTurnSource, resolve_environment, tool_metrics, turns_for
from ..models.io import load_tokenizer
from ..models.policy import Policy
from ..rewards import (
    RewardFunction,
    RewardMonitor,
    check_columns,
    resolve,
    resolve_names,
    reward_metrics,
    reward_table,
    score_samples,
)
from ..rewards.resolve import SHIPPED
from ..rollouts.local.source import LocalSource
from ..rollouts.sample import Request, Row, Sample
from ..rollouts.scheduler import RolloutScheduler, prompt_order
from ..rollouts.source import RolloutSource
from ..runs.context import RunContext, open_accelerator, open_run
from ..runs.ranks import from_main
from ..train.losses import Losses, TensorReader
from .buffer import RolloutBuffer
from .settings import OnlineConfig
from .sources import SampleLog, check_sampling, open_sample_log, open_scheduler, stop_tokens


@dataclass
class RLContext(RunContext[Policy]):
    """An open run, its rewards, and where its completions come from. `open_rl` makes one from a configuration.

    Attributes:
        rewards: reward functions; on ranks other than the main process, their names and weights.
        scheduler: on the main process; None on the others, which are sent its samples.
        sample_log: on the main process: where all samples are written to, those that were passed over too.
        converse: makes a source of conversations of a source of completions, given the row of each task.
        monitor: warns of degenerate rewards.
    """

    rewards: Sequence[RewardFunction] = ()
    scheduler: RolloutScheduler | None = None
    sample_log: SampleLog | None = None
    converse: Callable[[RolloutSource, Callable[[int], Row]], RolloutSource] = lambda source, row: source
    monitor: RewardMonitor = field(default_factory=RewardMonitor)

    @property
    def rollouts(self) -> dict[str, Any]:
        """The arguments of `RolloutFeed` that are settings."""
        config, steps = self.config, self.config.steps
        if steps is None:
            rollouts = -(-len(self.data) * config.epochs // config.prompts_per_rollout)
            steps = rollouts * config.steps_per_rollout
        settings = {"groups": config.prompts_per_rollout, "steps": steps, "mask_truncated": config.mask_truncated}
        return {**settings, "epochs": config.epochs_per_rollout, "minibatches": config.minibatches}

    def train(self, losses: Losses, read: TensorReader, feed: Any = None, **options: Any) -> dict[str, float]:
        """Train on rollouts, see `RunContext.train`; held-out prompts are evaluated by their rewards.

        Args:
            feed: a `RolloutFeed`, which is part of checkpoints, and closed at the end.
        """
        report = options.pop("report", dict)
        options = {"evaluation": self.evaluation, "memory": feed, **options}
        try:
            return super().train(losses, read, feed, report=lambda: {**feed.report(), **report()}, **options)
        finally:
            feed.close()

    def metrics(self, rollout: RolloutBuffer) -> Mapping[str, float]:
        """Metrics of the rewards and conversations of a rollout, and of the sampler on the main process."""
        metrics = {**reward_metrics(rollout.scores), **conversation_metrics(rollout.samples)}
        if self.scheduler is None:
            return metrics
        self.monitor(rollout.scores, rollout.samples)
        waited, self.scheduler.waited = self.scheduler.waited, 0.0
        return {**metrics, "sampling/seconds": waited, "sampling/retries": float(self.scheduler.counts["retries"])}

    @property
    def evaluation(self) -> Callable[[int], Mapping[str, float]] | None:
        """The mean reward of completions for held-out prompts, sampled like those that are trained on."""
        config, data = self.config, self.eval_data
        if data is None or config.eval_data is None:
            return None
        rows = load(config.eval_data).dataset

        def evaluate() -> dict[str, float]:
            assert self.scheduler is not None
            return self.scheduler.run(self._evaluate(data, rows))

        return lambda steps: from_main(self.accelerator, evaluate)

    async def _evaluate(self, data: Dataset, rows: Dataset) -> dict[str, float]:
        config = self.config
        local = LocalSource(
            self.model,
            self.tokenizer,
            cache_bytes=config.cache_bytes,
            context=self.accelerator.autocast,
            version=0,
        )
        source = self.converse(local, lambda task: rows[data[task]["row"]])
        sampling = replace(config.sampling, stop=stop_tokens(self), temperature=config.eval_temperature)

        async def sample(i: int) -> list[Sample]:
            # Seeded apart from the run, so that no held-out completion shares a seed with one that is trained on.
            return await source.sample(Request(i, data[i]["prompt"], range(1), sampling, -1 - config.seed))

        try:
            samples = [one for group in await asyncio.gather(*map(sample, range(len(data)))) for one in group]
        finally:
            await source.close()
        await score_samples(self.rewards, [rows[row] for row in data["row"]], samples)
        metrics = reward_metrics(reward_table(self.rewards, samples))
        return {name: value for name, value in metrics.items() if "zero_std" not in name and name != "reward_std"}


def open_rl(config: OnlineConfig, make_policy: Callable[[nn.Module], Policy] | None = None) -> RLContext:
    """Open the run, then load rewards (on the main process alone), data, policy and source; nothing is sampled yet.

    Args:
        make_policy: the policy of a model, unless it is a plain one.

    Raises:
        ValueError: if the configuration contradicts itself, or the data lacks a column that a reward reads.
    """
    check_online(config)
    rows = load(config.data).dataset
    accelerator = open_accelerator(config)
    rewards = open_rewards(config, accelerator)
    run = open_run(config, encode_prompts, make_policy, accelerator=accelerator)
    order = prompt_order(len(run.data), seed=config.seed, shuffle=config.shuffle)
    converse = open_conversations(config, run)

    def row_of(task: int) -> Row:
        row: Row = rows[run.data[order(task)]["row"]]
        return row

    async def score_group(group: list[Sample]) -> None:
        for sample in group:
            if not sample.text:
                tokens = [token for token, trained in zip(sample.tokens, sample.trained, strict=True) if trained]
                sample.text = str(run.tokenizer.decode(tokens, skip_special_tokens=True))
        await score_samples(rewards, [row_of(group[0].task)] * len(group), group)

    scheduler = open_scheduler(
        config,
        run,
        lambda task: run.data[order(task)]["prompt"],
        groups_per_step=config.prompts_per_rollout,
        converse=lambda source: converse(source, row_of),
        score=score_group,
        max_staleness=config.max_staleness,
    )
    return RLContext(**vars(run), rewards=rewards, scheduler=scheduler, sample_log=open_sample_log(config, run),
                     converse=converse)  # fmt: skip


def open_rewards(config: OnlineConfig, accelerator: Accelerator) -> Sequence[RewardFunction]:
    """On the main process, the configured functions, their models on the device; on the others, their names.

    Raises:
        ValueError: if the data lacks a column that one of them reads.
    """
    spec = config.rewards or {"environment": 1.0}
    rewards = resolve_names(spec)

    def open_there() -> None:
        rewards[:] = resolve(spec, tokenizer=load_tokenizer(config), device=str(accelerator.device))
        for source in filter(None, (config.data, config.eval_data)):
            check_columns(rewards, load(source).dataset.column_names, source)

    from_main(accelerator, open_there)
    return rewards


def open_conversations(
    config: OnlineConfig, run: RunContext[Policy]
) -> Callable[[RolloutSource, Callable[[int], Row]], RolloutSource]:
    """Make a source of conversations of a source of completions, if there is an environment."""
    if config.environment is None:
        return lambda source, row: source
    make = resolve_environment(config.environment)
    # Without a template only environments that speak in token ids are understood.
    turns = turns_for(make, run.tokenizer) if run.tokenizer.chat_template else None
    return lambda source, row: MultiTurnSource(source, make, row, turns, config.limits)


def conversation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """How many turns conversations took, how many were aborted, and the metrics of tools."""
    turns = [sample.info["turns"] for sample in samples if "turns" in sample.info]
    if not turns:
        return {}
    aborted = sum(sample.finish == "aborted" for sample in samples)
    return {"turns/mean": sum(turns) / len(turns), "turns/aborted": float(aborted), **tool_metrics(samples)}


def check_online(config: OnlineConfig) -> None:
    """Check settings against each other, before anything is loaded.

    Raises:
        ValueError: if completions can't be sampled, or not be learned from, as configured.
    """
    check_sampling(config)
    if config.minibatches > config.prompts_per_rollout:
        raise ValueError(
            f"minibatches: the {config.prompts_per_rollout} prompts of a rollout can't be shared by "
            f"{config.minibatches} steps; raise prompts_per_rollout, or lower minibatches"
        )
    if config.environment is not None:
        resolve_environment(config.environment)
    elif not config.rewards:
        raise ValueError(
            f"rewards: none is named, so nothing could be learned; give at least one, such as --rewards "
            f"'{{exact_match: 1.0}}'. There are {', '.join(SHIPPED)}, or your own as module:function"
        )
