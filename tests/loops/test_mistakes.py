"""Mistakes of the Python loop: each is answered in words that say what was wanted, what came, and
the fix.
"""

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import burnish
import pytest
import torch
from accelerate import Accelerator
from burnish import loops, objectives
from burnish.kernels import linear_divergence, linear_logprob, logits_logprob
from burnish.loops.environments.multi_turn import MultiTurnSource
from tiny import make_examples, make_model, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

NLL = loops.Term(objectives.nll)
dpo = partial(objectives.dpo, beta=0.1)


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.fixture
def batch():
    return loops.collate(make_examples(2), {"importance": torch.tensor([1.0, 2.0])})


def step(model, batch, objective, weightings=None, batches=None):
    """One step of the README's loop."""
    weightings = loops.weightings({"nll": NLL}) if weightings is None else weightings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [batch] if batches is None else batches
    return loops.train_step(
        Accelerator(cpu=True),
        loops.Policy(model),
        optimizer,
        batches,
        objective,
        weightings,
        max_grad_norm=1.0,
    )


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize(
    "make", [loops.weightings, lambda losses: loops.compose(losses, loops.policy_tensors())]
)
@pytest.mark.parametrize("loss", [dpo, objectives.nll])
def test_a_loss_without_its_term_is_named(make: Callable[..., Any], loss: Any) -> None:
    with refused(
        r"^(compose|weightings): wanted a Term for the loss mine, got .*; make it one: Term\(mine\)$"
    ):
        make({"mine": loss})


def bare(logp: objectives.PerToken) -> tuple[objectives.PerToken, objectives.Stats]:
    return -logp  # type: ignore[return-value]


def test_a_loss_that_returns_a_bare_tensor_is_named(model, batch) -> None:
    wanted = (
        r"^loss {}: wanted \(loss, stats\), .*, got Tensor; without stats return \(loss, {{}}\)$"
    )
    composed = loops.compose({"nll": loops.Term(bare)}, loops.policy_tensors())
    with refused(wanted.format("bare")):
        step(model, batch, composed)
    with refused(wanted.format("nll")):
        step(model, batch, lambda policy, batch: {"nll": policy(batch).logprob})
    with refused(r"^objective: wanted {name: \(loss, stats\)} of named losses, got Tensor; return"):
        step(model, batch, lambda policy, batch: policy(batch).logprob.sum())


def test_a_wrong_name_among_the_columns_is_answered_with_the_nearest(batch) -> None:
    with pytest.raises(
        KeyError, match="there is no column 'importence', did you mean 'importance'"
    ):
        loops.weighted(batch, weighting=loops.token_mean, by="importence", unit="tokens")
    with pytest.raises(KeyError, match="there is no column 'advantage': the batch has no columns"):
        loops.collate(make_examples(1)).columns["advantage"]
    assert batch.columns.get("importence") is None
    rollout = loops.RolloutBuffer([])
    with pytest.raises(
        KeyError, match=r"there is no column 'advantage'; there are age, sampled_logp"
    ):
        rollout["advantage"]


def test_lists_in_place_of_columns_are_named() -> None:
    with refused(
        r"^collate: column margin: wanted a tensor, got list; make it one, torch\.tensor$"
    ):
        loops.collate(make_examples(2), {"margin": [1.0, 2.0]})  # type: ignore[dict-item]
    with refused(r"^rollout: advantage must be a tensor, got list"):
        loops.RolloutBuffer([])["advantage"] = []  # type: ignore[assignment]


