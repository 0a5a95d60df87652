"""Distillation: learn a teacher's distribution of the next token.

It is learned on completions of the data, or of the student. A student trained on the data's
completions meets prefixes that it was never trained on when it samples by itself. In a share λ of
the steps it is therefore trained on its own completions of the step's prompts (GKD, Agarwal et al.
2023, arXiv:2306.13649).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ...data import Encode, Example, encode_supervised, where
from ...objectives import iw_opd, sampled_reverse_kl
from ..batch import Batch
from ..config import Teacher
from ..models.policy import Policy
from ..rl.context import RLContext
from ..rl.feed import RolloutFeed
from ..rl.reprompt import Reprompt, Reprompts, resolve_reprompt
from ..rl.served_teacher import ServedTeacher, open_served_teacher
from ..rl.settings import OnlineConfig, SamplingConfig
from ..rl.sources import check_sampling, open_scheduler
from ..rollouts.replay import open_sample_log
from ..runs.context import RunContext, open_run
from ..runs.cross_tokenizer import (
    Aligner,
    load_teacher_tokenizer,
    losses_of_spans,
    open_cross_tokenizer,
)
from ..runs.feed import Feed, Measure, StepFeed
from ..runs.reference import Reference, frozen
from ..runs.teacher import (
    PROMPT_COLUMN,
    TaidSchedule,
    add_teacher_prompts,
    as_the_teacher_reads,
    encode_with_teacher_prompts,
    follow_student,
    load_teacher,
    open_teacher,
)
from ..runs.trackers import log_table
from ..runs.training import Training
from ..train.losses import (
    ENTROPY,
    TensorReader,
    Tensors,
    Term,
    columns_of,
    outputs_for,
    policy_tensors,
    tensors_needed,
)
from ..train.mix import TOKEN_LOSSES, WEIGHTINGS, distillation, loss_name, parse_losses
from .settings import Distill

LOSSES = TOKEN_LOSSES | {
    "distillation": distillation,
    "sampled_reverse_kl": sampled_reverse_kl,
    "iw_opd": iw_opd,
}
# The completions of each loss where some are the student's (None: all of them); all other losses
# learn from the data's completions.
_APPLIES_TO = {"distillation": None, "sampled_reverse_kl": "sampled", "iw_opd": "sampled"}


def open_distill(config: Distill) -> Training:
    """Open a run that is ready to train."""
    losses = distill_losses(config)
    reprompt = None
    if config.teacher.reprompt is not None:
        reprompt = resolve_reprompt(config.teacher.reprompt)
    no_images = objection_to_images(config.teacher)
    context = open_run(config, encoder(config), no_images=no_images)
    needed = tensors_needed(losses)
    compares = "divergence" in needed
    on_samples = "teacher_logp" in needed  # the teacher rates what the student samples
    live = LiveTeacher()
    if config.teacher.server is not None:
        live = open_server(context, config)
    elif config.teacher.model is not None and (on_samples or compares):
        live = open_model(context, config)
    teacher, stored = open_teacher(context, config.teacher, needed=compares, model=live.model)
    if live.aligner is not None:
        assert live.model is not None
        tokenizer = live.aligner.tokenizer
        teacher = open_cross_tokenizer(context, config.teacher, live.model, tokenizer)
    temperature = config.temperature if on_samples else 1.0
    read = policy_tensors(teacher=teacher, outputs=outputs_for(losses), temperature=temperature)
    schedule = None
    if config.teacher.divergence == "taid":
        schedule = TaidSchedule(config.teacher.taid_start, config.teacher.taid_start)
    prepare = partial(prepared_for_teacher, config.teacher, schedule, live.served or live.aligner)
    if not config.on_policy:
        columns = columns_of(losses)
        return context.train(
            losses, read, columns=columns, per_token=(stored,), prepare=prepare, memory=schedule
        )
    if live.model is not None and on_samples:
        logprobs = context.accelerator.autocast()(frozen(live.model, temperature=temperature))
        read = partial(with_teacher, read, logprobs)
    feed = MixedFeed(context, prepare, schedule, reprompt, live.limit)
    return context.train(losses, read, feed)


@dataclass(frozen=True)
class LiveTeacher:
    """A teacher that is asked in every step; all None for one that is stored.

    Attributes:
        model: in memory.
        aligner: of a model with another tokenizer.
        served: on a server.
        limit: tokens that it reads at most, if that is known.
    """

    model: Policy | None = None
    aligner: Aligner | None = None
    served: ServedTeacher | None = None
    limit: int | None = None


def open_server(context: RunContext[Policy], config: Distill) -> LiveTeacher:
    """The teacher on the configured server."""
    served = open_served_teacher(context, config.teacher, k=config.teacher.top_k or 0)
    limit = None
    if served.context is not None:
        limit = served.context - 1  # a server draws one token more, which nobody reads
    check_teacher_context(limit, context, config)
    return LiveTeacher(served=served, limit=limit)


def open_model(context: RunContext[Policy], config: Distill) -> LiveTeacher:
    """The configured model as teacher."""
    tokenizer = load_teacher_tokenizer(config.teacher) if config.teacher.reads_text else None
    model = load_teacher(context, config.teacher, tokenizer)
    limit = context_length(model)
    if tokenizer is not None:
        return LiveTeacher(model, Aligner(context.tokenizer, tokenizer, limit), limit=limit)
    if config.teacher.prompt is not None:
        check_teacher_context(limit, context, config)
    if config.teacher.sync_steps:
        follow_student(context, config.teacher, model)
    return LiveTeacher(model, limit=limit)


def objection_to_images(teacher: Teacher) -> str:
    """Why the teacher can't rate rows with images; "" if it can."""
    for name in ("prompt", "reprompt"):
        if getattr(teacher, name) is not None:
            return f"teacher.{name} is read without images so far; leave it out"
    if teacher.server is not None:
        return "a teacher's server is sent no images so far; give --teacher.model"
    if teacher.reads_text:
        return f"teacher.divergence: {teacher.divergence} reads text without images so far; take another"
    return ""


