"""The step and the generator. (That a step does not depend on its split is shown in test_law.)"""

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.batch import collate, token_mean
from burnish.loops.config import Common
from burnish.loops.models.policy import Policy
from burnish.loops.runs.context import open_accelerator
from burnish.loops.train.losses import Term, compose, policy_tensors
from burnish.loops.train.step import PATIENCE, evaluate, optimize, train_step
from burnish.objectives import nll
from forked import run_forked
from safetensors.torch import load_file
from tiny import make_examples, make_model

NLL = compose({"nll": Term(nll)}, policy_tensors())
EXPRESSION = {"nll": (1.0, token_mean)}


@pytest.fixture
def policy():
    return Policy(make_model("llama"))


def sgd(policy, rate=0.1):
    return torch.optim.SGD(policy.parameters(), lr=rate)


def test_the_loss_and_gradient_are_those_of_a_plain_torch_loop(policy):
    batch = collate(make_examples(4, completions=1))
    (-policy(batch).logprob.mean()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters()])
    expected = [p.detach() - 0.1 * p.grad / norm for p in policy.parameters()]  # clipped to a norm of 1
    loss = -policy(batch).logprob.mean().detach()
    policy.zero_grad()
    accelerator = Accelerator()
    metrics = train_step(accelerator, policy, sgd(policy), [batch], NLL, EXPRESSION, max_grad_norm=1.0)
    assert metrics["loss"] == pytest.approx(float(loss))
    assert metrics["grad_norm"] == pytest.approx(float(norm))
    assert norm > 1
    assert metrics["tokens"] == len(batch.target)
    for parameter, wanted in zip(policy.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-6)  # clipping divides by norm + 1e-6


def test_a_coefficient_of_zero_measures_without_training(policy):
    batch = collate(make_examples(2, completions=1))
    before = [parameter.detach().clone() for parameter in policy.parameters()]

    def objective(policy, batch):
        losses = NLL(policy, batch)
        return {**losses, "constant": (torch.full_like(losses["nll"][0], 3.0), {})}

    weightings = {"constant": (0.0, token_mean), "nll": (1e-300, token_mean)}
    metrics = train_step(Accelerator(), policy, sgd(policy), [batch], objective, weightings, max_grad_norm=1e9)
    assert metrics["constant"] == pytest.approx(3.0)
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-200)
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_step_without_a_single_unit_is_skipped_and_not_nan(policy):
    metrics = train_step(Accelerator(), policy, sgd(policy), [collate([])], NLL, EXPRESSION, max_grad_norm=1.0)
    assert (metrics["loss"], metrics["grad_norm"], metrics["skipped"]) == (0.0, 0.0, 1.0)


def poisoned(policy, batch):
    loss, stats = NLL(policy, batch)["nll"]
    return {"nll": (loss * float("nan"), stats)}


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(policy):
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    batch = collate(make_examples(2, completions=1))
    metrics = train_step(Accelerator(), policy, sgd(policy), [batch], poisoned, EXPRESSION, max_grad_norm=1.0)
    assert metrics["skipped"] == 1
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, policy.parameters(), strict=True))


def steps(policy, objective, count):
    optimizer = sgd(policy)
    batch = collate(make_examples(2, completions=1))
    return optimize(
        policy,
        lambda step: [batch],
        objective,
        EXPRESSION,
        accelerator=Accelerator(),
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        steps=count,
    )


def test_training_stops_when_gradients_stay_infinite(policy):
    taken = steps(policy, poisoned, 100)
    message = rf"not finite in {PATIENCE} steps in a row, the last one step {PATIENCE}.*; micro-batches \[0\]"
    with pytest.raises(FloatingPointError, match=message):
        list(taken)


def test_the_generator_counts_from_one_and_reports_the_rate_it_used(policy):
    taken = list(steps(policy, NLL, 3))
    assert [step.number for step in taken] == [1, 2, 3]
    assert [step.metrics["learning_rate"] for step in taken] == pytest.approx([0.1, 0.05, 0.025])
    assert taken[-1].metrics["loss"] < taken[0].metrics["loss"]


def test_evaluation_turns_dropout_off_and_on_again(policy):
    policy.plain.base_model.embed_tokens = torch.nn.Sequential(
        policy.plain.base_model.embed_tokens, torch.nn.Dropout(0.5)
    )
    policy.train()
    batches = [collate(make_examples(3, completions=1))]
    once, again = (evaluate(Accelerator(), policy, batches, NLL, EXPRESSION) for _ in range(2))
    assert once == again
    assert policy.training


def test_evaluation_measures_the_same_numbers_and_changes_nothing(policy):
    batches = [collate(make_examples(3, completions=1, seed=seed)) for seed in (0, 1)]
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    measured = evaluate(Accelerator(), policy, batches, NLL, EXPRESSION)
    trained = train_step(Accelerator(), policy, sgd(policy, 0.0), batches, NLL, EXPRESSION, max_grad_norm=1.0)
    assert measured == {name: pytest.approx(trained[name], rel=1e-12) for name in measured}
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_run_steps_even_where_an_earlier_one_died_between_two_micro_batches(tmp_path):
    Accelerator().gradient_state._set_sync_gradients(False)
    accelerator = open_accelerator(Common(model="", data="", output=str(tmp_path / "run")))
    assert accelerator.sync_gradients  # an optimizer prepared by it would not step otherwise


def test_ranks_do_not_train_apart_on_a_policy_that_was_not_prepared(policy, monkeypatch):
    batch = collate(make_examples(2, completions=1))
    monkeypatch.setattr(Accelerator, "use_distributed", True)
    with pytest.raises(
        ValueError, match=r"train_step: .* policy, optimizer = accelerator\.prepare\(policy, optimizer\)"
    ):
        train_step(Accelerator(), policy, sgd(policy), [batch], NLL, EXPRESSION, max_grad_norm=1.0)


@pytest.mark.parametrize("unused", [True, False])
def test_weights_that_get_no_gradient_leave_the_steps_of_two_ranks_as_they_are(tmp_path, unused):
    for ranks in (1, 2):
        outcomes = run_forked(ranks, "unused", str(tmp_path), unused)
        assert [status for status, _ in outcomes] == [0] * ranks, outcomes
    alone, together = (load_file(tmp_path / f"{ranks}.safetensors") for ranks in (1, 2))
    assert any("indexer" in name for name in alone) == unused
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=1e-5, atol=1e-6)
