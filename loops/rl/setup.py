"""What recipes have in common that train on answers which the policy samples: from a configuration to `RolloutFeed`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from ...data import Batches, encode_prompts, load
from ..environments import MultiTurnSource, resolve_environment, tool_metrics, turns_for
from ..models.io import load_model, load_tokenizer
from ..models.policy import Policy
from ..rewards import (
    RewardFunction,
    RewardMonitor,
    check_columns,
    judge,
    judged,
    refuse_broken,
    resolve,
    resolve_names,
    reward_metrics,
)
from ..rewards.resolve import SHIPPED
from ..rewards.scoring import Row
from ..rollouts.local.source import LocalSource
from ..rollouts.sample import Request, Sample
from ..rollouts.scheduler import Group, RolloutScheduler
from ..rollouts.source import RolloutSource
from ..runs.context import Recipe, open_run
from ..runs.ranks import from_main
from ..runs.run import Evaluation, Run
from ..train.losses import Losses, Reader, compose, weightings
from .buffer import RolloutBuffer, RolloutFeed, Store
from .settings import OnlineConfig
from .sources import check_sampled, open_scheduler, open_store, stop_tokens

Converse = Callable[[RolloutSource, Callable[[int], Row]], RolloutSource]


@dataclass(frozen=True)
class RLContext:
    """An open run, where its answers come from, and who judges them."""

    recipe: Recipe[Policy]
    rewards: Sequence[RewardFunction]
    sampler: RolloutScheduler | None
    watch: RewardMonitor
    store: Store | None
    converse: Converse

    def experience(self, config: OnlineConfig, **options: Any) -> RolloutFeed:
        """The micro-batches of every step; ``options`` are further ones of `RolloutFeed`."""
        per_rollout = config.epochs_per_rollout * config.minibatches
        steps = config.steps
        if steps is None:
            steps = -(-len(self.recipe.data) * config.epochs // config.batch_size) * per_rollout
        asked: dict[str, Any] = {"report": self.report, **options}
        return RolloutFeed(
            self.sampler,
            self.recipe.model,
            self.recipe.run.accelerator,
            judgment=lambda samples: judged(self.rewards, samples),
            check=lambda samples: refuse_broken(self.rewards, samples),
            groups=config.batch_size,
            steps=steps,
            epochs=config.epochs_per_rollout,
            minibatches=config.minibatches,
            mask_truncated=config.mask_truncated,
            micro_tokens=config.micro_tokens,
            seed=config.seed,
            store=self.store,
            **asked,
        )

    def train(
        self,
        config: OnlineConfig,
        experience: RolloutFeed,
        terms: Losses,
        read: Reader,
        report: Callable[[], Mapping[str, float]] = dict,
    ) -> dict[str, float]:
        """Train until the steps are done; returns the metrics of the last one.

        Args:
            terms: losses, and what is measured beside them.
            report: further metrics of the step that was just taken.
        """
        try:
            return self.recipe.run.train(
                self.recipe.model,
                self.recipe.tokenizer,
                experience,
                compose(terms, read),
                weightings(terms),
                evaluation=self.evaluation(config),
                memory=experience,
                report=lambda: {**experience.report(), **report()},
            )
        finally:
            experience.close()

    def evaluation(self, config: OnlineConfig) -> Evaluation | None:
        """The mean reward of answers to held-out prompts, drawn like those that are trained on."""
        data, source = self.recipe.eval_data, config.eval_data
        if data is None or source is None:
            return None
        rows = load(source).dataset

        def evaluate() -> dict[str, float]:
            assert self.sampler is not None
            return self.sampler.run(self._evaluated(config, data, rows))

        return lambda taken: from_main(self.recipe.run.accelerator, evaluate)

    async def _evaluated(self, config: OnlineConfig, data: Dataset, rows: Dataset) -> dict[str, float]:
        source = self.converse(
            LocalSource(
                self.recipe.model,
                self.recipe.tokenizer,
                cache_bytes=config.cache_bytes,
                context=self.recipe.run.accelerator.autocast,
                version=0,
            ),
            lambda task: rows[data[task]["row"]],
        )
        sampling = replace(config.sampling, stop=stop_tokens(self.recipe), temperature=config.eval_temperature)

        async def answered(i: int) -> list[Sample]:
            # Keyed apart from the run, so that no held-out answer shares a seed with one that is trained on.
            return await source.sample(Request(i, data[i]["prompt"], range(1), sampling, -1 - config.seed))

        try:
            samples = [sample for group in await asyncio.gather(*map(answered, range(len(data)))) for sample in group]
        finally:
            await source.close()
        await judge(self.rewards, [rows[row] for row in data["row"]], samples)
        metrics = reward_metrics(self.rewards, samples)
        return {name: value for name, value in metrics.items() if "zero_std" not in name and name != "reward_std"}

    def report(self, rollout: RolloutBuffer) -> Mapping[str, float]:
        """Metrics of the rewards of a rollout; on the main process they are watched, too."""
        metrics = {**reward_metrics(self.rewards, rollout.samples), **spoken(rollout.samples)}
        if self.sampler is None:
            return metrics
        self.watch(self.rewards, rollout.samples)
        waited, self.sampler.waited = self.sampler.waited, 0.0
        return {**metrics, "sampling/seconds": waited, "sampling/retries": float(self.sampler.counts["retries"])}


def open_rl(config: OnlineConfig, make_policy: Callable[[nn.Module], Policy] | None = None) -> RLContext:
    """Open the run, then load rewards (on the main process alone), data, policy and source; nothing is sampled yet.

    Args:
        make_policy: the policy of a model, unless it is a plain one.

    Raises:
        ValueError: if the configuration contradicts itself, or the data lacks a column that a reward reads.
    """
    check_online(config)
    rows = load(config.data).dataset
    run = Run(config)
    rewards = open_rewards(config, run.accelerator)
    make = make_policy or (lambda model: Policy(model, **config.kernel))
    recipe = open_run(config, encode_prompts, make, load_model, run=run)
    order = order_of(config, recipe.data)
    converse = open_conversations(config, recipe)

    def row(task: int) -> Row:
        found: Row = rows[recipe.data[order(task)]["row"]]
        return found

    async def scored(group: Group) -> None:
        for sample in group:
            if not sample.text:
                drawn = [token for token, own in zip(sample.tokens, sample.trained, strict=True) if own]
                sample.text = str(recipe.tokenizer.decode(drawn, skip_special_tokens=True))
        await judge(rewards, [row(group[0].task)] * len(group), group)

    sampler = open_scheduler(
        config,
        recipe,
        lambda task: recipe.data[order(task)]["prompt"],
        converse=lambda source: converse(source, row),
        judge=scored,
        max_staleness=config.max_staleness,
    )
    return RLContext(recipe, rewards, sampler, RewardMonitor(), open_store(config, recipe), converse)


def open_rewards(config: OnlineConfig, accelerator: Accelerator) -> Sequence[RewardFunction]:
    """On the main process: what the configuration names, its models on the device; their names on the others.

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