def context_length(model: Policy) -> int | None:
    """Tokens that a model can read, where its configuration says so."""
    length: int | None
    length = getattr(model.plain.config.get_text_config(), "max_position_embeddings", None)
    return length


def check_teacher_context(limit: int | None, context: RunContext[Policy], config: Distill) -> None:
    """Raise ValueError if a prompt that the teacher reads and its completion exceed its context."""
    if limit is None or context.stream is not None:
        return
    sampled = config.max_tokens if config.on_policy else 0
    longest = math.inf
    if config.teacher.prompt is None and config.max_length is not None:
        longest = config.max_length + sampled
    if longest <= limit:
        return  # without a look at every row
    column = "prompt" if config.teacher.prompt is None else PROMPT_COLUMN
    shorten = "rows (max_length)"
    if config.teacher.prompt is not None:
        shorten = f"the column {config.teacher.prompt}"
    for row in context.data:
        prompt = len(row[column])
        length = prompt + max(sampled, *map(len, row["completions"]))
        if length > limit:
            raise ValueError(
                f"{where(context.records, row['_row'])}: the teacher's prompt of {prompt} tokens and its completion "
                f"make {length}, and the teacher's context is {limit}; shorten {shorten}"
            )


def prepared_for_teacher(
    teacher: Teacher,
    schedule: TaidSchedule | None,
    reader: ServedTeacher | Aligner | None,
    feed: "Feed | MixedFeed",
    step: int,
    micro_batches: list[Batch],
) -> list[Batch]:
    """The micro-batches of a step with what the teacher reads beside them, its own prompts; what its
    server says, or the text in its own tokens; and how far taid's has come.
    """
    if teacher.prompt is not None:
        micro_batches = add_teacher_prompts(feed.dataset, feed.plan(step), micro_batches)
    if reader is not None:
        micro_batches = reader.prepare(micro_batches)
    if schedule is not None:
        micro_batches = schedule.prepare(feed, step, micro_batches)
    return micro_batches


