"""Reward models: a score for a completion, learned from pairs, ratings or rankings."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...data import (
    Accounting,
    DataError,
    Encode,
    Parts,
    Tokenization,
    encode_preference,
    encode_ranking,
    encode_scores,
    encode_supervised,
    example,
)
from ...objectives import (
    IntPerSequence,
    PerPair,
    PerSequence,
    Stats,
    bradley_terry,
    bradley_terry_ties,
    centering,
    hl_gauss,
    ordinal_preference,
    plackett_luce,
    score_regression,
)
from ...objectives.types import Positive
from ..batch import Batch, Weights, collate
from ..models.io import load_classifier
from ..models.scorer import Scorer, bin_middles, ends_marked, scores
from ..runs.context import open_run
from ..runs.training import Training
from ..train.losses import Tensors, Term, score_tensors
from .settings import Reward


def open_reward(config: Reward) -> Training:
    """Open a run that is ready to train."""
    losses = reward_losses(config)
    scorer = partial(Scorer, layout=config.layout)
    context = open_run(config, encoder(config), scorer, load_weights=load_reward)
    mark = partial(ends_marked, pad=set_pad_token(context.model.plain, context.tokenizer))
    read = read_scores
    if config.loss == "hl_gauss":
        _check_bins(context.model, config)
        read = read_histograms
    return context.train(losses, read, columns=_columns(config), mark=mark)


def load_reward(config: Any, *, images: bool = False) -> nn.Module:
    """The model to train, with one output, or with the bins of its histogram.

    Args:
        images: whether it will see images, see `load_model`.
    """
    return load_classifier(config, "SEQ_CLS", bin_labels(config), images=images)


def bin_labels(config: Reward) -> dict[int, str]:
    """Names of the outputs: of a histogram, the middles of its bins."""
    low, high = config.lowest_score, config.highest_score
    if low is None or high is None:
        return {0: "reward"}
    width = (high - low) / config.bins
    return {i: repr(low + width * (i + 0.5)) for i in range(config.bins)}


def _check_bins(scorer: Scorer, config: Reward) -> None:
    """Raise ValueError if a model that was given has another histogram."""
    wanted = bin_middles(bin_labels(config))
    assert wanted is not None
    found = scorer.middles
    if found is None or not torch.equal(found, wanted):
        raise ValueError(
            f"hl_gauss: the model has another head than one of {config.bins} bins from {config.lowest_score:g} to "
            f"{config.highest_score:g}; give its name instead, or the settings that it was trained with"
        )


def set_pad_token(plain: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Set the pad token of the model, unless it has one, and return it.

    `transformers` finds the end of a completion by it: the last token that is none.
    """
    saved = plain.config.get_text_config()
    if saved.pad_token_id is None:
        saved.pad_token_id = tokenizer.pad_token_id
    if saved.pad_token_id is None:
        saved.pad_token_id = tokenizer.eos_token_id
    return int(saved.pad_token_id)


def reward_losses(config: Reward) -> dict[str, Term]:
    """The losses and what is measured beside them; ValueError if settings contradict each other."""
    losses = dict(LOSSES[config.loss])
    if config.loss != "hl_gauss":  # whose model has no score, but a histogram
        losses = {**RANGE, **losses}
    if config.tie_threshold is not None:
        ties = partial(_ties, threshold=config.tie_threshold)
        losses["bradley_terry_ties"] = Term(ties)
    if config.lowest_score is not None and config.highest_score is not None:
        low, high = config.lowest_score, config.highest_score
        sigma = config.sigma or 0.75 * (high - low) / config.bins
        histogram = partial(_histogram_loss, low=low, high=high, sigma=sigma)
        losses["hl_gauss"] = Term(histogram, further=_range_of_means)
    if config.centering:
        losses["centering"] = Term(centering, config.centering)
    return losses


@torch.no_grad()
def reward_scores(
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, object]],
    *,
    batch_size: int = 16,
) -> Tensor:
    """The scores [rows] of completions.

    Args:
        rows: have a prompt and a completion, plain or conversational.

    Raises:
        DataError: naming the row and what is wrong with it.
    """
    data, _ = encode_supervised(list(rows), tokenizer, train_on="completion")
    pad = scorer.plain.config.get_text_config().pad_token_id
    examples = [ends_marked(example(data, i), pad) for i in range(len(data))]
    batches = []
    for start in range(0, len(examples), batch_size):
        several = examples[start : start + batch_size]
        batches.append(collate(several, device=scorer.device))
    return scores(scorer, batches)


def encoder(config: Reward) -> Encode:
    """The encoder for the data layout of the loss, with the extra columns that it reads."""
    if config.loss in _OF_DEGREES:
        ties = config.loss == "bradley_terry_ties"
        return partial(_with_degrees, column=config.preference, ties=ties)
    if config.margin is not None:
        return partial(_with_number, column=config.margin, name="margin")
    low, high = config.lowest_score, config.highest_score
    if low is not None and high is not None:
        return partial(_within_histogram, low=low, high=high)
    encode, _ = _DATA[config.loss]
    return encode


def _columns(config: Reward) -> tuple[str, ...]:
    """The columns of the data that the loss reads besides tokens."""
    if config.loss in _OF_DEGREES:
        return ("preference",)
    if config.margin is not None:
        return ("margin",)
    _, columns = _DATA[config.loss]
    return columns


