"""What recipes have in common that train on answers which the policy samples: from a configuration to `Experience`."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from ..data import Batches, encode_prompts, load
from .config import Common
from .experience import Experience, Rollout, Store
from .model import load_model, load_tokenizer, merged
from .policy import Policy
from .recipe import Recipe, open_run
from .rewards import Watch, Weighted, check_columns, judge, judged, resolve, reward_metrics
from .rewards.judge import Unscored
from .rewards.resolve import SHIPPED
from .rollouts.embedded import DetachedSource, EmbeddedSource
from .rollouts.replay import SampleWriter, read_samples
from .rollouts.sample import Request, Sample, Sampling
from .rollouts.sampler import Group, Sampler, Tasks
from .run import Evaluation
from .terms import Reader, Terms, compose, expression

_SHOWN, _LONGEST = 3, 300  # samples of a rollout that are printed, and letters of one


@dataclass(frozen=True)
class Sampled(Common):
    """How answers are sampled."""

    group_size: int = 8
    """Answers to each prompt."""
    max_tokens: int = 256
    """Tokens of an answer."""
    temperature: float = 1.0
    """Of the softmax that answers are drawn from; the log-probs that train are at this temperature too."""
    top_p: float = 1.0
    """Share of the probability that answers are drawn from."""
    top_k: int = 0
    """Number of tokens that answers are drawn from; 0 is all."""
    cache_bytes: int = 2 << 30
    """Keys and values that the policy holds at once while it samples."""
    show_every: int = 10
    """Rollouts between two of which a few answers are shown; 0 shows none."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class Online(Sampled):
    """Training on answers that the policy samples and that rewards judge."""

    batch_size: int = 8
    """Prompts per rollout, over all ranks."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warmup."""
    max_length: int | None = 512
    """Tokens of a prompt; null for no limit."""
    truncation: Literal["keep_start", "keep_end", "error"] = "error"
    """What becomes of a longer prompt: its start or its end is kept, or it is an error."""
    rewards: dict[str, float | dict[str, Any]] = field(default_factory=dict)
    """Reward functions and their weights: {math: 1.0, format: 0.2}, or your own as module:function."""
    max_age: int = 0
    """How many rollouts behind the weights of its step an answer may be; above 0, answers are drawn while training."""
    rollout_epochs: int = 1
    """How often a rollout is trained on."""
    minibatches: int = 1
    """Optimizer steps in which a rollout is trained on, each epoch."""
    mask_truncated: bool = False
    """Leave out answers that were cut at max_tokens."""
    eval_temperature: float = 0.0
    """Temperature of the answers to `eval_data`; 0 takes the likeliest token."""


