"""Reward models on pairs with ties, and on pairs with degrees of preference."""

import pytest
import torch
from burnish.data import DataError
from burnish.loops.batch import collate
from burnish.loops.models.io import load_tokenizer
from burnish.loops.models.scorer import Scorer, ends_marked
from burnish.loops.recipes.reward import (
    LOSSES,
    bin_labels,
    open_reward,
    read_histograms,
    read_scores,
    reward_losses,
)
from burnish.loops.recipes.settings import Reward
from burnish.loops.rewards.reward_models import RewardModel
from burnish.objectives import bradley_terry_ties, histogram_mean, hl_gauss, ordinal_preference
from online import lines
from tiny import make_classifier, make_examples, save_model, sums
from transformers import AutoModelForSequenceClassification

DEGREES = [1.0, 0.5, 1.0, 0.5, 1.0, 1.0, 0.5, 1.0]


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    model = str(save_model(tmp_path_factory.mktemp("model")))
    return {"model": model, "batch_size": 8, "steps": 4, "learning_rate": 1e-2}


def rated(degrees):
    return [{**row, "degree": z} for row, z in zip(sums(8), degrees, strict=True)]


def scored_pairs():
    """A batch of pairs with the shares of those who prefer the chosen one, and their scores."""
    examples = [ends_marked(example, None) for example in make_examples(4, completions=2)]
    shares = torch.tensor([1.0, 0.5, 1.0, 0.5])
    batch = collate(examples, {"preference": shares})
    tensors = read_scores(Scorer(make_classifier("SEQ_CLS").float()), batch)
    return batch, tensors, shares


def test_the_loss_with_ties_reads_a_tie_off_the_share():
    batch, tensors, shares = scored_pairs()
    config = Reward("", "", "", loss="bradley_terry_ties", tie_threshold=0.3)
    loss, stats = reward_losses(config)["bradley_terry_ties"](tensors, batch)
    chosen, rejected = tensors["pairs", "chosen"], tensors["pairs", "rejected"]
    expected, _ = bradley_terry_ties(chosen, rejected, shares == 0.5, threshold=0.3)
    torch.testing.assert_close(loss, expected)
    assert loss[0] != loss[1]
    assert stats.keys() == {"mean_reward", "margin", "accuracy"}


def test_the_loss_of_degrees_takes_the_share_itself():
    batch, tensors, shares = scored_pairs()
    loss, _ = LOSSES["ordinal_preference"]["ordinal_preference"](tensors, batch)
    expected, _ = ordinal_preference(
        tensors["pairs", "chosen"], tensors["pairs", "rejected"], shares
    )
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", ["bradley_terry_ties", "ordinal_preference"])
def test_a_run_learns_from_a_column_of_degrees(loss, dtype, common, tmp_path):
    threshold = {"tie_threshold": 0.3} if loss == "bradley_terry_ties" else {}
    settings = {**common, **threshold, "loss": loss, "preference": "degree", "dtype": dtype}
    config = Reward(data=rated(DEGREES), output=str(tmp_path), centering=0.01, **settings)
    open_reward(config).train()
    first, *_, last = lines(tmp_path)
    assert {loss, "centering", "margin", "accuracy"} <= first.keys()
    assert last[loss] < first[loss]


@pytest.mark.parametrize(
    ("loss", "degree", "message"),
    [
        ("bradley_terry_ties", 0.25, "degree: with bradley_terry_ties a pair is 1, or 0.5"),
        ("ordinal_preference", 1.5, "degree: must be in .0, 1., .* got 1.5"),
        ("ordinal_preference", float("nan"), "'degree' is nan, wanted a finite number"),
    ],
)
def test_a_share_that_is_none_is_refused(loss, degree, message, common, tmp_path):
    threshold = {"tie_threshold": 0.3} if loss == "bradley_terry_ties" else {}
    settings = {**common, **threshold, "loss": loss, "preference": "degree"}
    data = rated([*DEGREES[:7], degree])
    with pytest.raises(DataError, match=message):
        open_reward(Reward(data=data, output=str(tmp_path), **settings))