def _with_number(
    records: Parts,
    tokenizer: PreTrainedTokenizerBase,
    options: Tokenization,
    *,
    column: str,
    name: str,
) -> tuple[Dataset, Accounting]:
    """Pairs with a numeric column of the records, under another name."""
    data, accounting = encode_preference(records, tokenizer, options, numeric_columns=(column,))
    if column != name:
        data = data.rename_column(column, name)
    return data, accounting


def _with_degrees(
    records: Parts,
    tokenizer: PreTrainedTokenizerBase,
    options: Tokenization,
    *,
    column: str,
    ties: bool,
) -> tuple[Dataset, Accounting]:
    """Pairs with a column ``preference``, the share of people who prefer the chosen completion.

    Raises:
        DataError: for a share that is none, or that the loss with ties does not know.
    """
    data, accounting = _with_number(records, tokenizer, options, column=column, name="preference")
    for share in data.unique("preference"):
        if ties and share not in (0.5, 1.0):
            raise DataError(
                f"{column}: with bradley_terry_ties a pair is 1, or 0.5 if it is a tie, got {share:g}; for other "
                "degrees use ordinal_preference, and swap the completions of a pair below 0.5"
            )
        if not 0 <= share <= 1:
            raise DataError(
                f"{column}: must be in [0, 1], the share of people who prefer the chosen completion, got {share:g}"
            )
    return data, accounting


def _within_histogram(
    records: Parts,
    tokenizer: PreTrainedTokenizerBase,
    options: Tokenization,
    *,
    low: float,
    high: float,
) -> tuple[Dataset, Accounting]:
    """Rated completions, whose scores are in [low, high].

    Raises:
        DataError: for a score outside, which the histogram could not tell from its end.
    """
    data, accounting = encode_scores(records, tokenizer, options)
    for score in data.unique("score"):
        if not low <= score <= high:
            raise DataError(
                f"score: wanted from lowest_score, {low:g}, to highest_score, {high:g}, got {score:g}; widen the range"
            )
    return data, accounting


def read_histograms(policy: nn.Module, batch: Batch) -> Tensors:
    """Log-probs of the bins of each completion's histogram, and the ratings of the data."""
    logp = policy(batch, histogram=True)
    return {
        ("sequences bins", "logp"): logp,
        ("sequences", "target"): batch.columns["score"],
    }


def read_scores(policy: nn.Module, batch: Batch) -> Tensors:
    """Scores of completions and pairs; and the ratings of the data as `score_regression`'s target."""
    tensors = score_tensors(policy, batch)
    if "score" in batch.columns:
        tensors = {**tensors, ("sequences", "target"): batch.columns["score"]}
    return tensors


def _range(score: PerSequence) -> tuple[PerSequence, Stats]:
    """Scores of all completions, whose mean, smallest and largest are logged."""
    score = score.detach()
    return score, {"min_reward": score, "max_reward": score}


def _range_of_means(stats: Stats, batch: Batch) -> Stats:
    """The means of the histograms of all completions, for their smallest and largest."""
    return {"min_reward": stats["mean_reward"], "max_reward": stats["mean_reward"]}


def _ranking_mean(batch: Batch) -> Weights:
    """w = 1, Z = number of rankings.

    The losses of a ranking's completions add up to its negative log-likelihood.
    """
    weights = torch.ones(batch.sequences, dtype=torch.float64, device=batch.target.device)
    return Weights(weights, len(batch.examples))


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


def _ties(
    chosen: PerPair, rejected: PerPair, preference: PerPair, *, threshold: Positive
) -> tuple[PerPair, Stats]:
    return bradley_terry_ties(chosen, rejected, preference == 0.5, threshold=threshold)


def _histogram_loss(
    logp: Float[Tensor, "sequences bins"],
    target: PerSequence,
    *,
    low: float,
    high: float,
    sigma: Positive,
) -> tuple[PerSequence, Stats]:
    return hl_gauss(logp, target, low=low, high=high, sigma=sigma)


RANGE = {"mean_reward": Term(_range, 0.0)}
# Losses of pairs that are preferred to a degree, which a column tells.
_OF_DEGREES = ("bradley_terry_ties", "ordinal_preference")
# Of the other losses: the encoder, and the columns that they read besides tokens.
_DATA: dict[str, tuple[Encode, tuple[str, ...]]] = {
    "bradley_terry": (encode_preference, ()),
    "score_regression": (encode_scores, ("score",)),
    "hl_gauss": (encode_scores, ("score",)),
    "plackett_luce": (encode_ranking, ("rank",)),
}
LOSSES: dict[str, dict[str, Term]] = {
    "bradley_terry": {"bradley_terry": Term(bradley_terry)},
    "bradley_terry_ties": {},  # its threshold is a setting
    "ordinal_preference": {"ordinal_preference": Term(ordinal_preference)},
    "score_regression": {"score_regression": Term(score_regression)},
    "hl_gauss": {},  # its range is a setting
    "plackett_luce": {
        "plackett_luce": Term(_ranking_loss, weighting=_ranking_mean),
        "accuracy": Term(_ranking_accuracy, 0.0),
    },
}