def one_each(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def test_rewards_that_are_no_list_are_named() -> None:
    rollout = loops.RolloutBuffer([])
    for one in (one_each, loops.RewardFunction("length", one_each), "math"):
        with refused(
            r"^score: wanted a list of functions, got one that is in none; write it in brackets, \[reward\]$"
        ):
            rollout.score(one)  # type: ignore[arg-type]
    with refused(r"^score: wanted functions, got None in place 1$"):
        rollout.score([one_each, None])


def test_a_model_in_place_of_a_policy_is_named(model, batch) -> None:
    for read, wanted in ((loops.policy_tensors(), "Policy"), (loops.score_tensors, "Scorer")):
        wrapped = torch.nn.Module()
        wrapped.module = model  # as DistributedDataParallel holds it
        for given in (model, wrapped):
            with refused(
                rf"wanted a burnish\.loops\.{wanted}, got the model itself, Llama.*; wrap it: {wanted}\(m"
            ):
                read(given, batch)
    with refused(
        r"^policy_tensors: reference must be a function of a batch .* got the model itself, Llama"
    ):
        loops.policy_tensors(reference=model)
    with refused(r"^frozen_copy: wanted a Policy, got Llama.*; wrap it: Policy\(model\)$"):
        loops.frozen_copy(model)
    with refused(r"^Policy: wanted a model of transformers or peft, got a Policy of one$"):
        loops.Policy(loops.Policy(model))
    with refused(r"^Policy: wanted a model, got 'gpt2'; load it by its from_pretrained$"):
        loops.LocalSource("gpt2")  # type: ignore[arg-type]


def test_steps_of_one_batch_or_of_bare_weightings_are_named(model, batch) -> None:
    objective = loops.compose({"nll": NLL}, loops.policy_tensors())
    with refused(
        r"^step: wanted a list of micro-batches, got one that is in none; write it in brackets, \[batch\]$"
    ):
        step(model, batch, objective, batches=batch)
    for entry in (loops.token_mean, NLL, (loops.token_mean, 1.0)):
        with refused(
            r"^step: wanted \(coefficient, weighting\) for the loss nll, got .*; weightings\(losses\) makes"
        ):
            step(model, batch, objective, {"nll": entry})
    assert step(model, batch, objective, batches=iter([batch]))["nll"] > 0


def test_what_a_term_is_made_of_is_checked() -> None:
    with refused(r"^Term: wanted a function of burnish\.objectives or your own, got 'nll'$"):
        loops.Term("nll")  # type: ignore[arg-type]
    with refused(
        r"^Term: the coefficient must be a number, got <function token_mean.*; a weighting is Term\("
    ):
        loops.Term(objectives.nll, loops.token_mean)  # type: ignore[arg-type]
    with refused(r"^Term: the weighting must be a function of a batch, .*, got 'token_mean'$"):
        loops.Term(objectives.nll, 1.0, "token_mean")  # type: ignore[arg-type]


def test_kernels_name_what_is_no_tensor() -> None:
    linear, hidden, target = (
        torch.nn.Linear(4, 8),
        torch.zeros(3, 4),
        torch.zeros(3, dtype=torch.int64),
    )
    with refused(
        r"^linear_logprob: weight must be a tensor, got Linear; pass its weight, or Head\(linear\.weight, "
    ):
        linear_logprob(hidden, linear, target)  # type: ignore[arg-type]
    with refused(
        r"^linear_logprob: target must be a tensor, got list; make it one, torch\.tensor$"
    ):
        linear_logprob(hidden, linear.weight, [0, 1, 2])  # type: ignore[arg-type]
    with refused(r"^linear_logprob: hidden must be a tensor, got list"):
        linear_logprob([[0.0]], linear.weight, target)  # type: ignore[arg-type]
    with refused(r"^logits_logprob: target must be a tensor, got list"):
        logits_logprob(hidden, [0, 1, 2])  # type: ignore[arg-type]
    with refused(r"^linear_divergence: teacher weight must be a tensor, got Linear"):
        linear_divergence(hidden, linear.weight, hidden, linear, beta=0.5)  # type: ignore[arg-type]


class Silent:
    """An environment whose prompt is the row's text."""

    def reset(self, row: dict[str, Any]) -> list[int]:
        return [1, 2, 3]

    def step(self, completion: loops.Sample) -> Any:
        return burnish.loops.environments.multi_turn.Step(done=True, reward=1.0)


def test_conversations_read_prompts_of_text_with_the_tokenizer_of_their_source(tmp_path) -> None:
    save_model(tmp_path)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    rows = [{"prompt": "what is 1 + 1?"}]
    inner = loops.LocalSource(loops.Policy(model), tokenizer)
    source = MultiTurnSource(inner, Silent, lambda task: rows[0])
    with loops.RolloutScheduler(
        source, rows, group_size=2, sampling=loops.SamplingParams(max_tokens=2)
    ) as scheduler:
        (group,) = scheduler.take(1)
    assert [sample.info["environment_reward"] for sample in group] == [1.0, 1.0]
    assert source.tokenizer is tokenizer
    asyncio.run(source.close())


RECIPES = [
    "sft",
    "dpo",
    "cpo",
    "orpo",
    "kto",
    "reward",
    "prm",
    "distill",
    "grpo",
    "rloo",
    "ppo",
    "online_dpo",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_of_a_recipe_explains_every_field(recipe: str) -> None:
    function = getattr(burnish, recipe)
    _, arguments = function.__doc__.split("\nArgs:\n")
    entries = [line.strip() for line in arguments.splitlines() if not line.startswith(" " * 5)]
    explained = {name: text for name, _, text in (entry.partition(":") for entry in entries)}
    assert list(explained) == list(inspect.signature(function).parameters)
    assert all(len(text) > 3 for text in explained.values())
    assert "Peak learning rate." in arguments


def test_no_function_of_the_loops_has_the_name_of_an_objective() -> None:
    assert not set(loops.__dir__()) & {
        name for name, value in vars(objectives).items() if inspect.isfunction(value)
    }
