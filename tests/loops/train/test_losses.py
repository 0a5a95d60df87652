"""Losses: named losses that find their own tensors, all from one forward pass."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.batch import collate
from burnish.loops.models.policy import Policy
from burnish.loops.train.losses import (
    CHOSEN,
    Term,
    compose,
    policy_tensors,
    weightings,
)
from burnish.loops.train.mix import TOKEN_LOSSES, parse_losses
from burnish.loops.train.step import train_step
from burnish.objectives import PerPair, apo_zero_unpaired, dpo, nll, sequence_sum, simpo
from tiny import make_examples, make_model


class Counted(torch.nn.Module):
    """A policy that counts its forward passes."""

    def __init__(self, policy):
        super().__init__()
        self.policy, self.passes = policy, 0

    def forward(self, batch, **options):
        self.passes += 1
        return self.policy(batch, **options)


@pytest.fixture
def policy():
    return Counted(Policy(make_model("llama")))


@pytest.fixture
def batch():
    return collate(make_examples(4), {"importance": torch.tensor([1.0, 0.0, 2.0, 0.5])})


def losses_of(terms, policy, batch, **options):
    return {
        name: loss
        for name, (loss, _) in compose(terms, policy_tensors(**options))(policy, batch).items()
    }


def test_losses_of_tokens_completions_and_pairs_share_one_forward_pass(policy, batch):
    reference = lambda batch: torch.full(batch.target.shape, -2.0, dtype=torch.float64)  # noqa: E731
    desirable = torch.tensor([True, False, False, True])
    batch = collate(batch.examples, {"desirable": desirable})
    terms = {
        "nll": Term(nll, of=CHOSEN),
        "dpo": Term(partial(dpo, beta=0.1)),
        "simpo": Term(partial(simpo, beta=2.0, gamma=0.5)),
        "apo": Term(partial(apo_zero_unpaired, beta=0.1)),
    }
    losses = losses_of(terms, policy, batch, reference=reference, pairs=True)
    assert policy.passes == 1
    logprob = policy(batch).logprob
    now, before = (sequence_sum(x, batch.sequence, 8) for x in (logprob, reference(batch)))
    mean = now / torch.bincount(batch.sequence)
    torch.testing.assert_close(losses["nll"], -logprob[batch.tokens_of(CHOSEN)])
    torch.testing.assert_close(
        losses["dpo"], dpo(now[::2], now[1::2], before[::2], before[1::2], beta=0.1)[0]
    )
    torch.testing.assert_close(
        losses["simpo"], simpo(mean[::2], mean[1::2], beta=2.0, gamma=0.5)[0]
    )
    # a column of the examples reaches each of their completions
    labels = desirable.repeat_interleave(2)
    torch.testing.assert_close(losses["apo"], apo_zero_unpaired(now, before, labels, beta=0.1)[0])


def test_a_loss_without_its_tensor_says_which_one_is_missing_and_what_gives_it(policy, batch):
    lacking = {"dpo": Term(partial(dpo, beta=0.1))}
    wanted = r"dpo: there is no tensor ref_chosen per pair; policy_tensors\(reference=..., pairs=True\) would give it"
    with pytest.raises(ValueError, match=wanted):
        losses_of(lacking, policy, batch, pairs=True)
    losses_of(
        lacking,
        policy,
        batch,
        pairs=True,
        reference=lambda batch: torch.zeros(len(batch.target)).double(),
    )
    lacking = {"apo": Term(partial(apo_zero_unpaired, beta=0.1))}
    reference = lambda batch: torch.zeros(len(batch.target)).double()  # noqa: E731
    with pytest.raises(
        ValueError, match="no tensor desirable per sequence; a column of the data of that name"
    ):
        losses_of(lacking, policy, batch, reference=reference)


def test_a_loss_without_a_unit_says_where_it_belongs():
    def mine(chosen: PerPair, rejected: PerPair):
        return (1 - chosen + rejected).clamp(min=0), {}

    with pytest.raises(
        ValueError, match=r"mine.*: wanted a return annotation .* -> tuple\[PerPair, Stats\]"
    ):
        weightings({"mine": Term(mine)})


def test_a_column_of_the_data_weighs_examples_as_often_as_it_says(policy, batch):
    """Weights 1, 0, 2, ½ over four examples: the gradient of the weighted mean, written out."""
    logprob = policy(batch).logprob
    example = batch.example[batch.sequence]
    weight = batch.columns["importance"].double()[example] * batch.tokens_of(CHOSEN)
    loss = -(weight * logprob).sum() / weight.sum()
    expected = torch.autograd.grad(loss, policy.parameters())
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    terms = parse_losses({"nll": {"weight": "importance"}}, {}, TOKEN_LOSSES, of=CHOSEN)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    objective = compose(terms, policy_tensors())
    metrics = train_step(
        Accelerator(),
        policy,
        optimizer,
        [batch],
        objective,
        weightings(terms),
        max_grad_norm=float("inf"),
    )
    assert metrics["nll"] == pytest.approx(loss.item())
    for old, new, wanted in zip(before, policy.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new.detach(), wanted, rtol=1e-9, atol=1e-12)


def test_what_had_nothing_to_measure_is_not_logged(policy):
    batch = collate(make_examples(2, completions=1), {"never": torch.tensor([False, False])})
    terms = {"nll": Term(nll), "missing": Term(nll, 0.0, of="never")}
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    objective = compose(terms, policy_tensors())
    metrics = train_step(
        Accelerator(), policy, optimizer, [batch], objective, weightings(terms), max_grad_norm=1.0
    )
    assert "nll" in metrics
    assert "missing" not in metrics