def encoder(config: Distill) -> Encode:
    """The encoder of demonstrations; it marks the tokens that ``train_on`` names."""
    if config.teacher.prompt is not None:
        column = config.teacher.prompt
        reader = None
        if config.teacher.reads_text:
            reader = partial(load_teacher_tokenizer, config.teacher)
        return partial(
            encode_with_teacher_prompts, train_on=config.train_on, column=column, reader=reader
        )
    return partial(encode_supervised, train_on=config.train_on)


def distill_losses(config: Distill) -> dict[str, Term]:
    """The losses and what is measured beside them; ValueError if settings contradict each other."""
    losses: dict[str, Term] = {}
    weighting = WEIGHTINGS[config.weighting]
    mix = config.loss if isinstance(config.loss, Mapping) else {config.loss: 1.0}
    for name, entry in mix.items():
        applies_to = None
        if config.on_policy:
            applies_to = _APPLIES_TO.get(loss_name(name), "demonstrated")
        losses |= parse_losses({name: entry}, {}, LOSSES, weighting=weighting, of=applies_to)
    needed = tensors_needed(losses)
    config.teacher.check(needed="teacher_logp" in needed or "divergence" in needed)
    if (
        config.teacher.server is not None
        and "divergence" in needed
        and config.teacher.top_k is None
    ):
        raise ValueError(
            "teacher.top_k: a server gives the likeliest tokens, and how many is missing; vLLM gives at most 20, or as "
            "many as its --max-logprobs says"
        )
    if config.teacher.divergence == "taid" and "divergence" not in needed:
        raise ValueError(
            "teacher.divergence: taid follows the loss distillation, which this mix lacks; add it, or leave taid out"
        )
    if config.on_policy:
        check_sampling(config)
        columns = set(columns_of(losses)) - {"sampled", "demonstrated"}
        if columns:
            problem = f"the student's completions have no column {min(columns)!r}"
            raise ValueError(f"on_policy: {problem}; leave it out")
    if config.teacher.reads_text:
        if "divergence" not in needed:
            raise ValueError(
                f"teacher.divergence: {config.teacher.divergence} is for the loss distillation, which this mix lacks; "
                "add it, or take another"
            )
        losses = losses_of_spans(losses)
    return {**losses, **ENTROPY}


def with_teacher(
    read: TensorReader, teacher_logp: Reference, policy: nn.Module, batch: Batch
) -> Tensors:
    """The student's tensors, and the teacher's log-probs of the same tokens."""
    rated = teacher_logp(as_the_teacher_reads(batch))
    return {("tokens", "teacher_logp"): rated, **read(policy, batch)}


