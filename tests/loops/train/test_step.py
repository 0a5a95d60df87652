"""The step and the generator. (That a step does not depend on its split is shown in test_law.)"""

from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from burnish.loops.batch import collate, pair_mean, token_mean
from burnish.loops.config import Common
from burnish.loops.models.policy import Policy
from burnish.loops.runs.context import open_accelerator, scale_loss
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
    # clipped to a norm of 1
    expected = [p.detach() - 0.1 * p.grad / norm for p in policy.parameters()]
    loss = -policy(batch).logprob.mean().detach()
    policy.zero_grad()
    accelerator = Accelerator()
    metrics = train_step(
        accelerator, policy, sgd(policy), [batch], NLL, EXPRESSION, max_grad_norm=1.0
    )
    assert metrics["loss"] == pytest.approx(float(loss))
    assert metrics["grad_norm"] == pytest.approx(float(norm))
    assert norm > 1
    assert metrics["tokens"] == len(batch.target)
    for parameter, wanted in zip(policy.parameters(), expected, strict=True):
        # clipping divides by norm + 1e-6
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_a_coefficient_of_zero_measures_without_training(policy):
    batch = collate(make_examples(2, completions=1))
    before = [parameter.detach().clone() for parameter in policy.parameters()]

    def objective(policy, batch):
        losses = NLL(policy, batch)
        return {**losses, "constant": (torch.full_like(losses["nll"][0], 3.0), {})}

    weightings = {"constant": (0.0, token_mean), "nll": (1e-300, token_mean)}
    metrics = train_step(
        Accelerator(), policy, sgd(policy), [batch], objective, weightings, max_grad_norm=1e9
    )
    assert metrics["constant"] == pytest.approx(3.0)
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-200)
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, policy.parameters(), strict=True))


def test_a_step_without_a_single_unit_is_skipped_and_not_nan(policy):
    metrics = train_step(
        Accelerator(), policy, sgd(policy), [collate([])], NLL, EXPRESSION, max_grad_norm=1.0
    )
    assert (metrics["loss"], metrics["grad_norm"], metrics["skipped"]) == (0.0, 0.0, 1.0)


def poisoned(policy, batch):
    loss, stats = NLL(policy, batch)["nll"]
    return {"nll": (loss * float("nan"), stats)}


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(policy):
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    batch = collate(make_examples(2, completions=1))
    metrics = train_step(
        Accelerator(), policy, sgd(policy), [batch], poisoned, EXPRESSION, max_grad_norm=1.0
    )
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
    trained = train_step(
        Accelerator(), policy, sgd(policy, 0.0), batches, NLL, EXPRESSION, max_grad_norm=1.0
    )
    assert measured == {name: pytest.approx(trained[name], rel=1e-12) for name in measured}
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, policy.parameters(), strict=True))


def test_evaluation_leaves_a_model_without_dropout_under_a_new_policy(policy):
    assert policy.training and not policy.model.training  # of transformers it comes to evaluate
    evaluate(Accelerator(), policy, [collate(make_examples(1))], NLL, EXPRESSION)
    assert policy.training and not any(module.training for module in policy.model.modules())


def once(
    policy, objective=NLL, weightings=EXPRESSION, accelerator=None, optimizer=None, batches=None
):
    batches = [collate(make_examples(1, completions=1))] if batches is None else batches
    step = (
        accelerator or Accelerator(),
        policy,
        optimizer or sgd(policy),
        batches,
        objective,
        weightings,
    )
    return train_step(*step, max_grad_norm=1.0)


def test_a_loss_is_not_spread_over_the_units_of_another(policy):
    def mean(policy, batch):
        return {"nll": (NLL(policy, batch)["nll"][0].mean(), {})}

    def measured(policy, batch):
        return {"nll": (NLL(policy, batch)["nll"][0], {"largest": torch.zeros(())})}

    with pytest.raises(
        ValueError,
        match=r"one entry of nll per unit .* nll weighs, \[\d+\], got \[\]; don't reduce",
    ):
        once(policy, mean)
    with pytest.raises(
        ValueError,
        match=r"one entry of nll per unit .*, \[1\], got \[\d+\]; .* weigh nll by another",
    ):
        once(policy, weightings={"nll": (1.0, pair_mean)})
    with pytest.raises(ValueError, match=r"one entry of largest per unit .*, got \[\]"):
        once(policy, measured)


@pytest.mark.parametrize("names", [["nll", "kl"], ["kl"], []])
def test_no_loss_goes_without_a_weighting_and_no_weighting_without_a_loss(policy, names):
    weightings = {name: (1.0, token_mean) for name in names}
    with pytest.raises(
        ValueError, match=rf"losses that have a weighting \({', '.join(names)}\), got \(nll\)"
    ):
        once(policy, weightings=weightings)