STARS = {"loss": "hl_gauss", "lowest_score": 1.0, "highest_score": 5.0, "bins": 8}


def starred(stars):
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "score": float(n)}
        for row, n in zip(sums(8), stars, strict=True)
    ]


def test_a_histogram_is_learned_saved_and_scores_by_its_mean(common, tmp_path):
    stars = [5, 1, 4, 2, 5, 1, 3, 3]
    config = Reward(data=starred(stars), output=str(tmp_path), **common | STARS | {"steps": 30})
    open_reward(config).train()
    first, *_, last = lines(tmp_path)
    assert last["hl_gauss"] < first["hl_gauss"]
    assert last["absolute_error"] < 0.5 * first["absolute_error"]
    # The model as transformers reads it: the logits of the bins, whose labels are their middles.
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert model.config.id2label == {i: repr(1 + 0.5 * (i + 0.5)) for i in range(8)}
    scorer = Scorer(model)
    batch = collate([ends_marked(example, 0) for example in make_examples(5, completions=1)])
    ids = [[*e.prompt, *e.completions[0]] for e in batch.examples]
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([row])).logits for row in ids])
        score = scorer(batch)
        torch.testing.assert_close(scorer(batch, histogram=True), logits.log_softmax(-1))
    expected = histogram_mean(logits.log_softmax(-1), low=1.0, high=5.0)
    torch.testing.assert_close(score, expected, rtol=1e-4, atol=1e-4)
    # It is a reward like any other.
    judge = RewardModel(str(tmp_path / "model"), tokenizer=load_tokenizer(config))
    assert judge.scorer.middles is not None


def test_the_loss_of_a_histogram_is_that_of_the_configured_range():
    model = make_classifier("SEQ_CLS", labels=8).float()
    config = Reward("", "", "", **STARS)
    model.config.id2label = bin_labels(config)
    examples = [ends_marked(example, None) for example in make_examples(4, completions=1)]
    batch = collate(examples, {"score": torch.tensor([1.0, 5, 2.5, 3])})
    tensors = read_histograms(Scorer(model), batch)
    for sigma in (None, 1.5):
        term = reward_losses(Reward("", "", "", **STARS, sigma=sigma))["hl_gauss"]
        loss, stats = term(tensors, batch)
        expected, _ = hl_gauss(
            tensors["sequences bins", "logp"],
            batch.columns["score"],
            low=1.0,
            high=5.0,
            sigma=sigma or 0.75 * 0.5,
        )
        torch.testing.assert_close(loss, expected)
        assert stats.keys() == {"min_reward", "max_reward", "mean_reward", "absolute_error"}


def test_a_rating_outside_of_the_histogram_is_refused(common, tmp_path):
    data = starred([5, 1, 4, 2, 5, 1, 3, 6])
    with pytest.raises(DataError, match=r"score: wanted from lowest_score, 1, to .* 5, got 6"):
        open_reward(Reward(data=data, output=str(tmp_path), **common | STARS))


def test_a_model_with_other_bins_is_refused(common, tmp_path):
    labels = bin_labels(Reward("", "", "", **STARS | {"highest_score": 6.0}))
    model = AutoModelForSequenceClassification.from_pretrained(common["model"], id2label=labels)
    settings = {**common, **STARS, "model": model, "tokenizer": common["model"]}
    with pytest.raises(ValueError, match="hl_gauss: the model has another head than one of 8 bins"):
        open_reward(Reward(data=starred([3] * 8), output=str(tmp_path), **settings))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lowest_score": None}, "hl_gauss needs both ends of its histogram"),
        ({"lowest_score": 5.0}, "the lower one first; got 5.0 and 5.0"),
        ({"highest_score": float("inf")}, "the lower one first; got 1.0 and inf"),
        ({"bins": 2}, "bins: a histogram has 3 or more, got 2"),
        ({"loss": "score_regression"}, "bins: is for the histogram of hl_gauss"),
    ],
)
def test_contradictions_of_a_histogram_are_told(fields, message):
    settings = {"model": "m", "data": "d", "output": "o"}
    with pytest.raises(ValueError, match=message):
        Reward(**settings, **STARS | fields).refuse_contradictions()
