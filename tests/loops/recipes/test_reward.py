"""Reward models on pairs with ties, and on pairs with degrees of preference."""

import pytest
import torch
from burnish.data import DataError
from burnish.loops.batch import collate
from burnish.loops.models.scorer import Scorer, ends_marked
from burnish.loops.recipes.reward import LOSSES, open_reward, read_scores, reward_losses
from burnish.loops.recipes.settings import Reward
from burnish.objectives import bradley_terry_ties, ordinal_preference
from online import lines
from tiny import make_classifier, make_examples, save_model, sums

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
