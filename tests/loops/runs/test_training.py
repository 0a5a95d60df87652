"""A run that is open: what happens beside it, or instead of its steps, does not change them."""

import gc

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.config import Teacher
from burnish.loops.recipes.distill import open_distill
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.kto import open_kto
from burnish.loops.recipes.settings import GRPO, KTO, SFT, Distill
from burnish.loops.recipes.sft import open_sft
from burnish.loops.rollouts.local.source import LocalSource
from burnish.loops.runs.training import stragglers
from forked import run_forked
from online import lines, prepare
from tiny import save_model, sums, write_rows
from transformers import TrainingArguments


@pytest.fixture
def settings(tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(8)]
    data = write_rows(tmp_path / "messages.jsonl", rows)
    return {
        "model": str(save_model(tmp_path / "start")),
        "data": str(data),
        "batch_size": 2,
        "learning_rate": 1e-2,
    }


def metrics_of(training, between=lambda: None):
    metrics = []
    for step in training:
        between()
        metrics.append({name: value for name, value in step.metrics.items() if name != "seconds"})
    return metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_arguments_of_transformers_do_not_change_an_open_run(settings, dtype, tmp_path):
    """They reset the state that all objects of Accelerate share, the precision among it."""

    def make_arguments():
        TrainingArguments(output_dir=str(tmp_path / "trainer"), report_to="none")

    undisturbed = metrics_of(open_sft(SFT(**settings, dtype=dtype)))
    training = open_sft(SFT(**settings, dtype=dtype))
    make_arguments()
    assert metrics_of(training, make_arguments) == undisturbed


def test_a_step_takes_three_reductions_over_ranks(settings, monkeypatch):
    """The denominators of its losses, all of its metrics, and what may end the run or save it."""
    reduced, reduce = [], Accelerator.reduce

    def then_reduce(accelerator, *arguments, **options):
        reduced.append(arguments)
        return reduce(accelerator, *arguments, **options)

    monkeypatch.setattr(Accelerator, "reduce", then_reduce)
    assert len(metrics_of(open_sft(SFT(**settings, steps=5)))) == 5 and len(reduced) == 3 * 5


def test_a_teacher_computes_in_the_precision_of_its_run_when_another_run_is_opened(
    settings, tmp_path
):
    default = torch.get_autocast_dtype("cpu")
    teacher = Teacher(model=str(save_model(tmp_path / "teacher", seed=1)))
    config = Distill(**settings, teacher=teacher, dtype="bfloat16")
    # as on a GPU, where the state of the other run names no dtype
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        alone = metrics_of(open_distill(config))
        training, _ = open_distill(config), open_sft(SFT(**settings))
        assert metrics_of(training) == alone
    finally:
        torch.set_autocast_dtype("cpu", default)


@pytest.mark.parametrize("recipe", ["kto", "grpo", "distill"])
def test_a_plan_says_which_examples_or_prompts_are_in_each_micro_batch(recipe, settings, tmp_path):
    if recipe == "grpo":
        training = open_grpo(
            GRPO(**{**prepare(tmp_path), "micro_tokens": 60, "minibatches": 2, "steps": 4})
        )
    elif recipe == "kto":
        data = write_rows(tmp_path / "pairs.jsonl", sums(8))
        training = open_kto(KTO(**{**settings, "data": str(data)}, micro_tokens=30))
    else:
        teacher = Teacher(model=str(save_model(tmp_path / "teacher", seed=1)))
        online = {"on_policy": 0.5, "max_tokens": 6, "steps": 6, "show_every": 0}
        training = open_distill(Distill(**settings, teacher=teacher, micro_tokens=30, **online))
    kinds, micro_batches = set(), 0
    for step in training:
        planned, batches = training.feed.plan(step.number - 1), training.feed(step.number - 1)
        prompts = [[training.context.data[index]["prompt"] for index in part] for part in planned]
        assert prompts == [
            [list(example.prompt) for example in batch.examples] for batch in batches
        ]
        kinds.add(step.metrics.get("on_policy"))
        micro_batches += len(planned)
    assert micro_batches > training.feed.steps and (recipe != "distill" or kinds == {0.0, 1.0})


def test_rows_are_named_by_their_lines_or_where_these_are_unknown_by_examples(settings):
    training = open_sft(SFT(**settings))
    assert (
        training.context.name_rows(0, [2, 0, 2]) == "messages.jsonl line 3, messages.jsonl line 1"
    )
    # as of a caller that encodes rows itself
    training.context.data = training.context.data.remove_columns("_row")
    named = "example 3, example 1, example 2, example 8 and 2 more"
    assert training.context.name_rows(0, [2, 0, 1, 7, 4, 5]) == named


@pytest.fixture
def closed(monkeypatch):
    """The sources that were closed."""
    closed, close = [], LocalSource.close

    async def then_close(source):
        closed.append(source)
        await close(source)

    monkeypatch.setattr(LocalSource, "close", then_close)
    return closed


@pytest.mark.parametrize("recipe", ["grpo", "distill"])
def test_a_run_that_fails_to_open_closes_its_source(recipe, closed, settings, tmp_path):
    with pytest.raises(ValueError, match="every coefficient is 0"):
        if recipe == "grpo":
            open_grpo(GRPO(**prepare(tmp_path), loss={"clipped_surrogate": 0.0}))
        else:
            teacher = Teacher(model=str(save_model(tmp_path / "teacher", seed=1)))
            open_distill(
                Distill(**settings, teacher=teacher, on_policy=1.0, loss={"distillation": 0.0})
            )
    assert len(closed) == 1


def test_a_run_whose_steps_are_never_taken_closes_its_source(closed, tmp_path):
    training = open_grpo(GRPO(**prepare(tmp_path)))
    assert not closed
    del training
    gc.collect()
    assert len(closed) == 1


def test_the_slowest_rank_is_the_one_that_exceeds_the_median():
    assert stragglers([1.0, 1.5, 4.0, 1.25]) == {"ranks/slowest": 2.0, "ranks/excess_seconds": 2.75}
    assert stragglers([3.0, 1.0]) == {"ranks/slowest": 0.0, "ranks/excess_seconds": 2.0}


def test_a_slow_rank_is_told_in_the_metrics_of_its_steps(settings, tmp_path):
    fields = {**settings, "output": str(tmp_path / "run"), "steps": 3}
    for status, printed in run_forked(2, "rank_slow", fields, 1, 0.5):
        assert status == 0, printed[-3000:]
    steps = lines(tmp_path / "run")
    assert [step["ranks/slowest"] for step in steps] == [1.0] * 3
    assert all(step["ranks/excess_seconds"] > 0.2 for step in steps)