@dataclass(frozen=True)
class Players:
    """An open run, where its answers come from, and who judges them."""

    recipe: Recipe[Policy]
    rewards: Sequence[Weighted]
    sampler: Sampler | None
    unscored: Unscored
    watch: Watch
    store: Store | None

    def experience(self, config: Online, **options: Any) -> Experience:
        """The micro-batches of every step; ``options`` are further ones of `Experience`."""
        per_rollout = config.rollout_epochs * config.minibatches
        steps = config.steps
        if steps is None:
            steps = -(-len(self.recipe.data) * config.epochs // config.batch_size) * per_rollout
        asked: dict[str, Any] = {"report": self.report, **options}
        return Experience(
            self.sampler,
            self.recipe.model,
            self.recipe.run.accelerator,
            judgment=lambda samples: judged(self.rewards, samples),
            groups=config.batch_size,
            steps=steps,
            epochs=config.rollout_epochs,
            minibatches=config.minibatches,
            mask_truncated=config.mask_truncated,
            micro_tokens=config.micro_tokens,
            seed=config.seed,
            store=self.store,
            **asked,
        )

    def train(
        self,
        config: Online,
        experience: Experience,
        terms: Terms,
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
                expression(terms),
                evaluation=self.evaluation(config),
                memory=experience,
                report=lambda: {**experience.report(), **report()},
            )
        finally:
            experience.close()

    def evaluation(self, config: Online) -> Evaluation | None:
        """The mean reward of answers to held-out prompts, drawn like those that are trained on."""
        data, source = self.recipe.eval_data, config.eval_data
        if data is None or source is None:
            return None
        rows = load(source).dataset

        def evaluate(taken: int) -> dict[str, float]:
            found: list[Any] = [None]
            if self.sampler is not None:
                found = [asyncio.run(self._evaluated(config, data, rows))]
            if self.recipe.run.accelerator.num_processes > 1:
                broadcast_object_list(found)
            return dict(found[0])

        return evaluate

    async def _evaluated(self, config: Online, data: Dataset, rows: Dataset) -> dict[str, float]:
        source = EmbeddedSource(
            self.recipe.model,
            self.recipe.tokenizer,
            cache_bytes=config.cache_bytes,
            context=self.recipe.run.accelerator.autocast,
            version=0,
        )
        sampling = replace(config.sampling, stop=stop_tokens(self.recipe), temperature=config.eval_temperature)

        async def answered(i: int) -> list[Sample]:
            # Keyed apart from the run, so that no held-out answer shares a seed with one that is trained on.
            return await source.sample(Request(i, data[i]["prompt"], range(1), sampling, -1 - config.seed))

        samples = [sample for group in await asyncio.gather(*map(answered, range(len(data)))) for sample in group]
        await source.close()
        unscored = await judge(self.rewards, [rows[row] for row in data["row"]], samples)
        metrics = reward_metrics(self.rewards, samples, unscored)
        return {name: value for name, value in metrics.items() if "zero_std" not in name and name != "reward_std"}

    def report(self, rollout: Rollout) -> Mapping[str, float]:
        """Metrics of the rewards of a rollout; on the main process they are watched, too."""
        metrics = reward_metrics(self.rewards, rollout.samples, self.unscored)
        self.unscored.clear()
        if self.sampler is None:
            return metrics
        self.watch(self.rewards, rollout.samples)
        waited, self.sampler.waited = self.sampler.waited, 0.0
        return {**metrics, "sampling/seconds": waited, "sampling/retries": float(self.sampler.counts["retries"])}


class Samples:
    """``samples.jsonl``, and a few of each so many rollouts on the screen."""

    def __init__(self, path: Path, show_every: int) -> None:
        self.path, self.show_every, self.rollouts = path, show_every, 0
        self.console = Console()

    def keep(self, tasks: int) -> None:
        partial = self.path.with_suffix(".partial.jsonl")
        partial.unlink(missing_ok=True)
        with SampleWriter(partial) as writer:
            for sample in read_samples(self.path) if self.path.exists() else ():
                if sample.task < tasks:
                    writer.write([sample])
        partial.replace(self.path)

    def write(self, samples: list[Sample]) -> None:
        with SampleWriter(self.path) as writer:
            writer.write(samples)
        if self.show_every and self.rollouts % self.show_every == 0:
            self._show(samples[:: max(1, len(samples) // _SHOWN)][:_SHOWN])
        self.rollouts += 1

    def _show(self, samples: Sequence[Sample]) -> None:
        table = Table("task", "answer", "rewards", title=f"rollout {self.rollouts}", title_justify="left")
        for sample in samples:
            scores = ", ".join(f"{name} {'none' if s is None else f'{s:.3g}'}" for name, s in sample.rewards.items())
            table.add_row(str(sample.task), Text(sample.text[:_LONGEST]), scores)
        self.console.print(table)


def open_players(config: Online, make_policy: Callable[[nn.Module], Policy] | None = None) -> Players:
    """Load rewards, data, policy and source; nothing is sampled yet.

    Args:
        make_policy: the policy of a model, unless it is a plain one.

    Raises:
        ValueError: if the configuration contradicts itself, or the data lacks a column that a reward reads.
    """
    check_online(config)
    rewards = resolve(config.rewards, tokenizer=load_tokenizer(config))
    rows = load(config.data).dataset
    for data in (rows, *([load(config.eval_data).dataset] if config.eval_data else [])):
        check_columns(rewards, data.column_names)
    make = make_policy or (lambda model: Policy(model, **config.kernel))
    recipe = open_run(config, encode_prompts, make, load_model)
    order, unscored = order_of(config, recipe.data), Unscored()

    async def scored(group: Group) -> None:
        row = rows[recipe.data[order(group[0].task)]["row"]]
        for sample in group:
            if not sample.text:
                drawn = [token for token, own in zip(sample.tokens, sample.trained, strict=True) if own]
                sample.text = str(recipe.tokenizer.decode(drawn, skip_special_tokens=True))
        unscored.update(await judge(rewards, [row] * len(group), group))

    sampler = open_sampler(
        config, recipe, lambda task: recipe.data[order(task)]["prompt"], judge=scored, max_age=config.max_age
    )
    return Players(recipe, rewards, sampler, unscored, Watch(), open_store(config, recipe))


def open_sampler(config: Sampled, recipe: Recipe[Policy], tasks: Tasks, **options: Any) -> Sampler | None:
    """On the main process: what draws the answers to ``tasks``; ``options`` are those of `Sampler`."""
    accelerator = recipe.run.accelerator
    if not accelerator.is_main_process:
        return None
    # A copy samples where the policy itself is being trained meanwhile.
    kind = DetachedSource if options.get("max_age") else EmbeddedSource
    return Sampler(
        kind(recipe.model, recipe.tokenizer, cache_bytes=config.cache_bytes, context=accelerator.autocast),
        tasks,
        lambda: named_weights(recipe.model),
        groups_per_step=config.batch_size,
        group_size=config.group_size,
        sampling=replace(config.sampling, stop=stop_tokens(recipe)),
        key=config.seed,
        **options,
    )


def open_store(config: Sampled, recipe: Recipe[Policy]) -> Store | None:
    if not recipe.run.accelerator.is_main_process:
        return None
    return Samples(recipe.run.directory / "samples.jsonl", config.show_every)


def check_sampled(config: Sampled) -> None:
    """Before anything is loaded.

    Raises:
        ValueError: if answers can't be sampled as configured.
    """
    _ = config.sampling
    if config.temperature == 0:
        raise ValueError("temperature: at 0 every answer to a prompt is the same, wanted > 0, such as 1.0")
    if config.group_size < 1:
        raise ValueError(f"group_size: must be >= 1, got {config.group_size}")


def check_online(config: Online) -> None:
    """Before anything is loaded.

    Raises:
        ValueError: if answers can't be sampled, or not be learned from, as configured.
    """
    check_sampled(config)
    for name in ("batch_size", "rollout_epochs", "minibatches"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: must be >= 1, got {getattr(config, name)}")
    if config.minibatches > config.batch_size:
        raise ValueError(
            f"minibatches: the {config.batch_size} prompts of a rollout can't be shared by {config.minibatches} steps; "
            "raise batch_size, or lower minibatches"
        )
    if config.max_age < 0:
        raise ValueError(f"max_age: must be >= 0, got {config.max_age}")
    if not config.rewards:
        raise ValueError(
            f"rewards: none is named, so nothing could be learned; give at least one, such as --rewards "
            f"'{{exact_match: 1.0}}'. There are {', '.join(SHIPPED)}, or your own as module:function"
        )


def missing_end(rollout: Rollout) -> Tensor:
    """float64 [answers], 1 for those that did not end by themselves."""
    return torch.tensor([sample.finish != "stop" for sample in rollout.samples], dtype=torch.float64)


def order_of(config: Online, data: Dataset) -> Callable[[int], int]:
    """Which prompt each task of the run is: one permutation of the data after another."""
    endless = Batches(
        [1] * len(data), batch_size=1, micro_tokens=None, seed=config.seed, shuffle=config.shuffle, steps=2**40
    )
    return lambda task: endless.indices(task)[0]


def stop_tokens(recipe: Recipe[Policy]) -> tuple[int, ...]:
    """Those that the model was made to end with, and the tokenizer's."""
    known = getattr(recipe.model.plain.generation_config, "eos_token_id", None)
    own: Any = recipe.tokenizer.eos_token_id
    ids = {own, *(known if isinstance(known, list) else [known])} - {None}
    if not ids:
        raise ValueError("stop: neither the tokenizer nor the model has an end token; set tokenizer.eos_token")
    return tuple(sorted(ids))


def named_weights(policy: Policy) -> Iterable[tuple[str, Tensor]]:
    """Of the model as it is now, under the names of transformers, adapters added in."""
    model: Any = merged(policy.model) if isinstance(policy.model, PeftModel) else policy.model
    yield from model.state_dict().items()
