"""Reward models: a score for a completion, learned from pairs, ratings or rankings."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...data import (
    Accounting,
    encode_preference,
    encode_ranking,
    encode_scores,
    encode_supervised,
    example,
)
from ...objectives import (
    IntPerSequence,
    PerSequence,
    Stats,
    bradley_terry,
    centering,
    plackett_luce,
    score_regression,
)
from ..batch import Batch, Weights, collate
from ..config import Common
from ..models.io import load_classifier
from ..models.scorer import Scorer, ends_marked, scores
from ..runs.context import open_run
from ..runs.training import Training
from ..train.losses import Tensors, Term, score_tensors
from .settings import Reward


def open_reward(config: Reward) -> Training:
    """Open a run that is ready to train."""
    losses = reward_losses(config)
    encode, columns = encoder(config)
    context = open_run(
        config, encode, partial(Scorer, layout=config.layout), load_weights=load_reward
    )
    mark = partial(ends_marked, pad=set_pad_token(context.model.plain, context.tokenizer))
    return context.train(losses, read_scores, columns=columns, mark=mark)


def load_reward(config: Common) -> nn.Module:
    """The model to train, with one output."""
    return load_classifier(config, "SEQ_CLS", {0: "reward"})


def set_pad_token(plain: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The pad token of the model, set unless it has one: `transformers` finds the end of a
    completion by it.
    """
    saved = plain.config.get_text_config()
    if saved.pad_token_id is None:
        saved.pad_token_id = (
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )
    return int(saved.pad_token_id)


def reward_losses(config: Reward) -> dict[str, Term]:
    """The losses, and what is measured beside them; ValueError if settings contradict each
    other.
    """
    centered = {"centering": Term(centering, config.centering)} if config.centering else {}
    return {**LOSSES[config.loss], **centered}


@torch.no_grad()
def reward_scores(
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    *,
    batch_size: int = 16,
) -> Tensor:
    """The scores [rows] of completions: ``rows`` have a prompt and a completion, plain or
    conversational.

    Raises:
        DataError: naming the row and what is wrong with it.
    """
    data, _ = encode_supervised(list(rows), tokenizer, train_on="completion")
    pad = scorer.plain.config.get_text_config().pad_token_id
    examples = [ends_marked(example(data, i), pad) for i in range(len(data))]
    batches = [
        collate(examples[i : i + batch_size], device=scorer.device)
        for i in range(0, len(examples), batch_size)
    ]
    return scores(scorer, batches)


def encoder(config: Reward) -> tuple[Callable[..., tuple[Dataset, Accounting]], tuple[str, ...]]:
    """Encoder for the loss's data layout, and the extra columns that the loss reads."""
    return (
        _DATA[config.loss]
        if config.margin is None
        else (partial(_with_margin, column=config.margin), ("margin",))
    )


def _with_margin(*arguments: Any, column: str, **options: Any) -> tuple[Dataset, Accounting]:
    data, accounting = encode_preference(*arguments, numeric_columns=(column,), **options)
    return data if column == "margin" else data.rename_column(column, "margin"), accounting


def read_scores(policy: nn.Module, batch: Batch) -> Tensors:
    """Scores of completions and pairs; and the ratings of the data, under the name of their
    objective.
    """
    tensors = score_tensors(policy, batch)
    return (
        {**tensors, ("sequences", "target"): batch.columns["score"]}
        if "score" in batch.columns
        else tensors
    )


def _ranking_mean(batch: Batch) -> Weights:
    """w = 1, Z = number of rankings: the losses of the completions of one add up to its negative
    log-likelihood.
    """
    return Weights(
        torch.ones(batch.sequences, dtype=torch.float64, device=batch.target.device),
        len(batch.examples),
    )


def _ranking_loss(
    score: PerSequence, group: IntPerSequence, rank: IntPerSequence
) -> tuple[PerSequence, Stats]:
    return plackett_luce(score, group, rank)[0], {}


def _ranking_accuracy(
    score: PerSequence, group: IntPerSequence, rank: IntPerSequence
) -> tuple[PerSequence, Stats]:
    _, stats = plackett_luce(score.detach(), group, rank)
    # the mean over completions, not the sum over those of a ranking
    return stats.pop("accuracy"), stats


_DATA = {
    "bradley_terry": (encode_preference, ()),
    "score_regression": (encode_scores, ("score",)),
    "plackett_luce": (encode_ranking, ("rank",)),
}
LOSSES: dict[str, dict[str, Term]] = {
    "bradley_terry": {"bradley_terry": Term(bradley_terry)},
    "score_regression": {"score_regression": Term(score_regression)},
    "plackett_luce": {
        "plackett_luce": Term(_ranking_loss, weighting=_ranking_mean),
        "accuracy": Term(_ranking_accuracy, 0.0),
    },
}
