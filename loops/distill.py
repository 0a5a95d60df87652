"""Distillation: learn a teacher's distribution of the next token on the answers of the data."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ..data import encode_supervised
from .config import Common
from .recipe import open_recipe
from .sft import TOKEN_LOSSES, WEIGHTINGS
from .teacher import Teacher, distillation, open_teacher
from .terms import ENTROPY, columns_of, compose, expression, needs, outputs_for, parse, policy_tensors


@dataclass(frozen=True)
class Distill(Common):
    """Training on a teacher's distribution of the next token, on messages, text, or prompts with completions."""

    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    teacher: Teacher = field(default_factory=Teacher)
    """The teacher and the divergence from it."""
    loss: str | dict[str, float | dict[str, Any]] = "distillation"
    """distillation, or a mix of it with token objectives: {distillation: 1.0, nll: 0.5}."""
    weighting: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Whether every token or every answer counts the same, in every loss that has no weighting of its own."""
    train_on: Literal["auto", "assistant", "completion", "all"] = "auto"
    """Tokens that carry loss: auto is assistant for messages, completion after a prompt, and all of a plain text."""


def run_distill(config: Distill) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    known = {**TOKEN_LOSSES, "distillation": distillation}
    terms = {**parse(config.loss, {}, known, weighting=WEIGHTINGS[config.weighting]), **ENTROPY}
    config.teacher.check(needed="divergence" in needs(terms))
    recipe = open_recipe(config, encode_supervised, train_on=config.train_on)
    teaching, per_token = open_teacher(recipe, config.teacher, needed="divergence" in needs(terms))
    read = policy_tensors(teaching=teaching, outputs=outputs_for(terms))
    return recipe.train(compose(terms, read), expression(terms), columns=columns_of(terms), per_token=per_token)