def open_conversations(config: OnlineConfig, recipe: Recipe[Policy]) -> Converse:
    """From a source of answers to one of conversations about the rows of tasks, if there is an environment."""
    if config.environment is None:
        return lambda source, row: source
    make = resolve_environment(config.environment)
    # Without a template only environments that speak in token ids are understood.
    turns = turns_for(make, recipe.tokenizer) if recipe.tokenizer.chat_template else None
    return lambda source, row: MultiTurnSource(source, make, row, turns, config.limits)


def spoken(samples: Sequence[Sample]) -> dict[str, float]:
    """Of conversations: how many turns they took, how many the environment ended early, and the tools' metrics."""
    turns = [sample.info["turns"] for sample in samples if "turns" in sample.info]
    if not turns:
        return {}
    aborted = sum(sample.finish == "aborted" for sample in samples)
    return {"turns/mean": sum(turns) / len(turns), "turns/aborted": float(aborted), **tool_metrics(samples)}


def check_online(config: OnlineConfig) -> None:
    """Before anything is loaded.

    Raises:
        ValueError: if answers can't be sampled, or not be learned from, as configured.
    """
    check_sampled(config)
    for name in ("steps", "epochs", "batch_size", "epochs_per_rollout", "minibatches"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise ValueError(f"{name}: must be >= 1, got {getattr(config, name)}")
    if config.minibatches > config.batch_size:
        raise ValueError(
            f"minibatches: the {config.batch_size} prompts of a rollout can't be shared by {config.minibatches} steps; "
            "raise batch_size, or lower minibatches"
        )
    if config.max_staleness < 0:
        raise ValueError(f"max_staleness: must be >= 0, got {config.max_staleness}")
    if config.environment is not None:
        resolve_environment(config.environment)
    elif not config.rewards:
        raise ValueError(
            f"rewards: none is named, so nothing could be learned; give at least one, such as --rewards "
            f"'{{exact_match: 1.0}}'. There are {', '.join(SHIPPED)}, or your own as module:function"
        )


def missing_end(rollout: RolloutBuffer) -> Tensor:
    """float64 [answers], 1 for those that did not end by themselves."""
    return torch.tensor([sample.finish != "stop" for sample in rollout.samples], dtype=torch.float64)


def order_of(config: OnlineConfig, data: Dataset) -> Callable[[int], int]:
    """Which prompt each task of the run is: one permutation of the data after another."""
    endless = Batches(
        [1] * len(data), batch_size=1, micro_tokens=None, seed=config.seed, shuffle=config.shuffle, steps=2**40
    )
    return lambda task: endless.indices(task)[0]