class MixedFeed(StepFeed):
    """The steps of the data, some of them with the student's own completions of their prompts.

    Args:
        prepare: as of `Feed`, for steps of both kinds.
        schedule: of taid's teacher, which follows the loss of both.
        reprompt: writes the teacher's prompts about the student's completions.
        limit: tokens that the teacher reads at most.
    """

    stateful = True

    def __init__(
        self,
        context: RunContext[Policy],
        prepare: Callable[..., list[Batch]],
        schedule: TaidSchedule | None = None,
        reprompt: Reprompt | None = None,
        limit: int | None = None,
    ) -> None:
        config = context.config
        self.prepare = prepare
        self.schedule = schedule
        self.data = context.feed(context.data)
        self.held_out: Feed | None = None
        if context.eval_data is not None:
            self.held_out = context.feed(context.eval_data, whole=True, prepare=self._held_out)
        self.evaluates = self.held_out is not None
        replaced = on_policy_steps(self.steps, config.on_policy, config.seed)
        self.rollout_of = {step: rollout for rollout, step in enumerate(replaced)}
        self.last = -1  # latest requested step

        def order(task: int) -> int:
            rollout, place = divmod(task, int(config.batch_size))
            # the last step may lack some: its first come again
            indices = self.data.batches.indices(replaced[rollout])
            return indices[place % len(indices)]

        def asked(task: int) -> Example:
            """The prompt of a demonstration, with the images that it shows itself."""
            whole = self.data.example(order(task))
            shown = tuple(image for image in whole.images if image.start < len(whole.prompt))
            return Example(whole.prompt, [], [], shown)

        settings = {field.name: getattr(config, field.name) for field in fields(SamplingConfig)}
        # What samples reads the settings of an online recipe.
        online = OnlineConfig(**settings, prompts_per_rollout=config.batch_size)
        run = replace(context, config=online)
        scheduler, follow = open_scheduler(run, asked)
        tables = partial(log_table, context.accelerator.trackers)
        log = open_sample_log(
            context.file("samples.jsonl"), config.show_every, context.tokenizer.decode, tables
        )
        rl = RLContext(
            run,
            (),
            scheduler,
            follow,
            sample_log=log,
            order=order,
            images=lambda task: asked(task).images,
        )
        self.reprompts: Reprompts | None = None
        if reprompt is None:
            self.rollouts = RolloutFeed(rl)
            return
        self.reprompts = Reprompts(
            reprompt, context, lambda task: int(context.data[order(task)]["_row"]), limit
        )
        self.rollouts = RolloutFeed(
            rl,
            advantages=self.reprompts.ask,
            select=self.reprompts.select,
            report=self.reprompts.metrics,
        )

    @property
    def steps(self) -> int:
        return self.data.steps

    def __call__(self, step: int) -> list[Batch]:
        self.last = step
        rollout = self.rollout_of.get(step)
        batches = self.data(step) if rollout is None else self.rollouts(rollout)
        if rollout is not None and self.reprompts is not None:
            batches = self.reprompts.add(self.rollouts.contexts(rollout), batches)
        return self.prepare(self, step, marked(batches, rollout is not None))

    def _held_out(self, feed: Feed, step: int, micro_batches: list[Batch]) -> list[Batch]:
        return self.prepare(feed, step, marked(micro_batches, False))

    @property
    def dataset(self) -> Any:
        """The encoded examples, whose prompts the student completes in some steps."""
        return self.data.dataset

    def plan(self, step: int) -> list[list[int]]:
        """The indices of examples in each micro-batch: of those completed, in an on-policy step."""
        rollout = self.rollout_of.get(step)
        return self.data.plan(step) if rollout is None else self.rollouts.plan(rollout)

    def observe(self, metrics: Mapping[str, float]) -> None:
        self.rollouts.observe(metrics)
        if self.schedule is not None:
            self.schedule.observe(metrics)

    def step_metrics(self) -> Mapping[str, float]:
        if self.last in self.rollout_of:
            return {"on_policy": 1.0, **self.rollouts.metrics}
        return {"on_policy": 0.0}

    def evaluate(self, measure: Measure, rows: Any = None) -> Mapping[str, float]:
        """The losses on held-out completions of the data.

        Raises:
            ValueError: if rows are given.
        """
        if rows is not None:
            raise ValueError(
                "evaluate: a student that samples is evaluated on eval_data; pass rows as that"
            )
        assert self.held_out is not None
        return measure(self.held_out(0))

    def state_dict(self) -> dict[str, Any]:
        state = self.rollouts.state_dict()
        if self.schedule is not None:
            state["taid"] = self.schedule.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollouts.load_state_dict(state)
        if self.schedule is not None:
            self.schedule.load_state_dict(state["taid"])

    def close(self) -> None:
        self.rollouts.close()


def on_policy_steps(steps: int, share: float, seed: int) -> list[int]:
    """The steps on the student's completions: each with this probability, by itself."""
    # raw bits, which numpy promises to keep between versions; 1 tells them from other draws
    bits = np.random.Philox(np.random.SeedSequence([seed, 1])).random_raw(steps)
    return [int(step) for step in np.flatnonzero(bits / 2.0**64 < share)]


def marked(batches: list[Batch], on_policy: bool) -> list[Batch]:
    """Batches with bool columns [examples]: ``sampled`` by the student, or ``demonstrated``."""
    result = []
    for batch in batches:
        sampled = torch.full((len(batch.examples),), on_policy, device=batch.target.device)
        columns = {**batch.columns, "sampled": sampled, "demonstrated": ~sampled}
        result.append(replace(batch, columns=columns))
    return result
