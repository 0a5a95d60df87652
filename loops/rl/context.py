"""An open run that samples: its rewards, where its completions come from, and how held-out prompts
are evaluated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

from accelerate import Accelerator
from datasets import Dataset
from torch import nn

from ...data import (
    Encode,
    Example,
    Records,
    concatenated,
    encode_prompts,
    encode_rows,
    example,
    load_data,
    part_of,
)
from ...data.chat import Encoder
from ...data.columns import with_pictures
from ...data.images import ImageRef
from ..agents import AgentServer, AgentSource, resolve_agent
from ..agents.source import Agent
from ..environments import ChatTurns, MultiTurnSource, resolve_environment, turns_for
from ..models.io import load_tokenizer
from ..models.policy import Policy
from ..redaction import resolved_data
from ..rewards.at_k import at_k_metrics
from ..rewards.resolve import resolve_rewards
from ..rewards.scoring import RewardFunction, check_columns, score_samples
from ..rewards.table import reward_metrics, score
from ..rollouts.event_loops import gather_or_cancel
from ..rollouts.replay import open_sample_log
from ..rollouts.sample import Request, Row, Sample
from ..rollouts.scheduler import RolloutScheduler, prompt_order
from ..rollouts.source import RolloutSource
from ..runs.context import RunContext, open_accelerator, open_run
from ..runs.ranks import from_main
from ..runs.trackers import log_table
from .curriculum import Curriculum, resolve_order
from .distributed import Follower, distributed
from .settings import OnlineConfig
from .sources import check_sampling, open_local, open_scheduler

_LAST = 1  # the priority of held-out prompts: after those that train


@dataclass
class RLContext:
    """What an open run samples, scores and orders completions with.

    `open_rl` makes one from a configuration.

    Attributes:
        run: the open run: its model, data, ranks and settings.
        rewards: reward functions; on ranks other than the main process, their names and weights.
        scheduler: on the main process; None on the others, which are sent its samples.
        follow: on the others, called when the scheduler publishes weights; see `from_main`.
        sample_log: ``sample_log(samples)`` keeps those of a rollout, also groups that were passed
            over.
        converse: ``converse(source, row=...)`` makes a source of conversations, given the row of
            each task; without an environment it is the source itself.
        order: which prompt of the data each task completes.
        curriculum: that order, where a function of the user's chooses it.
        images: that the prompt of a task shows.
    """

    run: RunContext[Policy]
    rewards: Sequence[RewardFunction] = ()
    scheduler: RolloutScheduler | None = None
    follow: Follower | None = None
    sample_log: Callable[[Sequence[Sample]], None] = lambda samples: None
    converse: Callable[..., RolloutSource] = lambda source, row: source
    order: Callable[[int], int] = lambda task: task
    curriculum: Curriculum | None = None
    images: Callable[[int], tuple[ImageRef, ...]] = lambda task: ()

    def evaluate(self, *, publish: bool = True) -> dict[str, float]:
        """The rewards of completions for held-out prompts, from the source of those that train.

        Every rank calls it. A server samples them when it has a place to spare, and from the
        weights that are published, whose version is one of the metrics; the policy itself from its
        weights at this moment.

        Args:
            publish: first publish the weights to the server, as the next rollout would.
        """
        if self.run.config.source == "policy":
            return self._evaluate_policy()
        scheduler: Any = self.scheduler

        def evaluate_there() -> dict[str, float]:
            if publish:
                scheduler.publish()
            metrics: dict[str, float] = scheduler.beside(self._evaluate)
            return {**metrics, "version": float(scheduler.version)}

        return from_main(self.run.accelerator, evaluate_there, self.follow)

    def _evaluate_policy(self) -> dict[str, float]:
        scheduler: Any = self.scheduler
        accelerator = self.run.accelerator
        source: Any = open_local(self.run, version=0)
        source, follower = distributed(
            accelerator,
            source,
            purpose="evaluation",
            groups=len(cast(Dataset, self.run.eval_data)),
            group_size=self.run.config.eval_samples,
        )

        async def evaluate_and_close() -> dict[str, float]:
            try:
                return await self._evaluate(source)
            finally:
                await source.close()

        metrics: dict[str, float] = from_main(
            accelerator, lambda: scheduler.loop.run(evaluate_and_close())
        )
        if follower is not None:
            follower.close()
        return metrics

    async def _evaluate(self, source: RolloutSource) -> dict[str, float]:
        config: OnlineConfig = self.run.config
        eval_data = self.run.eval_data
        assert self.scheduler is not None and eval_data is not None
        row_of = rows_for_rewards(self.run.eval_records)
        rows = [row_of(row) for row in eval_data["row"]]
        source = self.converse(source, row=rows.__getitem__)
        sampling = replace(self.scheduler.sampling, temperature=config.eval_temperature)
        # Other seeds than the run's, so that no held-out completion shares a seed with a trained
        # one.
        key = -1 - config.seed
        requests = []
        for task in range(len(eval_data)):
            held_out = example(eval_data, task)
            request = Request(
                task,
                held_out.prompt,
                range(config.eval_samples),
                sampling,
                key,
                priority=_LAST,
                images=held_out.images,
            )
            requests.append(request)
        groups = await gather_or_cancel(map(source.sample, requests))
        samples = list(chain.from_iterable(groups))
        await score_samples(self.rewards, [rows[sample.task] for sample in samples], samples)
        table = score(self.rewards, samples)
        metrics = reward_metrics(table)
        if config.eval_samples > 1:
            return metrics | at_k_metrics(table, config.eval_samples, config.eval_right)
        # With one completion of each prompt, nothing varies within a group.
        of_groups = [name for name in metrics if "zero_std" in name or name == "reward_std"]
        for name in of_groups:
            del metrics[name]
        return metrics


def open_rl(
    config: OnlineConfig, make_policy: Callable[[nn.Module], Policy] | None = None
) -> RLContext:
    """Open the run, then load rewards (on the main process alone), data, policy and source.

    Nothing is sampled yet.

    Args:
        make_policy: the policy of a model, unless it is a plain one.

    Raises:
        ValueError: if the configuration contradicts itself, or the data lacks a column that a
            reward reads.
    """
    config.refuse_contradictions()
    check_sampling(config)
    make = None if config.environment is None else resolve_environment(config.environment)
    agent = None if config.agent is None else resolve_agent(config.agent)
    choose = None if config.order is None else resolve_order(config.order)
    accelerator = open_accelerator(config)
    records = load_data(
        resolved_data(config.data), resolved_data(config.eval_data), seed=config.seed
    )
    rows = rows_for_rewards(records[0])
    rewards = open_rewards(config, [*records[0], *records[1]], accelerator)
    run = open_run(
        config,
        encoder(config),
        make_policy,
        records=records,
        accelerator=accelerator,
        no_images=_objection_to_images(config),
    )
    order = prompt_order(len(run.data), seed=config.seed, shuffle=config.shuffle)
    curriculum = None
    if choose is not None:
        order = curriculum = Curriculum(
            choose,
            len(run.data),
            config.prompts_per_rollout,
            seed=config.seed,
            shuffle=config.shuffle,
            row=lambda number: rows(run.data[number]["row"]),
        )
    converse: Callable[..., RolloutSource] = RLContext.converse
    if make is not None:
        converse = with_environments(run, make)
    elif agent is not None:
        converse = with_agents(run, agent)

    def row_of(task: int) -> Row:
        return rows(run.data[order(task)]["row"])

    def prompt_of(task: int) -> Example:
        return example(run.data, order(task))

    scheduler, follow = open_scheduler(
        run,
        prompt_of,
        converse=partial(converse, row=row_of),
        score=lambda group: score_samples(rewards, [row_of(group[0].task)] * len(group), group),
    )
    tables = partial(log_table, accelerator.trackers)
    log = open_sample_log(
        run.file("samples.jsonl"),
        config.show_every,
        run.tokenizer.decode,
        tables,
        taken=lambda task: scheduler is None or task in scheduler.ledger,
    )
    return RLContext(
        run,
        rewards,
        scheduler,
        follow,
        sample_log=log,
        converse=converse,
        order=order,
        curriculum=curriculum,
        images=lambda task: prompt_of(task).images,
    )


def _objection_to_images(config: OnlineConfig) -> str:
    """Why completions for prompts with images can't be sampled; "" if they can."""
    if config.environment is not None:
        return "an environment converses in text alone so far; leave it out"
    if config.agent is not None:
        return "an agent converses in text alone so far; leave it out"
    return ""


