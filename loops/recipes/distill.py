"""Distillation: learn a teacher's distribution of the next token, on the answers of the data or on one's own.

A student that learns on the data's answers meets, when it answers by itself, prefixes that it has never been taught
about. In a share λ of the steps it is therefore taught on what it says itself (GKD, Agarwal et al. 2023,
arXiv:2306.13649): the prompts of such a step are those that the data has for it, the answers are the student's.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import nn

from ...data import encode_supervised
from ...objectives import sampled_reverse_kl
from ..batch import Batch
from ..models.policy import Policy
from ..rewards import judged
from ..rl.buffer import RolloutFeed
from ..rl.sources import check_sampled, open_scheduler, open_store
from ..runs.context import Recipe, open_recipe
from ..runs.feed import Feed
from ..runs.teacher import distillation, load_teacher, open_teacher
from ..train.losses import (
    ENTROPY,
    Loss,
    Losses,
    Reader,
    Tensors,
    Term,
    columns_of,
    compose,
    needs,
    outputs_for,
    parse,
    policy_tensors,
    weightings,
)
from .settings import Distill
from .sft import TOKEN_LOSSES, WEIGHTINGS

LOSSES: dict[str, Loss] = {
    **TOKEN_LOSSES,
    "distillation": distillation,
    "sampled_reverse_kl": sampled_reverse_kl,
}
_ABOUT = {"distillation": None, "sampled_reverse_kl": "sampled"}  # whose answers; those of the data for other losses


def run_distill(config: Distill) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    terms = distill_terms(config)
    recipe = open_recipe(config, encode_supervised, train_on=config.train_on)
    sampled, compared = ("teacher_logp" in needs(terms)), ("divergence" in needs(terms))
    teaching, per_token = open_teacher(recipe, config.teacher, needed=True) if compared else (None, lambda data: {})
    read = policy_tensors(
        teaching=teaching, outputs=outputs_for(terms), temperature=config.temperature if sampled else 1.0
    )
    logged = {**terms, **ENTROPY}
    if not config.on_policy:
        return recipe.train(compose(logged, read), weightings(logged), columns=columns_of(terms), per_token=per_token)
    if sampled:
        read = with_teacher(read, load_teacher(recipe, config.teacher), recipe, config.temperature)
    return train_mixed(config, recipe, logged, read)


def distill_terms(config: Distill) -> dict[str, Term]:
    """The losses of this configuration; in a mix of data and samples, each on the answers that it is about.

    Raises:
        ValueError: if settings contradict each other.
    """
    mix = {config.loss: 1.0} if isinstance(config.loss, str) else config.loss
    terms: dict[str, Term] = {}
    for name, entry in mix.items():
        about = _ABOUT.get(name, "demonstrated") if config.on_policy else None
        terms |= parse({name: entry}, {}, LOSSES, weighting=WEIGHTINGS[config.weighting], of=about)
    sampled = "teacher_logp" in needs(terms)
    config.teacher.check(needed=sampled or "divergence" in needs(terms))
    if not 0 <= config.on_policy <= 1:
        raise ValueError(f"on_policy: a share of the steps, must be in [0, 1], got {config.on_policy}")
    if not config.on_policy:
        if sampled:
            raise ValueError(
                "loss: sampled_reverse_kl is about answers that the student samples; set on_policy above 0"
            )
        return terms
    check_sampled(config)
    if sampled and (config.top_p < 1 or config.top_k):
        raise ValueError(
            "top_p, top_k: sampled_reverse_kl is a policy gradient, biased where answers are drawn from a part of the "
            "distribution; draw from all of it, or use the loss distillation"
        )
    if config.teacher.model is None or config.teacher.top_k is not None:
        raise ValueError(
            "on_policy: what the student will say is not known before, so no teacher can have been asked about it; "
            "give --teacher.model, and neither teacher.top_k nor teacher.logprobs"
        )
    if columns := set(columns_of(terms)) - {"sampled", "demonstrated"}:
        raise ValueError(f"on_policy: the student's answers have no column {min(columns)!r}; leave it out")
    return terms


def with_teacher(read: Reader, teacher: Policy, recipe: Recipe[Policy], temperature: float) -> Reader:
    """Beside what the student says, the teacher's log-probs of the same tokens."""

    def tensors(policy: nn.Module, batch: Batch) -> Tensors:
        with torch.no_grad(), recipe.run.accelerator.autocast():
            logp = teacher(batch, temperature=temperature).logprob
        return {**read(policy, batch), ("tokens", "teacher_logp"): logp}

    return tensors


def train_mixed(config: Distill, recipe: Recipe[Policy], terms: Losses, read: Reader) -> dict[str, float]:
    """Train on the data in some steps, and on answers to its prompts in the others."""
    steps = Mixed(recipe.feed(recipe.data), config, recipe)
    held_out = recipe.eval_data
    evaluation = None if held_out is None else recipe.feed(held_out, whole=True, prepare=_demonstrated)
    try:
        return recipe.run.train(
            recipe.model,
            recipe.tokenizer,
            steps,
            compose(terms, read),
            weightings(terms),
            evaluation=evaluation,
            memory=steps.experience,
            report=steps.report,
        )
    finally:
        steps.experience.close()


class Mixed:
    """The steps of a feed, of which a share is replaced by the student's own answers to the prompts of that step."""

    def __init__(self, feed: Feed, config: Distill, recipe: Recipe[Policy]) -> None:
        self.feed = feed
        self.own = own_steps(feed.steps, config.on_policy, config.seed)
        self.before = [0, *accumulate(self.own)]
        self.last = -1  # step that was asked for
        replaced = [step for step, own in enumerate(self.own) if own]

        def prompt(task: int) -> list[int]:
            rollout, place = divmod(task, config.batch_size)
            indices = feed.batches.indices(replaced[rollout])  # the last step may lack some: its first come again
            return list(feed.example(indices[place % len(indices)]).prompt)

        self.experience = RolloutFeed(
            open_scheduler(config, recipe, prompt, max_staleness=0),
            recipe.model,
            recipe.run.accelerator,
            judgment=lambda samples: judged([], samples),
            groups=config.batch_size,
            steps=len(replaced),
            micro_tokens=config.micro_tokens,
            seed=config.seed,
            store=open_store(config, recipe),
        )

    @property
    def steps(self) -> int:
        return self.feed.steps

    def __call__(self, step: int) -> list[Batch]:
        self.last = step
        own = self.own[step]
        return marked(self.experience(self.before[step]) if own else self.feed(step), own)

    def report(self) -> Mapping[str, float]:
        own = self.own[self.last]
        return {"on_policy": float(own), **(self.experience.report() if own else {})}


def own_steps(steps: int, share: float, seed: int) -> list[bool]:
    """Which steps are the student's: each with this probability, whatever the others."""
    bits = np.random.Philox(np.random.SeedSequence([seed, 1])).random_raw(steps)
    return [bool(draw < share) for draw in bits / 2.0**64]


def _demonstrated(feed: Feed, step: int, batches: list[Batch]) -> list[Batch]:
    return marked(batches, False)


def marked(batches: list[Batch], own: bool) -> list[Batch]:
    """With the columns that say whose answers these are."""
    found = []
    for batch in batches:
        sampled = torch.full((len(batch.examples),), own, device=batch.target.device)
        found.append(replace(batch, columns={**batch.columns, "sampled": sampled, "demonstrated": ~sampled}))
    return found