@pytest.mark.parametrize(
    "coefficient, message",
    [
        (1.0, r"objective: nll has no gradient; compute it from the policy's outputs"),
        (0.0, "every coefficient is 0, so nothing is trained"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(policy, coefficient, message):
    def objective(policy, batch):
        return {"nll": nll(policy(batch).logprob.detach())}

    weightings = {"nll": (coefficient, token_mean)}
    batch = collate(make_examples(2, completions=1))
    with pytest.raises(ValueError, match=message):
        train_step(
            Accelerator(), policy, sgd(policy), [batch], objective, weightings, max_grad_norm=1.0
        )


def test_an_accelerator_does_not_divide_the_gradient_by_its_accumulation_steps(policy):
    with pytest.raises(
        ValueError, match="wanted an Accelerator with gradient_accumulation_steps 1, got 4"
    ):
        once(policy, accelerator=Accelerator(gradient_accumulation_steps=4))


@pytest.mark.parametrize("training", [True, False])
def test_micro_batches_may_be_generated_and_must_be_some(policy, training):
    def run(policy, batches):
        evaluated = partial(evaluate, Accelerator(), policy, objective=NLL, weightings=EXPRESSION)
        return once(policy, batches=batches) if training else evaluated(batches)

    metrics = run(policy, batches=(collate([each]) for each in make_examples(2, completions=1)))
    assert metrics["loss"] > 0
    with pytest.raises(ValueError, match=r"wanted micro-batches, got none; .* \[collate\(\[\]\)\]"):
        run(policy, batches=[])


def test_gradients_of_weights_outside_the_optimizer_clip_nothing_and_do_not_add_up(policy):
    (-policy(collate(make_examples(1, completions=1))).logprob.mean()).backward()
    wanted = policy.head.weight.grad.norm().item()
    optimizer = torch.optim.SGD(policy.head.parameters(), lr=0.0)
    norms = [once(policy, optimizer=optimizer)["grad_norm"] for _ in range(2)]
    assert norms == pytest.approx([wanted, wanted])


def test_an_optimizer_of_another_model_is_refused(policy):
    with pytest.raises(
        ValueError, match=r"no parameter of the policy; make it of policy\.parameters\(\)"
    ):
        once(policy, optimizer=sgd(Policy(make_model("llama"))))


def test_what_a_failed_step_left_is_not_part_of_the_next(policy):
    batches = [collate([each]) for each in make_examples(2, completions=1)]
    optimizer, calls = sgd(policy, 0.0), []

    def fails(policy, batch):
        calls.append(batch)
        if len(calls) == 2:
            raise MemoryError
        return NLL(policy, batch)

    with pytest.raises(MemoryError):
        once(policy, fails, optimizer=optimizer, batches=batches)
    again, alone = (
        once(policy, optimizer=each, batches=batches) for each in (optimizer, sgd(policy, 0.0))
    )
    assert again["grad_norm"] == alone["grad_norm"]


@pytest.fixture
def in_float16():
    """An accelerator whose loss has a scale of 4."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    scale_loss(accelerator)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    yield accelerator
    AcceleratorState._reset_state()


def test_an_overflow_in_float16_lowers_the_scale_and_training_goes_on(policy, in_float16):
    prepared, optimizer = in_float16.prepare(policy, sgd(policy))
    known = {"accelerator": in_float16, "optimizer": optimizer}
    overflowed = once(prepared, poisoned, **known)
    assert (overflowed["skipped"], overflowed["loss_scale"]) == (1, 4.0)
    assert in_float16.scaler.get_scale() == 2.0
    taken = once(prepared, **known)
    assert (taken["skipped"], taken["loss_scale"]) == (0, 2.0)


def test_the_scale_of_the_loss_is_off_the_gradient_before_it_is_clipped(in_float16):
    batch, norms = collate(make_examples(2, completions=1)), []
    for scale in (1.0, 2.0**10):
        in_float16.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        policy = Policy(make_model("llama", dtype=torch.float32))
        prepared, optimizer = in_float16.prepare(policy, sgd(policy, 1.0))
        before = [each.detach().clone() for each in policy.parameters()]
        metrics = train_step(
            in_float16, prepared, optimizer, [batch], NLL, EXPRESSION, max_grad_norm=0.5
        )
        steps = [a - b.detach() for a, b in zip(before, policy.parameters(), strict=True)]
        assert float(torch.nn.utils.get_total_norm(steps)) == pytest.approx(0.5, rel=1e-3)
        norms.append(metrics["grad_norm"])
        in_float16.free_memory()
    # small gradients of float16 are lost without a scale
    assert norms[0] == pytest.approx(norms[1], rel=1e-2) and norms[0] > 0.5


def overflowing(policy, batch):
    """Its loss is finite, and its gradient is not in float16."""
    loss, stats = NLL(policy, batch)["nll"]
    return {"nll": (loss * 1e36, stats)}


def test_overflows_of_the_scale_are_told_and_no_failures_until_it_is_at_1(in_float16, caplog):
    policy = Policy(make_model("llama", dtype=torch.float32))
    in_float16.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**PATIENCE * 2)
    prepared, optimizer = in_float16.prepare(policy, sgd(policy))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    batches = [collate(make_examples(2, completions=1))]
    taken = []
    with pytest.raises(FloatingPointError, match=r"in float16: set dtype to bfloat16 or float32"):
        for step in optimize(
            prepared,
            lambda step: batches,
            overflowing,
            EXPRESSION,
            accelerator=in_float16,
            optimizer=optimizer,
            schedule=schedule,
            steps=100,
        ):
            taken.append(step.metrics)
    scales = [metrics["loss_scale"] for metrics in taken]
    assert scales[: PATIENCE + 1] == [2.0 ** (PATIENCE + 1 - i) for i in range(PATIENCE + 1)]
    assert len(taken) == PATIENCE + 1 + PATIENCE - 1
    assert all(metrics["skipped"] for metrics in taken)
    rates = [metrics["learning_rate"] for metrics in taken]
    assert rates == pytest.approx([0.1 / (1 + i) for i in range(len(taken))])
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == (
        "step 1 is skipped, as its gradient overflows float16 at a loss scale of 64; the next has half of it"
    )


@pytest.mark.parametrize("kind", ["copies", "shards", "split"])
def test_ranks_agree_on_an_overflow_that_one_of_them_has(kind, tmp_path):
    outcomes = run_forked(2, "rank_overflow", str(tmp_path), kind)
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first["metrics"] == second["metrics"]
    assert first["scaler"] == second["scaler"]
    assert [each["skipped"] for each in first["metrics"]] == [0, 1, 0, 0]
    assert [each["loss_scale"] for each in first["metrics"]] == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert first["scaler"]["_growth_tracker"] == 2
    for rank in (first, second):
        assert torch.equal(rank["weights"][0], rank["weights"][1])
        assert not torch.equal(rank["weights"][1], rank["weights"][2])


def test_a_schedule_that_accelerate_has_prepared_takes_one_step_on_two_ranks(policy, monkeypatch):
    optimizer = sgd(policy)
    schedule: Any = AcceleratedScheduler(
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step), [optimizer]
    )
    accelerator = Accelerator()
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    batches, known = (
        [collate(make_examples(1, completions=1))],
        {"accelerator": accelerator, "optimizer": optimizer},
    )
    taken = optimize(
        policy, lambda step: batches, NLL, EXPRESSION, schedule=schedule, steps=3, **known
    )
    assert [step.metrics["learning_rate"] for step in taken] == pytest.approx([0.1, 0.05, 0.025])


def test_a_run_steps_even_where_an_earlier_one_died_between_two_micro_batches(tmp_path):
    Accelerator().gradient_state._set_sync_gradients(False)
    accelerator = open_accelerator(Common(model="", data="", output=str(tmp_path / "run")))
    assert accelerator.sync_gradients  # an optimizer prepared by it would not step otherwise


@pytest.mark.parametrize(
    "wrap", [lambda policy: policy, partial(torch.compile, backend="eager"), torch.nn.Sequential]
)
def test_ranks_do_not_train_apart_on_a_policy_that_was_not_prepared(policy, monkeypatch, wrap):
    batch, policy = collate(make_examples(2, completions=1)), wrap(policy)
    monkeypatch.setattr(Accelerator, "use_distributed", True)
    with pytest.raises(
        ValueError,
        match=r"train_step: .* policy, optimizer = accelerator\.prepare\(policy, optimizer\)",
    ):
        train_step(Accelerator(), policy, sgd(policy), [batch], NLL, EXPRESSION, max_grad_norm=1.0)


@pytest.mark.parametrize("unused", [True, False])
def test_weights_that_get_no_gradient_leave_the_steps_of_two_ranks_as_they_are(tmp_path, unused):
    for ranks in (1, 2):
        outcomes = run_forked(ranks, "rank_unused", str(tmp_path), unused)
        assert [status for status, _ in outcomes] == [0] * ranks, outcomes
    alone, together = (load_file(tmp_path / f"{ranks}.safetensors") for ranks in (1, 2))
    assert any("indexer" in name for name in alone) == unused
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=1e-5, atol=1e-6)


def test_shards_that_the_caller_made_take_the_step_of_one_rank(tmp_path):
    for ranks in (1, 2):
        outcomes = run_forked(ranks, "rank_own_shards", str(tmp_path))
        assert [status for status, _ in outcomes] == [0] * ranks, outcomes
    alone, together = (torch.load(tmp_path / f"{ranks}.pt") for ranks in (1, 2))
    assert together == pytest.approx(alone)