def rows_for_rewards(parts: Sequence[Records]) -> Callable[[int], Row]:
    """``row(i)``, a row of the concatenated parts as rewards get it: with pictures in its columns
    of images.
    """
    rows = concatenated(parts)

    def row(number: int) -> Row:
        part, _ = part_of(parts, number)
        return with_pictures(rows[number], part.folder)

    return row


def with_environments(
    run: RunContext[Policy], make: Callable[[], object]
) -> Callable[..., RolloutSource]:
    """Makes a source of conversations with environments, see `RLContext.converse`."""
    config: OnlineConfig = run.config
    # Without a template only environments that speak in token ids are understood.
    turns = None
    if run.tokenizer.chat_template:
        turns = turns_for(make, run.tokenizer, config.chat_template_kwargs)
        run.end_with({turns.end})
    return partial(MultiTurnSource, make=make, turns=turns, limits=config.limits)


def with_agents(run: RunContext[Policy], agent: Agent) -> Callable[..., RolloutSource]:
    """Makes a source of conversations with agents, see `RLContext.converse`.

    Raises:
        ValueError: if there is no chat template, or it can't be followed turn by turn.
    """
    config: OnlineConfig = run.config
    if not run.tokenizer.chat_template:
        raise ValueError(
            "agent: it speaks in messages, and the tokenizer has no chat template; pass one (--chat_template "
            "file.jinja)"
        )
    turns = ChatTurns(Encoder(run.tokenizer, None, config.chat_template_kwargs or {}))
    run.end_with({turns.end})
    return partial(
        AgentSource,
        run=agent,
        turns=turns,
        limits=config.limits,
        sampling=config.sampling,
        server=AgentServer(config.agent_host),
    )


def encoder(config: OnlineConfig) -> Encode:
    """The encoder of prompts; of rows, if an environment or an agent makes prompts of them."""
    return encode_rows if config.converses else encode_prompts


def open_rewards(
    config: OnlineConfig, parts: Sequence[Records], accelerator: Accelerator
) -> Sequence[RewardFunction]:
    """On the main process, the configured functions, their models on the device; on the others,
    names and weights.

    Raises:
        ValueError: if a part of the data lacks a column that one of them reads.
    """
    rewards: list[RewardFunction] = []

    def open_there() -> dict[str, float]:
        given = {"tokenizer": load_tokenizer(config), "device": str(accelerator.device)}
        rewards.extend(resolve_rewards(config.rewards or {"environment": 1.0}, **given))
        for part in parts:
            check_columns(rewards, part.dataset.column_names, part.source)
        return {reward.name: reward.weight for reward in rewards}

    weights = from_main(accelerator, open_there)
    return rewards or [
        RewardFunction(name, _scored_elsewhere, weight) for name, weight in weights.items()
    ]


def _scored_elsewhere(row: Row, sample: Sample) -> float:
    raise AssertionError("rewards are given on the main process alone")
